"""Console: the terminal of a run, with a row per step, a live line below, and completions on request.

    step, validation, log, completions    rows, lines and tables that stay
    phase, samples, note                  the live line, only on a terminal:

      step  elapsed    left  reward  exact_match  response  tokens/s       s
      6/60     0:09    1:21   0.812        0.812      24.1     5,321    1.98
    ⠹ 7/60  0:10, 1:20 left  rollout  1.4 s  ━━━━━━━━━━━━━━──────  180/256  ▁▂▄▅▇█

In a log, a pipe or a notebook there are only lines, one a minute during a slow step.

    metrics --cells--> [Cell] --fit_cells--> [Cell] that fit the width --StepTable--> a row
                                                                    --label_cells--> a plain line
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, TextIO, TypeVar

import rich.console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from controller.observability.health import LEAST_MISMATCH
from controller.observability.run_folder import Row
from controller.observability.session_tree import draw_tree, summary
from controller.observability.slow_work import log_if_slow

Metrics = Mapping[str, float]
GAP = "  "
NARROWEST = 6  # characters of a column, so that values of ordinary size stay in line
UNEVEN = 0.05  # planned imbalance from which on it is shown
SPREAD = ("reward/mean", "reward/std")
REFRESHES_PER_SECOND = 4
REWARDS_SHOWN = 12
KEPT_WIDTH = 200  # characters of tables in a log
HEARTBEAT_SECONDS = 60.0  # between lines about a slow step, without a live line
BLOCKS = "▁▂▃▄▅▆▇█"
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
BAR = 20  # characters
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Column:
    """rank: the highest is dropped first. shown: whether the step's value is worth showing."""

    label: str
    metric: str
    form: str
    rank: int
    shown: Callable[[Metrics], bool] = lambda metrics: True


@dataclass(frozen=True)
class Cell:
    label: str
    value: str
    rank: int


def clock(seconds: float) -> str:
    """Write `m:ss`, or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _above(metric: str, limit: float) -> Callable[[Metrics], bool]:
    return lambda metrics: metrics.get(metric, 0.0) > limit


REWARD = Column("reward", "reward/mean", ".3f", 0)
FAILURES = Column("failures", "reward/failures", ".0f", 1, _above("reward/failures", 0))
differs = _above("policy/rollout_mismatch_mean", LEAST_MISMATCH)
is_uneven = _above("balance/imbalance/micro_steps", UNEVEN)
COLUMNS = (
    Column("response", "rollout/response_tokens_mean", ".1f", 3),
    Column("age", "rollout/staleness_mean", ".1f", 7, _above("rollout/staleness_max", 0)),
    Column("loss", "policy/loss", "+.4f", 6),
    Column("accuracy", "preferences/accuracy", ".3f", 2),
    Column("margin", "preferences/margin", "+.3f", 7),
    Column("grad", "policy/grad_norm", ".2f", 8),
    Column("explained", "critic/explained_variance", ".2f", 8),
    Column("mismatch", "policy/rollout_mismatch_max", ".1e", 2, differs),
    Column("imbalance given", "balance/imbalance_before/micro_steps", ".1%", 4, is_uneven),
    Column(
        "Karmarkar-Karp",
        "balance/imbalance_karmarkar_karp/micro_steps",
        ".2%",
        4,
        is_uneven,
    ),
    Column("planned", "balance/imbalance/micro_steps", ".2%", 2, is_uneven),
    Column("epoch", "data/epoch", ".2f", 9),
    Column("tokens/s", "throughput/tokens_per_s", ",.0f", 4),
    Column("s", "time/step_s", ".2f", 0),
)


def cells(metrics: Metrics, also: Callable[[str], bool]) -> list[Cell]:
    """Return a step's cells in order. also: labels to show even if their values are good."""
    parts = [
        Column(name.removeprefix("reward/"), name, ".3f", 3)
        for name in metrics
        if name.startswith("reward/") and name not in (*SPREAD, FAILURES.metric)
    ]
    # One rank has no imbalance.
    several = bool(metrics.get("balance/imbalance_before/micro_steps"))
    return [
        Cell(column.label, f"{metrics[column.metric]:{column.form}}", column.rank)
        for column in (REWARD, FAILURES, *parts, *COLUMNS)
        if column.metric in metrics
        and (column.shown(metrics) or also(column.label))
        and (several or not column.metric.startswith("balance/"))
    ]


def fit_cells(
    cells: Sequence[Cell], width: int, length: Callable[[Cell], int]
) -> list[Cell]:
    """Return the cells that fit `width` characters. length: characters of a cell."""
    row_cells = list(cells)
    while (
        len(row_cells) > 1
        and sum(map(length, row_cells)) + len(GAP) * (len(row_cells) - 1) > width
    ):
        row_cells.remove(max(reversed(row_cells), key=lambda cell: cell.rank))
    return row_cells


def label_cells(cells: Sequence[Cell], width: int | None = None) -> str:
    """Write labels and values in a line, all of them without `width`."""
    form = "{0.label} {0.value}".format
    row_cells = (
        cells if width is None else fit_cells(cells, width, lambda cell: len(form(cell)))
    )
    return GAP.join(map(form, row_cells))


def _of(step: int, steps: int) -> str:
    """Write a step and their number, which a loop of one's own may exceed."""
    return f"{step:>{len(str(steps))}}/{steps}" if step <= steps else str(step)


class StepTable:
    """The terminal's table, a row per step. Columns keep their width, and stay once shown."""

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}  # characters by label
        self._header = ""

    def lines(self, cells: Sequence[Cell], width: int) -> list[str]:
        """Return a step's row, with a header if the columns have changed."""
        for cell in cells:
            self.widths[cell.label] = max(
                self.widths.get(cell.label, NARROWEST), len(cell.label), len(cell.value)
            )
        row_cells = fit_cells(cells, width, lambda cell: self.widths[cell.label])
        widths = [self.widths[cell.label] for cell in row_cells]
        header = _align([cell.label for cell in row_cells], widths)
        row = _align([cell.value for cell in row_cells], widths)
        old_header = self._header
        self._header = header
        return [row] if header == old_header else [header, row]


def _align(texts: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


@dataclass
class SamplingRound:
    total: int
    done: int = 0


@dataclass
class LiveLine:
    """Contents of the live line.

    phases: (name, start), the innermost last. rewards: of the last steps. note: awaited work. began, ends:
    start and estimated end of the run.
    """

    step: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)
    rounds: list[SamplingRound] = field(default_factory=list)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=REWARDS_SHOWN))
    note: str = ""
    began: float = field(default_factory=lambda: time.monotonic())
    ends: float | None = None

    def row(self, now: float) -> Text:
        """Draw the line at time `now`."""
        name, began = self.phases[-1] if self.phases else ("", now)
        countdown = (
            "" if self.ends is None else f", {clock(max(self.ends - now, 0.0))} left"
        )
        parts = [
            (self.step, "bold"),
            (clock(now - self.began) + countdown, ""),
            (name, ""),
            (f"{now - began:.1f} s", ""),
        ]
        for sampling_round in self.rounds[-1:]:
            full = round(BAR * sampling_round.done / max(sampling_round.total, 1))
            parts += [
                ("━" * full + "─" * (BAR - full), "cyan"),
                (f"{sampling_round.done:,}/{sampling_round.total:,}", ""),
            ]
        parts += [(sparkline(self.rewards), ""), (self.note, "dim")]
        spinner = SPINNER[int(now * REFRESHES_PER_SECOND) % len(SPINNER)]
        row = Text(f"{spinner} ", no_wrap=True, overflow="ellipsis")
        return row.append_text(
            Text("  ").join(Text(text, style) for text, style in parts if text)
        )

    def line(self) -> str:
        """Write step and phase in a line, for a log. Other threads may end them meanwhile."""
        phase = "".join(name for name, _ in self.phases[-1:])
        rounds = "".join(
            f", {sampling_round.done:,} of {sampling_round.total:,} samples"
            for sampling_round in self.rounds[-1:]
        )
        return f"{f'step {self.step}: ' if self.step else ''}{phase}{rounds}"


class Console:
    """Prints to standard output. Phases and rounds may come from several threads."""

    def __init__(
        self, console: rich.console.Console | None = None, *, verbose: bool = False
    ) -> None:
        """console: where to print instead. verbose: show imbalances and mismatch at every step."""
        # Not sys.stdout at each call: `run_log` replaces it, and would keep the live line too.
        self._console = console or plain_console(
            sys.stdout, force_terminal=sys.stdout.isatty()
        )
        self._verbose = verbose
        self._table = StepTable()
        self._status = LiveLine()
        self._lock = RLock()
        # The first step of this process, and its start.
        self._first: tuple[int, float] | None = None
        self._live: Live | None = None
        self._heartbeat = ExitStack()
        self.kept: TextIO | None = None  # the log that also gets lines and tables

    @contextmanager
    def keep_in(self, log: TextIO) -> Iterator[None]:
        """Also write lines and tables to `log`, as plain text, during the block."""
        self.kept = log
        try:
            yield
        finally:
            self.kept = None

    def log(self, text: str) -> None:
        self._print(text)

    def note(self, text: str) -> None:
        """Show slow work in the live line if there is one, else in a line."""
        if self._live is None:
            self.log(text)
        else:
            self._status.note = text
            self._keep(text)

    def _print(self, renderable: str | Table | Tree, *, soft_wrap: bool = True) -> None:
        self._console.print(renderable, soft_wrap=soft_wrap, markup=False)
        self._keep(renderable, soft_wrap=soft_wrap)

    def _keep(self, renderable: str | Table | Tree, *, soft_wrap: bool = True) -> None:
        if self.kept is not None:
            plain_console(self.kept, width=KEPT_WIDTH, color_system=None).print(
                renderable, soft_wrap=soft_wrap, markup=False
            )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Send the block's output on the standard streams only to the log, if any."""
        with ExitStack() as stack:
            if self.kept is not None:
                stack.enter_context(redirect_stdout(self.kept))
                stack.enter_context(redirect_stderr(self.kept))
            yield

    def begin_step(self, step: int, steps: int) -> None:
        """Name the step in the live line."""
        self._status.step = _of(step, steps).lstrip()
        self._first = self._first or (step, time.monotonic())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show phase `name` during the block."""
        with self._shown(self._status.phases, (name, time.monotonic())):
            yield

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Show the reason for waiting: live on a terminal, else in lines if the block is slow."""
        text = f"waiting for {reason}"
        alive = self._console.is_interactive
        log = self._keep if alive else self.log
        with self.phase(text) if alive else nullcontext(), log_if_slow(log, text):
            yield

    @contextmanager
    def samples(self, total: int) -> Iterator[Callable[[int], None]]:
        """Show a round of `total` samples. Yields a function to call with each number of finished ones."""
        sampling_round = SamplingRound(total)

        def advance(finished: int) -> None:
            sampling_round.done += finished

        with self._shown(self._status.rounds, sampling_round):
            yield advance

    @contextmanager
    def _shown(self, entries: list[Entry], entry: Entry) -> Iterator[None]:
        """Show the live line from the first entry to the last, then erase it."""
        with self._lock:
            self._status.note = ""
            entries.append(entry)
            if len(self._status.phases) + len(self._status.rounds) == 1:
                self._start()
        try:
            yield
        finally:
            with self._lock:
                last = len(self._status.phases) + len(self._status.rounds) == 1
                if last and self._live is not None:
                    self._live.stop()  # draws once more, before the entry is removed
                    self._live = None
                entries.remove(entry)
            if last:
                self._heartbeat.close()  # without the lock, which its last line may wait for

    def _start(self) -> None:
        if not self._console.is_interactive:
            rhythm = {"delay": HEARTBEAT_SECONDS, "every": HEARTBEAT_SECONDS}
            self._heartbeat.enter_context(
                log_if_slow(self.log, self._status.line, **rhythm)
            )
            return
        self._live = Live(
            get_renderable=lambda: self._status.row(time.monotonic()),
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,  # `run_log` redirects both
            redirect_stderr=False,
        )
        self._live.start()

    def step(self, step: int, steps: int, metrics: Metrics) -> None:
        """Print a step's row with its main metrics, on a terminal in a table. The log keeps all."""
        if math.isfinite(metrics.get("reward/mean", math.nan)):
            self._status.rewards.append(metrics["reward/mean"])
        now = time.monotonic()
        status = self._status
        if self._first:
            first, began = self._first
            remaining_s = (now - began) / max(step - first + 1, 1) * (steps - step)
            status.ends = now + remaining_s if remaining_s >= 0 else None
        times = [
            Cell("step", _of(step, steps), 0),
            Cell("elapsed", clock(now - status.began), 5),
            *(
                [Cell("left", clock(status.ends - now), 1)]
                if status.ends is not None
                else []
            ),
        ]
        seen = self._table.widths
        row_cells = times + cells(metrics, lambda label: self._verbose or label in seen)
        width = self._console.width
        lines = (
            self._table.lines(row_cells, width)
            if self._console.is_interactive
            else [label_cells(row_cells, width)]
        )
        for line in lines:
            self._console.print(
                Text(line, "" if line is lines[-1] else "dim"), soft_wrap=True
            )
        self._keep(label_cells(times + cells(metrics, lambda label: True)))

    def validation(self, step: int, scores: Mapping[str, float]) -> None:
        self.log(
            f"validation at step {step}  "
            + "  ".join(f"{name} {score:.3f}" for name, score in scores.items())
        )

    def completions(self, rows: Sequence[Row]) -> None:
        """Print samples, see `RunRecord.examples`: agents' sessions as trees, others as a table."""
        table = Table(
            "prompt", "sample", "response", title="completions", title_justify="left"
        )
        recorded_names = {name for row in rows for name in row}
        names = [name for name in ("reward", "advantage") if name in recorded_names]
        for name in names:
            table.add_column(name, justify="right")
        for row in rows:
            if "session" in row:
                self._print(draw_tree(row, "session"), soft_wrap=False)
                continue
            numbers = summary(row)
            table.add_row(
                row["prompt"],
                str(row["sample"]),
                row["response"],
                *(numbers.get(name, "-") for name in names),
            )
        if table.rows:
            self._print(table, soft_wrap=False)


def plain_console(file: TextIO, **options: Any) -> rich.console.Console:
    """Create a console that prints only to `file`, not also into a notebook's cell."""
    return rich.console.Console(
        file=file, highlight=False, soft_wrap=True, force_jupyter=False, **options
    )


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """Draw one character per value, scaled from lowest to highest."""
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    return "".join(
        BLOCKS[round((value - low) / (high - low or 1.0) * (len(BLOCKS) - 1))]
        for value in values
    )
