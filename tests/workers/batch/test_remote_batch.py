import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refused
from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Image, PlacedImage
from workers.batch.remote_batch import IMAGES, RemoteBatch, places
from workers.errors import DataError


def places_of(batch: RemoteBatch) -> list[tuple[str, int]]:
    return [(block, row) for block, _, row in batch.tokens["input_ids"]]


def batch_of(rows: list[tuple[str, int]]) -> RemoteBatch:
    return RemoteBatch(
        {"length": np.arange(len(rows))},
        {"input_ids": places("input_ids", *zip(*rows, strict=True))},
    )


ROWS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), min_size=1, max_size=20
)


@given(ROWS, st.data())
def test_selecting_moves_handles_and_columns_together(
    rows: list[tuple[str, int]], data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=30))
    selected = batch_of(rows).select(indices)
    assert places_of(selected) == [rows[i] for i in indices]
    assert selected["length"].tolist() == indices


@given(ROWS, ROWS)
def test_joining_keeps_the_order_of_the_parts(
    first: list[tuple[str, int]], second: list[tuple[str, int]]
) -> None:
    joined = RemoteBatch.concat([batch_of(first), batch_of(second)])
    assert places_of(joined) == first + second
    lengths = [*range(len(first)), *range(len(second))]
    assert joined["length"].tolist() == lengths
    alone = RemoteBatch.concat([batch_of(first)])
    assert (places_of(alone), alone["length"].tolist()) == (first, lengths[: len(first)])


def test_a_batch_without_images_joins_one_with_them() -> None:
    image = PlacedImage(Image(1, 28, 28, b""), first=0, tokens=1)
    with_images = RemoteBatch({IMAGES: object_column([(image,), ()])}, {})
    without = RemoteBatch({}, {"input_ids": places("input_ids", "abc", range(3))})
    both = RemoteBatch.concat(
        [with_images.with_tokens(**without.select([0, 1]).tokens), without]
    )
    assert both[IMAGES].tolist() == [(image,), (), (), (), ()]
    assert list(both.light.columns) == list(without.columns)
    with refused("zero batches", DataError):
        RemoteBatch.concat([])


def test_meta_data_travel_with_every_selection_and_must_agree_to_be_joined() -> None:
    batch = batch_of([("a", 0), ("b", 1)]).with_meta(step=3)
    assert RemoteBatch.concat([batch.select([1]), batch.select([0])]).meta == {"step": 3}
    with refused("step", DataError):
        RemoteBatch.concat([batch, batch.with_meta(step=4)])


def test_a_boolean_mask_selects_and_rows_that_are_not_there_are_refused() -> None:
    batch = batch_of([("a", 0), ("b", 1)])
    assert places_of(batch.select(np.array([False, True]))) == [("b", 1)]
    for outside, named in (([0, 2], "row 2"), ([-1], "row -1"), ([True], "mask of 1")):
        with refused(named, DataError):
            batch.select(outside)


def test_columns_that_do_not_fit_are_refused_by_name() -> None:
    batch = batch_of([("a", 0)])
    with refused("input_ids", DataError):
        RemoteBatch({"uid": np.array(["x", "y"])}, batch.tokens)
    with refused("reward", DataError):
        RemoteBatch.concat([batch, batch.with_columns(reward=np.zeros(1))])
    with refused("reward", DataError):
        batch["reward"]


def rows_block(*lengths: int) -> DataProto:
    rows = [
        {"input_ids": np.full(n, n, np.int32), "loss_mask": np.arange(n) > 0}
        for n in lengths
    ]
    return DataProto.from_rows(rows)


def test_gathering_fetches_rows_in_the_batch_order(ray_session) -> None:
    import ray

    two, one = ray.put(rows_block(3, 2)), ray.put(rows_block(5))
    tokens = {
        name: places(name, [one, two, two], [0, 1, 0])
        for name in ("input_ids", "loss_mask")
    }
    batch = RemoteBatch(
        {"uid": np.array(["c", "b", "a"]), "reward": np.array([1.0, 2.0, 3.0])},
        tokens,
        {"step": 3},
    )
    proto = batch.gather()
    assert [proto.row(i)["input_ids"].tolist() for i in range(3)] == [
        [5] * 5,
        [2, 2],
        [3, 3, 3],
    ]
    assert proto.num_loss_tokens == 4 + 1 + 2
    assert proto.columns["reward"].tolist() == [1.0, 2.0, 3.0]
    assert proto.objects["uid"].tolist() == ["c", "b", "a"]
    assert proto.meta == {"step": 3}
    assert batch.select([]).gather().num_tokens == 0


def test_gathering_refuses_columns_whose_rows_differ_in_length(ray_session) -> None:
    import ray

    whole, short = ray.put(rows_block(3, 2)), ray.put(rows_block(3, 1))
    tokens = {
        "input_ids": places("input_ids", [whole] * 2, [0, 1]),
        "m": places("loss_mask", [short] * 2, [0, 1]),
    }
    with refused("column 'm' has", DataError):
        RemoteBatch({}, tokens).gather()
