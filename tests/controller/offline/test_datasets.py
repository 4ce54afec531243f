"""Records dealt in epochs: a new order each, the same for the same seed, and whole pairs."""

import pytest

from controller.config.offline import SftDataConfig
from controller.offline.datasets import SequenceDataset
from controller.offline.examples import Example
from tests.controller.stand_ins.local_ray import LocalRay
from workers.batch.remote_batch import RemoteBatch
from workers.rendering import Renderer

COUNT = 7


@pytest.fixture(autouse=True)
def local_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    LocalRay({}).install(monkeypatch)


class Numbers:
    """A tokenizer of texts of numbers."""

    eos_token_id = 99

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        del add_special_tokens
        return {"input_ids": [int(word) for word in text.split() if word.isdigit()]}


def example(number: int) -> Example:
    """Two more tokens than its number, with the last: one of the prompt, the number again and
    again, <eos>.
    """
    return Example(f"{number}", " ".join([f"{number}"] * number))


def dataset(seed: int = 0, *, shuffle: bool = True) -> SequenceDataset:
    records = [(example(number), example(number + COUNT)) for number in range(COUNT)]
    return SequenceDataset(
        records, Renderer(Numbers()), SftDataConfig(), name="x", shuffle=shuffle, seed=seed
    )


def numbers(batch: RemoteBatch) -> list[int]:
    gathered = batch.gather()
    return [int(gathered.row(row)["input_ids"][0]) for row in range(len(gathered))]


def chosen(batch: RemoteBatch) -> list[int]:
    return numbers(batch)[0::2]


def test_a_batch_holds_whole_records_with_their_lengths() -> None:
    batch = dataset(shuffle=False).take(2, 2)
    assert numbers(batch) == [2, 2 + COUNT, 3, 3 + COUNT]
    assert batch["uid"].tolist() == ["2", "2", "3", "3"]
    assert batch["length"].tolist() == [4, 4 + COUNT, 5, 5 + COUNT]
    assert batch["response_tokens"].tolist() == [3, 3 + COUNT, 4, 4 + COUNT]


def test_every_epoch_has_every_record_once_in_an_order_of_its_own() -> None:
    epochs = [chosen(dataset().take(start, COUNT)) for start in (0, COUNT)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * 2
    assert epochs[0] != epochs[1]


def test_the_stream_depends_on_the_seed_and_the_place_alone() -> None:
    whole = chosen(dataset().take(0, 2 * COUNT))
    assert chosen(dataset().take(5, 6)) == whole[5:11]
    assert chosen(dataset(seed=1).take(0, 2 * COUNT)) != whole


def test_held_out_records_come_in_file_order() -> None:
    assert chosen(dataset().first(3)) == [0, 1, 2]
    assert chosen(dataset().first(0)) == list(range(COUNT))
