"""Replayer: a run with recorded samples; `controller.replay` is its command.

checkpoint --resume--> Replayer --read_step, step--> metrics of the step
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from balancing import CostModel
from controller.actors.roles import Roles, start_roles_without_engines
from controller.algorithm.logprob_check import LogProbCheck, Proof
from controller.checkpoints.checkpoint_writer import resume
from controller.config import Config, to_yaml
from controller.data.prompts import Prompt, Prompts
from controller.lifecycle.inputs import find_step
from controller.lifecycle.session import Session
from controller.observability.console import Console
from controller.observability.live_metrics import LiveMetrics
from controller.observability.run_folder import RunWriter, step_file
from controller.observability.run_record import RunRecord
from controller.rollout.buffer import RolloutBuffer
from controller.rollout.sample_files import read_step
from controller.rollout.samples import RolloutBatch
from controller.run import Run
from controller.step import step
from controller.training_loop import advance
from workers.errors import DataError, MismatchError
from workers.metrics import Metric


class Replayer(Run):
    """Trains steps on recorded samples, without engines."""

    def __init__(self, config: Config, session: Session[Roles], folder: Path, *, cost_model: CostModel) -> None:
        """folder: of the recorded run. cost_model: see `TrainingRun`. Raises ConfigError as `find_step`."""
        self.make_step = cloudpickle.loads(find_step(config)) if config.run.step else step
        self.recorded = folder
        super().__init__(config, session, NoPrompts(), None, cost_model=cost_model)
        self.logprob_check = ToldMismatch(config, session.record)

    def new_buffer(self, prompts: Prompts) -> RolloutBuffer:
        """Return a buffer that reads files."""
        arguments = self.config, self.roles, prompts, self.planner, self.record, self.progress
        return RecordedSamples(self.recorded, *arguments)

    def asked(self, uid: str) -> dict[str, str]:
        """Return only the uid, because prompts are not read again."""
        return {"prompt": uid}

    def replay(self, number: int) -> dict[str, float]:
        """Train step `number` and return its metrics. Raises DataError as `read_step`, and what a step raises."""
        with self.record.step(number, self.last_step):
            self.make_step(self)
            self.step_finished()
        self.record.console.step(number, self.last_step, self.record.metrics)
        advance(self, number, self.progress.latest)
        return self.record.metrics


class RecordedSamples(RolloutBuffer):
    """Recorded samples of a run. folder: of the run."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.folder = folder

    def collect(self, step: int) -> RolloutBatch:
        """Read a step's samples. Raises DataError as `read_step`."""
        return read_step(step_file(self.folder, step))


class ToldMismatch(LogProbCheck):
    """Reports differences between engines and trainer without raising, so that a replay can find their cause."""

    def __init__(self, config: Config, record: RunRecord) -> None:
        super().__init__(config, first_version=0)
        self._pending.clear()  # there are no engines to prove
        self._log = record.console.log

    def judge(self, step: int, metrics: Mapping[str, Metric], proof: Proof = Proof.NONE) -> None:
        """Judge as `LogProbCheck.judge`, without raising."""
        try:
            super().judge(step, metrics, proof)
        except MismatchError as error:
            self._log(f"{error}")


class NoPrompts:
    """Prompts of a trainer that does not sample."""

    def take(self, start: int, count: int) -> list[Prompt]:
        """Raises DataError."""
        raise DataError(f"a replay has no prompts, and {count} from place {start} on were asked for.")


def replay(config: Config, folder: Path, steps: range, console: Console) -> dict[str, float]:
    """Train a run's steps again from the state of run.resume; return the last one's metrics.

    folder: of the run. Needs a connected Ray. Raises as `Replayer.replay` and `start_roles`.
    """
    metrics: dict[str, float] = {}
    with replaying(config, folder, console) as replayer:
        for number in steps:
            metrics = replayer.replay(number)
    return metrics


@contextmanager
def replaying(config: Config, recorded: Path, console: Console) -> Iterator[Replayer]:
    """Start the training roles on a connected Ray and yield a run resumed by run.resume; then end them.

    recorded: folder of the recorded run. The replay's files go to a temporary folder.
    """
    cost_model = CostModel.from_model_config(config.model_description())
    with (
        start_roles_without_engines(config, console) as roles,
        tempfile.TemporaryDirectory(prefix="ballast-replay-") as folder,
        RunWriter(Path(folder), to_yaml(config), [], timeline=False) as writer,
    ):
        progress = resume(config, roles, console.log, {})
        session = Session(roles, progress, RunRecord(console, LiveMetrics(), writer))
        yield Replayer(config, session, recorded, cost_model=cost_model)
