"""Named, seeded distributions of sequence lengths.

    name, count, seed -> int64 [count] lengths

Realistic, as post-training produces them: `lognormal`, `reasoning`, `agentic`, `uniform`, `grouped`, `equal`.
Adversarial, hard to pack under a given cap: `geometric`, `thirds`, `above_half`, `one_huge`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from balancing.validation import one_of, positive_integer

DEFAULT_CAP = 65_536
"""Default cap in tokens for the adversarial distributions."""

LONGEST_CHAT = 8_192
LONGEST_REASONING = 32_768
GROUP = 16
"""Responses to one prompt in `grouped`."""

Distribution = Callable[[np.random.Generator, int, int], NDArray[np.int64]]
"""(generator, count, cap) -> int64 [count]."""


def draw(name: str, count: int, seed: int, *, cap: int = DEFAULT_CAP) -> NDArray[np.int64]:
    """int64 [count], lengths in tokens, each at least 1; deterministic.

    name: one of `DISTRIBUTIONS`. cap: tokens of a micro-batch; the adversarial distributions depend on it and keep it.
    Raises OptionError for an unknown name, or a count or cap below 1.
    """
    one_of(name, "name", tuple(DISTRIBUTIONS))
    generator = np.random.default_rng(seed)
    return DISTRIBUTIONS[name](generator, positive_integer(count, "count"), positive_integer(cap, "cap"))


def lognormal(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """Chat: median 600, 16..8,192."""
    return _lognormal(generator, count, median=600, sigma=1.0, longest=LONGEST_CHAT)


def reasoning(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """Chains of thought: median 1,500, and one in five cut off at 32,768."""
    lengths = _lognormal(generator, count, median=1_500, sigma=1.0, longest=LONGEST_REASONING)
    lengths[generator.random(count) < 0.2] = LONGEST_REASONING
    return lengths


def agentic(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """Two modes: short tool calls (70 %, median 800) and long sessions (30 %, median 12,000), up to 32,768."""
    short = _lognormal(generator, count, median=800, sigma=0.6, longest=LONGEST_REASONING)
    long = _lognormal(generator, count, median=12_000, sigma=0.4, longest=LONGEST_REASONING)
    return np.where(generator.random(count) < 0.7, short, long)


def uniform(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """16..8,192, all equally likely."""
    return generator.integers(16, LONGEST_CHAT + 1, count)


def grouped(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """As `lognormal`, but the 16 responses to a prompt are neighbours of similar length."""
    between = np.repeat(generator.normal(0.0, 0.9, -(-count // GROUP)), GROUP)[:count]
    within = generator.normal(0.0, 0.4, count)
    return _whole(600 * np.exp(between + within), LONGEST_CHAT)


def equal(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """All 2,048."""
    return np.full(count, 2_048, np.int64)


def geometric(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """The cap, its half, its quarter, ... down to 1, repeated and shuffled."""
    halvings = np.arange(count) % cap.bit_length()
    return generator.permutation(np.maximum(cap >> halvings, 1)).astype(np.int64)


def thirds(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """Within 1 % of a third of the cap, above and below, so that only some triples fit together."""
    third = cap / 3
    return _whole(generator.uniform(third * 0.99, third * 1.01, count), cap)


def above_half(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """Just above half the cap: no two fit together."""
    half = cap // 2
    return np.minimum(generator.integers(half + 1, half + max(cap // 16, 1) + 1, count), cap)


def one_huge(generator: np.random.Generator, count: int, cap: int) -> NDArray[np.int64]:
    """`lognormal` with one sequence as long as the cap."""
    lengths = np.minimum(lognormal(generator, count, cap), cap)
    lengths[generator.integers(count)] = cap
    return lengths


DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        each.__name__: each
        for each in (lognormal, reasoning, agentic, uniform, grouped, equal, geometric, thirds, above_half, one_huge)
    }
)
"""By name, the realistic ones first."""

ADVERSARIAL = frozenset({"geometric", "thirds", "above_half", "one_huge"})
"""Those that depend on the cap."""


def _lognormal(
    generator: np.random.Generator, count: int, *, median: float, sigma: float, longest: int
) -> NDArray[np.int64]:
    return _whole(generator.lognormal(np.log(median), sigma, count), longest, shortest=16)


def _whole(values: NDArray[np.float64], longest: int, shortest: int = 1) -> NDArray[np.int64]:
    return np.clip(np.rint(values), shortest, longest).astype(np.int64)
