"""RunRecord: where a training loop reports what it does; everything that shows or keeps a run gets it from here.

with record.phase("update"):   terminal, Prometheus, timeline.jsonl, and the seconds in `time/update_s`
record.samples(step, ...)      samples.jsonl, Prometheus
record.micro_steps(times)      timeline.jsonl, Prometheus
record.end_step(step, ...)     trackers, terminal
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from balancing import CostModel
from controller.observability.console import Console
from controller.observability.health import Health
from controller.observability.live_metrics import LiveMetrics
from controller.observability.metrics import RunWriter
from controller.observability.timeline import TimelineRecorder

if TYPE_CHECKING:
    from controller.samples import Rollout
    from workers.model.timing import MicroStepTime

RECORDED_SAMPLES = 4  # of each kind: first, slowest, longest


class RunRecord:
    """Reports to several places at once; what concerns one place alone goes to `console`, `writer` or `timeline`.

    samples: whether engines sample from the policy while it learns.
    """

    def __init__(self, console: Console, live: LiveMetrics, writer: RunWriter, *, samples: bool = True) -> None:
        self.console, self.live, self.writer = console, live, writer
        self.timeline = TimelineRecorder()
        self._health = Health(samples=samples)
        self.seconds: dict[str, float] = {}
        """Seconds by phase since the step began, in the order in which phases ended."""

    @contextmanager
    def step(self, step: int, steps: int) -> Iterator[None]:
        """The block is step `step` of `steps`."""
        self.seconds = {}
        self.console.begin_step(step, steps)
        with self.phase("step"):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is phase `name`, also where it raises; phases nest."""
        start = time.perf_counter()
        try:
            with self.live.phase(name), self.console.phase(name):
                yield
        finally:
            end = time.perf_counter()
            self.timeline.phase(name, start, end)
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start

    def times(self) -> dict[str, float]:
        """`seconds` under the names that a run logs."""
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}

    def samples(self, step: int, rollout: "Rollout", asked: Callable[[str], dict[str, str]]) -> None:
        """The samples of a step. asked: the texts of what a prompt's uid asks."""
        self.writer.samples(step, rollout.examples(RECORDED_SAMPLES, asked))
        self.live.samples(rollout.batch)

    def micro_steps(self, times: Mapping[str, Sequence["MicroStepTime"]], cost_model: CostModel) -> None:
        """The micro-steps of a step, by the name of the rank's actor, and the cost model of their plan."""
        self.timeline.micro_steps(times, cost_model)
        self.live.micro_steps(times, cost_model)

    def end_step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step. They are written before they are shown: what the terminal showed is in the file."""
        self.writer.step(step, metrics)
        self.console.step(step, steps, metrics)
        for told in self._health.see(step, metrics):
            self.console.log(told)

    def write_timeline(self, step: int) -> None:
        """Write what happened since the last call as the timeline of `step`."""
        self.writer.timeline(step, self.timeline.take())
