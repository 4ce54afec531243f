"""Losses of a step from sums over rows, by the named aggregation and by what trainers get wrong.

row losses, mini-batches --Denominator--> one loss for each mini-batch
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ballast.audit.bundle import Bundle, MissingError
from ballast.audit.token_losses import RowLosses
from ballast.audit.token_sums import row_sums, trained_rows

AGGREGATIONS = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
)


@dataclass(frozen=True)
class Batch:
    """Rows of a step, [B] each. counts: loss tokens, of rows that are not trained too. mini_batches: numbered
    from 0, -1 for rows that are not trained. responses: tokens after the prompt, or None.
    """

    counts: np.ndarray
    lengths: np.ndarray
    mini_batches: np.ndarray
    micro_batches: np.ndarray | None
    responses: np.ndarray | None
    groups: np.ndarray | None
    constant_length: float

    @property
    def number(self) -> int:
        """Count mini-batches."""
        return int(self.mini_batches.max(initial=-1)) + 1


def read_batch(bundle: Bundle) -> Batch:
    trained = trained_rows(bundle)
    mini_batches = np.zeros(bundle.row_count, np.int64)
    if bundle.has("mini_batch") and trained.any():
        mini_batches = np.asarray(bundle.row_column("mini_batch"))
        mini_batches = np.searchsorted(np.unique(mini_batches[trained]), mini_batches)
    return Batch(
        counts=row_sums(bundle, "loss_mask"),
        lengths=bundle.lengths,
        mini_batches=np.where(trained, mini_batches, -1),
        micro_batches=bundle.rows.get("micro_batch"),
        responses=bundle.lengths - bundle.rows["prompt_length"]
        if bundle.has("prompt_length")
        else None,
        groups=bundle.rows.get("group"),
        constant_length=float(bundle.facts.algorithm.constant_length or 0),
    )


@dataclass(frozen=True)
class Denominator:
    """function: gives the loss of a mini-batch, from the sums [B], the counts [B] and its rows."""

    cause: str
    text: str
    function: Callable[[np.ndarray, np.ndarray, np.ndarray], float]


def losses_of(batch: Batch, losses: RowLosses, denominator: Denominator) -> np.ndarray:
    """Return a loss for each mini-batch."""
    return _of_mini_batches(batch, losses.sums, losses.counts, denominator)


def sizes_of(batch: Batch, losses: RowLosses, denominator: Denominator) -> np.ndarray:
    """Return the same of absolute token losses, which do not cancel."""
    return _of_mini_batches(batch, losses.sizes, losses.counts, denominator)


def _of_mini_batches(
    batch: Batch, sums: np.ndarray, counts: np.ndarray, denominator: Denominator
) -> np.ndarray:
    values = []
    for number in range(batch.number):
        rows = np.flatnonzero(batch.mini_batches == number)
        with np.errstate(invalid="ignore", divide="ignore"):
            values.append(denominator.function(sums, counts, rows))
    return np.array(values)


def named(batch: Batch, aggregation: str) -> Denominator:
    """Return an aggregation of the format. Raises MissingError if it is unknown, or lacks its length."""
    text = f"aggregation={aggregation}"
    cause = f"aggregation:{aggregation}"
    match aggregation:
        case "token_mean":
            return Denominator(
                cause,
                text,
                lambda sums, counts, rows: sums[rows].sum() / counts[rows].sum(),
            )
        case "sequence_mean_token_mean":
            return Denominator(cause, text, _mean_of_row_means)
        case "sequence_mean_token_sum":
            return Denominator(cause, text, _mean_of_rows)
        case "sequence_mean_token_sum_norm":
            length = batch.constant_length
            if not length:
                raise MissingError("algorithm.constant_length")
            return Denominator(
                cause,
                text,
                lambda sums, counts, rows: _mean_of_rows(sums, counts, rows) / length,
            )
        case _:
            raise MissingError(f"a formula for algorithm.aggregation={aggregation}")


def _mean_of_row_means(sums: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> float:
    rows = rows[counts[rows] > 0]
    return float(np.mean(sums[rows] / counts[rows]))


def _mean_of_rows(sums: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> float:
    return float(sums[rows].sum() / np.count_nonzero(counts[rows]))


def other_denominators(batch: Batch, aggregation: str) -> Iterator[Denominator]:
    """Yield what trainers divide by in place of the named aggregation, the frequent mistakes first."""
    usual = named(batch, aggregation)
    if batch.micro_batches is not None:
        micro_batches = batch.micro_batches

        def mean_of_micro_batches(
            sums: np.ndarray, counts: np.ndarray, rows: np.ndarray
        ) -> float:
            numbers = np.unique(micro_batches[rows])
            members = [rows[micro_batches[rows] == number] for number in numbers]
            return float(
                np.mean(
                    [
                        usual.function(sums, counts, part)
                        for part in members
                        if counts[part].sum()
                    ]
                )
            )

        text = f"the mean over micro-batches of their {aggregation}, not the {aggregation} of the mini-batch"
        yield Denominator("micro_batch_mean", text, mean_of_micro_batches)
    if aggregation == "token_mean":
        yield from _token_denominators(batch)
    else:
        yield from _row_denominators(batch, usual)
    for name in AGGREGATIONS:
        if name != aggregation and (
            name != "sequence_mean_token_sum_norm" or batch.constant_length
        ):
            yield named(batch, name)
    yield Denominator("not_divided", "the sum over tokens, divided by nothing", _sum)


def _sum(sums: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> float:
    return float(sums[rows].sum())


def _divided(cause: str, text: str, divisor: Callable[[np.ndarray], float]) -> Denominator:
    return Denominator(
        cause, text, lambda sums, counts, rows: float(sums[rows].sum() / divisor(rows))
    )


def _token_denominators(batch: Batch) -> Iterator[Denominator]:
    counts = batch.counts
    lengths = batch.lengths
    trained = batch.mini_batches >= 0
    share = 1 / max(batch.number, 1)
    text = "divided by the tokens of the whole step, not of the mini-batch"
    yield _divided("step_tokens", text, lambda rows: counts[trained].sum() * share)
    text = "divided by loss tokens of all rows, with those that were left out"
    yield _divided("dropped_rows_counted", text, lambda rows: counts.sum() * share)
    text = "divided by all tokens, prompts counted"
    yield _divided("prompt_tokens_counted", text, lambda rows: lengths[rows].sum())
    if batch.responses is not None:
        responses = batch.responses
        text = "divided by the longest response times the rows, padding counted"
        yield _divided(
            "padding_counted", text, lambda rows: len(rows) * responses[rows].max()
        )
        text = "divided by all tokens of responses, masked ones counted"
        yield _divided("masked_tokens_counted", text, lambda rows: responses[rows].sum())
    text = "divided by the longest row times the rows, padding counted"
    yield _divided("padding_counted", text, lambda rows: len(rows) * lengths[rows].max())


def _row_denominators(batch: Batch, usual: Denominator) -> Iterator[Denominator]:
    trained = batch.mini_batches >= 0
    share = 1 / max(batch.number, 1)

    def scaled(
        cause: str, text: str, divisor: Callable[[np.ndarray], float]
    ) -> Denominator:
        def function(sums: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> float:
            return (
                usual.function(sums, counts, rows)
                * np.count_nonzero(counts[rows])
                / divisor(rows)
            )

        return Denominator(cause, text, function)

    text = "divided by all rows, with those without loss tokens"
    yield scaled("empty_rows_counted", text, len)
    text = "divided by the rows of the whole step, not of the mini-batch"
    yield scaled("step_rows", text, lambda rows: trained.sum() * share)
    text = "divided by all rows, with those that were left out"
    yield scaled("dropped_rows_counted", text, lambda rows: len(batch.counts) * share)
    if batch.groups is not None:
        groups = batch.groups
        text = "divided by groups, not by rows"
        yield scaled("groups_counted", text, lambda rows: len(np.unique(groups[rows])))
    text = "summed over rows, divided by nothing"
    yield scaled("not_divided", text, lambda rows: 1)
