"""prime-rl and verifiers: samples of a step become prompts, the environment's options stand behind its name."""

from urllib.parse import urlencode

from controller.config.file import leaves
from controller.migration.rules import Recipe, Settings

SIZES = (("orchestrator.batch_size", "orchestrator.group_size"), ("batch_size", "rollouts_per_example"))
KEYS_OF_VERIFIERS = ("env.taskset.id", "env.*", "select.*")
KEYS = ("orchestrator.train.source", *(size for size, _ in SIZES))


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    derive_environment(recipe, settings, to_decide)
    _prompts_of_samples(recipe, settings, to_decide)


def derive_environment(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """The environment's options stand behind its name. prime-rl has a list of environments."""
    sources = recipe.get("orchestrator.train.source")
    sources = [dict(leaves(source)) for source in sources] if isinstance(sources, list) else [recipe]
    for source in sources[1:]:
        to_decide.append(f"rollout.environment: one here. Left out is {source.get('env.taskset.id')}.")
    given = {key: value for key, value in sources[0].items() if key.startswith(("env.", "select.")) and "*" not in key}
    options = {key.removeprefix("env."): "null" if value is None else value for key, value in given.items()}
    if name := options.pop("taskset.id", ""):
        query = urlencode(options, safe=":/,")
        settings["rollout.environment"] = settings["data.train"] = f"verifiers:{name}{'?' * bool(query)}{query}"


def _prompts_of_samples(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    for size_key, samples_key in SIZES:
        if size_key not in recipe:
            continue
        size = recipe[size_key]
        samples = recipe.get(samples_key)
        if not isinstance(size, int) or not isinstance(samples, int) or min(size, samples) < 1:
            to_decide.append(f"batch.prompts_per_step: {size_key}={size} samples needs {samples_key}. Divide it.")
            continue
        settings["batch.prompts_per_step"] = max(1, size // samples)
        if size % samples:
            to_decide.append(f"batch.prompts_per_step: {size_key}={size} is not a multiple of {samples_key}={samples}.")
