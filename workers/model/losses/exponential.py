"""The exponential of a difference of log-probs, which must stay a number however far two policies are apart."""

from torch import Tensor

LARGEST_LOG_RATIO = 40.0
"""Bound of `bounded_exp`: e^40 = 2.4e17 is far above every clip, and its square, in the norm of a gradient, still a
float32."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(x) up to x = LARGEST_LOG_RATIO, and beyond it the tangent there, e^40 (1 + x - 40).

    Values and gradients are those of exp within the bound. Beyond it both stay finite and keep their sign, where exp
    overflows at x = 88 in float32: a clip then multiplies infinity by 0, and its gradient is NaN in place of 0.
    """
    bounded = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return bounded.exp() * (1 + (log_ratio - bounded))


def bounded_expm1(log_ratio: Tensor) -> Tensor:
    """`bounded_exp` less 1, without the rounding of a difference of numbers near 1."""
    bounded = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return bounded.expm1() + bounded.exp() * (log_ratio - bounded)
