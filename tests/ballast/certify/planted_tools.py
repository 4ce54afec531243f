"""Tools with planted defects, by name, and clean ones. A function of `DEFECTS` is a module of one tool."""

import os
import random
import subprocess
import time

CALLS: list[str] = []


def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word.upper()


def power(base: int, exponent: int = 2) -> int:
    """Raise a number to a power.

    Args:
        base: The number.
        exponent: The power.
    """
    if not isinstance(base, int) or not isinstance(exponent, int) or not 0 <= exponent < 99:
        raise ValueError("two small integers, please")
    return base**exponent


def ends_process(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word.upper() if word else os._exit(4)


def hangs(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    while len(word) > 1000:
        time.sleep(1)
    return word.upper()


def broken(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return dictionary[word]  # noqa: F821


def state_left_behind(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    CALLS.append(word)
    return f"{word.upper()}, call {len(CALLS)}"


def not_deterministic(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return f"{word.upper()} {random.random()}"


def runs_code_unconfined(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return str(eval(word))


def runs_shell(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return subprocess.run(f"echo {word}", shell=True, capture_output=True, text=True).stdout


def always_fails(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    raise ValueError(f"{word} is not a date")


CLEAN = [lookup, power]
DEFECTS = {
    "tools.ends_process": ends_process,
    "tools.hangs": hangs,
    "tools.broken": broken,
    "tools.state_left_behind": state_left_behind,
    "tools.not_deterministic": not_deterministic,
    "tools.always_fails": always_fails,
}
