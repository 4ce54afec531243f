"""Count the pairs of tokens that attention computes where some layers look back a limited way.

    all layers             window of w             chunks of c
    L**2                   L**2 - (L - w)**2       c**2 of each whole chunk, and the square of the rest

All in units in which causal attention to every token is L**2. A model's sum over layers keeps this form,
weighted by each kind's share.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from balancing.basics.grouping import Floats


class Window(NamedTuple):
    """How far some layers look back.

    tokens: the last ones that a token sees, itself among them. share: of these layers in the cost of a
    squared token. chunked: tokens see only those of their chunk.
    """

    tokens: int
    share: float
    chunked: bool = False


def attended_squares(lengths: ArrayLike, windows: Sequence[Window] = ()) -> Floats:
    """Return the squared tokens that attention computes for each length, on average over layers."""
    tokens = np.asarray(lengths, np.float64)
    squares = np.square(tokens)
    for window in windows:
        hidden = np.square(np.maximum(tokens - window.tokens, 0.0))
        if window.chunked:
            chunks, rest = np.divmod(tokens, window.tokens)
            hidden = np.square(tokens) - chunks * window.tokens**2 - np.square(rest)
        squares = squares - window.share * hidden
    attended: Floats = np.maximum(squares, 0.0)
    return attended
