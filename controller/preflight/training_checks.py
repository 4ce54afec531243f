"""Check settings of every training command: run, model files, caps, counts, kernels, warm-up."""

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from controller.actors.cluster_address import check_address
from controller.checkpoints.progress import checkpoints_at
from controller.checkpoints.run_lock import check_folder_is_free
from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.functions import check_function
from controller.config.model_files import check_whole, is_job_copy, read_model_files
from controller.config.training import Limits
from workers.chat_templates import read_template
from workers.errors import (
    CheckpointError,
    ConfigError,
    Problems,
    check_together,
    clause,
    raise_all,
)
from workers.model.rules.model_rules import kernel_problem
from workers.rendering import RESERVED

# 16 bytes of bfloat16, a row's step in torch's grouped products on GPUs.
RANKS_OF_EXPERTS = 8
LONGEST_FILE_NAME = 255  # NAME_MAX of common file systems


def check_one_policy(config: TrainingConfig) -> None:
    """Raise ConfigError if a run whose loop is configured has several policies."""
    if config.model.lora.policies > 1:
        raise ConfigError(
            f"model.lora.policies={config.model.lora.policies}: a configured run trains one policy. Set 1, "
            "or write the loop with ballast.open."
        )


def check_run(config: TrainingConfig) -> None:
    check_together(
        lambda: _check_name(config),
        lambda: _check_resume(config.run.resume),
        lambda: _check_hub(config),
        lambda: _check_rank_of_experts(config),
        lambda: check_writable(config.run_folder, "run.dir"),
        lambda: check_address(config),
    )


def _check_rank_of_experts(config: TrainingConfig) -> None:
    """Raise ConfigError for a rank at which torch's grouped products of half precision refuse their rows."""
    lora = config.model.lora
    in_half = config.uses_gpus and config.compute_dtype != "float32"
    if lora.target_parameters and lora.rank % RANKS_OF_EXPERTS and in_half:
        raise ConfigError(
            f"model.lora.rank={lora.rank}: with model.lora.target_parameters GPUs take multiples of "
            f"{RANKS_OF_EXPERTS}. Set {lora.rank + -lora.rank % RANKS_OF_EXPERTS}."
        )


def _check_name(config: TrainingConfig) -> None:
    if not re.fullmatch(r"\w[\w.=+-]*", config.run.name):
        raise ConfigError(
            f"run.name={config.run.name!r}: it names a folder. Use letters, digits and any of _ . = + -."
        )
    length = len(os.fsencode(config.run.name))
    if length > LONGEST_FILE_NAME:
        raise ConfigError(
            f"run.name has {length} bytes and names a folder, which has at most {LONGEST_FILE_NAME}. "
            "Shorten it."
        )
    if not config.default_name:  # such a run takes another name if its folder is taken
        check_folder_is_free(config)


def _check_hub(config: TrainingConfig) -> None:
    repository = config.run.push_to_hub
    if not repository:
        return
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(
            f"run.push_to_hub={repository}: expected owner/name. {clause(error)}."
        ) from None
    if config.is_described:
        return
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"run.push_to_hub={repository} needs the hub, and HF_HUB_OFFLINE forbids to ask it."
        )
    if not get_token():
        raise ConfigError(
            f"run.push_to_hub={repository} needs a token of the hub: `hf auth login`, or HF_TOKEN in the "
            "environment."
        )


def check_writable(folder: Path, key: str) -> None:
    """Raise ConfigError for a folder that cannot be made or written. key: setting that names it."""
    # A test by writing, because permissions do not show a full or read-only disk, or /proc for root.
    if not folder.is_absolute() and is_job_copy(Path.cwd()):
        raise ConfigError(
            f"{key}: {folder} is relative to a Ray job's copy of its --working-dir, which Ray removes. Give "
            "an absolute path, on storage that all nodes share."
        )
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".ballast-"):
            pass
    except OSError:
        raise ConfigError(
            f"{key}: {folder} cannot be written, {existing} is not a writable folder."
        ) from None


def _check_resume(resume: str) -> None:
    if resume in ("never", "auto"):
        return
    try:
        if not checkpoints_at(Path(resume)):
            raise ConfigError(
                f"run.resume={resume}: there is no complete checkpoint. It may also be auto or never."
            )
    except CheckpointError as error:
        raise ConfigError(f"run.resume: {error}") from None


def check_optimizer(config: TrainingConfig, role: str, total: int, follows: str) -> None:
    """Raise ConfigError for an optimiser of `role` that is not possible, or a schedule that ends within the
    warm-up.

    total: its optimiser steps, or 0 if unknown. follows: settings that determine `total` if
    optimizer.total_steps is 0.
    """
    key = f"{role}.optimizer"
    optimizer = value_of(config, f"{role}.optimizer")
    if optimizer.name == "custom":
        check_function(f"{key}.function", optimizer.function)
    if optimizer.schedule == "custom":
        check_function(f"{key}.schedule_function", optimizer.schedule_function)
    offload = value_of(config, f"{role}.cpu_offload")
    if offload not in ("none", *optimizer.offloads):
        low = optimizer.name == "adamw" and offload == "optimizer"
        option = "state_dtype" if low else "name"
        raise ConfigError(
            f"{role}.cpu_offload={offload}: not with {key}.{option}={getattr(optimizer, option)}. Set "
            f"{role}.cpu_offload=none, or {key}.{option}={'float32' if low else 'adamw'}."
        )
    warmup = optimizer.warmup(total)
    if total and (warmup > total or (warmup == total and optimizer.schedule != "constant")):
        raise ConfigError(
            f"{key}.warmup_steps={warmup} is more than the {total} optimiser steps of the {role} "
            f"({key}.total_steps, or {follows}). Lower it."
        )


def check_caps(
    config: TrainingConfig, caps: Iterable[Limits], longest: int, parts: str
) -> None:
    """Raise ConfigError for a cap below the longest possible sequence, which would stop the run later.

    parts: settings that determine that length, in words.
    """
    sharing = config.policy.parallel.context_parallel
    patches = config.policy.max_patches_per_micro_batch
    if patches and "vision_config" not in config.model_description():
        raise ConfigError(
            f"policy.max_patches_per_micro_batch={patches}: model.path={config.model.path} reads no images. "
            "Remove it."
        )
    for limits in caps:
        needed = -(-longest // limits.length_multiple) * limits.length_multiple
        multiple = limits.length_multiple
        if limits.max_tokens * sharing < needed:
            rounded = f", {needed} as a multiple of {multiple}" if needed > longest else ""
            times = (
                f" times policy.parallel.context_parallel={sharing}" if sharing > 1 else ""
            )
            raise ConfigError(
                f"{limits.cap}={limits.max_tokens}{times} is below the longest possible sequence, "
                f"{parts}{rounded}. Raise the cap or lower either."
            )


def check_attention(config: TrainingConfig) -> None:
    """Raise ConfigError unless model.attention supports the run's layout, device and precision."""
    kernel = config.model.attention
    layout = config.model.attention_layout(shared=config.shares_model)
    half = config.model.dtype != "float32"
    if problem := kernel_problem(kernel, layout, cuda=config.uses_gpus, half=half):
        raise ConfigError(f"model.attention={kernel} {problem}.")


def check_parallel(config: TrainingConfig) -> None:
    """Raise ConfigError unless `replicate` divides the data-parallel ranks, and `expert_parallel` the ranks
    of a copy.

    Also for a micro-step order that needs a pipeline.
    """
    if config.policy.data_parallel % config.policy.parallel.replicate:
        raise ConfigError(
            f"policy.parallel.replicate={config.policy.parallel.replicate} does not divide "
            f"policy.data_parallel={config.policy.data_parallel}."
        )
    check_context_degrees(config)
    shared = config.expert_ranks
    experts = config.policy.parallel.expert_parallel
    if shared % experts:
        raise ConfigError(
            f"policy.parallel.expert_parallel={experts} does not divide policy.data_parallel / replicate * "
            f"context_parallel * tensor_parallel = {shared} ranks, which hold different tokens of one model "
            "copy."
        )
    if config.balance.order == "makespan" and config.policy.parallel.pipeline_parallel == 1:
        raise ConfigError(
            "balance.order=makespan: requires policy.parallel.pipeline_parallel above 1. Raise it, or set "
            "balance.order to auto, descending or small_ends."
        )


def check_context_degrees(config: TrainingConfig) -> None:
    """Raise ConfigError for settings that need one context-parallel degree in all micro-steps."""
    parallel = config.policy.parallel
    model = config.model
    balance = config.balance
    ours = ("karmarkar_karp", "load_balance")
    if parallel.context_parallel_degree == "fixed":
        return
    most = parallel.context_parallel
    loss = config.algorithm.loss.name if isinstance(config, Config) else ""
    refused = {
        f"policy.parallel.context_parallel={most}. Set a power of two": most & (most - 1)
        > 0,
        f"policy.parallel.pipeline_parallel={parallel.pipeline_parallel}. Set 1": parallel.pipeline_parallel
        > 1,
        "padded rows. Set model.layout and forward_layout to packed": any(
            limits.layout == "padded" for limits in config.limits.values()
        ),
        f"balance.algorithm={balance.algorithm}. Set karmarkar_karp": balance.algorithm
        not in ours,
        f"balance.count_multiple={balance.count_multiple}. Set 1": balance.count_multiple
        > 1,
        "losses of routers. Set model.router_aux_loss_coefficient and router_z_loss_coefficient to 0": (
            model.has_router_losses
        ),
        f"algorithm.loss.name={loss}. Set another": loss in ("clip_cov", "kl_cov"),
    }
    degree = "policy.parallel.context_parallel_degree=auto: does not work with"
    raise_all(
        [
            ConfigError(f"{degree} {problem}, or fixed degrees.")
            for problem, holds in refused.items()
            if holds
        ]
    )


def check_model_files(config: TrainingConfig) -> None:
    """Check config.json, weights and tokenizer of every model. Raises ConfigError.

    A described cluster needs only config.json. `controller.lifecycle.model_checks` reads the files.
    """
    template = config.model.chat_template
    arguments = "data.chat_template_arguments"
    problems = Problems()
    for key, path in config.model_paths.items():
        with problems.collecting():
            files = read_model_files(path, key)
            if not config.is_described:
                check_whole(files, path, key)
    with problems.collecting():
        if template and (Path(template).exists() or not config.is_described):
            read_template(template)
    for name in value_of(config, arguments):
        with problems.collecting():
            if name in RESERVED:
                raise ConfigError(f"{arguments}: {name} is set otherwise. Remove it.")
    problems.raise_all()


OPTIMIZER_STEPS = "run.steps * batch.mini_batches * batch.epochs"
"""Settings that determine a run's optimiser steps."""


def check_counts(config: Config) -> None:
    sequences = config.sequences_per_step
    smallest = config.mini_batch_sizes[-1]
    product = f"batch.prompts_per_step * rollout.samples_per_prompt = {sequences} sequences"
    if config.batch.mini_batches > sequences:
        raise ConfigError(
            f"batch.mini_batches={config.batch.mini_batches} is more than the {product} of a step. Lower it."
        )
    if config.policy.data_parallel > smallest:
        raise ConfigError(
            f"policy.data_parallel={config.policy.data_parallel} is more than the {smallest} sequences of a "
            f"mini-batch ({product} over batch.mini_batches={config.batch.mini_batches}). Lower one, or "
            "sample more."
        )
    advice = "batch.mini_batches, or sample more"
    of_mini_batch = f"{smallest} sequences of a mini-batch"
    of_step = f"{sequences} sequences of a step"
    check_together(
        lambda: check_micro_batches(
            config, "min_micro_batches", smallest, of_mini_batch, advice
        ),
        lambda: check_micro_batches(
            config, "forward_min_micro_batches", sequences, of_step, advice
        ),
        lambda: check_optimizer(
            config, "policy", config.total_optimizer_steps, OPTIMIZER_STEPS
        ),
    )


def check_micro_batches(
    config: TrainingConfig, name: str, sequences: int, unit: str, advice: str
) -> None:
    """Raise ConfigError if policy.`name` requires more micro-batches than there are `sequences`.

    unit: noun for these. advice: other settings to change.
    """
    minimum = getattr(config.policy, name)
    multiple = config.balance.count_multiple
    least = -(-minimum // multiple) * multiple
    if least > sequences:
        raise ConfigError(
            f"policy.{name}={minimum} and balance.count_multiple={multiple} ask for {least} micro-batches, "
            f"none of them empty on every rank, of the {unit}. Lower them, or {advice}."
        )
