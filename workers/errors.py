"""Errors of Ballast. Every message is one sentence that says what was wrong, where, and which setting changes it."""

import reprlib

LONGEST_QUOTE = 200  # characters of an error's text, or of the last line that a process wrote
_QUOTES = reprlib.Repr()
_QUOTES.maxstring = _QUOTES.maxother = 80


class BallastError(Exception):
    """Base of all errors that a user can cause or must know about."""


class ConfigError(BallastError):
    """A setting is unknown, of the wrong type, or has no meaning in this combination."""


class DataError(BallastError):
    """A batch, a file or a record does not have the promised form."""


class UnsupportedModelError(ConfigError):
    """The model needs something that the chosen layout, kernel or parallelism cannot compute."""


class ResourceError(BallastError):
    """The cluster cannot give what a role asks for."""


class WorkerError(BallastError):
    """A worker raised; names the rank and carries the remote traceback."""


class LostError(BallastError):
    """An actor that the run needs was lost; the run can be resumed from its last checkpoint."""


class RolloutError(BallastError):
    """Generation cannot continue: no engine is left, or none answers."""


class CheckpointError(BallastError):
    """A checkpoint is torn, foreign, of another model, or could not be written; names its folder."""


class OutputError(BallastError):
    """A file of the run could not be written; names it."""


class NonFiniteError(BallastError):
    """Loss or gradients were NaN or infinite in too many optimiser steps in a row; names the sequences."""


class MismatchError(BallastError):
    """Log-probs of the same tokens differ between engines and trainer by more than the tolerance, or are NaN."""


class EpisodeError(BallastError):
    """An episode's environment raised, hung, died or answered with the wrong type; only that sample is lost."""


def quoted(value: object) -> str:
    """A user's value in a message: the beginning of its repr, whatever that raises."""
    try:
        return _QUOTES.repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}"


def clause(error: BaseException) -> str:
    """The first line of an error's text without its full stop, to be continued in a longer sentence."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def named(error: BaseException) -> str:
    """An error of users' code in one short line: its type and the beginning of its text, if that can be read."""
    try:
        text = next(iter(str(error).splitlines()), "").rstrip(".")
    except Exception:
        text = ""
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}..."
