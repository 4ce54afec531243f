"""CostModelFitter: fits the cost model that plans follow to measured micro-steps (`balance.refit`).

    measured micro-steps of the updates --observe--> error of the model in use --every few steps--> CostModel of seconds

From config.json the model knows FLOPs; how long the hardware takes for a squared token (attention) in relation to a
token (matrix products), only a measurement shows. A factor common to both changes no plan. The fit is kept in
checkpoints, so that a resumed run plans as before.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from balancing import CostFit, CostModel
from balancing.errors import CostModelError
from workers.model.timing import MicroStepTime

UPDATE = "update"
MOST_MEASUREMENTS = 4096
STEPS_BETWEEN_FITS = 10

Measurement = tuple[int, int, float]
"""Tokens, sum of squared lengths, seconds of one micro-step."""


class CostModelFitter:
    """The cost model of a run, and how far its predictions are from what was measured."""

    def __init__(self, cost_model: CostModel, *, enabled: bool) -> None:
        """`cost_model`: used until the first fit. `enabled`: if False it stays; errors are reported anyway."""
        self._first, self._enabled = cost_model, enabled
        self._fit: CostFit | None = None
        self._measured: deque[Measurement] = deque(maxlen=MOST_MEASUREMENTS)
        self._steps = 0

    def state(self) -> dict[str, Any] | None:
        """The current fit, for a checkpoint; None before the first."""
        return asdict(self._fit) if self._fit else None

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Use the fit of a checkpoint until the next one; None changes nothing."""
        if state and self._enabled:
            self._fit = CostFit(**state | {"model": CostModel(**state["model"])})

    @property
    def cost_model(self) -> CostModel:
        """The model to plan with."""
        return self._fit.model if self._fit else self._first

    def observe(self, micro_steps: Iterable[MicroStepTime]) -> dict[str, float]:
        """Add the micro-steps of all ranks of one step, and fit again every STEPS_BETWEEN_FITS steps.

        Returns `predicted_time_error`, the root mean square of predicted / measured - 1 over the updates of this step,
        by the model that they were planned with; an empty dict if there were none.
        """
        found = [(t.tokens, t.squared_tokens, t.seconds) for t in micro_steps if t.name == UPDATE and t.tokens]
        if not found:
            return {}
        error = fit_error(self._fit, found) if self._fit else scaled_error(self._first, found)
        self._measured.extend(found)
        self._steps += 1
        if self._enabled and self._steps % STEPS_BETWEEN_FITS == 0:
            with suppress(CostModelError):  # micro-batches too alike to identify both terms: the model stays
                self._fit = CostModel.fit_sums(*zip(*self._measured, strict=True))
        return {"predicted_time_error": error}


def over_stages(times: Mapping[str, Sequence[MicroStepTime]]) -> list[MicroStepTime]:
    """Micro-steps by actor; those of the stages of a pipeline, which compute parts of the same, added up."""
    stages: dict[str, list[Sequence[MicroStepTime]]] = {}
    for actor, found in times.items():
        stages.setdefault(actor.partition(" pp=")[0], []).append(found)
    return [
        replace(parts[0], seconds=sum(part.seconds for part in parts))
        for every in stages.values()
        for parts in zip(*every, strict=True)
    ]


def fit_error(fit: CostFit, measured: Sequence[Measurement]) -> float:
    """Root mean square of predicted / measured seconds - 1."""
    tokens, squared, seconds = np.array(measured, np.float64).T
    predicted = fit.overhead_seconds + fit.model.linear * tokens + fit.model.quadratic * squared
    return float(np.sqrt(np.mean((predicted / seconds - 1.0) ** 2)))


def scaled_error(cost_model: CostModel, measured: Sequence[Measurement]) -> float:
    """The same for a model without a unit of time: predictions are scaled by the factor c with the smallest error.

    It minimises sum_i (c x_i - 1)^2 with x_i = predicted_i / seconds_i: c = sum(x) / sum(x^2).
    """
    tokens, squared, seconds = np.array(measured, np.float64).T
    ratio = (cost_model.linear * tokens + cost_model.quadratic * squared) / seconds
    return float(np.sqrt(np.mean((ratio * ratio.sum() / np.square(ratio).sum() - 1.0) ** 2)))
