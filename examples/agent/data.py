"""Prices in a database, and questions about them, as chat messages.

user 73 in shop 95?  > <think>...</think> query(sql="SELECT price ...")  tool 168  > <think>...</think> 168
user 73 in shop 95?  > <think>...</think> 171                                                       guessed
"""

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from zlib import crc32

from examples.addition.data import HELD_OUT_SHARE, write_records
from examples.tools import data
from examples.tools.data import LARGEST, SMALLEST, Messages, thought

NUMBERS = range(SMALLEST, LARGEST + 1)  # of items and of shops


def price(item: int, shop: int) -> int:
    """Return a price that nobody can guess."""
    return SMALLEST + crc32(f"price {item} {shop}".encode()) % len(NUMBERS)


def create_database(path: Path) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE TABLE prices (item INTEGER, shop INTEGER, price INTEGER, PRIMARY KEY (item, shop))"
        )
        rows = [(item, shop, price(item, shop)) for item in NUMBERS for shop in NUMBERS]
        database.executemany("INSERT INTO prices VALUES (?, ?, ?)", rows)


def problem(rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    """Return an item and a shop, from the held-out problems or from the others."""
    while True:
        item, shop = rng.choice(NUMBERS), rng.choice(NUMBERS)
        if (crc32(f"{item} {shop}".encode()) % HELD_OUT_SHARE == 0) == held_out:
            return item, shop


def question(item: int, shop: int) -> Messages:
    return [{"role": "user", "content": f"{item} in shop {shop}?"}]


def called(item: int, shop: int) -> Messages:
    """Return the turns in which the policy asks the database."""
    sql = f"SELECT price FROM prices WHERE item={item} AND shop={shop}"
    return data.call("query", {"sql": sql}, price(item, shop))


def guessed(rng: random.Random) -> Messages:
    return [thought("I can guess.", rng.choice(NUMBERS))]


def write(path: Path, count: int, *, seed: int, held_out: bool) -> None:
    """Write `count` problems as JSONL records with `prompt` and `answer`."""
    rng = random.Random(seed)
    problems = [problem(rng, held_out=held_out) for _ in range(count)]
    write_records(
        path,
        ({"prompt": question(*each), "answer": str(price(*each))} for each in problems),
    )
