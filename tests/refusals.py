"""Refusals are asserted by the type of the error and the setting that it names, not by their prose."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from workers.errors import ConfigError


@contextmanager
def refused(named: str, error: type[Exception] = ConfigError) -> Iterator[None]:
    """Expect an error of this type in one line, which begins with the setting `named`, or has it within."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert named in message and "\n" not in message, message
    assert "omegaconf" not in message.lower(), message


def _words(table: str, short: Mapping[str, Sequence[str]]) -> list[list[str]]:
    return [
        [override for word in shlex.split(line) for override in short.get(word, [word])]
        for line in table.strip().splitlines()
    ]


def rows(table: str, **short: Sequence[str]) -> pytest.MarkDecorator:
    """The table's lines, each with overrides, as parameter `overrides` of a test.

    short: overrides that one word of the table stands for.
    """
    return pytest.mark.parametrize("overrides", _words(table, short), ids=" ".join)


def refused_rows(table: str, **short: Sequence[str]) -> pytest.MarkDecorator:
    """Lines of overrides as parameters `named`, the setting of the first, and `overrides`.

    Where the error names another setting, the line begins with the name of that one. short: as in `rows`.
    """
    cases = []
    for first, *others in _words(table, short):
        cases.append(
            (first.partition("=")[0], [first, *others] if "=" in first else others)
        )
    return pytest.mark.parametrize(
        ("named", "overrides"), cases, ids=[" ".join(given) for _, given in cases]
    )
