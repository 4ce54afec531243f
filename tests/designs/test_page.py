"""docs/designs.md: every published behaviour has a test, by its id, that starts from a configuration."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.end_to_end.processes import ROOT

PAGE, TESTS = ROOT / "docs" / "designs.md", sorted(Path(__file__).parent.glob("test_*.py"))
IDS = [
    *(f"P{number}" for number in range(1, 17)),
    *(f"D{number}" for number in range(1, 9)),
    *(f"M{number}" for number in range(1, 11)),
    *(f"V{number}" for number in range(1, 11)),
    *(f"C{number}" for number in range(1, 10)),
]
FROM_A_CONFIGURATION = {"file", "run", "command", "documentation_workspace"}
"""Arguments of tests through which a configuration comes in."""
OF_A_PAGE = {"C5", "M7"}  # advice, which the documentation gives


def rows() -> Iterator[tuple[str, str, str]]:
    """(id, path of the test's file, name of the test) of every row."""
    for line in PAGE.read_text().splitlines():
        if found := re.match(r"\| ([PDMVC]\d+) \|.*`(tests/[\w/]+\.py)::(\w+)` \|$", line):
            yield found[1], found[2], found[3]


def arguments(path: str, name: str) -> set[str]:
    """Names of the test's arguments. Raises StopIteration if there is no such test."""
    tree = ast.parse((ROOT / path).read_text())
    test = next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return {argument.arg for argument in test.args.args}


def test_every_behaviour_has_a_row() -> None:
    assert [name for name, _, _ in rows()] == IDS


def test_an_id_has_one_test_here() -> None:
    names = re.findall(
        r"^def test_((?:[pdmvc]\d+_)+)", "\n".join(map(Path.read_text, TESTS)), re.MULTILINE
    )
    ids = [found for name in names for found in name.rstrip("_").split("_")]
    assert sorted(set(ids)) == sorted(ids)


def test_every_row_names_a_test_of_that_id_that_starts_from_a_configuration() -> None:
    for behaviour, path, name in rows():
        assert f"_{behaviour.lower()}_" in name, (behaviour, name)
        assert behaviour in OF_A_PAGE or arguments(path, name) & FROM_A_CONFIGURATION, (
            behaviour,
            name,
        )
