"""Keys tell images apart where ids cannot."""

import numpy as np
import ray
from hypothesis import given
from hypothesis import strategies as st

from workers.batch.dataproto import object_column
from workers.batch.placed_images import Image, PlacedImage, keys
from workers.batch.remote_batch import fetch_images

PLACEHOLDER = 9


def _placed(digest: int, first: int, tokens: int) -> PlacedImage:
    return PlacedImage(Image(digest, 28, 28, b""), first, tokens)


@st.composite
def _sequences(draw: st.DrawFn) -> tuple[np.ndarray, list[PlacedImage], list[object]]:
    """Ids, their images, and what each token stands for."""
    ids: list[int] = []
    images, meaning = [], []
    for _ in range(draw(st.integers(0, 4))):
        text = draw(st.lists(st.sampled_from([1, 2, PLACEHOLDER]), max_size=2))
        digest, tokens = draw(st.sampled_from([0, 1, 2**63 - 1])), draw(st.integers(1, 3))
        ids += text
        images.append(_placed(digest, len(ids), tokens))
        ids += [PLACEHOLDER] * tokens
        meaning += [*text, *((digest, offset) for offset in range(tokens))]
    return np.array(ids, np.int32), images, meaning


@given(_sequences(), _sequences())
def test_keys_are_equal_where_ids_and_images_are(one, other):
    found, others = keys(*one[:2]).tolist(), keys(*other[:2]).tolist()
    assert [each < 0 for each in found] == [isinstance(each, tuple) for each in one[2]]
    for count in range(1, min(len(found), len(others)) + 1):
        assert (found[:count] == others[:count]) == (one[2][:count] == other[2][:count])


def test_without_images_keys_are_the_ids():
    ids = np.arange(3, dtype=np.int32)
    assert keys(ids, ()) is ids


def test_the_bytes_of_an_image_are_not_compared():
    assert Image(1, 2, 3, b"here") == Image(1, 2, 3, b"there")


def test_the_bytes_of_images_are_read_without_a_ray():
    found = fetch_images(object_column([(PlacedImage(Image(1, 2, 3, b"here"), 0, 1),)]))
    assert found[0][0].image.data == b"here"
    assert not ray.is_initialized()
