"""`python -m ballast NAME ...`, or the script `ballast`: run a command by its short name.

    ballast fit --config mine.yaml  -->  controller.fit.main(["--config", "mine.yaml"])

Command modules are imported only when called, so that the list appears at once. It leaves out the commands
of a tool whose folder is not there: each folder of ballast/ can be removed as a whole.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

from ballast import __version__
from ballast.packages import check_controller


@dataclass(frozen=True)
class Command:
    """module: its `main(arguments)` returns the exit code, or None for 0. does: short description."""

    module: str
    does: str

    def is_here(self) -> bool:
        package, name, *_ = self.module.split(".")
        # Other packages are found at the call: a user's file may hide them.
        return package != "ballast" or find_spec(f"ballast.{name}") is not None


ALL_COMMANDS = {
    "fit": Command("controller.fit", "train a policy by reinforcement learning"),
    "sft": Command("controller.sft", "train it on given responses"),
    "preferences": Command(
        "controller.preferences", "train it on pairs of responses (DPO, IPO, SimPO)"
    ),
    "reward-model": Command(
        "controller.reward_model", "train a reward model on pairs, scores or labelled steps"
    ),
    "serve": Command(
        "ballast.serve.__main__", "serve the training API of Tinker's clients over a policy"
    ),
    "evaluate": Command(
        "ballast.sampling_commands.evaluate",
        "measure a model on a data set, with confidence intervals",
    ),
    "generate": Command(
        "ballast.sampling_commands.generate",
        "write samples with token ids and log-probs to a file",
    ),
    "show": Command(
        "ballast.pages.show",
        "draw the recorded sessions and samples of a run in the terminal",
    ),
    "report": Command("ballast.pages.report", "write one page about a run"),
    "timeline": Command(
        "ballast.pages.timeline", "write a trace of a run for Perfetto or Chrome"
    ),
    "balance": Command(
        "balancing.__main__",
        "compare balancing strategies on the lengths of a run or a file",
    ),
    "doctor": Command(
        "ballast.doctor", "check this machine, or a cluster, before the first run"
    ),
    "replay": Command("ballast.replay.__main__", "train a recorded step again"),
    "certify": Command(
        "ballast.certify.__main__",
        "try data, reward and environment of a run before it gets a GPU",
    ),
    "audit": Command(
        "ballast.audit.__main__",
        "check a recorded step of any trainer, or compare two runs",
    ),
    "layout": Command(
        "ballast.planning.layouts", "find the fastest layouts of a run on a cluster"
    ),
    "migrate": Command(
        "ballast.migrate.__main__", "translate a recipe of verl, TRL and other systems"
    ),
    "template": Command(
        "ballast.pages.template",
        "show what a chat template does to the turns of a conversation",
    ),
    "init": Command(
        "ballast.init", "write a configuration, data and a reward to start from"
    ),
    "completion": Command(
        "ballast.completion", "print the Tab completion for bash and zsh"
    ),
}
COMMANDS = {name: command for name, command in ALL_COMMANDS.items() if command.is_here()}

REMOVED = {
    "whatif": "`ballast fit --config runs/NAME/config.yaml --dry-run --cluster ... "
    "--measured runs/NAME key=value` predicts a recorded run's speed under other settings."
}
"""Commands that the last version had, and what to use instead. Kept for one version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default from the process's command line, and return its exit code.

    2, with one line, for an unknown name or if a user's file hides one of our packages.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(help_page())
        return 0
    if name == "--version":
        print(f"ballast {__version__}")
        return 0
    if name in ALL_COMMANDS and name not in COMMANDS:
        return _refuse(f"ballast {name}: {ALL_COMMANDS[name].module} is not installed.")
    if name in REMOVED:
        return _refuse(f"ballast {name} was removed. {REMOVED[name]}")
    if name not in COMMANDS:
        return _refuse(f"ballast has no command {name!r}; {_suggestion(name)}")
    try:
        command = main_of(COMMANDS[name])
    except ImportError as error:
        return _refuse(str(error))
    return command(rest) or 0


def main_of(command: Command) -> Callable[[Sequence[str]], int | None]:
    """Return the command's `main`. Raises ImportError if a user's file hides one of our packages."""
    check_controller()
    return cast(
        Callable[[Sequence[str]], int | None], importlib.import_module(command.module).main
    )


def help_page() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.does}" for name, command in COMMANDS.items()]
    last = "`ballast COMMAND --help` explains a command's arguments."
    return "\n".join(
        ["usage: ballast COMMAND [arguments] | --version", "", *lines, "", last]
    )


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(COMMANDS)}."


def _refuse(message: str) -> int:
    # Not `workers.errors.one_line`: the message may be that a user's file hides `workers`.
    printable = "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in message
    )
    print(f"error: {printable}", file=sys.stderr)
    return 2
