"""ReplayBuffer: good samples of earlier steps, on which later steps train again.

new samples with advantages --remember--> kept, up to batch.replay.keep versions --draw--> a later batch
                                            ^--read, save--> checkpoints/replay/step-30.npz

A replayed sample keeps the advantage of its own group, whose baseline describes the policy that sampled it.
The loss takes its ratio to the same policy. See docs/replay.md for what papers do.
"""

from pathlib import Path

import numpy as np

from controller.algorithm.advantages import sample_columns
from controller.algorithm.credit import has_offsets
from controller.config import Config
from controller.data.sample_functions import SampleFunction
from controller.observability.run_record import RunRecord
from controller.rollout.batch_rows import KEPT_ADVANTAGES, sample_numbers, trainable_rows
from controller.rollout.sample_files import read_rows, write_rows
from controller.rollout.samples import SAMPLED_COLUMNS
from workers.batch.remote_batch import RemoteBatch
from workers.errors import DataError

DRAWS = 2  # separates this random stream from others with the same seed
OF_TURNS = ("credit", "offsets")
"""Columns that some steps lack. Advantages of whole samples do not need them."""
OF_A_STEP = ("group_number", "sample_number", "advantages")


class ReplayBuffer:
    """Keeps good samples, as rows in the order of their steps. Does nothing without batch.replay.share."""

    def __init__(
        self,
        config: Config,
        record: RunRecord,
        file: str,
        is_good: SampleFunction | None = None,
    ) -> None:
        """file: of the checkpoint, or empty. is_good: batch.replay.by. Raises DataError for a broken file."""
        self.config = config
        self.record = record
        self._is_good = is_good
        self.rows = (
            read_rows(Path(file))
            if file and config.batch.replay.share
            else RemoteBatch({}, {})
        )

    def save(self, path: Path) -> None:
        """Write the kept samples for a checkpoint. Raises OutputError."""
        if len(self.rows):
            write_rows(path, self.rows)

    def with_replayed(self, batch: RemoteBatch, step: int, version: int) -> RemoteBatch:
        """Add the step's replayed rows behind its new rows. version: of the policy.

        Raises DataError if new samples have several advantages.
        """
        settings = self.config.batch.replay
        if not settings.share:
            return batch
        if has_offsets(batch):
            raise DataError(
                f"batch.replay.share={settings.share}: an agent gave rewards to single responses, so a "
                "sample has several advantages. Reward whole sessions, or remove batch.replay."
            )
        columns = {
            name: column for name, column in batch.columns.items() if name not in OF_TURNS
        }
        batch = RemoteBatch(
            columns | {KEPT_ADVANTAGES: np.full(len(batch), np.nan, np.float32)},
            batch.tokens,
        )
        if len(self.rows):
            self.rows = self.rows.select(
                version - self.rows["weight_version"] <= settings.keep
            )
            numbers = sample_numbers(self.rows)
            rng = np.random.default_rng((self.config.run.seed, DRAWS, step))
            drawn = rng.permutation(np.unique(numbers))[: self.config.replayed_per_step]
            batch = RemoteBatch.concat([batch, self.rows.select(np.isin(numbers, drawn))])
        ages = (version - batch["weight_version"])[~np.isnan(batch[KEPT_ADVANTAGES])]
        self.record.add({"replay/share": len(ages) / max(1, len(batch))})
        if len(ages):
            self.record.add({"replay/age_mean": float(ages.mean())})
        return batch

    def with_advantages(self, batch: RemoteBatch, new: RemoteBatch) -> RemoteBatch:
        """Give `batch` the advantages of its `new` rows and of its replayed rows, and keep the good new
        samples.
        """
        if KEPT_ADVANTAGES not in batch.columns:
            return new
        self._remember(trainable_rows(new, self.config.reward))
        old_advantages = batch[KEPT_ADVANTAGES][len(new) :]
        return batch.with_columns(
            advantages=np.concatenate([new["advantages"], old_advantages])
        )

    def _remember(self, new: RemoteBatch) -> None:
        is_good = new["advantages"] > 0
        if self._is_good is not None and len(new):
            columns, sample = sample_columns(new.with_columns(advantage=new["advantages"]))
            is_good = self._is_good(columns)[sample] > 0
        good = new.select(is_good)
        columns = {
            name: column for name, column in good.columns.items() if name not in OF_A_STEP
        }
        columns[KEPT_ADVANTAGES] = good["advantages"]
        tokens = {
            name: good.tokens[name] for name in SAMPLED_COLUMNS if name in good.tokens
        }
        parts = []
        if len(self.rows):
            is_resampled = np.isin(self.rows["uid"], new["uid"])
            parts.append(self.rows.select(~is_resampled))
        parts.append(RemoteBatch(columns, tokens))
        self.rows = RemoteBatch.concat(parts)
