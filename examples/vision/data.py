"""Pictures with coloured dots, drawn by PIL. The policy names the dots by colour, then their number.

    a picture of 3 x 2 cells with two red dots and a blue one   ->   RRB=3

A cell is 28 x 28 pixels, which is one token of the model. It holds at most one dot.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from examples.addition.data import write_records

COLOURS = {"R": (220, 40, 40), "G": (40, 180, 60), "B": (50, 70, 230)}
QUESTION = "Count the dots."
CHARACTERS = "RGB=0123456789"
CELL = 28
SHORTEST, LONGEST = 2, 4  # sides of a picture, in cells
DOTS = 0.4  # share of cells with a dot


def picture(rng: random.Random) -> tuple[Image.Image, str]:
    """Draw a picture. Returns it with the letters of its dots."""
    width, height = (rng.randint(SHORTEST, LONGEST) for _ in range(2))
    image = Image.new("RGB", (width * CELL, height * CELL), (rng.randint(170, 250),) * 3)
    draw, dots = ImageDraw.Draw(image), ""
    for cell in range(width * height):
        if rng.random() >= DOTS:
            continue
        dots += rng.choice(list(COLOURS))
        radius = rng.randint(5, 8)
        x, y = (
            CELL * place + rng.randint(radius, CELL - 1 - radius)
            for place in (cell % width, cell // width)
        )
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius), fill=COLOURS[dots[-1]]
        )
    return image, dots


def solution(dots: str) -> str:
    """Return the full response: the dots by colour, `=`, their number."""
    return f"{''.join(sorted(dots, key=list(COLOURS).index))}={len(dots)}"


def corrupted(dots: str, share: float, rng: random.Random) -> str:
    """Miss a share of the dots, and take as many for one of any colour."""
    seen = "".join(
        rng.choice(list(COLOURS)) if rng.random() < share else dot for dot in dots
    )
    return "".join(dot for dot in seen if rng.random() >= share)


def question() -> list[dict[str, Any]]:
    """Return the question about a record's image."""
    return [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    ]


def pictures(folder: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Save pictures. Yields their paths, from the folder above, and the letters of their dots."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for number in range(count):
        image, dots = picture(rng)
        image.save(folder / f"{number}.png")
        yield f"{folder.name}/{number}.png", dots


def write(path: Path, count: int, *, seed: int) -> None:
    """`count` pictures, and JSONL records with `prompt`, `images` and `solution`."""
    drawn = pictures(path.with_suffix(""), count, seed)
    write_records(
        path,
        (
            {"prompt": question(), "images": [file], "solution": solution(dots)}
            for file, dots in drawn
        ),
    )
