"""Draws of what users and accidents put into a command: values, settings, files and arguments, near to valid
ones.

a folder in which every command works --one to three things broken--> Draw(files, command, arguments)
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from controller.config import Config, TrainingConfig
from controller.config.file import Setting, settings
from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig

ANY_CHARACTER = st.characters()  # lone surrogates too
ODD_TEXTS = (
    *(
        "",
        " ",
        ".",
        "..",
        "/",
        "~",
        "-",
        "--",
        "=",
        "None",
        "null",
        "nan",
        "???",
        "${run.seed}",
        "${run.seed",
        "a:b",
    ),
    *(
        "\x00",
        "\n",
        "\ud800",
        "a\u2028b",
        "a\u0085b",
        "\u202e",
        "\ufeff",
        "x" * 300,
        "/dev/null/x",
        "/dev/zero",
        "\x1b[31m",
        "${x} {0}.yaml",
        "runs",
        "[a]",
        "%s",
    ),
    *(
        "model",
        "train.jsonl",
        "sft.jsonl",
        "config.yaml",
        "reward.py:reward",
        "reward.py",
        "auto",
        "runs/done",
    ),
)
# As libyaml's stack overflows, and PyYAML takes minutes.
DEEP = b"[" * 100_000 + b"]" * 100_000
ODD_NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    7,
    64,
    10**4,
    2**31,
    2**53,
    2**63,
    10**30,
    -(10**30),
    1e-320,
    0.5,
    1e16,
    1e308,
    -1e308,
)
TEXTS = st.sampled_from(ODD_TEXTS) | st.text(ANY_CHARACTER, max_size=8)
NUMBERS = st.sampled_from(ODD_NUMBERS) | st.integers() | st.floats()
VALUES: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3)
    ),
    max_leaves=5,
)
SCHEMAS: dict[str, type[TrainingConfig]] = {
    "fit": Config,
    "evaluate": Config,
    "generate": Config,
    "sft": SftConfig,
    "preferences": PreferencesConfig,
    "reward-model": RewardTrainingConfig,
}
FILES = {
    "sft": "sft.yaml",
    "preferences": "preferences.yaml",
    "reward-model": "preferences.yaml",
}
"""Configurations of commands; of others it is config.yaml."""


@dataclass(frozen=True)
class Draw:
    """files: content by path, None for one that is missing. arguments: of the command."""

    command: str
    arguments: tuple[str, ...]
    files: dict[str, bytes | None]


def value_of_setting(found: Setting) -> SearchStrategy[Any]:
    """Values in and out of a setting's range, and of any type."""
    likely: dict[type, SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(0, 9) | st.integers(0, 2**20),
        float: st.floats(0, 2) | st.floats(),
        str: st.sampled_from([*(found.choices or ()), *ODD_TEXTS]),
    }
    return likely.get(found.type, VALUES) | VALUES


@st.composite
def of_settings(draw: st.DrawFn) -> Draw:
    """Settings in the file or behind the command."""
    command = draw(st.sampled_from(list(SCHEMAS)))
    given = {}
    for found in draw(
        st.lists(st.sampled_from(list(settings(SCHEMAS[command]()))), max_size=3)
    ):
        given[found.key] = draw(value_of_setting(found))
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    file = FILES.get(command, "config.yaml")
    options = draw(
        st.sampled_from([["--dry-run"], ["--dry-run"], ["--dry-run", "--all"], []])
    )
    if command == "fit" and draw(st.integers(0, 4)) == 0:
        options = [
            "--dry-run",
            "--cluster",
            "nodes=2,gpus=8,gpu_gib=80,cpus=96",
            "--no-measure",
        ]
    return Draw(command, ("--config", file, *options, *overrides), {})


@st.composite
def of_yaml(draw: st.DrawFn, contents: dict[str, bytes]) -> Draw:
    """The text of the file."""
    command = draw(st.sampled_from(list(SCHEMAS)))
    file = FILES.get(command, "config.yaml")
    content = draw(damaged(contents[file]) | st.just(DEEP))
    return Draw(command, ("--config", file, "--dry-run"), {file: content})


@st.composite
def of_files(
    draw: st.DrawFn, contents: dict[str, bytes], uses: Sequence[tuple[str, tuple[str, ...]]]
) -> Draw:
    """Files that the commands read. uses: commands with their arguments."""
    command, arguments = draw(st.sampled_from(list(uses)))
    names = draw(
        st.lists(st.sampled_from(sorted(contents)), min_size=1, max_size=2, unique=True)
    )
    return Draw(
        command, arguments, {name: draw(broken(name, contents[name])) for name in names}
    )


@st.composite
def of_arguments(draw: st.DrawFn, uses: Sequence[tuple[str, tuple[str, ...]]]) -> Draw:
    """Arguments left out, repeated, exchanged, or of another kind."""
    command, arguments = draw(st.sampled_from(list(uses)))
    words = list(arguments)
    odd = st.sampled_from(
        (
            "--trust-run",
            "--step",
            "--steps",
            "--output",
            "--config",
            "--all",
            "--prompts",
            "--model",
            "-1",
            "3-5",
        )
    )
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(words)))
        words[place : place + draw(st.integers(0, 1))] = [
            draw(odd | TEXTS | NUMBERS.map(str))
        ]
    safe = [word.replace("\x00", "") for word in words]  # an operating system passes none
    return Draw(command, tuple(safe), {})


def broken(name: str, content: bytes) -> SearchStrategy[bytes | None]:
    """The file with bytes, lines or values changed, or without it."""
    ways: list[SearchStrategy[Any]] = [damaged(content), st.none(), st.just(DEEP)]
    if name.endswith((".jsonl", ".json")):
        lines = [
            json.loads(line)
            for line in (content.split(b"\n") if name.endswith(".jsonl") else [content])
            if line
        ]
        ways += [changed_lines(lines)] * 6
    return st.one_of(ways)


@st.composite
def changed_lines(draw: st.DrawFn, lines: list[Any]) -> bytes:
    """Values changed at any depth of one of the lines; or one line repeated, or put in place of another."""
    found = copy.deepcopy(lines)
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, len(found) - 1))
        found[place] = draw(changed(found[place]))
    if draw(st.integers(0, 4)) == 0:
        found.insert(
            draw(st.integers(0, len(found))), draw(st.sampled_from(found) | VALUES)
        )
    as_they_are = draw(st.booleans())
    return b"\n".join(
        json.dumps(line, ensure_ascii=as_they_are).encode("utf-8", "surrogatepass")
        for line in found
    ) + draw(st.sampled_from([b"\n", b"", b"\r\n"]))


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A value of JSON with one part replaced, left out or added."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 9)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(keys))
        way = draw(st.integers(0, 9))
        if way == 0:
            del value[key]
        elif way == 1 and isinstance(value, dict):
            value[draw(TEXTS)] = draw(VALUES)
        else:
            value[key] = draw(changed(value[key]))
        return value
    return draw(VALUES)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes cut off, left out, doubled, or replaced."""
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 40)) | st.just(len(content)))
    odd = st.binary(max_size=4) | TEXTS.map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )
    return content[:start] + draw(odd | st.just(content[start:end] * 2)) + content[end:]
