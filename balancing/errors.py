"""Define the errors of `balancing`. Every message names the value, its index and the argument to change."""


class BalancingError(ValueError):
    """Base class of all errors about arguments."""


class OptionError(BalancingError):
    """An argument is invalid, such as a count below 1 or an unknown algorithm."""


class LengthError(BalancingError):
    """Lengths or loss tokens are empty, not one-dimensional, not whole numbers, or out of range."""


class WeightError(BalancingError):
    """Weights or workloads are negative, infinite, NaN, or too few or many."""


class OverCapError(BalancingError):
    """A sequence is longer than the cap on the tokens of a micro-batch."""


class CountError(BalancingError):
    """The requested counts contradict each other or the number of sequences."""


class MiniBatchError(BalancingError):
    """The mini-batches do not contain every index exactly once."""


class CostModelError(BalancingError):
    """A cost model has invalid coefficients, or the given data do not determine it."""


class LengthFileError(BalancingError):
    """A file of lengths, or a model config, is missing or malformed."""
