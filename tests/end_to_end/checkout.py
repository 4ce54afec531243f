"""A clone of the repository as somebody has it who has just found it: one types lines into a shell in it.

    git clone --> folder --`make setup`--> .venv/ --activated--> run("python -m controller.fit ...") --> what is said

`make setup` installs every package anew with BALLAST_INSTALL=1. Otherwise the environment that the tests run
in lends its packages, so that pip finds all of them: the clone's own .venv then holds Ballast, and the
packages' commands.
"""

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.processes import (
    LAST_PROCESS_ENDS,
    MARK,
    ROOT,
    all_end,
    begin,
    marked_environment,
)

INSTALL = "BALLAST_INSTALL"
OWN = ("python", "pip", "activate", "Activate", "ballast")
"""What the names of commands begin with that no environment lends."""
OF_THIS_SESSION = (
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "VIRTUAL_ENV",
    "MAKEFLAGS",
    "MAKELEVEL",
    "COLUMNS",
)


@dataclass(frozen=True)
class Said:
    """How a line ended, and what it wrote to standard output and standard error."""

    code: int
    out: str
    errors: str

    @property
    def lines(self) -> list[str]:
        """Of standard output."""
        return self.out.splitlines()

    def lines_with(self, begin: str) -> list[str]:
        """Those of standard output that begin so."""
        return [line for line in self.lines if line.startswith(begin)]


class Checkout:
    """The clone in `folder`, of the last commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {
            name: value
            for name, value in marked_environment().items()
            if name not in OF_THIS_SESSION
        }
        self.environment = kept | {
            "PYTHON": str(getattr(sys, "_base_executable", sys.executable)),
            "NO_COLOR": "1",
        }
        # The clone's commands, once it is activated, and the machine's; not those of the tests' environment.
        binaries = str(Path(sys.executable).parent)
        self.environment["PATH"] = ":".join(
            p for p in self.environment["PATH"].split(":") if p != binaries
        )
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        if not os.environ.get(INSTALL):
            self._lend()

    def _lend(self) -> None:
        binaries, packages = self.folder / ".venv" / "bin", sysconfig.get_paths()["purelib"]
        own = self.folder / ".venv" / "lib" / Path(packages).parent.name / "site-packages"
        for made in (binaries, own):
            made.mkdir(parents=True)
        (own / "lent.pth").write_text(f"{packages}\n")
        for command in Path(sys.executable).parent.iterdir():
            if not command.name.startswith(OWN):
                (binaries / command.name).symlink_to(command)

    def write(self, name: str, text: str) -> None:
        """A file, in folders that are made."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def start(self, line: str) -> "subprocess.Popen[str]":
        """Begin a line of bash with the environment activated, if there is one, in a session of its own."""
        activated = (
            "source .venv/bin/activate; "
            if (self.folder / ".venv" / "bin" / "activate").exists()
            else ""
        )
        return begin(["bash", "-c", activated + line], self.environment, self.folder)

    def run(self, line: str, *, code: int = 0, seconds: float = 600.0) -> Said:
        """A line and what it said; fails unless it ends with `code`."""
        return ended(self.start(line), code=code, seconds=seconds)

    def left(self, seconds: float = LAST_PROCESS_ENDS) -> list[str]:
        """What still runs of all that was started here, after at most `seconds`; it is killed."""
        return all_end(self.environment[MARK], seconds)


def ended(
    process: "subprocess.Popen[str]", *, code: int = 0, seconds: float = 600.0
) -> Said:
    """What a begun line said; fails unless it ends with `code`, and never with a traceback."""
    out, errors = process.communicate(timeout=seconds)
    said = Said(process.returncode, out, errors)
    assert said.code == code, f"{process.args}: {said.code}\n{out}\n{errors}"
    assert "Traceback" not in out + errors, out + errors
    return said
