"""Times of a rank's micro-steps, for timelines and for fitting the cost model.

    with clock.micro_step("update", lengths) as step: forward
    with clock.more_of(step): backward                                 --take()--> [MicroStepTime, ...]

Seconds include waits in collectives inside the micro-step. A pipeline computes other micro-batches between
the two parts, whose time is not included.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from balancing.basics.windows import Window, attended_squares

MOST_KEPT = 100_000
"""Micro-steps kept for `take`. Older ones are dropped, so that memory stays bounded if it is never called."""


@dataclass(frozen=True)
class MicroStepTime:
    """Record one micro-batch on one rank.

    name: the pass, `update`, `log_probs` or `values`. start: seconds since 1970 by this machine's clock.
    tokens: sum of the lengths L of its sequences, squared_tokens: sum of L**2, as far as layers see them
    (balancing.basics.windows). A shared prefix of S tokens counts once: S and S**2 less for each other
    sequence. image_tokens: the same sums over the images. These are the regressors of `balancing.cost_model`.
    """

    name: str
    start: float
    seconds: float
    tokens: int
    squared_tokens: int
    image_tokens: int = 0
    squared_image_tokens: int = 0

    @property
    def sums(self) -> tuple[int, int, int, int]:
        return (
            self.tokens,
            self.squared_tokens,
            self.image_tokens,
            self.squared_image_tokens,
        )


@dataclass
class MicroStep:
    """Hold start and stop of each part: `perf_counter` seconds or CUDA events. regressors, of_images: int64
    [2], see `MicroStepTime`.
    """

    name: str
    regressors: Tensor
    of_images: Tensor
    windows: tuple[Window, ...] = ()
    parts: list[tuple[Any, Any]] = field(default_factory=list)

    def leave_out(self, prefixes: Sequence[int]) -> None:
        self.regressors = self.regressors - _regressors(
            torch.tensor(prefixes, dtype=torch.int64), self.windows
        )

    def share(self, degree: int) -> None:
        """Count the part of one of `degree` ranks. Each computes all images."""
        self.regressors = self.regressors // degree


class MicroStepClock:
    """Measure on the computing device: a host clock would see only kernel launches on a GPU."""

    def __init__(self, device: torch.device, windows: tuple[Window, ...] = ()) -> None:
        """windows: of the model's layers."""
        self._windows = windows
        self._on_gpu = device.type == "cuda"
        self._measured: deque[MicroStep] = deque(maxlen=MOST_KEPT)
        # Wall clock and mark of the moment that others are measured from.
        self._origin: tuple[float, Any] | None = None

    @contextmanager
    def micro_step(
        self, name: str, lengths: Tensor, images: Sequence[int] = ()
    ) -> Iterator[MicroStep]:
        """Measure the block, unless it raises. lengths: int64 [sequences], on the CPU. images: tokens of
        each.
        """
        self._origin = self._origin or self._now()
        of_images = _regressors(torch.tensor(images, dtype=torch.int64))
        step = MicroStep(
            name, _regressors(lengths, self._windows), of_images, self._windows
        )
        with self.more_of(step):
            yield step
        self._measured.append(step)

    @contextmanager
    def more_of(self, step: MicroStep) -> Iterator[None]:
        begin = self._mark()
        yield
        step.parts.append((begin, self._mark()))

    def take(self) -> list[MicroStepTime]:
        """Return the micro-steps since the last call, in order. Waits for the GPU."""
        if self._origin is None:
            return []
        if self._on_gpu:
            torch.cuda.synchronize()
        (wall, origin), measured = self._origin, list(self._measured)
        self._measured.clear()
        self._origin = None
        times = []
        for micro_step in measured:
            begin = wall + self._between(origin, micro_step.parts[0][0])
            seconds = sum(self._between(*part) for part in micro_step.parts)
            counts = (*micro_step.regressors.tolist(), *micro_step.of_images.tolist())
            times.append(MicroStepTime(micro_step.name, begin, seconds, *counts))
        return times

    def _now(self) -> tuple[float, Any]:
        if self._on_gpu:
            torch.cuda.synchronize()  # queued work would put the mark after the wall clock's reading
        return time.time(), self._mark()

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin


def _regressors(lengths: Tensor, windows: tuple[Window, ...] = ()) -> Tensor:
    squared = attended_squares(lengths.numpy(), windows).sum()
    return torch.stack([lengths.sum(), torch.tensor(round(float(squared)))])
