"""Datasets: tokenized records in an endless stream of epochs."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from controller.config.offline import LearnedDataConfig, OfflineDataConfig
from controller.data.prompts import epoch_order, warn_of_left_out
from controller.observability.slow_work import Log, count_if_slow
from controller.offline.examples import Example
from controller.offline.tokenized import Row, example_row, expand_images, scored_row
from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Placed, keys
from workers.batch.remote_batch import IMAGES, RemoteBatch, store_images
from workers.errors import DataError, ImageError
from workers.rendering import Renderer

Item = tuple[tuple[Row, Placed], ...]
"""The sequences of one record, trained in the same step, with their images."""
MakeRow = Callable[[Renderer, Example, str], Row]


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

        Leaves out records with an image that cannot be read, with a warning. Raises DataError on a record
        that cannot be tokenized, on a long one with overlong_records="error", and if none is left.
        """
        self.name = name
        self._shuffle = shuffle
        self._seed = seed
        self.dropped = 0
        self._items: list[Item] = []
        self._labels: list[float] = []
        unreadable: list[str] = []
        make_row: MakeRow = scored_row
        if isinstance(settings, LearnedDataConfig):
            make_row = partial(example_row, train_on=settings.train_on)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        counted = count_if_slow(
            records, f"{name}: records tokenized", log, total=len(records)
        )
        for index, record in enumerate(counted):
            place = record_name(name, index)
            pairs = [(make_row(renderer, example, place), example) for example in record]
            try:
                self._add(
                    tuple(expand_images(renderer, *pair, place) for pair in pairs),
                    record,
                    settings,
                    place,
                )
            except ImageError as error:
                unreadable.append(str(error))
        if unreadable and not self._items:
            raise DataError(unreadable[0])
        if not self._items:
            raise DataError(
                f"{name}: all {len(records)} records are longer than data.max_tokens={settings.max_tokens}. "
                "Raise it."
            )
        equal = sum(_are_equal(item) for item in self._items)
        if equal == len(self._items):
            raise DataError(
                f"{name}: chosen and rejected responses are equal in all records. See data.chosen_key."
            )
        self.warnings = warn_of_left_out(name, unreadable)
        self.warnings += [
            f"{name}: {equal} of {len(self)} pairs have equal responses, and teach nothing"
        ] * (equal > 0)

    def _add(
        self,
        item: Item,
        record: tuple[Example, ...],
        settings: OfflineDataConfig,
        place: str,
    ) -> None:
        longest = max(len(row["input_ids"]) for row, _ in item)
        if longest <= settings.max_tokens:
            self._items.append(item)
            self._labels.append(record[0].label)
        elif settings.overlong_records == "error":
            raise DataError(
                f"{place} has {longest} tokens. Raise data.max_tokens ({settings.max_tokens}) or "
                "set data.overlong_records=drop."
            )
        else:
            self.dropped += 1

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first_ids(self) -> list[int]:
        return [int(token) for token in self._items[0][0][0]["input_ids"]]

    @property
    def lengths(self) -> list[int]:
        return [len(row["input_ids"]) for item in self._items for row, _ in item]

    def take(self, start: int, count: int) -> RemoteBatch:
        """Return `count` records from position `start` (from 0) of the stream, determined by the seed (see
        `first`).
        """
        places = range(start, start + count)
        return self._batch(
            [f"{place}" for place in places], [self._at(place) for place in places]
        )

    def first(self, count: int) -> RemoteBatch:
        """Return the first `count` records in file order, 0 for all.

        Light columns `uid`, equal for a record's sequences, `length`, `response_tokens` (learned ones),
        `label` (see `Example`), and the tokens of a `Row`. A record's sequences are adjacent.
        """
        items = range(len(self._items[: count or None]))
        return self._batch([f"{number}" for number in items], items)

    def _at(self, place: int) -> int:
        epoch, index = divmod(place, len(self._items))
        if self._shuffle and self._order[0] != epoch:
            self._order = epoch, epoch_order(self._seed, epoch, len(self._items))
        return int(self._order[1][index]) if self._shuffle else index

    def _batch(self, uids: Sequence[str], numbers: Sequence[int]) -> RemoteBatch:
        batch = _batch(uids, [self._items[number] for number in numbers])
        if "label" in batch.tokens:
            return batch
        labels = np.array([self._labels[number] for number in numbers])
        return batch.with_columns(label=labels[batch["group_number"]])


def _are_equal(item: Item) -> bool:
    return len(item) == 2 and len({sequence.tobytes() for sequence in _keys(item)}) == 1


def _keys(item: Item) -> list[np.ndarray]:
    return [keys(row["input_ids"], images) for row, images in item]


def _shared_tokens(item: Item) -> int:
    """Count the first tokens that all sequences share, each with at least one more."""
    sequences = _keys(item)
    size = min(map(len, sequences)) - 1
    alike = np.all(
        [sequence[:size] == sequences[0][:size] for sequence in sequences], axis=0
    )
    return int(np.cumprod(alike).sum())


def _batch(uids: Sequence[str], items: Sequence[Item]) -> RemoteBatch:
    import ray

    rows = [row for item in items for row, _ in item]
    image_refs = dict[int, ray.ObjectRef]()
    images = [store_images(placed, image_refs) for item in items for _, placed in item]
    columns = {
        "uid": np.repeat(np.array(uids), [len(item) for item in items]),
        "group_number": np.repeat(np.arange(len(items)), [len(item) for item in items]),
        "length": np.array([len(row["input_ids"]) for row in rows]),
        "response_tokens": np.array([int(row["loss_mask"].sum()) for row in rows]),
    }
    # The planner keeps sequences with the same beginning together.
    if len(items) < len(rows):
        shared = [_shared_tokens(item) for item in items for _ in item]
        hashes = object_column([b""] * len(rows))
        columns |= {
            "prompt_hash": columns["group_number"],
            "prompt_tokens": np.array(shared),
            "prefix_hashes": hashes,
        }
    columns |= {IMAGES: object_column(images)} if any(images) else {}
    return RemoteBatch.of_block(ray.put(DataProto.from_rows(rows)), columns, list(rows[0]))
