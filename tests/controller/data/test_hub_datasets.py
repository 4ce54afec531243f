"""Data sets by their name on the hub: what is a name, what is asked of `datasets`, and what is said without
it.
"""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from controller.config import load
from controller.data.hub import HubDataset, hub_dataset
from controller.data.records import read_records
from controller.preflight.checks import check
from tests.controller.config_workspace import refusal
from tests.refusals import refused
from workers.errors import DataError

ROWS = {
    "train": [{"question": "1+1=", "solution": "2"}],
    "test": [{"question": "2+2=", "solution": "4"}],
}


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """`datasets` as far as it is used, with what was asked of it: the package is no requirement
    of the tests.
    """
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(
        path: str, name: str | None = None, *, split: str
    ) -> list[dict[str, str]]:
        asked.append((path, name, split))
        if path != "openai/gsm8k":
            raise ConnectionError(f"Couldn't reach {path!r} on the Hub")
        return ROWS[split]

    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    vars(module).update(load_dataset=load_dataset, disable_progress_bars=lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("controller.data.hub.version", lambda name: "4.0.0")
    return asked


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("openai/gsm8k", HubDataset("openai/gsm8k", "", "train")),
        ("openai/gsm8k:main@test", HubDataset("openai/gsm8k", "main", "test")),
        ("openai/gsm8k@train[:10%]", HubDataset("openai/gsm8k", "", "train[:10%]")),
        ("model/gsm8k", None),  # below a folder that is there
        ("./openai/gsm8k", None),
        ("gone/train.jsonl", None),
        ("a/b/c", None),
        ("train.jsonl", None),
    ],
)
def test_a_name_of_the_hub_is_told_from_a_path(
    workspace: Path, path: str, expected: HubDataset | None
) -> None:
    assert hub_dataset(path) == expected


def test_a_configuration_names_split_and_subset(
    workspace: Path, datasets: list[tuple[str, str | None, str]]
) -> None:
    names = [
        "data.train=openai/gsm8k:main",
        "data.validation=openai/gsm8k:main@test",
        "data.prompt_key=question",
    ]
    check(load("config.yaml", names))
    assert datasets == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert read_records("openai/gsm8k:main@test", "question") == ROWS["test"]
    assert "openai/gsm8k@test." in refusal(
        "data.train=openai/gsm8k",
        "data.validation=openai/gsm8k",
        "data.prompt_key=question",
    )
    with refused("openai/gsm8k record 1", DataError):
        read_records("openai/gsm8k", "prompt")


def test_without_a_network_or_the_package_a_line_says_what_to_do(
    workspace: Path,
    datasets: list[tuple[str, str | None, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = refusal("data.train=somebody/sums")
    assert said.startswith("data.train: ") and "ConnectionError" in said
    assert "`hf download somebody/sums --repo-type dataset --local-dir data/sums`" in said
    monkeypatch.setattr("controller.data.hub.find_spec", lambda name: None)
    assert '`pip install "datasets>=4"`' in refusal("data.train=openai/gsm8k")
