"""Sums of token columns over rows, part by part, so that memory does not grow with the bundle."""

from collections.abc import Callable

import numpy as np

from ballast.audit.bundle import Bundle


def segment_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum flat values [T] over rows, float64 [B]. An empty row has 0."""
    sums = np.zeros(len(offsets) - 1)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        # Not differences of running sums: one NaN would reach all later rows.
        sums[filled] = np.add.reduceat(np.asarray(values, np.float64), offsets[filled])
    return sums


def sum_rows(bundle: Bundle, function: Callable[[Bundle], np.ndarray]) -> np.ndarray:
    """Return sums over rows of what `function` gives for each token, float64 [B]."""
    sums = [segment_sums(function(part), part.offsets) for _, part in bundle.parts()]
    return np.concatenate(sums) if sums else np.empty(0)


def row_sums(bundle: Bundle, column: str) -> np.ndarray:
    return sum_rows(bundle, lambda part: part.token_column(column))


def trained_rows(bundle: Bundle) -> np.ndarray:
    """Return which rows the update trained on, bool [B]. Without the column, all."""
    if bundle.has("trained"):
        return bundle.row_column("trained").astype(bool)
    return np.ones(bundle.row_count, bool)


def loss_tokens(part: Bundle) -> np.ndarray:
    """Return the places of tokens that the update trains on, int64."""
    mask = part.token_column("loss_mask").astype(bool)
    rows = np.repeat(trained_rows(part), part.lengths)
    return np.flatnonzero(mask & rows)
