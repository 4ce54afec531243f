"""Images of sequences: where each begins, and its tokens.

p p I I I I p a b | p p I I I I p c      tokens that a sequence shares bring the images that begin in them: a
    ----                 ----            micro-batch computes these once
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancing.basics.grouping import Floats, Integers
from balancing.errors import LengthError

ImagesOf = Sequence[Sequence[Sequence[int]]]
"""The images of each sequence: (first token, tokens) of each."""


@dataclass(frozen=True, eq=False)
class Images:
    """The k images of n sequences. row, first, tokens: int64 [k], the sequence, and its tokens with the
    image.
    """

    given: ImagesOf
    row: Integers
    first: Integers
    tokens: Integers

    @classmethod
    def of(cls, images: ImagesOf | None, sequences: int) -> "Images | None":
        """Return None without images. Raises LengthError unless each of `sequences` has an entry."""
        if images is None or not any(map(len, images)):
            return None
        if len(images) != sequences:
            raise LengthError(
                f"images holds {len(images)} entries for {sequences} lengths. Pass one for each."
            )
        first, tokens = np.array(
            [place for places in images for place in places], np.int64
        ).T
        return cls(
            images, np.repeat(np.arange(sequences), list(map(len, images))), first, tokens
        )

    def within(self, depths: Integers | Floats, values: Integers | Floats) -> Floats:
        """Sum `values` [k] of the images that begin in the first `depths` [n] tokens: float64 [n]."""
        sums = np.bincount(
            self.row, values * (self.first < depths[self.row]), len(self.given)
        )
        return sums.astype(np.float64, copy=False)
