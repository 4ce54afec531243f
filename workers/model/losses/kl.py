"""Estimates of a KL divergence from samples, token by token."""

from torch import Tensor

from workers.errors import ConfigError
from workers.model.losses.exponential import bounded_expm1


def kl_estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(p || q) from samples of p, with log_ratio = log q - log p (Schulman 2020, "Approximating KL").

        k1 = -log_ratio                   k2 = log_ratio^2 / 2
        k3 = exp(log_ratio) - 1 - log_ratio       absolute = |log_ratio|

    k1 is unbiased and noisy, k2 biased and quiet, k3 unbiased, quiet and never negative; absolute is no estimate of the
    KL but a distance that ranks with it. As a loss term, k1 has a gradient of mean zero under the policy's own samples:
    use it to watch, not to hold the policy near its reference. The gradient of k2 is that of the KL.

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
