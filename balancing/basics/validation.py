"""Check arguments. Each function returns the value in the form that the package computes with."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.basics.grouping import Floats, Integers
from balancing.errors import (
    BalancingError,
    LengthError,
    MiniBatchError,
    OptionError,
    OverCapError,
    WeightError,
)


def positive_integer(value: Any, name: str) -> int:
    """Raise OptionError unless `value` is a whole number of at least 1."""
    if (
        isinstance(value, (bool, np.bool_))
        or not isinstance(value, Integral)
        or int(value) < 1
    ):
        raise OptionError(f"{name}={value!r} must be a whole number of at least 1")
    return int(value)


def one_of(value: Any, name: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OptionError(
            f"{name}={value!r} is unknown. Set {name} to one of {', '.join(map(repr, choices))}."
        )


def whole_numbers(
    values: ArrayLike, name: str, *, minimum: int, error: type[BalancingError] = LengthError
) -> Integers:
    """Return int64 [n]. Raises `error` for the first entry that is not a whole number of at least
    `minimum`.
    """
    array = _one_dimensional(values, name, error)
    if array.dtype.kind not in "iuf":
        raise error(f"{name} holds {array.dtype} values. Pass whole numbers.")
    bad = (
        ~np.isfinite(array)
        | (array != np.floor(array))
        | (array < minimum)
        | (array > 2**53)
    )
    if bad.any():
        index = int(np.argmax(bad))
        raise error(
            f"{name}[{index}] is {array[index]}. Every entry of {name} must be a whole number >= {minimum}."
        )
    return array.astype(np.int64)


def sequence_lengths(lengths: ArrayLike) -> Integers:
    """Return int64 [n]. Raises LengthError unless n >= 1 and every length >= 1."""
    checked = whole_numbers(lengths, "lengths", minimum=1)
    if checked.size == 0:
        raise LengthError("lengths is empty. Pass the length of at least one sequence.")
    return checked


def weight_array(weights: ArrayLike, name: str, size: int | None = None) -> Floats:
    """Return float64 [n]. Raises WeightError unless all are finite, >= 0, and `size` in number."""
    array = _one_dimensional(weights, name, WeightError)
    if array.dtype.kind not in "iufb":
        raise WeightError(f"{name} holds {array.dtype} values. Pass numbers.")
    if size is not None and array.size != size:
        raise WeightError(
            f"{name} holds {array.size} values for {size} sequences. Pass one for each of lengths."
        )
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        index = int(np.argmax(bad))
        raise WeightError(
            f"{name}[{index}] is {array[index]}. Every entry of {name} must be finite and >= 0."
        )
    return array.astype(np.float64)


def check_fits(lengths: Integers, aligned: Integers, max_tokens: int) -> None:
    """Raise OverCapError for the first sequence that alone exceeds the cap."""
    too_long = aligned > max_tokens
    if not too_long.any():
        return
    index = int(np.argmax(too_long))
    grown = (
        f" ({aligned[index]} after alignment)" if aligned[index] != lengths[index] else ""
    )
    raise OverCapError(
        f"lengths[{index}] is {lengths[index]} tokens{grown}, above max_tokens={max_tokens}. "
        f"Raise max_tokens to at least {aligned.max()} or shorten the sequence."
    )


def check_patches(patches: Floats, max_patches: int | None) -> None:
    """Raise OverCapError for the first sequence whose images alone exceed the cap."""
    if max_patches is not None and (patches > max_patches).any():
        index = int(np.argmax(patches > max_patches))
        raise OverCapError(
            f"images[{index}] has {patches[index]:,.0f} patches, above max_patches={max_patches}. "
            f"Raise max_patches to at least {np.ceil(patches.max()):.0f} or use smaller images."
        )


def loss_token_counts(loss_tokens: ArrayLike | None, lengths: Integers) -> Integers:
    """Return int64 [n], `lengths` for None. Raises LengthError unless each length has one, at
    most as large.
    """
    if loss_tokens is None:
        return lengths
    checked = whole_numbers(loss_tokens, "loss_tokens", minimum=0)
    if len(checked) != len(lengths):
        raise LengthError(
            f"loss_tokens holds {len(checked)} values for {len(lengths)} lengths. Pass one for each."
        )
    above = checked > lengths
    if above.any():
        index = int(np.argmax(above))
        raise LengthError(
            f"loss_tokens[{index}] is {checked[index]}, above lengths[{index}]={lengths[index]}. "
            "loss_tokens is the number of tokens of a sequence in the loss."
        )
    return checked


def group_names(groups: ArrayLike, name: str, count: int) -> Integers:
    """Return int64 [n]. Raises LengthError unless each of `count` lengths has a whole number."""
    names = whole_numbers(groups, name, minimum=0)
    if len(names) != count:
        raise LengthError(
            f"{name} holds {len(names)} values for {count} lengths. Pass one for each."
        )
    return names


def membership(mini_batches: Sequence[ArrayLike] | None, count: int) -> list[Integers]:
    """Return the caller's mini-batches. Raises MiniBatchError unless each index 0..count is in
    exactly one.
    """
    if mini_batches is None:
        return [np.arange(count)]
    members = [
        whole_numbers(rows, f"mini_batches[{number}]", minimum=0, error=MiniBatchError)
        for number, rows in enumerate(mini_batches)
    ]
    seen = np.zeros(count, np.int64)
    for number, rows in enumerate(members):
        if len(rows) == 0:
            raise MiniBatchError(f"mini_batches[{number}] is empty. Leave it out.")
        if rows.max() >= count:
            raise MiniBatchError(
                f"mini_batches[{number}] holds index {rows.max()}, but there are {count} lengths"
            )
        seen += np.bincount(rows, minlength=count)
    if (seen != 1).any():
        index = int(np.argmax(seen != 1))
        raise MiniBatchError(
            f"index {index} is {seen[index]} times in mini_batches. Every index of lengths must be in "
            "exactly one."
        )
    return members


def _one_dimensional(
    values: ArrayLike, name: str, error: type[BalancingError]
) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as ragged:
        raise error(f"{name} is not an array of numbers: {ragged}") from ragged
    if array.ndim != 1:
        raise error(
            f"{name} has {array.ndim} dimensions. Pass one number for each sequence."
        )
    return array.astype(np.int64) if array.size == 0 else array
