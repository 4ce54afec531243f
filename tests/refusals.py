"""Refusals are asserted by the type of the error and the setting that it names, not by their prose."""

import shlex
from collections.abc import Iterator
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


def rows(table: str) -> pytest.MarkDecorator:
    """The table's lines, each with overrides, as parameter `overrides` of a test."""
    return pytest.mark.parametrize(
        "overrides",
        [shlex.split(line) for line in table.strip().splitlines()],
        ids=" ".join,
    )


def refused_rows(table: str) -> pytest.MarkDecorator:
    """Lines of overrides as parameters `named`, the setting of the first, and `overrides`.

    Where the error names another setting, the line begins with the name of that one.
    """
    cases = []
    for line in table.strip().splitlines():
        first, *others = shlex.split(line)
        cases.append(
            (first.partition("=")[0], [first, *others] if "=" in first else others)
        )
    return pytest.mark.parametrize(
        ("named", "overrides"), cases, ids=[" ".join(given) for _, given in cases]
    )
