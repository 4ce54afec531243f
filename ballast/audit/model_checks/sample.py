"""Rows of a bundle that the model computes again, spread over the step."""

from dataclasses import dataclass

import numpy as np

from ballast.audit.bundle import Bundle


@dataclass(frozen=True)
class Row:
    """A row. number: in the bundle. places: of its loss tokens that something predicts, increasing.

    before: the tokens of the row before it in the same micro-batch, or none. padding: tokens by which its
    prompt is shorter than the longest. recorded: log-probs at `places`, float64.
    """

    number: int
    token_ids: np.ndarray
    places: np.ndarray
    before: np.ndarray
    padding: int
    recorded: np.ndarray

    @property
    def targets(self) -> np.ndarray:
        return self.token_ids[self.places]

    def turns(self) -> list[np.ndarray]:
        """Return indices into `places` for each run of adjoining loss tokens."""
        breaks = np.flatnonzero(np.diff(self.places) > 1) + 1
        return np.split(np.arange(len(self.places)), breaks)


def sample_rows(
    bundle: Bundle, column: str, count: int, excluded_token: int | None
) -> list[Row]:
    """Return up to `count` rows with loss tokens and without the excluded token, evenly spread."""
    mask = bundle.token_column("loss_mask").astype(bool)
    values = bundle.token_column(column)
    candidates = []
    for number in range(bundle.row_count):
        start, end = bundle.offsets[number : number + 2]
        if end - start < 2 or not mask[start + 1 : end].any():
            continue
        if excluded_token is not None and np.any(
            bundle.token_column("token_ids")[start:end] == excluded_token
        ):
            continue
        candidates.append(number)
    chosen = np.unique(
        np.linspace(0, len(candidates) - 1, min(count, len(candidates))).astype(int)
    )
    rows = [_read_row(bundle, mask, values, candidates[index]) for index in chosen]
    return [row for row in rows if np.all(np.isfinite(row.recorded))]


def _read_row(bundle: Bundle, mask: np.ndarray, values: np.ndarray, number: int) -> Row:
    ids = bundle.token_column("token_ids")
    start, end = bundle.offsets[number : number + 2]
    places = np.flatnonzero(mask[start:end])
    places = places[places > 0]
    before = np.empty(0, np.int64)
    micro_batches = bundle.rows.get("micro_batch")
    if number and (
        micro_batches is None or micro_batches[number - 1] == micro_batches[number]
    ):
        before = np.asarray(ids[bundle.offsets[number - 1] : start])
    padding = 0
    if bundle.has("prompt_length"):
        lengths = bundle.row_column("prompt_length")
        padding = int(lengths.max() - lengths[number])
    recorded = values[start:end][places].astype(np.float64)
    return Row(number, np.asarray(ids[start:end]), places, before, padding, recorded)
