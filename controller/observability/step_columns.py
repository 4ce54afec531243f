"""Columns of a step's row: which of its metrics are shown, in which order, and which go first where the width is short.

metrics --cells--> [Cell] --fitted--> [Cell] that fit the width --row, labelled--> a line of a table, or a plain line
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controller.observability.health import LEAST_MISMATCH

Metrics = Mapping[str, float]

GAP = "  "
NARROWEST = 6
"""Characters of a column, so that values of ordinary size stay in line."""
UNEVEN = 0.05
"""Planned imbalance from which on it is shown."""
SPREAD = ("reward/mean", "reward/std")


@dataclass(frozen=True)
class Column:
    """rank: columns of the highest rank are dropped first. shown: whether the step has something to show there."""

    label: str
    metric: str
    form: str
    rank: int
    shown: Callable[[Metrics], bool] = lambda metrics: True


@dataclass(frozen=True)
class Cell:
    """A value as text, below its label."""

    label: str
    value: str
    rank: int


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def is_uneven(metrics: Metrics) -> bool:
    """Whether the planned imbalance is large."""
    return metrics.get("balance/imbalance/micro_steps", 0.0) > UNEVEN


def differs(metrics: Metrics) -> bool:
    """Whether engines and trainer differ by more than rounding."""
    return metrics.get("policy/rollout_mismatch_mean", 0.0) > LEAST_MISMATCH


REWARD = Column("reward", "reward/mean", ".3f", 0)
FAILURES = Column("failures", "reward/failures", ".0f", 1, lambda metrics: metrics["reward/failures"] > 0)
COLUMNS = (
    Column("response", "rollout/response_tokens_mean", ".1f", 3),
    Column("age", "rollout/staleness_mean", ".1f", 7, lambda metrics: metrics.get("rollout/staleness_max", 0) > 0),
    Column("loss", "policy/loss", "+.4f", 6),
    Column("accuracy", "preferences/accuracy", ".3f", 2),
    Column("margin", "preferences/margin", "+.3f", 7),
    Column("grad", "policy/grad_norm", ".2f", 8),
    Column("explained", "critic/explained_variance", ".2f", 8),
    Column("mismatch", "policy/rollout_mismatch_max", ".1e", 2, differs),
    Column("imbalance given", "balance/imbalance_before/micro_steps", ".1%", 4, is_uneven),
    Column("Karmarkar-Karp", "balance/imbalance_karmarkar_karp/micro_steps", ".2%", 4, is_uneven),
    Column("planned", "balance/imbalance/micro_steps", ".2%", 2, is_uneven),
    Column("epoch", "data/epoch", ".2f", 9),
    Column("tokens/s", "throughput/tokens_per_s", ",.0f", 4),
    Column("s", "time/step_s", ".2f", 0),
)


def cells(metrics: Metrics, also: Callable[[str], bool]) -> list[Cell]:
    """The cells of a step in order. also: labels of columns that are shown even if nothing is bad there."""
    parts = [
        Column(name.removeprefix("reward/"), name, ".3f", 3)
        for name in metrics
        if name.startswith("reward/") and name not in (*SPREAD, FAILURES.metric)
    ]
    several = bool(metrics.get("balance/imbalance_before/micro_steps"))  # of one rank there is no imbalance
    return [
        Cell(column.label, f"{metrics[column.metric]:{column.form}}", column.rank)
        for column in (REWARD, FAILURES, *parts, *COLUMNS)
        if column.metric in metrics
        and (column.shown(metrics) or also(column.label))
        and (several or not column.metric.startswith("balance/"))
    ]


def fitted(found: Sequence[Cell], width: int, length: Callable[[Cell], int]) -> list[Cell]:
    """The cells that fit `width` characters. length: characters of a cell."""
    kept = list(found)
    while len(kept) > 1 and sum(map(length, kept)) + len(GAP) * (len(kept) - 1) > width:
        kept.remove(max(reversed(kept), key=lambda cell: cell.rank))
    return kept


def labelled(found: Sequence[Cell], width: int | None = None) -> str:
    """A line of labels and values; without `width` of all cells."""
    form = "{0.label} {0.value}".format
    shown = found if width is None else fitted(found, width, lambda cell: len(form(cell)))
    return GAP.join(map(form, shown))


class StepTable:
    """The table of a terminal, a row a step. A column stays as wide as it was; one that was shown once stays."""

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}
        """Characters by the label of the column."""
        self._header = ""

    def lines(self, found: Sequence[Cell], width: int) -> list[str]:
        """The row of a step, below a header where columns have changed."""
        for cell in found:
            self.widths[cell.label] = max(self.widths.get(cell.label, NARROWEST), len(cell.label), len(cell.value))
        shown = fitted(found, width, lambda cell: self.widths[cell.label])
        header, row = (
            GAP.join(f"{text:>{self.widths[cell.label]}}" for cell, text in zip(shown, texts, strict=True))
            for texts in ([cell.label for cell in shown], [cell.value for cell in shown])
        )
        before, self._header = self._header, header
        return [row] if header == before else [header, row]
