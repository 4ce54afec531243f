"""Metrics of a step from its samples and its seconds by phase: staleness, waiting, throughput."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from workers.batch.remote_batch import RemoteBatch


def staleness(
    oldest: np.ndarray, newest: np.ndarray, version_tokens: Mapping[int, int], current: int
) -> dict[str, float]:
    """Measure the age of samples and their tokens, in weight versions.

    oldest, newest: versions that sampled a token of each [B]. version_tokens: tokens by version. current: the
    policy's.
    """
    age = current - oldest
    spanned = newest - oldest + 1
    tokens = sum(version_tokens.values())
    return {
        "rollout/staleness_mean": float(age.mean()),
        "rollout/staleness_max": float(age.max()),
        "rollout/versions_per_sample": float(spanned.mean()),
        **{
            f"rollout/tokens_of_age_{current - v}": n / tokens
            for v, n in sorted(version_tokens.items())
        },
    }


def waiting(
    idle_seconds: float, queued: int, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Compute the shares of a step in which the trainer waited for samples, and engines were idle.

    idle_seconds: mean over engines. queued: requests without an engine. seconds: by phase.
    """
    return {
        "rollout/trainer_idle_share": seconds["rollout"] / seconds["step"],
        "rollout/engine_idle_share": min(1.0, idle_seconds / seconds["step"]),
        "rollout/queued": float(queued),
    }


def throughput(
    generated: RemoteBatch,
    trained: RemoteBatch,
    seconds: Mapping[str, float],
    epochs: int = 1,
) -> dict[str, float]:
    """Compute a step's rollout and update tokens, and tokens/s of step, wait for samples and update.

    seconds: by phase. epochs: how often the update reads its tokens.
    """
    rates = {
        "tokens/rollout": float(generated["response_tokens"].sum()),
        "throughput/tokens_per_s": float(generated["length"].sum()) / seconds["step"],
        "throughput/rollout_tokens_per_s": float(generated["response_tokens"].sum())
        / seconds["rollout"],
    }
    if "update" in seconds:
        updated = update_throughput(trained, seconds, epochs)
        rates |= updated | {"throughput/tokens_per_s": rates["throughput/tokens_per_s"]}
    return rates


def update_throughput(
    trained: RemoteBatch, seconds: Mapping[str, float], epochs: int = 1
) -> dict[str, float]:
    """Compute a step's update tokens over all epochs, and tokens/s of update and step, from `seconds` by
    phase.
    """
    tokens = float(epochs * trained["length"].sum())
    return {
        "tokens/update": tokens,
        "throughput/update_tokens_per_s": tokens / seconds["update"],
        "throughput/tokens_per_s": tokens / seconds["step"],
    }


def session_metrics(
    sessions: Sequence[Sequence[Mapping[str, Any]]], seconds: np.ndarray
) -> dict[str, float]:
    """Count what agents' sessions did. sessions: each sample's `Session.describe_turns`. seconds: of each,
    float64 [B].

    A request continues the turn that it extends. One that extends nothing, or a turn that has been extended,
    branches.
    """
    active_sessions = [nodes for nodes in sessions if nodes]
    if not active_sessions:
        return {}
    nodes = list(itertools.chain(*active_sessions))
    # The first roots count too.
    firsts = len(
        {
            (place, node["parent"])
            for place, session in enumerate(active_sessions)
            for node in session
        }
    )
    joined = sum(node["joined"] for node in nodes)
    of_requests = {
        "continued_share": firsts - len(active_sessions),
        "branched_share": len(nodes) - firsts,
        "retried_share": joined,
        "replayed_share": sum(node["replayed"] for node in nodes),
    }
    of_sessions = {
        "branches": len(nodes) - firsts + len(active_sessions),
        "dropped_turns": sum(not node["kept"] for node in nodes),
        "sampled_tokens": sum(node["tokens"] for node in nodes),
        "agent_s": sum(
            max(0.0, time - _busy(session))
            for session, time in zip(sessions, seconds.tolist(), strict=True)
            if session
        ),
    }
    return {
        f"session/{name}": value / (len(nodes) + joined)
        for name, value in of_requests.items()
    } | {
        f"session/{name}": value / len(active_sessions)
        for name, value in of_sessions.items()
    }


def _busy(nodes: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds in which some request ran."""
    busy, until = 0.0, 0.0
    for began, seconds in sorted((node["began"], node["seconds"]) for node in nodes):
        busy += max(0.0, began + seconds - max(began, until))
        until = max(until, began + seconds)
    return busy
