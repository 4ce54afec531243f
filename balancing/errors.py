"""Errors of `balancing`. One base class; every message names the value, its index and the argument to change."""


class BalancingError(ValueError):
    """Base of everything that this package raises about its arguments."""


class OptionError(BalancingError):
    """An argument is not of the promised kind: a count below 1, an unknown algorithm or layout."""


class LengthError(BalancingError):
    """Lengths (or loss tokens) are empty, not one-dimensional, not whole numbers, or out of range."""


class WeightError(BalancingError):
    """Weights or workloads are of the wrong number, negative, infinite or NaN."""


class OverCapError(BalancingError):
    """A single sequence is longer than the cap on tokens of a micro-batch."""


class CountError(BalancingError):
    """The counts that were asked for contradict one another or the number of sequences."""


class MiniBatchError(BalancingError):
    """The mini-batches do not hold every index exactly once."""


class CostModelError(BalancingError):
    """A cost model cannot be made from what was given."""


class LengthFileError(BalancingError):
    """A file of lengths, or a model config, is missing or not of the form that its name promises."""
