"""Confidence intervals of validation metrics, over prompts: the responses to one prompt are not independent.

    PromptValues --each prompt one value, 0 or 1--> Wilson's score interval
                 --anything else--> percentile bootstrap: prompts are drawn anew, with all that belongs to them

They say how far a metric may be from that of all prompts of which these are a random sample.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from controller.validation_metrics import PromptValues

CONFIDENCE = 0.95
RESAMPLES = 2_000
NUMBERS_AT_A_TIME = 2**22  # of a chunk of resamples: 32 MiB
WILSON, BOOTSTRAP = "wilson", "bootstrap"


@dataclass(frozen=True)
class Interval:
    """low <= the metric <= high. method: `wilson` or `bootstrap`."""

    low: float
    high: float
    method: str


def interval(values: PromptValues, confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of a metric; None where prompts that all have one value, other than 0 or 1, show no spread.

    confidence: in (0, 1). Repeats exactly for the same values.
    """
    if _is_binary(values):
        low, high = wilson(int(values.sums.sum()), len(values.sums), confidence)
        return Interval(low, high, WILSON)
    if np.ptp(values.sums / values.counts) == 0:
        return None
    low, high = bootstrap(values, confidence)
    return Interval(low, high, BOOTSTRAP)


def _is_binary(values: PromptValues) -> bool:
    return bool(np.all(values.counts == 1) and np.all(np.isin(values.sums, (0.0, 1.0))))


def wilson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927): all p with |p_hat - p| <= z sqrt(p (1 - p) / n), that is

    (p_hat + z^2 / 2n -+ z sqrt(p_hat (1 - p_hat) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    p_hat: successes / trials; n: trials, at least 1.
    """
    z, share = NormalDist().inv_cdf(0.5 + confidence / 2), successes / trials
    centre, scale = share + z * z / (2 * trials), 1 + z * z / trials
    margin = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At 0 and at `trials` one end is the share itself, but for rounding.
    low = 0.0 if successes == 0 else (centre - margin) / scale
    return low, 1.0 if successes == trials else (centre + margin) / scale


def bootstrap(values: PromptValues, confidence: float) -> tuple[float, float]:
    """The percentile interval (Efron 1979) of sum(sums) / sum(counts) over RESAMPLES draws of as many prompts, with
    replacement."""
    prompts, rng = len(values.sums), np.random.default_rng(0)
    at_a_time = max(1, NUMBERS_AT_A_TIME // prompts)
    found = []
    for start in range(0, RESAMPLES, at_a_time):
        count = min(at_a_time, RESAMPLES - start)
        times = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=count)  # that each prompt is drawn
        found.append((times @ values.sums) / (times @ values.counts))
    ends = [0.5 - confidence / 2, 0.5 + confidence / 2]
    low, high = np.quantile(np.concatenate(found), ends, method="inverted_cdf")  # of few prompts, values that occur
    return float(low), float(high)
