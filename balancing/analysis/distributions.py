"""Draw lengths from named, seeded distributions: name, count, seed -> int64 [count] lengths.

Realistic, as post-training produces them: `lognormal`, `reasoning`, `agentic`, `uniform`, `grouped`, `equal`.
Adversarial, hard to pack under a given cap: `geometric`, `thirds`, `above_half`, `one_huge`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from balancing.basics.validation import one_of, positive_integer

DEFAULT_CAP = 65_536

LONGEST_CHAT = 8_192
LONGEST_REASONING = 32_768
GROUP = 16
"""Responses to one prompt in `grouped`."""

Distribution = Callable[[np.random.Generator, int, int], NDArray[np.int64]]
"""(generator, count, cap) -> int64 [count]."""


def draw(name: str, count: int, seed: int, *, cap: int = DEFAULT_CAP) -> NDArray[np.int64]:
    """Draw int64 [count] lengths in tokens, deterministically. cap: of a micro-batch, for adversarial
    distributions.

    Raises OptionError for an unknown name, or a count or cap below 1.
    """
    one_of(name, "name", tuple(DISTRIBUTIONS))
    generator = np.random.default_rng(seed)
    return DISTRIBUTIONS[name](
        generator, positive_integer(count, "count"), positive_integer(cap, "cap")
    )


def _lognormal(
    rng: np.random.Generator,
    count: int,
    median: float,
    sigma: float,
    longest: int = LONGEST_REASONING,
) -> NDArray[np.int64]:
    return _whole(rng.lognormal(np.log(median), sigma, count), longest, shortest=16)


def _whole(
    values: NDArray[np.float64], longest: int, shortest: int = 1
) -> NDArray[np.int64]:
    return np.clip(np.rint(values), shortest, longest).astype(np.int64)


def _chat(rng: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    return _lognormal(rng, count, 600, 1.0, LONGEST_CHAT)


def _reasoning(rng: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    lengths = _lognormal(rng, count, 1_500, 1.0)
    lengths[rng.random(count) < 0.2] = LONGEST_REASONING
    return lengths


def _agentic(rng: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    short = _lognormal(rng, count, 800, 0.6)
    long = _lognormal(rng, count, 12_000, 0.4)
    return np.where(rng.random(count) < 0.7, short, long)


def _grouped(rng: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    between = np.repeat(rng.normal(0.0, 0.9, -(-count // GROUP)), GROUP)[:count]
    return _whole(600 * np.exp(between + rng.normal(0.0, 0.4, count)), LONGEST_CHAT)


def _geometric(rng: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    return rng.permutation(
        np.maximum(cap >> (np.arange(count) % cap.bit_length()), 1)
    ).astype(np.int64)


def _above_half(rng: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    return np.minimum(
        rng.integers(cap // 2 + 1, cap // 2 + max(cap // 16, 1) + 1, count), cap
    )


def _one_huge(rng: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    lengths = np.minimum(_chat(rng, count, cap), cap)
    lengths[rng.integers(count)] = cap
    return lengths


DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        "lognormal": _chat,  # chat: median 600, 16 to 8,192
        "reasoning": _reasoning,  # chains of thought: median 1,500, and one in five cut off at 32,768
        "agentic": _agentic,  # tool calls (70 %, median 800), sessions (median 12,000), up to 32,768
        "uniform": lambda rng, count, cap: rng.integers(16, LONGEST_CHAT + 1, count),
        "grouped": _grouped,  # as `lognormal`, but 16 neighbours answer a prompt at similar length
        "equal": lambda rng, count, cap: np.full(count, 2_048, np.int64),
        "geometric": _geometric,  # the cap, its half, its quarter, ... down to 1, repeated and shuffled
        "thirds": lambda rng, count, cap: _whole(
            rng.uniform(cap / 3 * 0.99, cap / 3 * 1.01, count), cap
        ),
        "above_half": _above_half,  # just above half the cap: no two fit together
        "one_huge": _one_huge,  # `lognormal` with one sequence as long as the cap
    }
)
"""By name, the realistic ones first. `thirds`: within 1 % of a third of the cap, so that only some triples
fit.
"""

ADVERSARIAL = frozenset({"geometric", "thirds", "above_half", "one_huge"})
