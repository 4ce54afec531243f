"""Sums that are hard to guess, and a calculator that one may ask. The policy writes what stands after `>`:

    prompt 738+956=    > [738+956]    calculator <1694>    > 1694          asked, then answered
    prompt 738+956=    > 1694                                              answered at once

Each of the policy's turns ends with the end-of-sequence token.
"""

import json
import random
from pathlib import Path
from zlib import crc32

from examples.addition.data import HELD_OUT_SHARE

CHARACTERS = "0123456789+=[]<>"
LARGEST = 999


def problem(rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    """Two numbers of three digits, from the held-out problems or from the others."""
    while True:
        a, b = rng.randint(100, LARGEST), rng.randint(100, LARGEST)
        if (crc32(f"{a}+{b}".encode()) % HELD_OUT_SHARE == 0) == held_out:
            return a, b


def prompt(a: int, b: int) -> str:
    """The problem as the policy reads it."""
    return f"{a}+{b}="


def write(path: Path, count: int, *, seed: int, held_out: bool) -> None:
    """`count` problems as JSONL records with `prompt` and `answer`."""
    rng = random.Random(seed)
    problems = (problem(rng, held_out=held_out) for _ in range(count))
    path.write_text(
        "".join(
            json.dumps({"prompt": prompt(a, b), "answer": a + b}) + "\n"
            for a, b in problems
        )
    )
