"""Datasets: tokenized records in an endless stream of epochs."""

from collections.abc import Sequence

import numpy as np

from controller.config.offline import OfflineDataConfig
from controller.data.prompts import epoch_order
from controller.observability.slow_work import Log, count_if_slow
from controller.offline.tokenized import Example, Row, example_row
from workers.dataproto import DataProto
from workers.errors import DataError
from workers.remote_batch import RemoteBatch
from workers.rendering import Renderer

Item = tuple[Row, ...]
"""The sequences of one record, trained in the same step."""


def record_name(path: str, index: int) -> str:
    return f"{path} record {index + 1}"


class SequenceDataset:
    """Records of one file, in fixed order or shuffled every epoch. dropped: number of overlong records."""

    def __init__(
        self,
        records: Sequence[tuple[Example, ...]],
        renderer: Renderer,
        settings: OfflineDataConfig,
        *,
        name: str,
        shuffle: bool,
        seed: int = 0,
        log: Log = print,
    ) -> None:
        """records: examples of each record.

        Raises DataError on a record that cannot be tokenized, on a long one with overlong_records="error", and if none
        is left.
        """
        self.name, self._shuffle, self._seed, self.dropped = name, shuffle, seed, 0
        self._items: list[Item] = []
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        counted = count_if_slow(records, f"{name}: records tokenized", log, total=len(records))
        for index, record in enumerate(counted):
            where = record_name(name, index)
            rows = (example_row(renderer, example, where, settings.train_on) for example in record)
            self._add(tuple(rows), settings, where)
        if not self._items:
            raise DataError(
                f"{name}: all {len(records)} records are longer than data.max_tokens={settings.max_tokens}. Raise it."
            )
        equal = sum(_are_equal(item) for item in self._items)
        if equal == len(self._items):
            raise DataError(f"{name}: chosen and rejected responses are equal in all records. See data.chosen_key.")
        self.warnings = [f"{name}: {equal} of {len(self)} pairs have equal responses, and teach nothing"] * (equal > 0)

    def _add(self, item: Item, settings: OfflineDataConfig, where: str) -> None:
        longest = max(len(row["input_ids"]) for row in item)
        if longest <= settings.max_tokens:
            self._items.append(item)
        elif settings.overlong_records == "error":
            raise DataError(
                f"{where} has {longest} tokens. Raise data.max_tokens ({settings.max_tokens}) or "
                "set data.overlong_records=drop."
            )
        else:
            self.dropped += 1

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first_ids(self) -> list[int]:
        return [int(token) for token in self._items[0][0]["input_ids"]]

    @property
    def lengths(self) -> list[int]:
        return [len(row["input_ids"]) for item in self._items for row in item]

    def take(self, start: int, count: int) -> RemoteBatch:
        """Return `count` records from position `start` (from 0) of the stream, determined by the seed (see `first`)."""
        places = range(start, start + count)
        return _batch([f"{place}" for place in places], [self._at(place) for place in places])

    def first(self, count: int) -> RemoteBatch:
        """Return the first `count` records in file order, 0 for all.

        Light columns `uid`, equal for a record's sequences, `length`, `response_tokens` (learned ones), and tokens
        `input_ids`, `loss_mask`. A record's sequences are adjacent.
        """
        items = self._items[: count or None]
        return _batch([f"{number}" for number in range(len(items))], items)

    def _at(self, place: int) -> Item:
        epoch, index = divmod(place, len(self._items))
        if self._shuffle and self._order[0] != epoch:
            self._order = epoch, epoch_order(self._seed, epoch, len(self._items))
        return self._items[self._order[1][index] if self._shuffle else index]


def _are_equal(item: Item) -> bool:
    return len(item) == 2 and np.array_equal(item[0]["input_ids"], item[1]["input_ids"])


def _batch(uids: Sequence[str], items: Sequence[Item]) -> RemoteBatch:
    import ray

    rows = [row for item in items for row in item]
    columns = {
        "uid": np.repeat(np.array(uids), [len(item) for item in items]),
        "group_number": np.repeat(np.arange(len(items)), [len(item) for item in items]),
        "length": np.array([len(row["input_ids"]) for row in rows]),
        "response_tokens": np.array([int(row["loss_mask"].sum()) for row in rows]),
    }
    return RemoteBatch.of_block(ray.put(DataProto.from_rows(rows)), columns, ("input_ids", "loss_mask"))
