"""Estimates of a KL divergence from samples, token by token, and an exponential that stays finite."""

from torch import Tensor

from workers.errors import ConfigError

LARGEST_LOG_RATIO = 40.0
"""Bound of `bounded_exp`: e^40 = 2.4e17 is far above every clip, and its square still a float32."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(x) up to x = LARGEST_LOG_RATIO, and beyond it the tangent there, e^40 (1 + x - 40).

    exp overflows at x = 88 in float32, where a clip would multiply infinity by 0: a NaN gradient.
    """
    bounded = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return bounded.exp() * (1 + (log_ratio - bounded))


def bounded_expm1(log_ratio: Tensor) -> Tensor:
    """Return `bounded_exp` less 1, without cancellation near 1."""
    bounded = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return bounded.expm1() + bounded.exp() * (log_ratio - bounded)


def kl_estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimate KL(p || q) from samples of p, with log_ratio = log q - log p (Schulman 2020, "Approximating
    KL").

        k1 = -log_ratio                   k2 = log_ratio^2 / 2
        k3 = exp(log_ratio) - 1 - log_ratio       absolute = |log_ratio|

    k1 is unbiased and noisy, k2 biased with low variance, k3 unbiased with low variance and never negative.
    absolute is a distance that grows with the KL. For their gradients see `kl_of_loss`. Raises ConfigError
    for an unknown name.
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return bounded_expm1(log_ratio) - log_ratio
    if estimator == "absolute":
        return log_ratio.abs()
    raise ConfigError(
        f"algorithm.loss.kl_estimator={estimator} is not one of k1, k2, k3, absolute"
    )


def kl_of_loss(
    log_ratio: Tensor, importance: Tensor, estimator: str, correction: str
) -> Tensor:
    """Return KL_t [N] of a loss, whose gradient should be the gradient of KL(pi || pi_ref).

        none                KL_t = k(x_t)
        straight_through    KL_t = sg(k(x_t) - k2(x_t)) + k2(x_t)   verl's `k1+`, `k3+` (sg: no gradient)
        importance          KL_t = r_t k(x_t)                       DeepSeek-V3.2 (2025), section 3.1, and TRL

    On the policy's own samples k1's gradient has mean zero, and k3's is the gradient of KL(pi_ref || pi)
    (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL"). k2's gradient,
    x_t grad(x_t), is right: `straight_through` uses it and keeps the value of the estimate. `importance`
    also holds for samples of an older policy. All are gradients of a token's KL given the tokens before it.
    A KL in the reward also counts a token's effect on later tokens.

    log_ratio: x_t = log pi_ref - log pi, [N]. importance: r_t = pi / pi_old, [N], with gradient. Raises
    ConfigError for an unknown name.
    """
    estimate = kl_estimate(log_ratio, estimator)
    if correction == "none":
        return estimate
    if correction == "straight_through":
        gradient_of = kl_estimate(log_ratio, "k2")
        return (estimate - gradient_of).detach() + gradient_of
    if correction == "importance":
        return importance * estimate
    raise ConfigError(
        f"algorithm.loss.kl_correction={correction} is not one of none, straight_through, importance"
    )
