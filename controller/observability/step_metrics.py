"""Metrics of a step from its samples and its seconds by phase: staleness, waiting, throughput."""

from collections.abc import Mapping, Sequence
from typing import Any

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


def session_metrics(sessions: Sequence[Sequence[Mapping[str, Any]]], seconds: np.ndarray) -> dict[str, float]:
    """Count what agents' sessions did. sessions: `Session.told` of each sample. seconds: of each, float64 [B].

    A request continues the turn that it extends. One that extends nothing, or a turn that has been extended, branches.
    A record's turn that the agent did not reach again is dropped, and does not count as a request.
    """
    found = [(nodes, time) for nodes, time in zip(sessions, seconds.tolist(), strict=True) if nodes]
    if not found:
        return {}
    nodes = [node for each, _ in found for node in each]
    reached = [[node for node in each if node["reached"]] for each, _ in found]
    joined = sum(node["joined"] for node in nodes)
    asked = sum(map(len, reached))
    begun, requests = sum(map(bool, reached)), max(1, asked + joined)
    extended = sum(len({node["parent"] for node in each} - {None}) for each in reached)
    dropped = [node for node in nodes if not node["kept"]]
    return {
        "session/requests": (asked + joined) / len(found),
        "session/continued_share": extended / requests,
        "session/branched_share": (asked - extended - begun) / requests,
        "session/retried_share": joined / requests,
        "session/replayed_share": sum(node["replayed"] for node in nodes) / requests,
        "session/branches": (asked - extended) / len(found),
        "session/dropped_turns": len(dropped) / len(found),
        "session/sampled_tokens": sum(node["tokens"] for node in nodes) / len(found),
        "session/trained_tokens": sum(node["tokens"] for node in nodes if node["kept"]) / len(found),
        "session/agent_s": float(
            np.mean([max(0.0, time - _busy(each)) for each, (_, time) in zip(reached, found, strict=True)])
        ),
    }


def _busy(nodes: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds in which some request ran."""
    busy, until = 0.0, 0.0
    for began, seconds in sorted((node["began"], node["seconds"]) for node in nodes):
        busy += max(0.0, began + seconds - max(began, until))
        until = max(until, began + seconds)
    return busy
