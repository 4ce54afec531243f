"""docs/balancing.md: its examples print what it says, and its picture and names are there."""

import doctest
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "balancing.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_examples_print_what_the_page_says(block):
    example = doctest.DocTestParser().get_doctest(block, {}, "docs/balancing.md", str(PAGE), 0)
    report: list[str] = []
    failed, tried = doctest.DocTestRunner().run(example, out=report.append)
    assert tried > 3
    assert failed == 0, "".join(report)


def test_there_are_three_examples_and_every_linked_file_is_there():
    assert len(BLOCKS) == 3
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text(encoding="utf-8"))
    assert links
    assert all((PAGE.parent / link).is_file() for link in links)
