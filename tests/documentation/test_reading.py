"""docs/reading.md: the files and functions of its walks exist, and their lines are as many as the page says."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documentation.blocks import ROOT

PAGE = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
WALK = re.compile(
    r"^## (?P<title>[^:\n]+): (?P<lines>[\d,]+) lines\n(?P<body>.*?)(?=^## |\Z)",
    re.M | re.S,
)
PLACE = re.compile(
    r"^\d+\. `(?P<file>[\w/]+\.py)`(?P<names>(?:,\s+`[\w.]+`)*):\s+[A-Z]", re.M
)
ITEM = re.compile(r"^\d+\. .*$", re.M)
MOST_LINES = 1500
TOLERANCE = 50  # the page's numbers are rounded, so that it need not follow every edit


@dataclass(frozen=True)
class Place:
    """A numbered line of a walk. names: functions or classes, empty for the whole file."""

    file: str
    names: tuple[str, ...]


def walks() -> dict[str, tuple[int, list[Place]]]:
    """The lines that each walk claims, and its places."""
    claims = {}
    for walk in WALK.finditer(PAGE):
        places = [
            Place(place["file"], tuple(re.findall(r"`([\w.]+)`", place["names"])))
            for place in PLACE.finditer(walk["body"])
        ]
        assert len(places) == len(ITEM.findall(walk["body"])), (
            f"a line of {walk['title']} has another form"
        )
        claims[walk["title"]] = int(walk["lines"].replace(",", "")), places
    return claims


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, set[int]]]:
    """Each function and class with its lines."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield (
                prefix + node.name,
                set(range(node.lineno, (node.end_lineno or node.lineno) + 1)),
            )
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{node.name}.")


def lines_of(file: str, names: tuple[str, ...], root: Path = ROOT) -> set[tuple[str, int]]:
    """Raises KeyError for a name that the file does not define."""
    source = (root / file).read_text(encoding="utf-8")
    if not names:
        return {(file, line) for line in range(1, len(source.splitlines()) + 1)}
    defined = dict(definitions(ast.parse(source).body))
    return {(file, line) for name in names for line in defined[name]}


@pytest.mark.parametrize("title", walks())
def test_a_walk_names_what_exists_and_is_as_long_as_it_says(title: str) -> None:
    claim, places = walks()[title]
    missing = [place.file for place in places if not (ROOT / place.file).is_file()]
    assert missing == []
    lines: set[tuple[str, int]] = set()
    for place in places:
        lines |= lines_of(place.file, place.names)
    assert len(lines) <= MOST_LINES
    assert abs(len(lines) - claim) <= TOLERANCE, f"{title} has {len(lines)} lines"


def test_there_are_five_walks() -> None:
    assert list(walks()) == ["A step", "A token", "A plan", "A micro-batch", "A sample"]


def test_the_tokens_walk_passes_the_files_of_its_forms() -> None:
    """CONTRIBUTING.md lists them, see `tests/test_token_path.py`."""
    table = re.findall(
        r"^\| `.* \| (`.*) \| .* \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M
    )
    listed = {file for cell in table for file in re.findall(r"`([^`]*)`", cell)}
    _, places = walks()["A token"]
    assert listed - {place.file for place in places} == set()


def test_a_name_that_is_gone_is_seen(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "class Thing:\n    def method(self):\n        return 1\n\nx = 1\n"
    )
    assert len(lines_of("module.py", ("Thing.method",), tmp_path)) == 2
    assert len(lines_of("module.py", ("Thing", "Thing.method"), tmp_path)) == 3
    assert len(lines_of("module.py", (), tmp_path)) == 5
    with pytest.raises(KeyError, match="gone"):
        lines_of("module.py", ("Thing.gone",), tmp_path)
