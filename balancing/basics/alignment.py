"""Align sequence lengths, and cut zig-zag chunks for context parallelism.

    sequence of 6, cp = 2, multiple 4:   0 1 | 2 3 | 4 5 | p p      2*cp equal segments
    cp rank 0 has segments 0 and 3:      0 1 p p
    cp rank 1 has segments 1 and 2:      2 3 4 5

With causal attention a token costs as much as it has predecessors, so segments r and 2*cp-1-r together cost
the same on every rank.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.basics.validation import positive_integer, whole_numbers
from balancing.errors import LengthError, OptionError


def length_multiple(context_parallel: int, tensor_parallel: int) -> int:
    """Return the multiple that sequences are padded to: `2*cp*tp`, or `tp` without context parallelism."""
    cp = positive_integer(context_parallel, "context_parallel")
    tp = positive_integer(tensor_parallel, "tensor_parallel")
    return tp if cp == 1 else 2 * cp * tp


def group_cap(max_tokens: int, context_parallel: int) -> int:
    """Return a context-parallel group's cap on a micro-batch: the cap of one rank times cp."""
    return positive_integer(max_tokens, "max_tokens") * positive_integer(
        context_parallel, "context_parallel"
    )


def round_up(lengths: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """Return the smallest multiples of `multiple` that are at least `lengths`, as int64 of the same shape."""
    return -(-lengths // multiple) * multiple


def cumulative_lengths(lengths: ArrayLike) -> NDArray[np.int64]:
    """Return bounds from 0, int64 [n + 1]: sequence i of a packed row is `[bounds[i], bounds[i + 1])`."""
    return np.concatenate(
        [[0], np.cumsum(whole_numbers(lengths, "lengths", minimum=0))]
    ).astype(np.int64)


def zigzag_positions(
    padded_lengths: ArrayLike, context_parallel: int, context_rank: int
) -> NDArray[np.int64]:
    """Return positions of one cp rank's tokens in the packed, padded row.

    padded_lengths: int [n], each a multiple of `2*cp` (any length for cp = 1). Returns int64
    [sum(padded_lengths) / cp], segments r and 2*cp-1-r of each sequence, sequence after sequence. Raises
    LengthError for a length that is not a multiple, OptionError for a rank outside the group.
    """
    cp = positive_integer(context_parallel, "context_parallel")
    if not 0 <= context_rank < cp:
        raise OptionError(
            f"context_rank={context_rank} is outside the group of context_parallel={cp}"
        )
    bounds = cumulative_lengths(padded_lengths)
    lengths = np.diff(bounds)
    if cp == 1:
        return np.arange(bounds[-1])
    _check_divides(lengths, 2 * cp)
    pieces = []
    for start, segment in zip(bounds[:-1], lengths // (2 * cp), strict=True):
        for number in (context_rank, 2 * cp - 1 - context_rank):
            pieces.append(
                np.arange(start + number * segment, start + (number + 1) * segment)
            )
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _check_divides(lengths: NDArray[np.int64], divisor: int) -> None:
    uneven = lengths % divisor != 0
    if uneven.any():
        index = int(np.argmax(uneven))
        raise LengthError(
            f"padded_lengths[{index}] is {lengths[index]}, not a multiple of 2*context_parallel={divisor}. "
            "Round lengths up to length_multiple(context_parallel, tensor_parallel) first."
        )
