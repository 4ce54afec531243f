"""What a run says on the terminal: the phase it is in, a line a step, completions on request. Plain lines in a log."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import rich.console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from controller.samples import Rollout

SPREAD = ("reward/mean", "reward/std")


class Console:
    """Prints to standard output; phases show as a spinner on a terminal and not at all elsewhere."""

    def __init__(self) -> None:
        self._console = rich.console.Console(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(escape(text))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show that phase `name` is under way."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(name):
            yield

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """The line of one step: its most telling numbers."""
        parts_of_reward = [name for name in metrics if name.startswith("reward/") and name not in SPREAD]
        shown = (
            ("reward", "reward/mean", ".3f"),
            *((name.removeprefix("reward/"), name, ".3f") for name in parts_of_reward),
            ("response", "rollout/response_tokens_mean", ".1f"),
            ("loss", "policy/loss", "+.4f"),
            ("grad", "policy/grad_norm", ".2f"),
            ("explained", "critic/explained_variance", ".2f"),
            ("mismatch", "policy/rollout_mismatch_max", ".1e"),
            ("imbalance", "balance/imbalance/micro_steps", ".2%"),
            ("tokens/s", "throughput/tokens_per_s", ",.0f"),
            ("s", "time/step_s", ".2f"),
        )
        parts = [f"{label} {metrics[key]:{form}}" for label, key, form in shown if key in metrics]
        self.say(f"step {step:>{len(str(steps))}}/{steps}  " + "  ".join(parts))

    def validation(self, step: int, scores: Mapping[str, float]) -> None:
        """The line of one validation."""
        self.say(f"validation at step {step}  " + "  ".join(f"{name} {score:.3f}" for name, score in scores.items()))

    def completions(self, rollout: "Rollout", count: int) -> None:
        """A table of the first `count` samples: prompt group, response, reward."""
        if not count:
            return
        table = Table("uid", "sample", "response", "reward", title="completions")
        for (uid, sample), score in list(rollout.by_sample.items())[:count]:
            table.add_row(uid, str(sample), escape(score.response), f"{score.reward:.3f}")
        self._console.print(table)
