"""Sequences into micro-batches under a cap on tokens.

    lengths -> aligned sizes -> how many micro-batches -> fill by workload under the cap -> exchanges -> index arrays

Invariants of every result: every index is in exactly one micro-batch; none is empty; no micro-batch is above
`max_tokens` or `max_sequences`; their number is at least `min_count` and a multiple of `multiple_of`.
The packed layout takes the sum of aligned lengths, the padded layout rows times the aligned longest.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.alignment import round_up
from balancing.bounds import fewest_bins, pack_exactly
from balancing.errors import CountError
from balancing.exchange import Groups, Limits, even_out
from balancing.padded import equal_counts, pack_padded, split_most_tokens, take_in_order
from balancing.validation import check_fits, one_of, positive_integer, sequence_lengths, weight_array

Layout = Literal["packed", "padded"]
PackAlgorithm = Literal["load_balance", "none"]

EXACT_LIMIT = 64
"""Batches of at most this many sequences are searched exactly where heuristics miss the lower bound."""
COUNTS_TRIED = 8
"""Counts from the lower bound upwards that are tried before the best-fit packing is taken."""


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
    """Group sequences into the fewest micro-batches that the caps allow, of equal workload.

    lengths: n whole numbers >= 1, tokens. max_tokens: cap of a micro-batch (for a context-parallel group: its cap
    times cp). workloads: n numbers >= 0, what is evened; tokens if None. length_multiple: each length (packed) or the
    longest (padded) is rounded up to a multiple of it before it counts. algorithm: `load_balance`, or `none`, which
    keeps the given order and cuts it.
    Returns int64 arrays. `load_balance`: heaviest micro-batch first, indices ascending in each; ties by the sum of
    squared lengths, then by first index. `none`: in given order.
    Raises LengthError, WeightError, OptionError for bad values; OverCapError for a sequence above the cap; CountError
    where `min_count` and `multiple_of` need more micro-batches than there are sequences.
    """
    one_of(layout, "layout", ("packed", "padded"))
    one_of(algorithm, "algorithm", ("load_balance", "none"))
    tokens = sequence_lengths(lengths)
    sizes = round_up(tokens, positive_integer(length_multiple, "length_multiple"))
    cap = positive_integer(max_tokens, "max_tokens")
    check_fits(tokens, sizes, cap)
    sequences = len(tokens) if max_sequences is None else positive_integer(max_sequences, "max_sequences")
    caps = Caps(cap, sequences, layout == "padded")
    count = CountRule(positive_integer(min_count, "min_count"), positive_integer(multiple_of, "multiple_of"))
    weights = None if workloads is None else weight_array(workloads, "workloads", len(tokens))
    if algorithm == "none":
        groups = pack_in_order(sizes, caps, count)
    else:
        # Planned in an order of their own, sequences are grouped alike however they are given.
        order = np.lexsort((-sizes, -(sizes if weights is None else weights)))
        sorted_groups = pack_evenly(sizes[order], None if weights is None else weights[order], caps, count)
        groups = heaviest_first([order[group].tolist() for group in sorted_groups], sizes, weights)
    return [np.asarray(group, np.int64) for group in groups]


@dataclass(frozen=True)
class Caps:
    """Cap on tokens and on sequences of a micro-batch, and how tokens are counted."""

    max_tokens: int
    max_sequences: int
    padded: bool = False


@dataclass(frozen=True)
class CountRule:
    """How many micro-batches there may be."""

    minimum: int = 1
    multiple_of: int = 1

    def at_least(self, needed: int, sequences: int) -> int:
        """The smallest allowed count that is not below `needed`; CountError if it is above `sequences`."""
        count = -(-max(needed, self.minimum) // self.multiple_of) * self.multiple_of
        if count > sequences:
            raise CountError(
                f"{sequences} sequences cannot fill {count} micro-batches (the caps need {needed}, "
                f"min_count={self.minimum}, multiple_of={self.multiple_of}); lower min_count or multiple_of, "
                "or pass more sequences"
            )
        return count


def pack_in_order(sizes: NDArray[np.int64], caps: Caps, count: CountRule) -> Groups:
    """Runs of the given order, as few as the caps allow.

    They hold equal counts of sequences where that keeps the caps; otherwise each is filled until the next sequence
    would exceed a cap, and those with most tokens are halved until there are enough.
    """
    filled = take_in_order(sizes, caps.max_tokens, caps.max_sequences, padded=caps.padded)
    bins = count.at_least(len(filled), len(sizes))
    runs = equal_counts(len(sizes), bins)
    if not all(keeps_caps(sizes[start:stop], caps) for start, stop in runs):
        runs = split_most_tokens(filled, sizes, bins, padded=caps.padded)
    return [list(range(start, stop)) for start, stop in runs]


def keeps_caps(sizes: NDArray[np.int64], caps: Caps) -> bool:
    """Whether sequences of these sizes (at least one) may share a micro-batch."""
    tokens = len(sizes) * sizes.max() if caps.padded else sizes.sum()
    return bool(tokens <= caps.max_tokens and len(sizes) <= caps.max_sequences)


def pack_evenly(sizes: NDArray[np.int64], weights: NDArray[np.float64] | None, caps: Caps, count: CountRule) -> Groups:
    """The fewest micro-batches, evened by weight (tokens if None); no order of groups is promised."""
    if caps.padded:
        return pack_padded(sizes, weights, caps.max_tokens, caps.max_sequences, count.at_least)
    loads = sizes.astype(np.float64) if weights is None else weights
    lowest = count.at_least(fewest_micro_batches(sizes, caps), len(sizes))
    groups = _pack_into(sizes, loads, caps, lowest)
    if groups is None:
        groups = _fewest(sizes, loads, caps, count, lowest)
    return even_out(groups, loads, sizes, Limits(caps.max_tokens, caps.max_sequences))


def fewest_micro_batches(sizes: NDArray[np.int64], caps: Caps) -> int:
    """A lower bound on micro-batches of any plan for `sizes`; in the padded layout it is reached."""
    if caps.padded:
        return len(take_in_order(np.sort(sizes)[::-1], caps.max_tokens, caps.max_sequences, padded=True))
    return fewest_bins(sizes, caps.max_tokens, caps.max_sequences)


def fill_evenly(sizes: NDArray[np.int64], weights: NDArray[np.float64], caps: Caps, bins: int) -> Groups | None:
    """Heaviest first, each into the lightest bin that has room (longest-first under caps); None if one finds no room.

    Gives `bins` groups; some are empty only where there are fewer sequences than bins.
    """
    groups: Groups = [[] for _ in range(bins)]
    room = [caps.max_tokens] * bins
    heap = [(0.0, 0, position) for position in range(bins)]
    smallest = int(sizes.min(initial=caps.max_tokens))
    for index in np.lexsort((-sizes, -weights)).tolist():
        size, passed = int(sizes[index]), []
        while heap and room[heap[0][2]] < size:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        load, members, position = heapq.heappop(heap)
        groups[position].append(index)
        room[position] -= size
        if members + 1 < caps.max_sequences and room[position] >= smallest:
            heapq.heappush(heap, (load + float(weights[index]), members + 1, position))
        for bin_without_room in passed:
            heapq.heappush(heap, bin_without_room)
    return groups


def heaviest_first(groups: Groups, sizes: NDArray[np.int64], weights: NDArray[np.float64] | None) -> Groups:
    """Groups by descending weight, ties by the sum of squared sizes, then by first index; indices ascending in each."""
    loads = sizes.astype(np.float64) if weights is None else weights
    squares = np.square(sizes.astype(np.float64))
    ordered = [sorted(group) for group in groups]
    return sorted(
        ordered, key=lambda group: (-loads[group].sum(), -squares[group].sum(), group[0] if group else len(sizes))
    )


def best_fit_decreasing(sizes: NDArray[np.int64], caps: Caps) -> Groups:
    """Largest first, each into the fullest bin that has room; at most about 11/9 of the fewest bins."""
    groups: Groups = []
    open_bins: list[tuple[int, int]] = []  # (room, bin), ascending
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        found = bisect_left(open_bins, (size, -1))
        room, position = open_bins.pop(found) if found < len(open_bins) else (caps.max_tokens, len(groups))
        if position == len(groups):
            groups.append([])
        groups[position].append(index)
        if len(groups[position]) < caps.max_sequences:
            insort(open_bins, (room - size, position))
    return groups


def _pack_into(sizes: NDArray[np.int64], loads: NDArray[np.float64], caps: Caps, bins: int) -> Groups | None:
    """`bins` groups, none empty, evened by load if possible, else by tokens; None where neither finds room."""
    groups = fill_evenly(sizes, loads, caps, bins)
    return groups if groups is not None else fill_evenly(sizes, sizes.astype(np.float64), caps, bins)


def _fewest(sizes: NDArray[np.int64], loads: NDArray[np.float64], caps: Caps, count: CountRule, lowest: int) -> Groups:
    """From the lowest count upwards the first that works; at the latest that of best-fit-decreasing."""
    tight = best_fit_decreasing(sizes, caps)
    for bins in list(range(lowest, len(tight), count.multiple_of))[:COUNTS_TRIED]:
        groups = _pack_into(sizes, loads, caps, bins) if bins > lowest else None
        if groups is None and len(sizes) <= EXACT_LIMIT:
            groups = pack_exactly(sizes, bins, caps.max_tokens, caps.max_sequences)
        if groups is not None:
            return spread([group for group in groups if group], sizes, bins)
    highest = count.at_least(len(tight), len(sizes))
    groups = _pack_into(sizes, loads, caps, highest)
    return groups if groups is not None else spread(tight, sizes, highest)


def spread(groups: Groups, sizes: NDArray[np.int64], count: int) -> Groups:
    """Halve the groups with most tokens until there are `count`; there must be as many indices."""
    heap = [(-(int(sizes[group].sum()) if len(group) > 1 else 0), number, group) for number, group in enumerate(groups)]
    heapq.heapify(heap)
    while len(heap) < count:
        _, number, group = heapq.heappop(heap)
        descending = sorted(group, key=lambda index: (-int(sizes[index]), index))
        for new_number, half in ((number, descending[::2]), (len(heap) + 1, descending[1::2])):
            heapq.heappush(heap, (-(int(sizes[half].sum()) if len(half) > 1 else 0), new_number, half))
    return [group for _, _, group in sorted(heap, key=lambda entry: entry[1])]
