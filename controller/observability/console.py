"""Console: the terminal of a run, with a live table, a line after every step, and completions on request.

    log, step, validation, completions    lines and tables that stay
    phase, samples                        the live table below them, on a terminal alone:

     step  phase    seconds  samples                       reward
     7/60  rollout      1.4  ━━━━━━━━━━━━━━━━━━━  180/256  ▁▂▄▅▇█ 0.812

In a log, or a pipe, there are only lines; one a minute tells of a step that lasts.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, TextIO, TypeVar

import rich.console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from controller.observability.slow_work import told_if_slow

if TYPE_CHECKING:
    from controller.samples import Rollout
    from workers.remote_batch import RemoteBatch

SPREAD = ("reward/mean", "reward/std")
REFRESHES_PER_SECOND = 4
REWARDS_SHOWN = 12
KEPT_WIDTH = 200  # of tables in a log
HEARTBEAT_SECONDS = 60.0  # between lines about a step that lasts, where no table is alive
BLOCKS = "▁▂▃▄▅▆▇█"
Entry = TypeVar("Entry")


@dataclass
class Samples:
    """A round of generation under way."""

    total: int
    done: int = 0


@dataclass
class Status:
    """Contents of the live table. phases: (name, start), the innermost last; rewards: of the last steps."""

    step: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)
    rounds: list[Samples] = field(default_factory=list)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=REWARDS_SHOWN))

    def table(self, now: float) -> Table:
        """A row for the innermost phase; `now` by the clock of `phases`."""
        table = Table("step", "phase", box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for name in ("seconds", "samples", "reward"):
            table.add_column(name, justify="right" if name == "seconds" else "left", no_wrap=True)
        name, began = self.phases[-1] if self.phases else ("", now)
        table.add_row(self.step, name, f"{now - began:.1f}", self._samples(), self._rewards())
        return table

    def line(self) -> str:
        """The step and phase in a line, for a log."""
        phases = list(self.phases)
        rounds = "".join(f", {found.done:,} of {found.total:,} samples" for found in list(self.rounds)[-1:])
        return f"step {self.step or 0}: {phases[-1][0] if phases else ''}{rounds}"

    def _samples(self) -> Table | str:
        if not self.rounds:
            return ""
        found = self.rounds[-1]
        grid = Table.grid(padding=(0, 1))
        bar = ProgressBar(found.total, found.done, width=24, complete_style="cyan", finished_style="green")
        grid.add_row(bar, f"{found.done:,}/{found.total:,}")
        return grid

    def _rewards(self) -> str:
        return f"{sparkline(self.rewards)} {self.rewards[-1]:.3f}" if self.rewards else ""


class Console:
    """Prints to standard output. Phases and rounds may come from several threads."""

    def __init__(self, console: rich.console.Console | None = None) -> None:
        """`console`: where to print instead."""
        # The stream of now: while a run is kept in its log, sys.stdout is another, that would keep the live table too.
        self._console = console or rich.console.Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._status, self._lock = Status(), RLock()
        self._live: Live | None = None
        self._heartbeat = ExitStack()
        self.kept: TextIO | None = None
        """The log that keeps lines and tables, too."""

    @contextmanager
    def kept_in(self, log: TextIO) -> Iterator[None]:
        """Keep lines and tables in `log` too, as plain text, while the block runs."""
        self.kept = log
        try:
            yield
        finally:
            self.kept = None

    def log(self, text: str) -> None:
        """One line."""
        self._print(escape(text))

    def _print(self, what: str | Table, *, soft_wrap: bool = True) -> None:
        self._console.print(what, soft_wrap=soft_wrap)
        if self.kept is not None:
            plain = rich.console.Console(file=self.kept, highlight=False, width=KEPT_WIDTH, color_system=None)
            plain.print(what, soft_wrap=soft_wrap)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keeps, and does not show, the block's output on the standard streams; shows it if nothing is kept."""
        if self.kept is None:
            yield
            return
        with redirect_stdout(self.kept), redirect_stderr(self.kept):
            yield

    def begin_step(self, step: int, steps: int) -> None:
        """Name the step that the live table shows."""
        self._status.step = f"{step}/{steps}"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show phase `name` while the block runs."""
        with self._shown(self._status.phases, (name, time.monotonic())):
            yield

    @contextmanager
    def samples(self, total: int) -> Iterator[Callable[[int], None]]:
        """Show a round of `total` samples; yields a function to call with the number of newly finished ones."""
        found = Samples(total)

        def advance(finished: int) -> None:
            found.done += finished

        with self._shown(self._status.rounds, found):
            yield advance

    @contextmanager
    def _shown(self, entries: list[Entry], entry: Entry) -> Iterator[None]:
        """Show the table from the first entry to the last, then erase it."""
        with self._lock:
            entries.append(entry)
            if len(self._status.phases) + len(self._status.rounds) == 1:
                self._start()
        try:
            yield
        finally:
            with self._lock:
                last = len(self._status.phases) + len(self._status.rounds) == 1
                if last and self._live is not None:
                    self._live.stop()  # before the entry is removed: it draws once more
                    self._live = None
                entries.remove(entry)
            if last:
                self._heartbeat.close()  # without the lock, which its last line may wait for

    def _start(self) -> None:
        if not self._console.is_terminal:
            rhythm = {"after": HEARTBEAT_SECONDS, "every": HEARTBEAT_SECONDS}
            self._heartbeat.enter_context(told_if_slow(self.log, self._status.line, **rhythm))
            return
        self._live = Live(
            get_renderable=lambda: self._status.table(time.monotonic()),
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,  # `run_log` has them
            redirect_stderr=False,
        )
        self._live.start()

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """The line of one step, with its main metrics."""
        if "reward/mean" in metrics:
            self._status.rewards.append(metrics["reward/mean"])
        parts_of_reward = [
            name
            for name in metrics
            if name.startswith("reward/") and name not in SPREAD and shows_something(name, metrics)
        ]
        age = (("age", "rollout/staleness_mean", ".1f"),) if metrics.get("rollout/staleness_max") else ()
        balance = (
            ("imbalance given", "balance/imbalance_before/micro_steps", ".1%"),
            ("Karmarkar-Karp", "balance/imbalance_karmarkar_karp/micro_steps", ".2%"),
            ("planned", "balance/imbalance/micro_steps", ".2%"),
        )
        shown = (
            ("epoch", "data/epoch", ".2f"),
            ("reward", "reward/mean", ".3f"),
            *((name.removeprefix("reward/"), name, ".3f") for name in parts_of_reward),
            ("response", "rollout/response_tokens_mean", ".1f"),
            *age,
            ("loss", "policy/loss", "+.4f"),
            ("accuracy", "preferences/accuracy", ".3f"),
            ("margin", "preferences/margin", "+.3f"),
            ("grad", "policy/grad_norm", ".2f"),
            ("explained", "critic/explained_variance", ".2f"),
            ("mismatch", "policy/rollout_mismatch_max", ".1e"),
            *(balance if metrics.get("balance/imbalance_before/micro_steps") else ()),  # of one rank there is none
            ("tokens/s", "throughput/tokens_per_s", ",.0f"),
            ("s", "time/step_s", ".2f"),
        )
        parts = [f"{label} {metrics[key]:{form}}" for label, key, form in shown if key in metrics]
        self.log(f"step {step:>{len(str(steps))}}/{steps}  " + "  ".join(parts))

    def validation(self, step: int, scores: Mapping[str, float]) -> None:
        """The line of one validation."""
        self.log(f"validation at step {step}  " + "  ".join(f"{name} {score:.3f}" for name, score in scores.items()))

    def completions(
        self, rollout: "Rollout", count: int, trained_on: "RemoteBatch", asked: Callable[[str], dict[str, str]]
    ) -> None:
        """A table of the first `count` samples: prompt, response, reward, and advantage where each has one of its own.

        trained_on: those of the samples that are trained on, with a column `advantages` [B]; others show none. asked:
        the texts of what a prompt's uid asks.
        """
        if not count:
            return
        advantages = _advantages(trained_on)
        table = Table("prompt", "sample", "response", title="completions", title_justify="left")
        for name in ("reward", "advantage") if advantages else ("reward",):
            table.add_column(name, justify="right")
        for key, score in list(rollout.by_sample.items())[:count]:
            numbers = [f"{score.reward:.3f}"]
            if advantages:
                numbers.append(f"{advantages[key]:+.3f}" if key in advantages else "-")
            table.add_row(escape(asked(key[0])["prompt"]), str(key[1]), escape(score.response), *numbers)
        self._print(table, soft_wrap=False)


def _advantages(batch: "RemoteBatch") -> dict[tuple[str, int], float]:
    """By (uid, sample); empty where advantages are of tokens."""
    if "advantages" not in batch.columns:
        return {}
    keys = zip(batch["uid"].tolist(), batch["sample"].tolist(), strict=True)
    return dict(zip(keys, batch["advantages"].tolist(), strict=True))


def shows_something(name: str, metrics: Mapping[str, float]) -> bool:
    """Failures are shown only if there are any."""
    return name != "reward/failures" or metrics[name] > 0


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """One character a value, from the lowest to the highest."""
    low, high = min(values), max(values)
    if high == low:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in values)
