"""ReplayBuffer: good samples of earlier steps, on which later steps train again.

new samples with advantages --remember--> kept, up to batch.replay.keep versions --draw--> a later step's batch
                                            ^--read, save--> checkpoints/replay/step-30.npz

A replayed sample keeps the advantage of its own group, whose baseline describes the policy that sampled it. The loss
takes its ratio to the same policy. See docs/replay.md for what papers do.
"""

from pathlib import Path

import numpy as np

from controller.algorithm.advantages import sample_columns
from controller.checkpoints.progress import Progress
from controller.config import Config
from controller.data.sample_functions import SampleFunction
from controller.observability.run_record import RunRecord
from controller.rollout.sample_files import read_rows, write_rows
from controller.rollout.samples import SAMPLED_COLUMNS, learned, sample_numbers
from workers.dataproto import object_column
from workers.errors import DataError
from workers.remote_batch import RemoteBatch

DRAWS = 2  # separates this random stream from others with the same seed
WEIGHT = "replay_weight"
KEPT = "kept_advantages"
"""Column: advantages of replayed rows, NaN for new rows."""
OF_ESTIMATORS = ("credit", "offsets", "by_turn")
"""Columns that only estimators read. Some steps lack them."""
OF_A_STEP = ("group_number", "sample_number", "advantages", *OF_ESTIMATORS)


def newly_sampled(batch: RemoteBatch) -> RemoteBatch:
    """Return the rows that were not replayed."""
    return batch.select(np.isnan(batch[KEPT])) if KEPT in batch.columns else batch


class ReplayBuffer:
    """Keeps good samples, as rows in the order of their steps. Does nothing without batch.replay.share."""

    def __init__(
        self, config: Config, record: RunRecord, progress: Progress, weights_of: SampleFunction | None = None
    ) -> None:
        """progress: names the checkpoint's file. A broken file is logged, and nothing is kept. weights_of: of
        batch.replay.by.
        """
        self.config, self.record, self._weights_of = config, record, weights_of
        self.rows = RemoteBatch({}, {})
        if progress.replay and config.batch.replay.share:
            try:
                self.rows = read_rows(Path(progress.replay))
            except DataError as error:
                record.console.log(f"{error}. No sample of an earlier step is replayed at first")

    def save(self, path: Path) -> None:
        """Write the kept samples for a checkpoint. Raises OutputError."""
        if len(self.rows):
            write_rows(path, self.rows)

    def with_replayed(self, batch: RemoteBatch, step: int, version: int) -> RemoteBatch:
        """Add the step's replayed rows behind its new rows. version: of the policy."""
        settings = self.config.batch.replay
        if not settings.share:
            return batch
        if len(self.rows):
            self.rows = self.rows.select(version - self.rows["weight_version"] <= settings.keep)
        new, drawn = batch.with_columns(**{KEPT: np.full(len(batch), np.nan, np.float32)}), self._drawn(step)
        samples = max(1, _samples(new) + _samples(drawn))
        self.record.add({"replay/share": _samples(drawn) / samples, "replay/kept": float(_samples(self.rows))})
        if not len(drawn):
            return new
        ages = version - drawn["weight_version"]
        self.record.add({"replay/age_mean": float(ages.mean()), "replay/age_max": float(ages.max())})
        empty = {name: object_column([()] * len(drawn)) for name in OF_ESTIMATORS if name in new.columns}
        columns = {name: column for name, column in drawn.columns.items() if name != WEIGHT}
        return RemoteBatch.concat([new, RemoteBatch(columns | empty, drawn.tokens)])

    def _drawn(self, step: int) -> RemoteBatch:
        if not len(self.rows):
            return self.rows
        numbers, first = np.unique(sample_numbers(self.rows), return_index=True)
        weights, count = self.rows[WEIGHT][first], min(len(numbers), self.config.replayed_per_step)
        rng = np.random.default_rng((self.config.run.seed, DRAWS, step))
        chosen = rng.choice(numbers, count, replace=False, p=weights / weights.sum())
        return self.rows.select(np.isin(sample_numbers(self.rows), chosen))

    def with_advantages(self, batch: RemoteBatch, new: RemoteBatch) -> RemoteBatch:
        """Give `batch` the advantages of its `new` rows and of its replayed rows, and keep the good new samples.

        Raises DataError if advantages are not one number a sample.
        """
        if KEPT not in batch.columns:
            return new
        if "advantages" not in new.columns:
            raise DataError(
                f"batch.replay.share={self.config.batch.replay.share}: an agent gave rewards to single responses, so a "
                "sample has several advantages. Reward whole sessions, or remove batch.replay."
            )
        self._remember(learned(new, self.config.reward))
        kept = batch[KEPT][len(new) :]
        return batch.with_columns(advantages=np.concatenate([new["advantages"], kept]))

    def _remember(self, new: RemoteBatch) -> None:
        weights = (new["advantages"] > 0).astype(np.float64)
        if self._weights_of is not None and len(new):
            columns, sample = sample_columns(new.with_columns(advantage=new["advantages"]))
            weights = self._weights_of(columns)[sample]
        good = new.with_columns(**{WEIGHT: weights}).select(weights > 0)
        columns = {name: column for name, column in good.columns.items() if name not in OF_A_STEP}
        tokens = {name: good.tokens[name] for name in SAMPLED_COLUMNS if name in good.tokens}
        good = RemoteBatch(columns | {KEPT: good["advantages"]}, tokens)
        before = [self.rows.select(~np.isin(self.rows["uid"], new["uid"]))] if len(self.rows) else []
        self.rows = RemoteBatch.concat([*before, good])


def _samples(rows: RemoteBatch) -> int:
    return int(sample_numbers(rows)[-1]) + 1 if len(rows) else 0
