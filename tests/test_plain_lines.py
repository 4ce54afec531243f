"""Code stays as plain as it is: no figure of `tests/plain_lines.toml` rises unless a commit says why."""

from pathlib import Path

import pytest

from tests import plain_lines

PLAIN = "def double(number):\n    return 2 * number\n"
VAGUE = "def double(found):\n    return 2 * found\n"
TUPLES = "first, second = 1, 2\n"
NESTED = "rows = [[0 for _ in range(2)] for _ in range(3)]\n"
WIDE = f"text = {'x' * 110!r}\n"
LONG = "def count():\n" + "    print()\n" * 71
STEP = {"controller/__init__.py": "", "controller/step.py": "from workers import big\n"}


def test_no_figure_rises() -> None:
    texts = plain_lines.read_texts(plain_lines.REPOSITORY)
    messages = plain_lines.rises(
        texts, plain_lines.read_table(), plain_lines.texts_of_the_table()
    )
    assert not messages, (
        "figures of tests/plain_lines.toml rose:\n"
        + "\n".join(messages)
        + "\nIf the rise is worth it, edit the table in the same commit and give the reason in its message"
        + " (`python -m tests.plain_lines --write`)."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (VAGUE, "vague_names_percent: 50, 50 above 0 (workers/new.py +1)"),
        (TUPLES, "tuple_assignments_per_1000: 333.3, 333.3 above 0 (workers/new.py +1)"),
        (
            NESTED,
            "nested_comprehensions_per_1000: 333.3, 333.3 above 0 (workers/new.py +1)",
        ),
        (WIDE, "lines_above_110: 1, 1 above 0 (workers/new.py +1)"),
        (LONG, "functions_above_70: 1, 1 above 0 (workers/new.py +1)"),
        (PLAIN * 251, "files_above_500: 1, 1 above 0 (workers/new.py +1)"),
        (PLAIN, "tokens in workers: 20, 10 above 10 (workers/new.py +10)"),
    ],
)
def test_a_rise_names_its_figure_and_file(text: str, message: str) -> None:
    earlier = {"workers/double.py": PLAIN}
    texts = earlier | {"workers/new.py": text}
    assert plain_lines.rises(earlier, plain_lines.measure(earlier), earlier) == []
    assert message in plain_lines.rises(texts, plain_lines.measure(earlier), earlier)


def test_the_closure_follows_imports_at_module_level() -> None:
    """An import below `if TYPE_CHECKING` or in a function brings nothing, a package brings its `__init__`."""
    big = {"workers/__init__.py": "", "workers/big.py": "x = 1\n" * 30}
    type_checking = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from workers import big\n"
    lazy = "def step():\n    import workers.big\n"
    assert plain_lines.measure(STEP | big)["step_closure_lines"] == 31
    assert (
        plain_lines.measure(STEP | big | {"controller/step.py": type_checking})[
            "step_closure_lines"
        ]
        == 4
    )
    assert (
        plain_lines.measure(STEP | big | {"controller/step.py": lazy})["step_closure_lines"]
        == 2
    )


def test_docstrings_and_comments_are_no_tokens() -> None:
    documented = '"""Double."""\n\n\ndef double(number):  # of apples\n    """Double."""\n    return 2 * number\n'
    assert plain_lines.count_tokens(documented) == (10, 2)
    assert plain_lines.count_tokens('name = f"{first} {second}"\n') == (3, 1)


def test_a_written_table_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = plain_lines.measure(STEP | {"workers/model/rows/new.py": VAGUE})
    monkeypatch.setattr(plain_lines, "TABLE", tmp_path / "plain_lines.toml")
    plain_lines.TABLE.write_text(plain_lines.render_table(figures))
    assert plain_lines.read_table() == figures
    assert figures["tokens in workers/model"] == 10
