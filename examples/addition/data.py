"""Addition problems with written-out working. All numbers are written ones first, in the order in which one
adds.

    58 + 67 = 125:   85+76=   ->   875^562^#521        8 and 7: 5, carry; 5 and 6 and the carry: 2, carry; 1

A column is four characters: both digits, the digit of the sum, and `^` (carry) or `.` (none), from the ones
upwards. Then `#` and the sum. With an end-of-sequence token, n digits take 5n + 2 or 5n + 3 tokens: 7 to 63
for 1 to 12 digits.
"""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

MAX_DIGITS = 12
CHARACTERS = "0123456789+=^.#"
HELD_OUT_SHARE = 8  # one problem in eight is never trained on


def ones_first(number: int) -> str:
    return str(number)[::-1]


def prompt(a: int, b: int) -> str:
    """Return the problem as the policy reads it."""
    return f"{ones_first(a)}+{ones_first(b)}="


def working(a: int, b: int) -> str:
    """The columns of a + b, from the ones upwards, both written with as many digits as the longer one."""
    width = max(len(str(a)), len(str(b)))
    carry, columns = 0, []
    for x, y in zip(reversed(f"{a:0{width}d}"), reversed(f"{b:0{width}d}"), strict=True):
        carry, digit = divmod(int(x) + int(y) + carry, 10)
        columns.append(f"{x}{y}{digit}{'^' if carry else '.'}")
    return "".join(columns)


def solution(a: int, b: int) -> str:
    """Return the full response: working, `#`, sum."""
    return f"{working(a, b)}#{ones_first(a + b)}"


def corrupted(text: str, share: float, rng: random.Random) -> str:
    """Replace that share of the digits in `text` by random digits."""
    return "".join(
        str(rng.randrange(10)) if c.isdigit() and rng.random() < share else c for c in text
    )


def number_of_digits(rng: random.Random) -> int:
    """1 to 12, long-tailed: three in four have at most 5."""
    return min(MAX_DIGITS, 1 + int(rng.expovariate(1 / 3.5)))


def problem(
    rng: random.Random, *, held_out: bool, any_length: float = 0.0
) -> tuple[int, int]:
    """Two numbers of the same number of digits, from the held-out problems or from the others.

    any_length: share of problems whose number of digits is drawn evenly instead of long-tailed.
    """
    while True:
        digits = (
            rng.randint(1, MAX_DIGITS)
            if rng.random() < any_length
            else number_of_digits(rng)
        )
        low = 10 ** (digits - 1) if digits > 1 else 0
        a, b = (rng.randrange(low, 10**digits) for _ in range(2))
        if (crc32(f"{a}+{b}".encode()) % HELD_OUT_SHARE == 0) == held_out:
            return a, b


def write(path: Path, count: int, *, seed: int, held_out: bool) -> None:
    """`count` problems as JSONL records with `prompt` and `solution`."""
    rng = random.Random(seed)
    problems = (problem(rng, held_out=held_out) for _ in range(count))
    write_records(
        path, ({"prompt": prompt(a, b), "solution": solution(a, b)} for a, b in problems)
    )


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
