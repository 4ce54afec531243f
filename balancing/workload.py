"""Cost models: computing a sequence of L tokens costs `linear * L + quadratic * L**2`.

model config ----- counted ---+
                              +--> CostModel --> workload of each sequence --> balanced by plans
measured seconds -- fitted ---+
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from balancing.errors import CostModelError
from balancing.fitting import FitQuality, fit_terms, regressors
from balancing.grouping import Floats
from balancing.model_config import forward_flops
from balancing.validation import one_of, weight_array, whole_numbers

TRAINING_FACTOR = 3.0
"""Cost of forward and backward / forward: the backward pass has two matrix products for each of the forward pass."""

Unit = Literal["FLOP", "token", "second"]


@dataclass(frozen=True)
class CostModel:
    """The cost of a sequence of L tokens is `linear * L + quadratic * L**2`, in `unit`.

    linear: cost per token (matrix products with weights). quadratic: cost per squared token (causal attention).
    Plans depend on their ratio only; a common factor scales the predicted times.
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

    def workload(self, lengths: ArrayLike) -> Floats:
        """float64 [n], the cost of each sequence in `unit`; LengthError unless `lengths` are whole numbers >= 0."""
        tokens = whole_numbers(lengths, "lengths", minimum=0).astype(np.float64)
        return tokens * (self.linear + self.quadratic * tokens)

    def scaled(self, factor: float) -> "CostModel":
        """The model times `factor`; `1 / TRAINING_FACTOR` turns costs of training into those of a forward pass."""
        return CostModel(self.linear * factor, self.quadratic * factor, self.unit)

    @classmethod
    def tokens(cls) -> "CostModel":
        """One unit per token; balances token counts."""
        return cls(1.0, 0.0, "token")

    @classmethod
    def from_model_config(cls, config: Mapping[str, Any] | object, *, training: bool = True) -> "CostModel":
        """FLOPs, from a Hugging Face model config: a mapping (`config.json`) or an object with attributes.

        A product [m, k] x [k, n] counts 2*m*k*n FLOPs, causal attention L**2 / 2 pairs, a mixture of experts only the
        active experts, and embedding look-ups nothing. Supports dense, grouped-query and latent (`kv_lora_rank`)
        attention and mixtures of experts; sliding windows count as full attention.
        training: forward and backward (`TRAINING_FACTOR`) instead of forward only.
        Raises CostModelError that names a missing key.
        """
        forward = cls(*forward_flops(config))
        return forward.scaled(TRAINING_FACTOR) if training else forward

    @classmethod
    def fit(cls, micro_batches: Sequence[ArrayLike], seconds: ArrayLike) -> "CostFit":
        """Seconds, from measurements: `overhead + linear * sum(L) + quadratic * sum(L**2)` for each micro-batch.

        micro_batches: the lengths of the sequences that ran together, one array for each measurement. seconds: their
        times, positive. Training steps and forward passes need a fit each.
        Raises CostModelError for fewer than `fitting.FEWEST_MEASUREMENTS`, for micro-batches too similar to separate
        the terms, and for times that do not grow with tokens; LengthError for bad lengths.
        """
        if len(micro_batches) != np.size(seconds):
            raise CostModelError(
                f"{len(micro_batches)} micro-batches with {np.size(seconds)} seconds; pass one time for each"
            )
        return _cost_fit(regressors(micro_batches), seconds)

    @classmethod
    def fit_sums(cls, tokens: ArrayLike, squared_tokens: ArrayLike, seconds: ArrayLike) -> "CostFit":
        """As `fit`, from sum(L) and sum(L**2) of each of m micro-batches, the form in which a run records them."""
        columns = [weight_array(tokens, "tokens"), weight_array(squared_tokens, "squared_tokens")]
        if not len(columns[0]) == len(columns[1]) == np.size(seconds):
            raise CostModelError("tokens, squared_tokens and seconds differ in length; pass one of each a micro-batch")
        return _cost_fit(np.column_stack([np.ones(len(columns[0])), *columns]), seconds)


@dataclass(frozen=True)
class CostFit(FitQuality):
    """A cost model fitted to measurements, and the quality of the fit.

    model: in seconds. overhead_seconds: fixed cost of a micro-batch, which plans do not consider.
    """

    model: CostModel
    overhead_seconds: float


def _cost_fit(terms: Floats, seconds: ArrayLike) -> CostFit:
    coefficients, quality = fit_terms(terms, seconds)
    overhead, linear, quadratic = coefficients.tolist()
    return CostFit(model=CostModel(linear, quadratic, "second"), overhead_seconds=overhead, **asdict(quality))
