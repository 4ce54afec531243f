"""Plain English, as far as patterns see it: sentences of at most 40 words, and `is not a` instead
of `is no`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.documentation.blocks import PAGES, ROOT

PACKAGES = ("ballast", "balancing", "controller", "workers", "examples")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
DEFINED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NEGATED_NOUN = re.compile(
    r"(?<!there )\b(?:is|are|was|were) no (?!longer|more than|less than|later than)"
)
ENDS = re.compile(r"[.!?:;](?=\s|$)|\n\s*\n|^\s*(?:[-*|#>]|\d+\.)|-->?|\|", re.MULTILINE)
LONGEST = 40


def docstrings(path: Path) -> Iterator[str]:
    """Without pictures and formulas, which are indented."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, DEFINED):
            yield re.sub(
                r"^ {2,}.*$", "\n\n", ast.get_docstring(node) or "", flags=re.MULTILINE
            )


def prose(page: Path) -> str:
    """A page without its blocks of code, tables and comments."""
    text = re.sub(
        r"```.*?```|<!--.*?-->", "\n\n", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    return "\n".join(
        line for line in text.splitlines() if not line.startswith(("|", "    "))
    )


def faults(text: str) -> list[str]:
    long = [sentence for sentence in ENDS.split(text) if len(sentence.split()) > LONGEST]
    return long + [found.group() for found in NEGATED_NOUN.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page: Path) -> None:
    assert faults(prose(page)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_and_messages_are_in_plain_english(package: str) -> None:
    modules = [path for path in MODULES if path.is_relative_to(ROOT / package)]
    found = {
        str(path): [fault for text in docstrings(path) for fault in faults(text)]
        for path in modules
    }
    messages = {
        str(path): NEGATED_NOUN.findall(path.read_text(encoding="utf-8"))
        for path in modules
    }
    assert {path: listed for path, listed in found.items() if listed} == {}
    assert {path: listed for path, listed in messages.items() if listed} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("x is no owner/name", 1), ("there is no file", 0), ("word " * 41, 1)],
)
def test_the_patterns_see_what_they_are_for(text: str, wrong: int) -> None:
    assert len(faults(text)) == wrong


@pytest.mark.parametrize(
    ("subject", "refused"),
    [("x" * 72, False), ("x" * 73, True), ("Add a thing; mend another", True)],
)
def test_the_hook_refuses_long_subjects_and_two_subjects_in_one(
    subject: str, refused: bool
) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))[
        "repos"
    ][0]["hooks"]
    (hook,) = [hook for hook in hooks if hook["id"] == "commit-subject"]
    message = f"{subject}\n\n{'a long line of the body; ' * 9}\n".encode()
    assert (
        bool(re.search(hook["entry"].encode(), message, re.MULTILINE | re.DOTALL))
        == refused
    )
