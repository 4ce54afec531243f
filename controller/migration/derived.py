"""Settings that follow from several keys of another system.

verl: prompts of a step over prompts of a mini-batch, nodes x GPUs over ranks that share a model, ...
"""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow
import pyarrow.parquet

from controller.config.file import leaves
from controller.migration.trl_rewards import FUNCTIONS, TOOLS, WEIGHTS, add_rewards, name_tools

Theirs = Mapping[str, Any]
Ours = MutableMapping[str, Any]
CAP = 16384  # tokens of a micro-batch where none is given
ACTOR = "actor_rollout_ref.actor."


def derive(system: str, theirs: Theirs, ours: Ours, to_decide: list[str]) -> None:
    """Add the derived settings to `ours`, and the open questions to `to_decide`."""
    if rule := {"verl": _verl, "TRL": _trl, "verifiers": _verifiers, "prime-rl": _verifiers}.get(system):
        rule(theirs, ours, to_decide)
    for keys in SEQUENCES_OF_AN_UPDATE.get(system, ()):
        _mini_batches(theirs, ours, to_decide, *keys)
    if system == "ROLL" and ROLL_SIZE in theirs:
        to_decide.append(
            f"batch.mini_batches: rollout_batch_size x num_return_sequences_in_group / ({ROLL_SIZE}="
            f"{theirs[ROLL_SIZE]} x gradient_accumulation_steps x data-parallel ranks)."
        )
    if ours.get("rollout.placement") == "apart" and not ours.get("rollout.replicas"):
        ours["rollout.replicas"] = 1
        to_decide.append("rollout.replicas=1: the number of engines on GPUs of their own. Set yours.")
    if system == "prime-rl":
        _prompts_of_samples(theirs, ours, to_decide)


SEQUENCES_OF_AN_UPDATE = {
    "slime": (("global-batch-size", "rollout-batch-size", "n-samples-per-prompt"),),
    "OpenRLHF": (
        ("train_batch_size", "rollout_batch_size", "n_samples_per_prompt"),
        ("train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt"),
    ),
    "NeMo-RL": (("policy.train_global_batch_size", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt"),),
    "SkyRL": (("trainer.policy_mini_batch_size", "trainer.train_batch_size", ""),),
}
ROLL_SIZE = "actor_train.training_args.per_device_train_batch_size"
"""By system: the size of a mini-batch, prompts of a step, and samples of a prompt ("" where the size is in prompts)."""
PRIME_RL_SIZES = (("orchestrator.batch_size", "orchestrator.group_size"), ("batch_size", "rollouts_per_example"))


DERIVED = {
    "verifiers": ("env.taskset.id", "env.*", "select.*"),
    "prime-rl": ("orchestrator.train.source", *(size for size, _ in PRIME_RL_SIZES)),
    **{system: tuple(keys[0] for keys in sizes) for system, sizes in SEQUENCES_OF_AN_UPDATE.items()},
    "ROLL": (ROLL_SIZE, "actor_train.training_args.gradient_accumulation_steps"),
    "verl": (
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.ppo_micro_batch_size",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size",
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_mini_batch_size",
        "critic.ppo_micro_batch_size",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.forward_micro_batch_size",
        "critic.forward_micro_batch_size_per_gpu",
        "*custom_reward_function.path",
        "*custom_reward_function.name",
        "*reward_manager",
        "*reward_manager.*",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
    ),
    "TRL": (
        "generation_batch_size",
        "steps_per_generation",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
        "num_train_epochs",
        FUNCTIONS,
        WEIGHTS,
        TOOLS,
    ),
}
"""Keys whose values do not become a setting directly."""


def _verifiers(theirs: Theirs, ours: Ours, to_decide: list[str]) -> None:
    """The environment's options stand behind its name. prime-rl has a list of environments."""
    sources = theirs.get("orchestrator.train.source")
    sources = [dict(leaves(source)) for source in sources] if isinstance(sources, list) else [theirs]
    for source in sources[1:]:
        to_decide.append(f"rollout.environment: one here. Left out is {source.get('env.taskset.id')}.")
    given = {key: value for key, value in sources[0].items() if key.startswith(("env.", "select.")) and "*" not in key}
    options = {key.removeprefix("env."): "null" if value is None else value for key, value in given.items()}
    if name := options.pop("taskset.id", ""):
        query = urlencode(options, safe=":/,")
        ours["rollout.environment"] = ours["data.train"] = f"verifiers:{name}{'?' * bool(query)}{query}"


def _mini_batches(
    theirs: Theirs, ours: Ours, to_decide: list[str], size_key: str, prompts_key: str, samples_key: str
) -> None:
    """Divide the size of a step by the size of a mini-batch, in sequences or in prompts."""
    if size_key not in theirs:
        return
    size, *of_a_step = (_above_0(theirs.get(key)) for key in (size_key, prompts_key, samples_key) if key)
    if not size or 0 in of_a_step:
        named = ", ".join(key for key in (size_key, prompts_key, samples_key) if key)
        to_decide.append(f"batch.mini_batches: {size_key}={theirs[size_key]} needs whole numbers above 0 of {named}.")
        return
    step = math.prod(of_a_step)
    ours["batch.mini_batches"] = max(1, round(step / size))
    if step % size:
        to_decide.append(
            f"batch.mini_batches={ours['batch.mini_batches']}: a step of {step} is not a multiple of {size_key}={size}."
        )


def _prompts_of_samples(theirs: Theirs, ours: Ours, to_decide: list[str]) -> None:
    for size_key, samples_key in PRIME_RL_SIZES:
        if size_key not in theirs:
            continue
        size = theirs[size_key]
        samples = theirs.get(samples_key)
        if not isinstance(size, int) or not isinstance(samples, int) or min(size, samples) < 1:
            to_decide.append(f"batch.prompts_per_step: {size_key}={size} samples needs {samples_key}. Divide it.")
            continue
        ours["batch.prompts_per_step"] = max(1, size // samples)
        if size % samples:
            to_decide.append(f"batch.prompts_per_step: {size_key}={size} is not a multiple of {samples_key}={samples}.")


def _above_0(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _count(theirs: Theirs, key: str, default: int, to_decide: list[str]) -> int:
    value = theirs.get(key, default)
    if isinstance(value, int) and value > 0:
        return int(value)
    to_decide.append(f"{key}={value}: must be a whole number above 0. Using {default}.")
    return default


def _verl(theirs: Theirs, ours: Ours, to_decide: list[str]) -> None:
    _files(theirs, ours, to_decide)
    prompts = _count(theirs, "data.train_batch_size", 1024, to_decide)
    mini = _count(theirs, f"{ACTOR}ppo_mini_batch_size", 256, to_decide)
    ours["batch.prompts_per_step"] = prompts
    ours["batch.mini_batches"] = max(1, round(prompts / mini))
    if prompts % mini:
        to_decide.append(
            f"batch.mini_batches={ours['batch.mini_batches']}: {prompts} prompts are not a multiple of {mini}."
        )
    for role, section in (("policy", f"{ACTOR}fsdp_config"), ("critic", "critic.model.fsdp_config")):
        if theirs.get(f"{section}.param_offload") is True:  # it includes the optimiser's, in either order
            ours[f"{role}.cpu_offload"] = "all"
    _gpus(theirs, ours, to_decide)
    _steps(theirs.get("trainer.total_epochs", 30), ours, to_decide)
    _caps(ours, to_decide)
    if ours.get("algorithm.loss.name") in ("gspo", "sapo", "gmpo"):  # they have a default there too
        ours.pop("algorithm.loss.aggregation", None)
    path = theirs.get("*custom_reward_function.path")
    if path:
        name = theirs.get("*custom_reward_function.name") or "compute_score"
        ours["reward.function"] = f"{path}:{name}"
    elif manager := theirs.get("*reward_manager") or theirs.get("*reward_manager.*"):
        to_decide.append(f"reward.function: verl's reward manager {manager} scores by data source. Write a function.")
    if "run.dir" in ours:
        ours["run.dir"] = str(ours["run.dir"]).removesuffix(f"/{ours.get('run.name')}")


def _files(theirs: Theirs, ours: Ours, to_decide: list[str]) -> None:
    train, *others = _paths(theirs.get("data.train_files"))
    if others:
        ours["data.sources"] = _shares([train, *others], to_decide)
    elif train:
        ours["data.train"] = train
    held_out, *others = _paths(theirs.get("data.val_files"))
    if held_out:
        ours["data.validation"] = held_out
    if others:
        to_decide.append(f"data.validation={held_out}: one file here. Join the others: {', '.join(others)}.")


def _shares(paths: Sequence[str], to_decide: list[str]) -> dict[str, float]:
    """Weigh files by their number of records: other systems join them."""
    sizes = [_records_of(Path(path).expanduser()) for path in paths]
    if all(sizes):
        return dict(zip(paths, map(float, sizes), strict=True))
    to_decide.append("data.sources: equal weights here, a joined file there. Set each to its number of records.")
    return dict.fromkeys(paths, 1.0)


def _records_of(path: Path) -> int:
    try:
        if path.suffix == ".parquet":
            return int(pyarrow.parquet.read_metadata(path).num_rows)
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(bool(line.strip()) for line in lines)
    except (OSError, pyarrow.ArrowException):
        pass
    return 0


def _paths(value: Any) -> list[str]:
    return [str(path) for path in value] or [""] if isinstance(value, list) else [str(value or "")]


def _gpus(theirs: Theirs, ours: Ours, to_decide: list[str]) -> None:
    nodes = _count(theirs, "trainer.nnodes", 1, to_decide)
    of_a_node = _count(theirs, "trainer.n_gpus_per_node", 8, to_decide)
    sharing = math.prod(ours.get(f"policy.parallel.{way}_parallel", 1) for way in ("context", "tensor", "pipeline"))
    gpus = nodes * of_a_node
    ours["policy.data_parallel"] = max(1, gpus // sharing)
    ours["rollout.replicas"], ours["rollout.placement"] = 0, "colocated"
    shard = theirs.get(f"{ACTOR}fsdp_config.fsdp_size", -1)
    if isinstance(shard, int) and 0 < shard < gpus:
        ours["policy.parallel.replicate"] = gpus // shard


def _steps(epochs: Any, ours: Ours, to_decide: list[str]) -> None:
    if "run.steps" not in ours:
        to_decide.append(
            f"run.steps: {epochs} epochs are {epochs} x the number of records / {ours['batch.prompts_per_step']} steps."
        )


def _caps(ours: Ours, to_decide: list[str]) -> None:
    if "policy.max_tokens_per_micro_batch" not in ours:
        longest = ours.get("data.max_prompt_tokens", 1024) + ours.get("rollout.sampling.max_new_tokens", 1024)
        cap = ours["policy.max_tokens_per_micro_batch"] = max(CAP, 2 * longest)
        to_decide.append(
            f"policy.max_tokens_per_micro_batch={cap}: replaces sequences per micro-batch. Raise or lower it."
        )


def _trl(theirs: Theirs, ours: Ours, to_decide: list[str]) -> None:
    add_rewards(theirs, ours, to_decide)
    name_tools(theirs, to_decide)
    group = _count(theirs, "num_generations", 8, to_decide)
    accumulated = _count(theirs, "gradient_accumulation_steps", 1, to_decide)
    of_a_device = _count(theirs, "per_device_train_batch_size", 8, to_decide)
    of_all = of_a_device * _count(theirs, "steps_per_generation", accumulated, to_decide)
    completions = _count(theirs, "generation_batch_size", of_all, to_decide)
    if "generation_batch_size" not in theirs:
        to_decide.append(f"batch.prompts_per_step={max(1, completions // group)}: of one GPU. Multiply it by yours.")
    ours["batch.prompts_per_step"] = max(1, completions // group)
    ours["batch.mini_batches"] = max(1, completions // (of_a_device * accumulated))
    updates = ours["batch.mini_batches"] * ours.get("batch.epochs", 1)
    if theirs.get("max_steps", -1) != -1:
        ours["run.steps"] = max(1, _count(theirs, "max_steps", 100, to_decide) // updates)
    _steps(theirs.get("num_train_epochs", 3), ours, to_decide)
    _caps(ours, to_decide)
    if ours.get("algorithm.loss.aggregation") == "sequence_mean_token_sum_norm":
        ours["algorithm.loss.constant_length"] = ours.get("rollout.sampling.max_new_tokens", 512)
