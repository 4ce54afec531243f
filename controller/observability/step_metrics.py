"""Metrics of a step from its samples and its seconds by phase: staleness, waiting, throughput."""

from collections.abc import Mapping

import numpy as np

from workers.remote_batch import RemoteBatch


def staleness(
    oldest: np.ndarray, newest: np.ndarray, version_tokens: Mapping[int, int], current: int
) -> dict[str, float]:
    """Measure the age of samples and their tokens, in weight versions.

    oldest, newest: versions that sampled a token of each [B]. version_tokens: tokens by version. current: the policy's.
    """
    age, spanned, tokens = current - oldest, newest - oldest + 1, sum(version_tokens.values())
    return {
        "rollout/staleness_mean": float(age.mean()),
        "rollout/staleness_max": float(age.max()),
        "rollout/versions_per_sample": float(spanned.mean()),
        **{f"rollout/tokens_of_age_{current - v}": n / tokens for v, n in sorted(version_tokens.items())},
    }


def waiting(idle_seconds: float, queued: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Compute the shares of a step in which the trainer waited for samples, and engines were idle.

    idle_seconds: mean over engines. queued: requests without an engine. seconds: by phase.
    """
    return {
        "rollout/trainer_idle_share": seconds["rollout"] / seconds["step"],
        "rollout/engine_idle_share": min(1.0, idle_seconds / seconds["step"]),
        "rollout/queued": float(queued),
    }


def throughput(
    generated: RemoteBatch, trained: RemoteBatch, seconds: Mapping[str, float], epochs: int = 1
) -> dict[str, float]:
    """Compute a step's rollout and update tokens, and tokens/s of step, wait for samples and update.

    seconds: by phase. epochs: how often the update reads its tokens.
    """
    rates = {
        "tokens/rollout": float(generated["response_tokens"].sum()),
        "throughput/tokens_per_s": float(generated["length"].sum()) / seconds["step"],
        "throughput/rollout_tokens_per_s": float(generated["response_tokens"].sum()) / seconds["rollout"],
    }
    if "update" in seconds:
        updated = update_throughput(trained, seconds, epochs)
        rates |= updated | {"throughput/tokens_per_s": rates["throughput/tokens_per_s"]}
    return rates


def update_throughput(trained: RemoteBatch, seconds: Mapping[str, float], epochs: int = 1) -> dict[str, float]:
    """Compute a step's update tokens over all epochs, and tokens/s of update and step, from `seconds` by phase."""
    tokens = float(epochs * trained["length"].sum())
    return {
        "tokens/update": tokens,
        "throughput/update_tokens_per_s": tokens / seconds["update"],
        "throughput/tokens_per_s": tokens / seconds["step"],
    }
