"""Estimates of a KL divergence from samples, token by token.

The exponential of a difference of log-probs, which must stay a number however far two policies are apart.
"""

from torch import Tensor

from workers.errors import ConfigError

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


def kl_estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(p || q) from samples of p, with log_ratio = log q - log p (Schulman 2020, "Approximating KL").

        k1 = -log_ratio                   k2 = log_ratio^2 / 2
        k3 = exp(log_ratio) - 1 - log_ratio       absolute = |log_ratio|

    k1 is unbiased and noisy, k2 biased and quiet, k3 unbiased, quiet and never negative; absolute is no estimate of the
    KL but a distance that ranks with it. Their gradients as loss terms are another matter: see `kl_of_loss`.

    Raises ConfigError for another name.
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return bounded_expm1(log_ratio) - log_ratio
    if estimator == "absolute":
        return log_ratio.abs()
    raise ConfigError(f"algorithm.loss.kl_estimator={estimator} is not one of k1, k2, k3, absolute")


def kl_of_loss(log_ratio: Tensor, importance: Tensor, estimator: str, correction: str) -> Tensor:
    """KL_t of a loss, whose gradient at the policy's parameters theta is to be that of KL(pi || pi_ref), [N].

        none                KL_t = k(x_t)
        straight_through    KL_t = sg(k(x_t) - k2(x_t)) + k2(x_t)        verl's `k1+`, `k3+`; sg: no gradient
        importance          KL_t = r_t k(x_t)                            DeepSeek-V3.2 (2025), section 3.1; TRL

    The samples depend on theta, too, which the gradient of an estimate k alone leaves out. Under the policy's own
    samples that of k1 has mean zero, and that of k3 is the gradient of KL(pi_ref || pi) (Tang and Munos 2025, "On a few
    pitfalls in KL divergence gradient estimation for RL"). The gradient of k2, x_t grad(x_t), is the right one:
    `straight_through` takes it and keeps the value of the estimate. It is right for samples of the policy itself.
    `importance` is right for samples of an older policy, too; at r_t = 1 the two agree, with k3 token by token.

    All are gradients of a token's KL given the tokens before it. A KL in the reward also counts what a token does to
    the KL of the tokens after it.

    log_ratio: x_t = log pi_ref - log pi, [N]. importance: r_t = pi / pi_old, [N], with gradient. Raises ConfigError for
    another name.
    """
    estimate = kl_estimate(log_ratio, estimator)
    if correction == "none":
        return estimate
    if correction == "straight_through":
        gradient_of = kl_estimate(log_ratio, "k2")
        return (estimate - gradient_of).detach() + gradient_of
    if correction == "importance":
        return importance * estimate
    raise ConfigError(f"algorithm.loss.kl_correction={correction} is not one of none, straight_through, importance")
