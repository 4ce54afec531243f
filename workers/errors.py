"""Errors of Ballast. Each message says what is wrong, where, and which setting changes it."""

import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

# Characters of an error's text, or of the last line that a process wrote.
LONGEST_QUOTE = 200
SETTING_OF_ERROR = re.compile(r"([a-z_]+(?:\.[a-z_]+)+=\S*?)(?=[:,.]*(\s|$))")
_QUOTES = reprlib.Repr()
_QUOTES.maxstring = _QUOTES.maxother = 80


class BallastError(Exception):
    """Base of all errors that a user can cause or must know about."""


class ConfigError(BallastError):
    """A setting is unknown, has the wrong type, or is meaningless in this combination."""


class DataError(BallastError):
    """A batch, file or record is malformed."""


class ImageError(DataError):
    """An image cannot be read, or no model reads one of its size."""


class UnsupportedModelError(ConfigError):
    """The chosen layout, kernel or parallelism cannot compute the model."""


class ResourceError(BallastError):
    """The cluster lacks what a role asks for."""


class WorkerError(BallastError):
    """A worker raised. The error names the rank and carries the remote traceback."""


class LostError(BallastError):
    """An actor that the run needs was lost. The run can be resumed from its last checkpoint."""


class RolloutError(BallastError):
    """Generation cannot continue: no engine is left, or none answers."""


class UnfinishedError(RolloutError):
    """No sample of a round was finished, though engines are there: they refused or failed these requests."""


class CheckpointError(BallastError):
    """A checkpoint is broken, foreign, of another model, or could not be written. The error names
    its folder.
    """


class OutputError(BallastError):
    """A file of the run could not be written. The error names the file."""


class NonFiniteError(BallastError):
    """Loss or gradients were not finite in too many optimiser steps in a row. The error names the
    sequences.
    """


class MismatchError(BallastError):
    """Engines and trainer differ in log-probs of the same tokens by more than the tolerance, or are NaN."""


class EpisodeError(BallastError):
    """An environment raised, hung, died or answered with the wrong type. Only that sample is lost."""


def without_control(text: str) -> str:
    """Escape characters that steer a terminal or show nothing on it. Lines and tabs stay."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else _escape(char) for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def one_line(error: BaseException) -> str:
    """Write an error as a command prints it: one line, without characters that steer a terminal."""
    text = str(error)
    # `[Errno 13] Permission denied: ...` otherwise.
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'a file'}: {error.strerror}."
    return without_control(text.replace("\n", "\\n"))


def quote(value: object) -> str:
    try:
        return _QUOTES.repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}"


def clause(error: BaseException) -> str:
    """An error's text in one line without its full stop. A library may say in the second line
    what is wrong.
    """
    text = without_control(" ".join(str(error).split())).rstrip(".") or type(error).__name__
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]} ... (cut)"


def why_not_json(error: Exception) -> str:
    """Say why a text is not JSON, without Python's advice on its own limits."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    text = clause(error)
    return (
        "a number has more than 4,300 digits" if "set_int_max_str_digits" in text else text
    )


def describe_error(error: BaseException) -> str:
    """Type and first words of an error in users' code."""
    try:
        text = without_control(next(iter(str(error).splitlines()), "").rstrip("."))
    except Exception:
        text = ""
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    line = line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}..."
    return line + _shadowed_package(error)


def _shadowed_package(error: BaseException) -> str:
    """Say that a file of the user stands in the place of a package of the same name, if that explains
    `error`.
    """
    if isinstance(error, ImportError):
        name = error.name
    else:
        name = (
            getattr(getattr(error, "obj", None), "__name__", "")
            if isinstance(error, AttributeError)
            else ""
        )
    package = (name or "").partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if not package or not file:
        return ""
    folder = Path(file).parent.resolve()
    elsewhere = [path for path in sys.path if Path(path or ".").resolve() != folder]
    spec = PathFinder.find_spec(package, elsewhere)
    if (
        spec is None
        or not spec.origin
        or Path(spec.origin).parent.resolve() == folder
        or "site-packages" in file
    ):
        return ""
    return f" ({file} shadows the package {package}. Rename it)"


class CombinedConfigError(ConfigError):
    """Several independent problems of a configuration, which a command prints a line each."""

    def __init__(self, errors: Sequence[BallastError]) -> None:
        super().__init__(" ".join(map(str, errors)))
        self.errors = list(errors)


def raise_all(errors: Sequence[BallastError]) -> None:
    """Raise the errors together, or the only one itself."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CombinedConfigError(errors)


class Problems:
    """Collect errors of independent checks: `with problems.collecting(): check()`, then
    `problems.raise_all()`.

    A fault of a check itself hides none of them. Of checks that refuse the same value, the first one counts:
    what a setting without effect names needs not exist.
    """

    def __init__(self) -> None:
        self.errors: list[BallastError] = []
        self._faults: list[Exception] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """End the block at its first error, and keep that. Of several checks, each takes a block."""
        try:
            yield
        except CombinedConfigError as several:
            self._add(several.errors)
        except BallastError as error:
            self._add([error])
        except Exception as error:
            self._faults.append(error)

    def _add(self, errors: Sequence[BallastError]) -> None:
        refused = {_subject(error) for error in self.errors}
        self.errors += [error for error in errors if _subject(error) not in refused]

    def raise_all(self) -> None:
        """Raise the errors together, or the only one itself, or the first fault."""
        raise_all(self.errors)
        if self._faults:
            raise self._faults[0]


def _subject(error: BallastError) -> str:
    setting = SETTING_OF_ERROR.match(str(error))
    return setting[1].replace("'", "") if setting else str(error)


def check_together(*checks: Callable[[], object]) -> None:
    """Run independent checks, and raise their errors together."""
    problems = Problems()
    for check in checks:
        with problems.collecting():
            check()
    problems.raise_all()
