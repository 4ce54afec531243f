"""Images in sequences of token ids, as a batch carries them.

    ids     5 7 I I I I 9       I: the tokens of an image, expanded
    keys    5 7 -a -b -c -d 9   numbers of the image's digest: equal only where ids and images are equal

Ids alone do not tell two images of one size apart. Whatever compares prefixes compares keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# 2^64 / golden ratio: multiples of it spread over all bits (Knuth 6.4).
_ODD = np.uint64(0x9E3779B97F4A7C15)
_LARGEST = np.uint64(2**63 - 1)


@dataclass(frozen=True)
class Image:
    """Hold an image of a record, after `data.image_pixels`.

    digest: a hash of size and RGB content, below 2^63. data: PNG bytes, an
    ImageSource until they are needed, or a Ray reference to them.
    """

    digest: int
    width: int
    height: int
    data: Any = field(compare=False, repr=False)

    def png(self) -> bytes:
        """Return the PNG bytes of an image whose `data` are here."""
        return self.data if isinstance(self.data, bytes) else self.data.png()


@dataclass(frozen=True)
class PlacedImage:
    """Place an image in a sequence: `tokens` consecutive tokens from `first` on, separators included."""

    image: Image
    first: int
    tokens: int


def keys(ids: np.ndarray, images: Sequence[PlacedImage]) -> np.ndarray:
    """Return int64 [n]: `ids`, with a negative number of digest and offset for each token of an image.

    Without images, `ids` themselves.
    """
    if not images:
        return ids
    token_keys = ids.astype(np.int64)
    for placed_image in images:
        numbers = (
            np.uint64(placed_image.image.digest)
            + np.arange(placed_image.tokens, dtype=np.uint64) * _ODD
        )
        token_keys[placed_image.first : placed_image.first + placed_image.tokens] = -1 - (
            numbers & _LARGEST
        ).astype(np.int64)
    return token_keys


Placed = tuple[PlacedImage, ...]
