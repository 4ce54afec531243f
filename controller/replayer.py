"""Replayer: the trainer of a run whose samples are there already. `controller.replay` is its command.

checkpoint --resume--> Replayer --read_step, learn--> metrics of the step
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from balancing import CostModel
from controller.actors.roles import Roles, start_roles_without_engines
from controller.checkpoint import resume
from controller.collector import Collector
from controller.config import Config, to_yaml
from controller.data.prompts import Prompt, Prompts
from controller.mismatch import MismatchWatch, Proof
from controller.observability.console import Console
from controller.observability.live_metrics import LiveMetrics
from controller.observability.metrics import RunWriter
from controller.observability.run_folder import step_file
from controller.observability.run_record import RunRecord
from controller.sample_files import read_step
from controller.session import Session
from controller.trainer import Trainer
from workers.errors import DataError, MismatchError
from workers.metrics import Metric


class Replayer(Trainer):
    """Trains steps on recorded samples. No engine samples, receives weights or proves them."""

    def __init__(self, config: Config, session: Session[Roles], *, cost_model: CostModel) -> None:
        """cost_model: see `TrainingLoop`."""
        super().__init__(config, session, NoPrompts(), None, cost_model=cost_model)
        self.mismatch = ToldMismatch(config, session.record)

    def new_collector(self, prompts: Prompts) -> Collector:
        """One that makes nothing ahead, and is asked for nothing."""
        return Collector(self.config, self.roles, prompts, self.planner, self.record, self.progress)

    def asked(self, uid: str) -> dict[str, str]:
        """The uid alone: the prompts are not read again."""
        return {"prompt": uid}

    def replay(self, path: Path, step: int) -> dict[str, float]:
        """Train `step` on the samples in the file; returns its metrics, none where the step trained on nothing.

        Raises DataError as `read_step` does, and what a step raises.
        """
        rollout = read_step(path)
        metrics: dict[str, float] = {}
        if len(rollout.trained):
            with self.record.step(step, self.last_step):
                metrics = self.learn(rollout, rollout.trained, step)
            self.record.console.step(step, self.last_step, metrics)
        self.progress.step = step
        return metrics


class ToldMismatch(MismatchWatch):
    """Says where engines and trainer differ by more than they may, and goes on: a replay is to find out why."""

    def __init__(self, config: Config, record: RunRecord) -> None:
        super().__init__(config, first_version=0)
        self._pending.clear()  # there are no engines to prove
        self._log = record.console.log

    def judge(self, step: int, metrics: Mapping[str, Metric], proof: Proof = Proof.NONE) -> None:
        """As `MismatchWatch.judge`, but that it does not raise."""
        try:
            super().judge(step, metrics, proof)
        except MismatchError as error:
            self._log(f"{error}")


class NoPrompts:
    """The prompts of a trainer that samples nothing."""

    def take(self, start: int, count: int) -> list[Prompt]:
        """Raises DataError."""
        raise DataError(f"a replay has no prompts, and {count} from place {start} on were asked for.")


def replay(config: Config, folder: Path, steps: range, console: Console) -> dict[str, float]:
    """Train the steps of a run again, from the state of run.resume; returns the metrics of the last.

    folder: of the run. Ray is connected. Raises as `Replayer.replay` and `start_roles` do.
    """
    metrics: dict[str, float] = {}
    with replaying(config, console) as replayer:
        for step in steps:
            metrics = replayer.replay(step_file(folder, step), step)
    return metrics


@contextmanager
def replaying(config: Config, console: Console) -> Iterator[Replayer]:
    """Start the training roles on a connected Ray and yield a trainer with the state of run.resume; then end them.

    What the trainer writes goes to a folder that ends with it.
    """
    cost_model = CostModel.from_model_config(config.model_description())
    with (
        start_roles_without_engines(config, console) as roles,
        tempfile.TemporaryDirectory(prefix="ballast-replay-") as folder,
        RunWriter(Path(folder), to_yaml(config), [], timeline=False) as writer,
    ):
        progress = resume(config, roles, console, {})
        session = Session(roles, progress, RunRecord(console, LiveMetrics(), writer))
        yield Replayer(config, session, cost_model=cost_model)
