"""prime-rl and verifiers: samples of a step become prompts, an environment's options stand behind
its name.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from ballast.migrate.rules import Recipe, Settings, above_0
from controller.config.file import leaves
from workers.errors import ConfigError

SIZES = (
    ("orchestrator.batch_size", "orchestrator.group_size"),
    ("batch_size", "rollouts_per_example"),
)
SOURCE = "orchestrator.train.source"
EVALUATION = "orchestrator.eval.source"
ALGORITHM = "orchestrator.algo.type"
LORA = "trainer.model.lora"
SCHEDULER = "trainer.scheduler"
SEQUENCE = "orchestrator.seq_len"
NAMES = (
    ("sampling.", "orchestrator.train.sampling."),
    ("algo.", "orchestrator.algo."),
    ("group_size", "orchestrator.group_size"),
)
"""Beginnings of a source's own keys, and of the keys of all sources that they replace."""
KEYS_OF_VERIFIERS = ("env.taskset.id", "env.*", "select.*")
KEYS = (
    SOURCE,
    EVALUATION,
    SEQUENCE,
    "deployment.num_train_gpus",
    "deployment.num_infer_gpus",
    "deployment.num_train_nodes",
    "deployment.num_infer_nodes",
    "deployment.num_infer_replicas",
    "deployment.gpus_per_node",
    f"{SCHEDULER}.type",
    f"{SCHEDULER}.warmup_steps",
    f"{SCHEDULER}.decay_steps",
    f"{SCHEDULER}.min_lr",
    *(size for size, _ in SIZES),
)


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    """A source's own keys come before those of all sources. Raises ConfigError for another algorithm."""
    keys = {key: value for key, value in recipe.items() if value != {}}
    if any(key.startswith(LORA) for key in recipe):
        keys.setdefault(f"{LORA}.rank", 16)
    for source in _sources(recipe, SOURCE)[:1]:
        for key, value in source.items():
            keys |= {
                theirs + key.removeprefix(prefix): value
                for prefix, theirs in NAMES
                if key.startswith(prefix)
            }
        # A gate: a group that scores alike does not enter the step.
        if "advantage_range" in source.values():
            keys["buffer.online_difficulty_filtering"] = True
    for source in _sources(recipe, EVALUATION)[:1]:
        eval_keys = source.keys() & {"group_size", "interval"}
        keys |= {f"orchestrator.eval.{key}": source[key] for key in eval_keys}
    if keys.get(ALGORITHM, "grpo") not in ("grpo", "max_rl"):
        raise ConfigError(
            f"{ALGORITHM}={keys[ALGORITHM]}: migrate translates grpo and max_rl. Start from the settings "
            "algorithm.advantage and algorithm.loss.distillation of `python -m controller.fit --settings`."
        )
    switch_parts_on(keys)
    if above_0(keys.get("trainer.model.cp")) > 1:
        keys.setdefault("trainer.model.cp_style", "ring")
    # A type has defaults of its own, which its other keys replace.
    return dict(sorted(keys.items(), key=lambda item: not item[0].endswith(".type")))


def switch_parts_on(keys: dict[str, Any]) -> None:
    """A section there is a switch by being there: trackers and the offload of activations."""
    if any(key.startswith("monitors.wandb.") for key in keys):
        keys["monitors.wandb"] = True
    offload = "trainer.model.ac_offloading"
    of_offload = [key for key in keys if key.startswith(f"{offload}.")]
    if of_offload:
        keys[offload] = True
    for key in of_offload:
        del keys[key]


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    derive_environment(recipe, settings, to_decide)
    _prompts_of_samples(recipe, settings, to_decide)
    _add_gpus(recipe, settings)
    replicas = above_0(settings.get("rollout.replicas")) or 1
    if in_flight := above_0(settings.get("rollout.max_concurrent")):
        formula = f"max_inflight {in_flight} / {replicas} engines"
        settings.compute("rollout.max_concurrent", max(1, in_flight // replicas), formula)
    add_schedule(recipe, settings)
    if settings.get("policy.optimizer.weight_decay"):
        settings["policy.optimizer.weight_decay_on"] = "all"
    for source in _sources(recipe, EVALUATION)[:1]:
        settings["data.validation"] = _name_environment(source)
    to_decide.append(
        "algorithm.loss.name: DPPO there, which masks tokens whose probability moved by more than 0.2, and "
        "0.001 x the squared log-ratio to the engine. Keep ppo_clip here, or write a custom loss."
    )
    if "run.steps" not in settings:
        to_decide.append("run.steps: without end there. Set a number.")
    _add_lengths(recipe, settings, to_decide)


def derive_environment(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """The environment's options stand behind its name. prime-rl has a list of environments."""
    sources = _sources(recipe, SOURCE) or [dict(recipe)]
    for source in sources[1:]:
        to_decide.append(
            f"rollout.environment: one here. Left out is {source.get('env.taskset.id')}."
        )
    if name := _name_environment(sources[0]):
        settings["rollout.environment"] = settings["data.train"] = name


def _sources(recipe: Recipe, key: str) -> list[dict[str, Any]]:
    sources = recipe.get(key)
    sources = sources if isinstance(sources, list) else []
    return [dict(leaves(source)) for source in sources if isinstance(source, Mapping)]


def _name_environment(source: Recipe) -> str:
    options = {
        key.removeprefix("env."): "null" if value is None else value
        for key, value in source.items()
        if key.startswith(("env.", "select.")) and "*" not in key
    }
    name = options.pop("taskset.id", "")
    query = urlencode(options, safe=":/,")
    return f"verifiers:{name}{'?' * bool(query)}{query}" if name else ""


def _prompts_of_samples(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    for size_key, samples_key in SIZES:
        if size_key not in recipe:
            continue
        size = recipe[size_key]
        samples = recipe.get(samples_key)
        if (
            not isinstance(size, int)
            or not isinstance(samples, int)
            or min(size, samples) < 1
        ):
            to_decide.append(
                f"batch.prompts_per_step: {size_key}={size} samples needs {samples_key}. Divide it."
            )
            continue
        formula = f"{size_key} {size} / {samples_key} {samples}"
        settings.compute("batch.prompts_per_step", max(1, size // samples), formula)
        if size % samples:
            to_decide.append(
                f"batch.prompts_per_step: {size_key}={size} is not a multiple of {samples_key}={samples}."
            )


def _add_lengths(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """A sample there is cut at the length of a sequence, and a response may be as long."""
    length = above_0(recipe.get(SEQUENCE)) or above_0(recipe.get("seq_len"))
    of_prompt = settings.get("data.max_prompt_tokens", 1024)
    response = above_0(settings.get("rollout.sampling.max_new_tokens"))
    if not response:
        formula = f"seq_len {length} - data.max_prompt_tokens {of_prompt}, at least 1024"
        response = settings.compute(
            "rollout.sampling.max_new_tokens", max(length - of_prompt, 1024), formula
        )
        to_decide.append(
            f"rollout.sampling.max_new_tokens={response}: without a limit there. Set yours."
        )
    if length and settings.get("rollout.environment"):
        of_episode = max(length - of_prompt, response)
        formula = f"seq_len {length} - data.max_prompt_tokens {of_prompt}, at least a response of {response}"
        settings.compute("rollout.max_episode_tokens", of_episode, formula)
        to_decide.append(
            f"rollout.max_episode_tokens={of_episode}: a sequence has {length} tokens there, and prompts "
            f"have {of_prompt} here. Set data.max_prompt_tokens too."
        )


def _add_gpus(recipe: Recipe, settings: Settings) -> None:
    """Engines and the trainer have GPUs of their own."""
    settings["rollout.placement"] = "apart"
    of_a_node = above_0(recipe.get("deployment.gpus_per_node")) or 8
    groups = above_0(recipe.get("deployment.num_infer_replicas")) or 1
    for key, part, factor, of_one in (
        (
            "policy.data_parallel",
            "train",
            1,
            settings.get("policy.parallel.context_parallel"),
        ),
        ("rollout.replicas", "infer", groups, settings.get("rollout.tensor_parallel")),
    ):
        nodes = above_0(recipe.get(f"deployment.num_{part}_nodes")) * factor * of_a_node
        if gpus := nodes or above_0(recipe.get(f"deployment.num_{part}_gpus")):
            ranks = above_0(of_one) or 1
            settings.compute(
                key, max(1, gpus // ranks), f"{gpus} GPUs of {part} / {ranks} of one copy"
            )


def add_schedule(recipe: Recipe, settings: Settings) -> None:
    """`linear` there is constant, and falls in the last `decay_steps`."""
    kind = recipe.get(f"{SCHEDULER}.type", "constant")
    if kind not in ("linear", "cosine"):
        return
    settings["policy.optimizer.warmup_steps"] = above_0(
        recipe.get(f"{SCHEDULER}.warmup_steps", 10)
    )
    decay = above_0(recipe.get(f"{SCHEDULER}.decay_steps", 10))
    if kind == "linear" and not decay:
        return
    settings["policy.optimizer.schedule"] = "cosine" if kind == "cosine" else "wsd"
    if kind == "linear" and above_0(settings.get("run.steps")):
        steps = settings["run.steps"]
        formula = f"decay_steps {decay} / max_steps {steps}"
        settings.compute("policy.optimizer.decay_ratio", round(decay / steps, 6), formula)
    lowest = recipe.get(f"{SCHEDULER}.min_lr")
    if lowest and isinstance(lowest, int | float):
        peak = settings.get("policy.optimizer.learning_rate", 1e-6)
        formula = f"min_lr {lowest} / lr {peak}"
        settings.compute(
            "policy.optimizer.final_learning_rate_ratio", round(lowest / peak, 9), formula
        )
