"""Where two runs part: the first step, stage, row, token and column at which they differ.

steps of A and B --rows matched--> stages in the order of a step --> the first difference of each
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from ballast.audit.bundle import Bundle
from workers.errors import DataError

STAGES: dict[str, tuple[str, ...]] = {
    "samples": (
        "token_ids",
        "loss_mask",
        "weight_versions",
        "sampler_logprobs",
        "truncated",
    ),
    "rewards": ("rewards", "greedy_rewards"),
    "plans": ("trained", "mini_batch", "micro_batch"),
    "log_probs": ("old_logprobs", "reference_logprobs"),
    "advantages": ("advantages",),
    "update": ("new_logprobs",),
}
"""Columns of each stage, in the order in which a step makes them. `prompts` stands before, and `loss` and
`gradients` after them. Weights parted if the next step's samples or log-probs do.
"""


@dataclass(frozen=True)
class Difference:
    """The first difference of a stage. row, token: in A, -1 if it is not of a row or a token.

    first, second: the two values. largest: largest difference in the stage. count: values that differ.
    """

    step: int
    stage: str
    column: str
    row: int
    token: int
    first: float
    second: float
    largest: float
    count: int

    @property
    def record(self) -> dict[str, Any]:
        record = asdict(self)
        for name in ("first", "second", "largest"):
            record[name] = record[name] if np.isfinite(record[name]) else None
        return record


@dataclass(frozen=True)
class Parting:
    """compared: steps that both have. columns: compared in them. differences: of the first step that
    differs, by stage in order. missing: columns that only one side has.
    """

    compared: tuple[int, ...]
    differences: tuple[Difference, ...]
    columns: tuple[str, ...]
    missing: tuple[str, ...]


def compare_steps(first: Bundle, second: Bundle) -> tuple[Difference, ...]:
    """Return the first difference of each stage, in the order of a step."""
    step = first.facts.step
    order = _match_rows(first, second)
    if order is None:
        difference = _row_counts(step, first, second)
        return (difference,)
    differences = []
    for stage, column in (("prompts", "prompt_length"), ("prompts", "token_ids")):
        differences += _compare_column(step, stage, column, first, second, order)
        if differences:
            break
    for stage, columns in STAGES.items():
        of_stage: list[Difference] = []
        for column in columns:
            of_stage += _compare_column(step, stage, column, first, second, order)
        differences += of_stage[:1]
    for stage, name in (("loss", "loss"), ("gradients", "gradient_norm")):
        differences += _compare_fact(step, stage, name, first, second)
    return tuple(differences)


def _row_counts(step: int, first: Bundle, second: Bundle) -> Difference:
    return Difference(
        step,
        "samples",
        "rows",
        -1,
        -1,
        first.row_count,
        second.row_count,
        abs(first.row_count - second.row_count),
        1,
    )


def _match_rows(first: Bundle, second: Bundle) -> np.ndarray | None:
    """Return the row of B for each row of A: of the same group and sample, or of the same number."""
    if first.row_count != second.row_count:
        return None
    if first.has("group", "sample") and second.has("group", "sample"):
        order_first = _key_order(first)
        order_second = _key_order(second)
        matched = np.empty(first.row_count, np.int64)
        matched[order_first] = order_second
        return matched
    return np.arange(first.row_count)


def _key_order(bundle: Bundle) -> np.ndarray:
    """Rows of one sample keep their order."""
    rows = np.arange(bundle.row_count)
    return np.lexsort((rows, bundle.row_column("sample"), bundle.row_column("group")))


def _compare_column(
    step: int, stage: str, column: str, first: Bundle, second: Bundle, order: np.ndarray
) -> list[Difference]:
    if column in first.rows and column in second.rows:
        return _compare_rows(
            step, stage, column, first.rows[column], second.rows[column][order]
        )
    if column not in first.tokens or column not in second.tokens:
        return []
    return _compare_tokens(step, stage, column, first, second, order)


def _compare_rows(
    step: int, stage: str, column: str, values: np.ndarray, others: np.ndarray
) -> list[Difference]:
    unequal = np.flatnonzero(_differ(values, others))
    if not len(unequal):
        return []
    row = int(unequal[0])
    largest = _largest(values[unequal], others[unequal])
    return [
        Difference(
            step,
            stage,
            column,
            row,
            -1,
            float(values[row]),
            float(others[row]),
            largest,
            len(unequal),
        )
    ]


def _compare_tokens(
    step: int, stage: str, column: str, first: Bundle, second: Bundle, order: np.ndarray
) -> list[Difference]:
    """Compare row by row. Ids of prompts are the stage `prompts`, all others `samples`."""
    place = None
    largest = 0.0
    count = 0
    prompts = (
        first.rows["prompt_length"]
        if first.has("prompt_length")
        else np.zeros(first.row_count, np.int64)
    )
    for row in range(first.row_count):
        values = first.tokens[column][first.offsets[row] : first.offsets[row + 1]]
        others = second.tokens[column][
            second.offsets[order[row]] : second.offsets[order[row] + 1]
        ]
        start = 0
        if column == "token_ids" and stage == "prompts":
            values = values[: prompts[row]]
            others = others[: prompts[row]]
        elif column == "token_ids":
            start = int(prompts[row])
        shared = min(len(values), len(others))
        unequal = (
            np.flatnonzero(_differ(values[start:shared], others[start:shared])) + start
        )
        longer = abs(len(values) - len(others))
        if not len(unequal) and not longer:
            continue
        count += len(unequal) + longer
        largest = max(largest, _largest(values[unequal], others[unequal]))
        if place is None:
            token = int(unequal[0]) if len(unequal) else shared
            place = (row, token, _value(values, token), _value(others, token))
    if place is None:
        return []
    row, token, value, other = place
    return [Difference(step, stage, column, row, token, value, other, largest, count)]


def _value(values: np.ndarray, place: int) -> float:
    """NaN behind the end of a row."""
    return float(values[place]) if place < len(values) else float("nan")


def _differ(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    both_nan = (values != values) & (others != others)
    return (values != others) & ~both_nan


def _largest(values: np.ndarray, others: np.ndarray) -> float:
    differences = np.abs(np.asarray(values, np.float64) - np.asarray(others, np.float64))
    return float(np.max(differences, initial=0.0))


def _compare_fact(
    step: int, stage: str, name: str, first: Bundle, second: Bundle
) -> list[Difference]:
    values = np.array(getattr(first.facts, name))
    others = np.array(getattr(second.facts, name))
    if not len(values) or not len(others) or len(values) != len(others):
        return []
    unequal = np.flatnonzero(_differ(values, others))
    if not len(unequal):
        return []
    number = int(unequal[0])
    largest = _largest(values, others)
    return [
        Difference(
            step, stage, name, -1, -1, values[number], others[number], largest, len(unequal)
        )
    ]


class Step(Protocol):
    """A step that is read when it is compared, see `sources.Source`."""

    @property
    def load(self) -> Callable[[], Bundle]: ...


def compare_runs(first: Mapping[int, Step], second: Mapping[int, Step]) -> Parting:
    """Compare the steps that both have, in order, up to the first that differs. Raises DataError if there is
    none.
    """
    steps = sorted(set(first) & set(second))
    if not steps:
        raise DataError(
            f"the two have no step in common: {sorted(first)[:5]} and {sorted(second)[:5]}. "
            "Name two runs of one configuration."
        )
    compared = []
    differences: tuple[Difference, ...] = ()
    columns: set[str] = set()
    missing: set[str] = set()
    for step in steps:
        compared.append(step)
        first_bundle = first[step].load()
        second_bundle = second[step].load()
        first_columns = {*first_bundle.tokens, *first_bundle.rows}
        second_columns = {*second_bundle.tokens, *second_bundle.rows}
        columns |= first_columns & second_columns
        missing |= first_columns ^ second_columns
        differences = compare_steps(first_bundle, second_bundle)
        if differences:
            break
    return Parting(
        tuple(compared), differences, tuple(sorted(columns)), tuple(sorted(missing))
    )
