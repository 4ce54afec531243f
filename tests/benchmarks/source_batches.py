"""Count the batch of a recipe by its own system's semantics, without a line of `ballast.migrate`.

keys --> Batch(prompts of a step, samples of a prompt, sequences of an optimiser step, optimiser steps of a step)

Sources: verl trainer/config and workers (sizes of mini-batches are prompts), OpenRLHF cli/train_ppo_ray.py, slime
utils/arguments.py, NeMo-RL grpo.py, ROLL base_config.py (sizes are of one rank), SkyRL config.py, AReaL cli_args.py,
prime-rl configs/orchestrator.py (sizes are samples), MindSpeed-RL rl_config.py (mini_batch_size x samples).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """prompts, samples: of a step. sequences: of an optimiser step. updates: optimiser steps of a step."""

    prompts: int
    samples: int
    sequences: Fraction
    updates: int


class UnknownSizeError(Exception):
    """A number that is not in the file, or a step that does not divide."""


def whole(keys: Keys, name: str, default: int | None = None) -> int:
    for key in (name, name.replace("-", "_"), name.rpartition(".")[2]):
        if key in keys:
            value = keys[key]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnknownSizeError(f"{key}={value}")
            return value
    if default is None:
        raise UnknownSizeError(name)
    return default


def exact(keys: Keys, name: str, default: int | None = None) -> int:
    """Return the number of just this key."""
    if name not in keys and default is not None:
        return default
    if name not in keys:
        raise UnknownSizeError(name)
    return whole({name: keys[name]}, name)


def of_mini_batch(prompts: int, samples: int, sequences: int, epochs: int = 1) -> Batch:
    """Divide a step into mini-batches with `sequences` samples. Raises UnknownSizeError if it does not divide."""
    if prompts * samples % sequences:
        raise UnknownSizeError(f"{prompts} x {samples} is not a multiple of {sequences}")
    minis = prompts * samples // sequences
    return Batch(prompts, samples, Fraction(sequences), minis * epochs)


def of_verl(keys: Keys) -> Batch:
    if any(key.startswith("async_training.") for key in keys):
        raise UnknownSizeError("async_training counts in its own units")
    prompts = exact(keys, "data.train_batch_size", 1024)
    samples = exact(keys, "actor_rollout_ref.rollout.n", 1)
    mini = exact(keys, "actor_rollout_ref.actor.ppo_mini_batch_size", 256)
    epochs = exact(keys, "actor_rollout_ref.actor.ppo_epochs", 1)
    return of_mini_batch(prompts, samples, mini * samples, epochs)


def of_slime(keys: Keys) -> Batch:
    prompts = whole(keys, "rollout-batch-size")
    samples = whole(keys, "n-samples-per-prompt", 1)
    steps = keys.get("num-steps-per-rollout")
    if steps:
        return of_mini_batch(prompts, samples, prompts * samples // int(steps))
    return of_mini_batch(prompts, samples, whole(keys, "global-batch-size"))


def of_openrlhf(keys: Keys) -> Batch:
    undotted = {key.replace("-", "_"): value for key, value in keys.items()}
    return of_mini_batch(
        exact(keys, "rollout.batch_size", undotted.get("rollout_batch_size", 1024)),
        whole(undotted, "rollout.n_samples_per_prompt", 1),
        exact(keys, "train.batch_size", undotted.get("train_batch_size", 128)),
        whole(undotted, "train.max_epochs", 1),
    )


def of_nemo_rl(keys: Keys) -> Batch:
    return of_mini_batch(
        exact(keys, "grpo.num_prompts_per_step"),
        exact(keys, "grpo.num_generations_per_prompt"),
        exact(keys, "policy.train_global_batch_size"),
    )


def ranks_of_roll(keys: Keys) -> int:
    """Return the GPUs of the list over the ways that share a model."""
    gpus: set[int] = set()
    ranges = re.findall(
        r"range\((\d+), *(\d+)\)", str(keys.get("actor_train.device_mapping"))
    )
    for start, end in ranges:
        gpus |= set(range(int(start), int(end)))
    section = "actor_train.strategy_args.strategy_config."
    names = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    sharing = math.prod(exact(keys, f"{section}{name}_size", 1) for name in names)
    sharing *= exact(keys, "actor_train.model_args.ulysses_size", 1)
    if not gpus or len(gpus) % sharing:
        raise UnknownSizeError("actor_train.device_mapping")
    return len(gpus) // sharing


def of_roll(keys: Keys) -> Batch:
    if "train_env_manager.group_size" in keys:
        samples = exact(keys, "train_env_manager.group_size")
        trajectories = exact(keys, "rollout_batch_size", 128)
        if trajectories % samples:
            raise UnknownSizeError(f"{trajectories} trajectories, groups of {samples}")
        prompts = trajectories // samples
    else:
        samples = exact(keys, "num_return_sequences_in_group", 1)
        prompts = exact(keys, "rollout_batch_size", 128)
    section = "actor_train.training_args."
    size = exact(keys, f"{section}per_device_train_batch_size", 8)
    size *= exact(keys, f"{section}gradient_accumulation_steps", 1)
    return of_mini_batch(
        prompts, samples, size * ranks_of_roll(keys), exact(keys, "ppo_epochs", 1)
    )


def of_skyrl(keys: Keys) -> Batch:
    samples = exact(keys, "generator.n_samples_per_prompt", 5)
    return of_mini_batch(
        exact(keys, "trainer.train_batch_size", 1024),
        samples,
        exact(keys, "trainer.policy_mini_batch_size", 256) * samples,
        exact(keys, "trainer.update_epochs_per_batch", 1),
    )


def of_areal(keys: Keys) -> Batch:
    prompts = exact(keys, "train_dataset.batch_size")
    samples = exact(keys, "gconfig.n_samples", 1)
    minis = exact(keys, "actor.ppo_n_minibatches", 4)
    return Batch(prompts, samples, Fraction(prompts * samples, minis), minis)


def of_prime_rl(keys: Keys) -> Batch:
    samples = exact(keys, "orchestrator.group_size", 1)
    for source in keys.get("orchestrator.train.source") or []:
        samples = source.get("group_size", samples)
        break
    size = exact(keys, "orchestrator.batch_size", 128)
    if size % samples:
        raise UnknownSizeError(f"{size} samples, groups of {samples}")
    return Batch(size // samples, samples, Fraction(size), 1)


def of_mindspeed_rl(keys: Keys) -> Batch:
    prompts = exact(
        keys,
        "rl_config.filter_groups_train_batch_size",
        exact(keys, "megatron_training.global_batch_size"),
    )
    samples = exact(keys, "rl_config.n_samples_per_prompt", 1)
    mini = exact(keys, "rl_config.mini_batch_size", 1)
    return of_mini_batch(
        prompts, samples, mini * samples, exact(keys, "rl_config.epochs", 1)
    )


def of_trl(keys: Keys) -> Batch:
    """One process, unless the recipe names their number. RLOOConfig has 2 samples, PPOConfig 1 and 4 passes."""
    program = getattr(keys, "program", "")
    processes = whole(keys, "num_processes", 1)
    device = whole(keys, "per_device_train_batch_size", 8)
    accumulated = whole(keys, "gradient_accumulation_steps", 1)
    update = device * accumulated * processes
    if re.search(r"\bPPO(?:Config|Trainer)", program):
        minis = whole(keys, "num_mini_batches", 1)
        epochs = whole(keys, "num_ppo_epochs", 4)
        return of_mini_batch(update * minis, 1, update, epochs)
    samples = whole(keys, "num_generations", 2 if "RLOO" in program else 8)
    steps = whole(keys, "steps_per_generation", accumulated)
    completions = whole(keys, "generation_batch_size", device * steps * processes)
    epochs = whole(keys, "num_iterations", 1)
    return of_mini_batch(completions // samples, samples, update, epochs)


SOURCES: Mapping[str, Callable[[Keys], Batch]] = {
    "verl": of_verl,
    "slime": of_slime,
    "OpenRLHF": of_openrlhf,
    "NeMo-RL": of_nemo_rl,
    "ROLL": of_roll,
    "SkyRL": of_skyrl,
    "AReaL": of_areal,
    "prime-rl": of_prime_rl,
    "MindSpeed-RL": of_mindspeed_rl,
    "TRL": of_trl,
}
OFFLINE_SIZES = {
    "verl": "data.train_batch_size",
    "OpenRLHF": "train.batch_size",
    "NeMo-RL": "policy.train_global_batch_size",
    "AReaL": "train_dataset.batch_size",
    "prime-rl": "data.batch_size",
    "SkyRL": "batch_size",
    "slime": "global-batch-size",
}


def of_offline(system: str, keys: Keys) -> int:
    """Return the sequences of an optimiser step of SFT, preferences or a reward model."""
    if system == "ROLL":
        part = (
            "sft_train"
            if any(key.startswith("sft_train.") for key in keys)
            else "actor_train"
        )
        section = f"{part}.training_args."
        size = exact(keys, f"{section}per_device_train_batch_size", 8)
        size *= exact(keys, f"{section}gradient_accumulation_steps", 1)
        named = {key.replace(part, "actor_train", 1): value for key, value in keys.items()}
        return size * ranks_of_roll(named)
    if system == "TRL":
        return math.prod(
            (
                whole(keys, "per_device_train_batch_size", 8),
                whole(keys, "gradient_accumulation_steps", 1),
                whole(keys, "num_processes", 1),
            )
        )
    key = OFFLINE_SIZES[system]
    return whole(keys, key)


def of_settings(settings: Mapping[str, Any]) -> Batch:
    """Count the batch of a migrated configuration, with the defaults of ours."""
    prompts = int(settings.get("batch.prompts_per_step", 32))
    samples = int(settings.get("rollout.samples_per_prompt", 8))
    minis = int(settings.get("batch.mini_batches", 1))
    epochs = int(settings.get("batch.epochs", 1))
    return Batch(prompts, samples, Fraction(prompts * samples, minis), minis * epochs)
