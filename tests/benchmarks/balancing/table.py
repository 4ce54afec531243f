"""A table of results, and how it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import process_time


def cpu_seconds(work: Callable[[], object], repetitions: int) -> float:
    """The median of several runs, which have one thread."""
    taken = []
    for _ in range(repetitions):
        start = process_time()
        work()
        taken.append(process_time() - start)
    return median(taken)


@dataclass(frozen=True)
class Table:
    """title: a line. columns: headings. rows: cells as text, one for each column. note: what was measured,
    how.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        """A heading, the note, and a table whose columns after the first are right-aligned."""
        rule = [":--", *("--:" for _ in self.columns[1:])]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows)]
        return (
            "\n\n".join(
                part for part in (f"## {self.title}", self.note, "\n".join(lines)) if part
            )
            + "\n"
        )
