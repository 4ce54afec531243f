"""The page of a dry run: sections that are printed as they come, or one JSON object (`--json`).

Section --Page.write--> stdout
        --JsonPage.write--> kept, with the facts that its lines tell, and errors by setting

docs/json.md lists the keys.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from typing import Any, TypeVar

from controller.config import Config
from controller.config.offline import SftConfig
from workers.errors import CombinedConfigError, one_line

Prepared = TypeVar("Prepared")

SECTIONS = {section.name for schema in (Config, SftConfig) for section in fields(schema)}

OPTION = "--json"
VERBS = "is|are|has|have|needs|must|does|do|cannot|gives|takes|names|holds|with|was|trains"
ERROR = re.compile(
    rf"(?P<setting>--[\w-]+|[a-z_]+\.[\w.-]+)(?:[= ](?P<value>(?!(?:{VERBS})\b).*?))?"
    rf"(?:: | (?=(?:{VERBS})\b))(?P<rest>.*)",
    re.DOTALL,
)
"""An error that names its setting: before a colon, or as the subject of its sentence."""


class Page:
    """Prints sections as they come."""

    def __init__(self) -> None:
        self._is_first = True

    def begin(self, name: str, title: str = "", **facts: Any) -> None:
        """Begin a section. name: its key in JSON. facts: what a program reads of it."""
        del facts
        if not self._is_first:
            print()
        print(f"== {title or name} ==", flush=True)
        self._is_first = False

    def write(self, *lines: str, **facts: Any) -> None:
        """Add lines, and facts, to the last section."""
        del facts
        # Processes of users' code write to the same place.
        for line in lines:
            print(line, flush=True)

    def note(self, line: str) -> None:
        """Print a line that belongs to no section."""
        print(line, flush=True)


class JsonPage(Page):
    """Keeps sections and errors for one JSON object."""

    def __init__(self) -> None:
        super().__init__()
        self._sections: dict[str, dict[str, Any]] = {}
        self._errors: list[dict[str, str | None]] = []
        self._name = ""

    def begin(self, name: str, title: str = "", **facts: Any) -> None:
        del title
        self._name = name
        self._sections[name] = {"lines": [], **facts}

    def write(self, *lines: str, **facts: Any) -> None:
        section = self._sections[self._name]
        section["lines"] += [line for text in lines for line in text.split("\n")]
        section |= facts

    def note(self, line: str) -> None:
        print(line, file=sys.stderr)

    def keep_errors(self, error: Exception) -> None:
        errors = error.errors if isinstance(error, CombinedConfigError) else [error]
        self._errors += map(error_record, errors)

    def to_json(self, code: int) -> str:
        document = {"exit_code": code, "errors": self._errors, **self._sections}
        return json.dumps(document, indent=1, ensure_ascii=False, default=str)


def error_record(error: Exception) -> dict[str, str | None]:
    """Split an error `<setting>=<value>: <problem>. <fix>.` A part that its text does not have is None."""
    text = one_line(error)
    parts = ERROR.fullmatch(text)
    if (
        parts
        and not parts["setting"].startswith("--")
        and parts["setting"].split(".")[0] not in SECTIONS
    ):
        parts = None  # a file
    problem, _, fix = (parts["rest"] if parts else text).partition(". ")
    return {
        "type": type(error).__name__,
        "setting": parts["setting"] if parts else None,
        "value": parts["value"] if parts else None,
        "problem": problem.rstrip("."),
        "fix": fix.rstrip(".") or None,
        "text": text,
    }


def run_command(
    exit_code: Callable[[Callable[[], Prepared]], int],
    prepare: Callable[[Sequence[str], Page], Prepared],
    arguments: Sequence[str] | None,
) -> int:
    """Run a command that may print its dry run as JSON, and return its exit code.

    exit_code: `controller.lifecycle.session.exit_code`. prepare: reads the words of the command line.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if OPTION not in words:
        return exit_code(lambda: prepare(words, Page()))
    page = JsonPage()

    def prepare_and_keep_errors() -> Prepared:
        try:
            return prepare(words, page)
        except Exception as error:
            page.keep_errors(error)
            raise

    with prints_to_stderr():
        code = exit_code(prepare_and_keep_errors)
    print(page.to_json(code))
    return code


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send to stderr what is printed here and in processes of users' code: stdout is for one document."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
