"""Pack sequences into micro-batches under a cap on tokens.

    lengths -> aligned sizes -> number of micro-batches -> filling by workload under the caps -> exchanges

A packed micro-batch takes the sum of its aligned lengths, a padded one its rows times the longest aligned
length.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.basics.alignment import round_up
from balancing.basics.grouping import Caps, Floats, Grouping, Integers, listed
from balancing.basics.validation import (
    check_fits,
    one_of,
    positive_integer,
    sequence_lengths,
    weight_array,
)
from balancing.errors import CountError
from balancing.search.exchange import MANY, even_out
from balancing.search.filling import best_fit, fill_lightest
from balancing.search.lower_bounds import fewest_bins
from balancing.search.padded import (
    Runs,
    equal_counts,
    pack_padded,
    split_most_tokens,
    take_in_order,
)

Layout = Literal["packed", "padded"]
PackAlgorithm = Literal["load_balance", "none"]


def pack(
    lengths: ArrayLike,
    max_tokens: int,
    *,
    max_sequences: int | None = None,
    min_count: int = 1,
    multiple_of: int = 1,
    workloads: ArrayLike | None = None,
    layout: Layout = "packed",
    length_multiple: int = 1,
    algorithm: PackAlgorithm = "load_balance",
) -> list[NDArray[np.int64]]:
    """Group sequences into the fewest micro-batches that the caps allow, with workloads as equal as possible.

    lengths: n whole numbers >= 1. max_tokens: cap of a micro-batch (of a context-parallel group: cap of a
    rank times cp). workloads: n numbers >= 0, or None for tokens. length_multiple: lengths are rounded up to
    a multiple.
    algorithm: `load_balance`, or `none`, which cuts the given order. Returns int64 arrays, heaviest
    micro-batch first, or for `none` in given order, indices ascending. Raises LengthError, WeightError,
    OptionError for bad values, OverCapError for a sequence above the cap, and CountError if counts ask for
    more micro-batches than there are sequences.
    """
    one_of(layout, "layout", ("packed", "padded"))
    one_of(algorithm, "algorithm", ("load_balance", "none"))
    tokens = sequence_lengths(lengths)
    sizes = round_up(tokens, positive_integer(length_multiple, "length_multiple"))
    cap = positive_integer(max_tokens, "max_tokens")
    check_fits(tokens, sizes, cap)
    sequences = (
        len(tokens)
        if max_sequences is None
        else positive_integer(max_sequences, "max_sequences")
    )
    caps = Caps(cap, sequences, layout == "padded")
    count = CountRule(
        positive_integer(min_count, "min_count"),
        positive_integer(multiple_of, "multiple_of"),
    )
    weights = (
        None if workloads is None else weight_array(workloads, "workloads", len(tokens))
    )
    if algorithm == "none":
        return [np.arange(start, stop) for start, stop in pack_in_order(sizes, caps, count)]
    # Sorted first, so that the result does not depend on the given order.
    loads = sizes.astype(np.float64) if weights is None else weights
    order = np.lexsort((-sizes, -loads))
    grouping = pack_evenly(
        sizes[order], None if weights is None else weights[order], caps, count
    )
    grouping = heaviest_first(grouping, sizes[order], loads[order], order)
    return [np.sort(order[group]) for group in grouping.members()]


@dataclass(frozen=True)
class CountRule:
    minimum: int = 1
    multiple_of: int = 1

    def at_least(self, needed: int, sequences: int) -> int:
        """Return the smallest allowed count >= `needed`. Raises CountError if above `sequences`."""
        count = -(-max(needed, self.minimum) // self.multiple_of) * self.multiple_of
        if count > sequences:
            raise CountError(
                f"{sequences} sequences cannot fill {count} micro-batches (the caps need {needed}, "
                f"min_count={self.minimum}, multiple_of={self.multiple_of}). Lower min_count or multiple_of, "
                "or pass more sequences."
            )
        return count


def pack_in_order(sizes: Integers, caps: Caps, count: CountRule) -> Runs:
    """Cut the given order into as few runs as the caps allow.

    Runs have equal counts if that keeps the caps. Otherwise each run ends where the next sequence would
    exceed a cap, and the runs with most tokens are halved until there are enough.
    """
    filled = take_in_order(sizes, caps.max_tokens, caps.max_sequences, padded=caps.padded)
    bins = count.at_least(len(filled), len(sizes))
    runs = equal_counts(len(sizes), bins)
    if not all(keeps_caps(sizes[start:stop], caps) for start, stop in runs):
        runs = split_most_tokens(filled, sizes, bins, padded=caps.padded)
    return runs


def keeps_caps(sizes: Integers, caps: Caps) -> bool:
    tokens = len(sizes) * sizes.max() if caps.padded else sizes.sum()
    return bool(tokens <= caps.max_tokens and len(sizes) <= caps.max_sequences)


def pack_evenly(
    sizes: Integers, weights: Floats | None, caps: Caps, count: CountRule
) -> Grouping:
    """Form the fewest micro-batches, balanced by weight (by tokens if None), in no particular order."""
    if caps.padded:
        return pack_padded(
            sizes, weights, caps.max_tokens, caps.max_sequences, count.at_least
        )
    loads = sizes.astype(np.float64) if weights is None else weights
    lowest = count.at_least(fewest_micro_batches(sizes, caps), len(sizes))
    grouping = pack_into(sizes, loads, caps, lowest)
    while grouping is None:
        lowest = count.at_least(lowest + 1, len(sizes))
        grouping = pack_into(sizes, loads, caps, lowest)
    return grouping


def fewest_micro_batches(sizes: Integers, caps: Caps) -> int:
    """Bound the number of micro-batches for `sizes`. The padded layout attains the bound."""
    if caps.padded:
        return len(
            take_in_order(
                -np.sort(-sizes), caps.max_tokens, caps.max_sequences, padded=True
            )
        )
    return fewest_bins(sizes, caps.max_tokens, caps.max_sequences)


def fewest_by_best_fit(sizes: Integers, caps: Caps) -> int:
    return _best_fit_decreasing(sizes, caps).count


def most_by_best_fit(sizes: Integers, caps: Caps) -> int:
    """Bound `fewest_by_best_fit` from above, in less time.

    A sequence of s tokens opens a micro-batch only if none of the others has room for it: each has its most
    sequences, or above max_tokens - s tokens and so at least that over the longest sequence's tokens as
    sequences.
    """
    descending = -np.sort(-sizes)
    sequences = np.arange(len(sizes))
    earlier_tokens = np.cumsum(descending) - descending
    held = caps.max_tokens - descending + 1
    tight = np.minimum(earlier_tokens // held, sequences // -(-held // descending[0]))
    return 1 + int((tight + sequences // caps.max_sequences).max())


def pack_into(sizes: Integers, loads: Floats, caps: Caps, count: int) -> Grouping | None:
    """Form `count` non-empty packed micro-batches, balanced by load. Returns None if every method of filling
    fails.

    From the most even loads to the tightest: heaviest first, exchanges without a cap, best-fit-decreasing.
    Many sequences do without exchanges, which cost most.
    """
    many = len(sizes) > MANY
    for fill in (
        (_by_load, _by_best_fit) if many else (_by_load, _by_exchanges, _by_best_fit)
    ):
        grouping = fill(sizes, loads, caps, count)
        if grouping is not None:
            return grouping if many else even_out(grouping, loads, sizes, caps)
    return None


def heaviest_first(
    grouping: Grouping, sizes: Integers, weights: Floats, indices: Integers
) -> Grouping:
    """Renumber by descending weight, ties by the sum of squared sizes, then by the least of `indices` (int64
    [n]).
    """
    first = np.full(grouping.count, np.iinfo(np.int64).max)
    np.minimum.at(first, grouping.group_of, indices)
    squares = np.square(sizes.astype(np.float64))
    order = np.lexsort((first, -grouping.sums(squares), -grouping.sums(weights)))
    return grouping.renumbered(np.argsort(order), grouping.count)


def _by_load(sizes: Integers, loads: Floats, caps: Caps, count: int) -> Grouping | None:
    order = np.lexsort((-sizes, -loads))
    return _complete(
        fill_lightest(order, sizes, loads, count, caps.max_tokens, caps.max_sequences),
        count,
    )


def _by_best_fit(sizes: Integers, loads: Floats, caps: Caps, count: int) -> Grouping | None:
    tight = _best_fit_decreasing(sizes, caps)
    return spread(tight, sizes, count) if tight.count <= count else None


def _by_exchanges(
    sizes: Integers, loads: Floats, caps: Caps, count: int
) -> Grouping | None:
    """Even out tokens without a cap until they keep it, which packs thirds of the cap three to a
    micro-batch.
    """
    tokens = sizes.astype(np.float64)
    uncapped = Caps(int(sizes.sum()), caps.max_sequences)
    start = _by_load(sizes, tokens, uncapped, count)
    if start is None:
        return None
    grouping = even_out(
        start, tokens, sizes, uncapped, only_heaviest=True, target=float(caps.max_tokens)
    )
    return grouping if grouping.sums(sizes).max() <= caps.max_tokens else None


def _best_fit_decreasing(sizes: Integers, caps: Caps) -> Grouping:
    order = np.argsort(-sizes, kind="stable")
    group_of = best_fit(order, sizes, caps.max_tokens, caps.max_sequences)
    return Grouping(group_of, int(group_of.max()) + 1)


def _complete(group_of: Integers, count: int) -> Grouping | None:
    return None if (group_of < 0).any() else Grouping(group_of, count)


def spread(tight: Grouping, sizes: Integers, count: int) -> Grouping:
    """Halve the groups with most tokens until there are `count`, at most the number of indices."""
    if tight.count >= count:
        return Grouping(tight.group_of.copy(), count)
    order, bounds = listed(tight.group_of, tight.count)
    group_of = tight.group_of.copy()
    groups = np.split(order, bounds[1:-1])
    heap = [(_priority(group, sizes), number) for number, group in enumerate(groups)]
    heapq.heapify(heap)
    while len(groups) < count:
        _, number = heapq.heappop(heap)
        group = groups[number]
        descending = group[np.lexsort((group, -sizes[group]))]
        remaining = descending[::2]
        moved = descending[1::2]
        group_of[moved] = len(groups)
        groups[number] = remaining
        groups.append(moved)
        heapq.heappush(heap, (_priority(remaining, sizes), number))
        heapq.heappush(heap, (_priority(moved, sizes), len(groups) - 1))
    return Grouping(group_of, count)


def _priority(group: Integers, sizes: Integers) -> float:
    """Return the group's tokens, negative for a heap, or 0 if it cannot be halved."""
    return -float(sizes[group].sum()) if len(group) > 1 else 0.0
