"""Compare the log-probs of engines and trainer in every step, before new weights are sent.

    first step after a start        samples of the weights that were just sent       --> rounding, or stop
    first step of changed weights   samples of weights that an update has changed    --> rounding, or stop
    every step                      also samples of older weights, after the update  --> policy.max_mismatch

The second check finds a transfer that loses a weight, or an engine that keeps a packed copy of the old
weight: both agree until a weight changes. Both checks precede the optimiser's step. An algorithm without a
log-prob pass gets one. Samples of older weights also differ because the policy has learned since. With
rollout.max_staleness a step may have no samples of its current weights. The second check then generates some.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum

import numpy as np

from controller.config import Config
from workers.batch.metrics import TOLERANCE, Metric, results
from workers.errors import MismatchError

MEAN, LARGEST = "rollout_mismatch_mean", "rollout_mismatch_max"
COARSER = ("quantization", "kv_cache_dtype")
"""Arguments of vLLM (`rollout.engine`) with which an engine computes in fewer bits than the trainer."""


class AtEqualWeights(Enum):
    """A comparison of engines and trainer at equal weights, as worded in an error."""

    FIRST = "at the weights that the engines were sent at the start"
    CHANGED = "at the first weights that an update has changed"
    NONE = ""


class LogProbCheck:
    def __init__(
        self, config: Config, first_version: int, log: Callable[[str], None] | None = None
    ) -> None:
        """first_version: the attempt's first weights. log: receives differences in place of an error, for a
        replay, which has no engines to compare with.
        """
        self._limit = config.policy.max_mismatch
        self._first = first_version
        self._dtype = config.compute_dtype
        self._log = log
        exact = log is None and compares_exactly(config)
        self._pending: set[AtEqualWeights] = (
            {AtEqualWeights.FIRST, AtEqualWeights.CHANGED} if exact else set()
        )
        self._kept: tuple[int, dict[str, float]] = 0, {}

    def at_equal_weights(
        self, oldest: np.ndarray, newest: np.ndarray, current: int
    ) -> AtEqualWeights:
        """Return the comparison that samples [B] allow, unless made before.

        oldest, newest: weight versions of each sample, which may span several. current: the trainer's
        version.
        """
        of_current = bool(np.all(oldest == current) and np.all(newest == current))
        comparison = (
            AtEqualWeights.FIRST if current == self._first else AtEqualWeights.CHANGED
        )
        return (
            comparison
            if of_current and comparison in self._pending
            else AtEqualWeights.NONE
        )

    def awaits(self, equal_weights: AtEqualWeights) -> bool:
        return equal_weights in self._pending

    def compare(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        equal_weights: AtEqualWeights = AtEqualWeights.NONE,
    ) -> None:
        """Raise MismatchError, with advice, if sampler and trainer differ by more than allowed.

        metrics: of a pass over the step's samples. Without mismatch metrics nothing is checked.
        """
        if MEAN not in metrics or not metrics[MEAN].weight:
            return
        mean = metrics[MEAN].result()
        largest = metrics[LARGEST].result()
        if problem := beyond(mean, largest, self._limit, self._dtype, equal_weights):
            if self._log is None:
                raise MismatchError(f"step {step}: {problem}")
            self._log(f"step {step}: {problem}")
        self._pending.discard(equal_weights)

    def compare_update(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Compare in a step's update, unless an earlier pass was kept."""
        if not self.metrics_before_update(step):
            self.compare(step, metrics)

    def keep(self, step: int, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Keep and return the mismatch metrics of a step's first log-prob pass."""
        if not self.metrics_before_update(step):
            self._kept = (
                step,
                results(
                    {name: metrics[name] for name in (MEAN, LARGEST) if name in metrics}
                ),
            )
        return self._kept[1]

    def metrics_before_update(self, step: int) -> dict[str, float]:
        """Return the metrics from before this step's update, or nothing."""
        return self._kept[1] if self._kept[0] == step else {}


def compares_exactly(config: Config) -> bool:
    """Return False if the sampling distribution is truncated, or the engine computes in fewer bits."""
    coarser = any(config.rollout.engine.get(name) for name in COARSER)
    return config.rollout.sampling.log_probs_are_whole and not coarser


def beyond(
    mean: float, largest: float, limit: float, dtype: str, equal_weights: AtEqualWeights
) -> str:
    """Return the problem with a mismatch, in nats a token, or an empty string. limit: policy.max_mismatch."""
    gap = f"log-probs of engines and trainer differ by {mean:.2g} nats a token (largest {largest:.2g})"
    if math.isnan(mean):
        return (
            "log-probs of engines and trainer differ by NaN: one of them produced NaN. No weights were "
            "sent and nothing was saved. Resume from the last checkpoint with a lower "
            "policy.optimizer.learning_rate."
        )
    if equal_weights is not AtEqualWeights.NONE and mean > TOLERANCE[dtype]:
        return (
            f"{gap} {equal_weights.value}, which is more than rounding in {dtype} ({TOLERANCE[dtype]:g}): "
            "the engine does not compute what the trainer does. `python -m ballast doctor` compares them "
            "with a tiny model."
        )
    if mean > limit:
        return (
            f"{gap}, above policy.max_mismatch={limit:g}. `python -m ballast doctor` compares them at equal "
            "weights. Raise policy.max_mismatch if samples are older than the weights, or if "
            "rollout.sampling changes the distribution."
        )
    return ""
