"""Fit the cost model of plans to measured micro-steps (`balance.fit_cost_model`).

    measured micro-steps of the updates --observe--> error of the model in use
                                        --every few steps--> CostModel of seconds

config.json yields FLOPs. Only measurements show the time of a squared token (attention) relative to a token
(matrix products), and a pipeline's fixed cost and shares. Checkpoints keep the fit, so that a resumed run
plans as before.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from balancing import CostFit, CostModel
from balancing.errors import CostModelError
from controller.planning.planner import NOT_MEASURED, StageTimes
from workers.model.timing import MicroStepTime

UPDATE = "update"
MOST_MEASUREMENTS = 4096
STEPS_BETWEEN_FITS = 10

Measurement = tuple[float, int, float]
"""Tokens, sum of squared lengths, seconds of one micro-step. An image counts as the tokens of as
many FLOPs.
"""


class CostModelFitter:
    def __init__(self, cost_model: CostModel, *, enabled: bool) -> None:
        """cost_model: until the first fit. enabled: False keeps it, but still reports errors."""
        self._first = cost_model
        self._enabled = enabled
        self._fit: CostFit | None = None
        self._stage_seconds = np.zeros(0)
        self._stages = NOT_MEASURED
        self._measured: deque[Measurement] = deque(maxlen=MOST_MEASUREMENTS)
        self._steps = 0

    def state(self) -> dict[str, Any] | None:
        """Return the fit, for a checkpoint."""
        return (
            asdict(self._fit) | {"stage_shares": self._stages.shares} if self._fit else None
        )

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Use a checkpoint's fit until the next."""
        if state and self._enabled:
            fit = {name: value for name, value in state.items() if name != "stage_shares"}
            self._fit = CostFit(**fit | {"model": CostModel(**state["model"])})
            shares = state.get("stage_shares")
            self._stages = StageTimes(
                self._fit.overhead_seconds, tuple(shares) if shares else None
            )

    @property
    def cost_model(self) -> CostModel:
        return self._fit.model if self._fit else self._first

    def _tokens(self, time: MicroStepTime) -> float:
        first = self._first
        images = (
            first.image_linear * time.image_tokens
            + first.image_quadratic * time.squared_image_tokens
        )
        return time.tokens + images / first.linear

    @property
    def stages(self) -> StageTimes:
        return self._stages

    def observe(
        self, micro_steps: Iterable[MicroStepTime], stage_seconds: Sequence[float] = ()
    ) -> dict[str, float]:
        """Add all ranks' micro-steps of a step, and fit again every STEPS_BETWEEN_FITS steps.

        stage_seconds: see `seconds_of_stages`. Returns `predicted_time_error`, the root mean square of
        predicted / measured - 1 over the step's updates, by the model that planned them, or empty without
        updates.
        """
        updates = [
            (self._tokens(t), t.squared_tokens, t.seconds)
            for t in micro_steps
            if t.name == UPDATE and t.tokens
        ]
        if not updates:
            return {}
        error = (
            fit_error(self._fit, updates)
            if self._fit
            else scaled_error(self._first, updates)
        )
        self._measured.extend(updates)
        self._stage_seconds = np.asarray(stage_seconds) + (
            self._stage_seconds if len(self._stage_seconds) else 0.0
        )
        self._steps += 1
        if self._enabled and self._steps % STEPS_BETWEEN_FITS == 0:
            # Similar micro-batches cannot identify both terms: then the model stays.
            with suppress(CostModelError):
                fit, first = (
                    CostModel.fit_sums(*zip(*self._measured, strict=True)),
                    self._first,
                )
                images = first.with_images(fit.model.linear / first.linear)
                model = replace(
                    images,
                    linear=fit.model.linear,
                    quadratic=fit.model.quadratic,
                    unit="second",
                )
                self._fit = replace(fit, model=model)
                self._stages = StageTimes(
                    self._fit.overhead_seconds, _shares(self._stage_seconds)
                )
        return {"predicted_time_error": error}


def over_stages(times: Mapping[str, Sequence[MicroStepTime]]) -> list[MicroStepTime]:
    """Return micro-steps, summed over pipeline stages."""
    stages: dict[str, list[Sequence[MicroStepTime]]] = {}
    for actor, micro_steps in times.items():
        stages.setdefault(actor.partition(" pp=")[0], []).append(micro_steps)
    whole_steps = []
    for stage_steps in stages.values():
        for parts in zip(*stage_steps, strict=True):
            whole_steps.append(
                replace(parts[0], seconds=sum(part.seconds for part in parts))
            )
    return whole_steps


def seconds_of_stages(times: Mapping[str, Sequence[MicroStepTime]]) -> list[float]:
    """Return the seconds of all updates on each stage, from micro-steps by actor, one number
    without stages.
    """
    seconds: dict[int, float] = {}
    for actor, micro_steps in times.items():
        stage = int(actor.partition(" pp=")[2].partition(" ")[0] or 0)
        seconds[stage] = seconds.get(stage, 0.0) + sum(
            step.seconds for step in micro_steps if step.name == UPDATE
        )
    return [seconds[stage] for stage in sorted(seconds)]


def _shares(seconds: np.ndarray) -> tuple[float, ...] | None:
    if len(seconds) < 2 or not (seconds > 0).all():
        return None
    return tuple(max(0.01, round(share, 2)) for share in (seconds / seconds.sum()).tolist())


def fit_error(fit: CostFit, measured: Sequence[Measurement]) -> float:
    """Return the root mean square of predicted / measured seconds - 1."""
    tokens, squared, seconds = np.array(measured, np.float64).T
    predicted = (
        fit.overhead_seconds + fit.model.linear * tokens + fit.model.quadratic * squared
    )
    return float(np.sqrt(np.mean((predicted / seconds - 1.0) ** 2)))


def scaled_error(cost_model: CostModel, measured: Sequence[Measurement]) -> float:
    """Return `fit_error` of a model without a time unit, with predictions scaled by the best factor c.

    c minimises sum_i (c x_i - 1)^2 with x_i = predicted_i / seconds_i: c = sum(x) / sum(x^2).
    """
    tokens, squared, seconds = np.array(measured, np.float64).T
    ratio = (cost_model.linear * tokens + cost_model.quadratic * squared) / seconds
    return float(
        np.sqrt(np.mean((ratio * ratio.sum() / np.square(ratio).sum() - 1.0) ** 2))
    )
