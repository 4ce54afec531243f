"""The cost of computing a sequence: `linear * L + quadratic * L**2` for L tokens.

model config ---- counted ----+
                              +--> CostModel --> workload of each sequence --> what a plan evens
measured seconds -- fitted ---+
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancing.errors import CostModelError
from balancing.fitting import Coefficients, fit_coefficients, fit_terms, regressors
from balancing.model_config import forward_flops
from balancing.validation import one_of, weight_array, whole_numbers

TRAINING_FACTOR = 3.0
"""Forward plus backward over forward: each matrix product has two products of its size in the backward pass."""

Unit = Literal["FLOP", "token", "second"]


@dataclass(frozen=True)
class CostModel:
    """The cost of a sequence of L tokens is `linear * L + quadratic * L**2`, in `unit`.

    linear: cost per token (matrix products with weights). quadratic: cost per squared token (causal attention).
    Only their ratio decides a plan; a common factor changes predicted figures, not the plan.
    Raises CostModelError if a coefficient is negative, not finite, or both are 0; OptionError for an unknown unit.
    """

    linear: float
    quadratic: float
    unit: Unit = "FLOP"

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise CostModelError(f"{name}={value!r} of a CostModel must be finite and >= 0")
        if self.linear == 0 and self.quadratic == 0:
            raise CostModelError("linear and quadratic of a CostModel are both 0; one must be positive")
        one_of(self.unit, "unit", ("FLOP", "token", "second"))

    def workload(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """float64 [n], the cost of each sequence in `unit`; `lengths` are whole numbers >= 0, else LengthError."""
        tokens = whole_numbers(lengths, "lengths", minimum=0).astype(np.float64)
        return tokens * (self.linear + self.quadratic * tokens)

    def scaled(self, factor: float) -> "CostModel":
        """The same model, `factor` times as costly; from training to forward-only it is `1 / TRAINING_FACTOR`."""
        return CostModel(self.linear * factor, self.quadratic * factor, self.unit)

    @classmethod
    def tokens(cls) -> "CostModel":
        """One unit per token: balances token counts."""
        return cls(1.0, 0.0, "token")

    @classmethod
    def from_model_config(cls, config: Mapping[str, Any] | object, *, training: bool = True) -> "CostModel":
        """FLOPs, from a Hugging Face model config: a mapping (`config.json`) or an object with attributes.

        A product [m, k] x [k, n] counts 2*m*k*n FLOPs. Causal attention is counted once (L**2 / 2 pairs, not L**2),
        of experts only those that a token visits, embedding look-ups as free. Dense, grouped-query, latent
        (`kv_lora_rank`) attention and mixtures of experts are known. Sliding windows are counted as full attention.
        training: forward and backward (`TRAINING_FACTOR`) instead of forward only.
        Raises CostModelError naming the missing key.
        """
        forward = cls(*forward_flops(config))
        return forward.scaled(TRAINING_FACTOR) if training else forward

    @classmethod
    def fit(cls, micro_batches: Sequence[ArrayLike], seconds: ArrayLike) -> "CostFit":
        """Seconds, from measurements: `overhead + linear * sum(L) + quadratic * sum(L**2)` for each micro-batch.

        micro_batches: the lengths of the sequences that ran together, one array for each measurement. seconds: their
        times, positive. The fit describes what was measured: training steps and forward passes need one each.
        Raises CostModelError for fewer than `fitting.FEWEST_MEASUREMENTS`, for micro-batches too alike to tell the
        terms apart, and for times that do not grow with tokens; LengthError for bad lengths.
        """
        return _cost_fit(fit_coefficients(micro_batches, seconds))

    @classmethod
    def fit_sums(cls, tokens: ArrayLike, squared_tokens: ArrayLike, seconds: ArrayLike) -> "CostFit":
        """As `fit`, from sum(L) and sum(L**2) of each micro-batch, [m] each: what a run measures and keeps."""
        columns = [weight_array(tokens, "tokens"), weight_array(squared_tokens, "squared_tokens")]
        if not len(columns[0]) == len(columns[1]) == np.size(seconds):
            raise CostModelError("tokens, squared_tokens and seconds differ in length; pass one of each a micro-batch")
        return _cost_fit(fit_terms(np.column_stack([np.ones(len(columns[0])), *columns]), seconds))


@dataclass(frozen=True)
class CostFit:
    """A cost model from measurements, and how far to trust it.

    model: in seconds. overhead_seconds: what every micro-batch costs whatever it holds; it does not decide who
    computes what, but many small micro-batches pay it often.
    relative_error: root mean square of `predicted / measured - 1`. r_squared: share of the variance of seconds that
    is explained. measurements: their number. condition: of the design with columns of length 1; the noise of the
    times reaches the coefficients multiplied by about this.
    """

    model: CostModel
    overhead_seconds: float
    relative_error: float
    r_squared: float
    measurements: int
    condition: float

    def predict(self, micro_batches: Sequence[ArrayLike]) -> NDArray[np.float64]:
        """float64 [m], seconds of each micro-batch of the given lengths; an empty one costs the overhead."""
        coefficients = np.array([self.overhead_seconds, self.model.linear, self.model.quadratic])
        return np.asarray(regressors(micro_batches) @ coefficients, np.float64)


def _cost_fit(result: Coefficients) -> CostFit:
    return CostFit(
        model=CostModel(result.linear, result.quadratic, "second"),
        overhead_seconds=result.overhead,
        relative_error=result.relative_error,
        r_squared=result.r_squared,
        measurements=result.measurements,
        condition=result.condition,
    )
