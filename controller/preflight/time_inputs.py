"""Translate a configuration for `balancing.time_model`.

Config, Cluster --> ModelShape, Layout, Machine      a run's lengths, or a distribution --> Workload
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean

import numpy as np

from balancing.time_model import Layout, Machine, ModelShape, Workload, machine_named
from balancing.time_model.memory import Needs
from controller.config import Config, TrainingConfig
from controller.config.counted_layers import complete_description
from controller.observability.run_folder import RunFolder
from controller.preflight.cluster import FIGURES, Cluster
from workers.config.model import ATTENTION_KEPT, RECOMPUTED
from workers.errors import ConfigError

DRAWS = "lognormal:1500,0.9 (median, sigma), fixed:1500 or uniform:100,2000"
LONGEST = 10**9
DEFAULT = (0.25, 0.8)
"""Without lengths: median of a log-normal distribution as a share of the longest response, and its sigma."""


def shape_of(config: TrainingConfig) -> ModelShape:
    """Count the policy's model. Adapters of rank r count as their two matrices on every projection."""
    shape = ModelShape.from_model_config(complete_description(config.model_description()))
    rank = config.model.lora.rank
    return (
        ModelShape(**vars(shape) | {"trained": 24.0 * rank * shape.layers * shape.hidden})
        if rank
        else shape
    )


def needs_of(config: TrainingConfig) -> Needs:
    """Count the models of a run's training roles, all of the policy's size."""
    models = {role: len(config.models_of(role)) for role in config.training_roles}
    trained = sum(count for role, count in models.items() if config.spec(role).learns)
    longest = config.max_model_tokens if isinstance(config, Config) else 1
    return Needs(
        trained, sum(models.values()) - trained, config.model.chunk_tokens("cuda"), longest
    )


def training_layout(config: TrainingConfig) -> Layout:
    """Describe how training ranks share a model. It has no engines."""
    parallel = config.policy.parallel
    model = config.model
    compiled = (
        config.uses_gpus and model.compile != "never" and parallel.tensor_parallel == 1
    )
    kept = compiled and model.gradient_checkpointing == "selective"
    return Layout(
        dp=config.policy.data_parallel,
        cp=parallel.context_parallel,
        tp=parallel.tensor_parallel,
        pp=parallel.pipeline_parallel,
        ep=parallel.expert_parallel,
        virtual_stages=parallel.virtual_stages,
        replicate=parallel.replicate,
        reshard_after_forward=config.policy.reshard_after_forward,
        defer_gradient_reduction=parallel.defer_gradient_reduction,
        max_tokens=config.policy.max_tokens_per_micro_batch,
        recomputed=RECOMPUTED[ATTENTION_KEPT if kept else model.gradient_checkpointing],
        compiled=compiled,
        shared_prompts=config.decide_prefixes(model).share_prefixes == "always",
        engines=0,
        engine_gib=0.0,
        placement="apart",
        dtype=config.compute_dtype,
    )


def layout_of(config: Config, cluster: Cluster) -> Layout:
    """Describe where a run's roles lie. On CPUs a node's GPUs are its cores."""
    rollout = config.rollout
    of_engine = rollout.gpu_share(config.rollout_placement) * cluster.gpu_gib
    if not config.uses_gpus:
        of_engine = rollout.cpu_kv_cache_gib + 4 * shape_of(config).parameters / 2**30
    return replace(
        training_layout(config),
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus or max(1, int(cluster.cpus)),
        engines=config.engines,
        engine_tp=rollout.tensor_parallel,
        engine_gib=of_engine,
        max_concurrent=rollout.max_concurrent,
        placement=config.rollout_placement,  # type: ignore[arg-type]
        staleness=rollout.max_staleness,
        window=rollout.out_of_order_window,
    )


def machine_of(cluster: Cluster) -> Machine:
    """Return the cluster's GPU, or a core of this project's machine for nodes without GPUs."""
    figures = {
        name.removeprefix("gpu_"): vars(cluster)[name]
        for name in FIGURES
        if vars(cluster)[name]
    }
    return machine_named(cluster.gpu or "cpu", **figures)


def workload_of(
    config: Config, responses: Sequence[int], prompts: Sequence[int]
) -> Workload:
    """Describe a step with responses and prompts of these distributions, int64 [any] each, in a fixed random
    order.
    """
    rng = np.random.default_rng(0)
    count = config.batch.prompts_per_step
    sampled = rng.permutation(_spread(responses, config.sequences_per_step))
    prompt_tokens = np.repeat(
        rng.permutation(_spread(prompts, count)), config.rollout.samples_per_prompt
    )
    other_roles = [config.spec(role) for role in config.used_roles if role != "policy"]
    return Workload(
        prompt_tokens,
        np.maximum(1, np.minimum(sampled, config.longest_response)),
        config.rollout.samples_per_prompt,
        updates=config.updates_per_step,
        epochs=config.batch.epochs,
        forward_passes=config.has_forward_pass + len(other_roles),
        trained_models=1 + sum(spec.learns for spec in other_roles),
        reward_workers=config.reward.workers,
    )


def _spread(lengths: Sequence[int], count: int) -> np.ndarray:
    """Return `count` lengths with the distribution of `lengths`."""
    return np.quantile(lengths, (np.arange(count) + 0.5) / count).round().astype(np.int64)


def recorded_lengths(folder: Path) -> tuple[list[int], list[int]]:
    """Return all responses of a run, and its mean prompt, which its records of whole samples leave.

    Raises ConfigError if it recorded no lengths.
    """
    run = RunFolder(folder)
    lengths = [length for step in run.lengths.values() for length in step]
    means = run.curve("rollout/response_tokens_mean").values if lengths else []
    if not means:
        raise ConfigError(
            f"--lengths {folder}: holds no lengths of a run. Give a folder like runs/NAME."
        )
    prompt = max(1, round(fmean(lengths) - fmean(means)))
    return [max(1, length - prompt) for length in lengths], [prompt]


def drawn_lengths(text: str, longest: int) -> list[int]:
    """Return quantiles of a distribution such as `lognormal:1500,0.9`, at most `longest`, or of the default
    if empty.

    Raises ConfigError for other forms.
    """
    kind, _, numbers = (text or f"lognormal:{DEFAULT[0] * longest},{DEFAULT[1]}").partition(
        ":"
    )
    if not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?)?", numbers):
        raise ConfigError(f"--response-tokens {text}: not a distribution. Write {DRAWS}.")
    first, second = ([float(number) for number in numbers.split(",")] + [0.0])[:2]
    quantiles: dict[str, Callable[[float], float]] = {
        "lognormal": lambda share: (
            first * math.exp(min(50.0, second * NormalDist().inv_cdf(share)))
        ),
        "fixed": lambda share: first,
        "uniform": lambda share: first + (second - first) * share,
    }
    if kind not in quantiles:
        raise ConfigError(f"--response-tokens {text}: {kind} is unknown. Write {DRAWS}.")
    if numbers.count(",") != (kind != "fixed"):
        raise ConfigError(
            f"--response-tokens {text}: {kind} has another count of numbers. Write {DRAWS}."
        )
    if (
        not 0 < first <= LONGEST
        or second > LONGEST
        or (kind == "uniform" and first > second)
    ):
        raise ConfigError(
            f"--response-tokens {text}: lengths are above 0, at most {LONGEST:,}, and the shorter is first. "
            f"Write {DRAWS}."
        )
    lengths = [quantiles[kind]((number + 0.5) / 1000) for number in range(1000)]
    return [max(1, min(longest, round(length))) for length in lengths]
