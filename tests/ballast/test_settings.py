"""Settings as Python has them mean what the same settings mean in a file or on a command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import ballast
from ballast.settings import load_settings
from controller.config import Config, load, to_yaml
from controller.config.offline import SftConfig
from tests.controller.config_workspace import write_workspace
from tests.refusals import refused


def test_a_mapping_is_the_file_with_the_same_content(tmp_path: Path) -> None:
    file = write_workspace(tmp_path)
    from_mapping = load_settings(Config, yaml.safe_load(file.read_text()), ())
    assert to_yaml(from_mapping) == to_yaml(load(file))


def test_overrides_are_texts_whole_keys_or_sections(tmp_path: Path) -> None:
    file = write_workspace(tmp_path)
    texts = ["policy.data_parallel=4", "rollout.engine={max_num_seqs: 3}", "model.path=a/b"]
    keys = {
        "policy.data_parallel": 4,
        "rollout.engine": {"max_num_seqs": 3},
        "model.path": Path("a/b"),
    }
    sections = {
        "policy": {"data_parallel": 4},
        "rollout": {"engine": {"max_num_seqs": 3}},
        "model": {"path": "a/b"},
    }
    wanted = to_yaml(load(file, texts))
    for overrides in (texts, keys, sections):
        assert to_yaml(load_settings(Config, file, overrides)) == wanted


ITSELF: dict[str, Any] = {}
ITSELF["run"] = ITSELF


@settings(max_examples=20)  # each reads the whole schema
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="$"), max_size=200))
@example(text="~")
@example(text="null")
@example(text="1e3")
def test_a_text_arrives_as_it_is(text: str) -> None:
    assume(text != "???")
    assert (
        load_settings(
            Config, None, {"model.path": "m", "data.system_prompt": text}
        ).data.system_prompt
        == text
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"policy.data_parallel": "two"}, "policy.data_parallel"),
        ({"policy": {"rank": 2}}, "policy.rank"),
        ({"data.system_prompt": "???"}, "data.system_prompt"),
        ({"model.path": object()}, "model.path"),
        ({"run.seed": 10**5001}, "run.seed"),
        ({"run.name": ITSELF}, "run.name"),
        (ITSELF, "a mapping of settings"),
        ("policy.data_parallel=2", "overrides='policy.data_parallel=2'"),
        (5, "overrides=5"),
        ([5], "overrides=[5]"),
    ],
)
def test_what_cannot_be_a_setting_is_refused_in_one_line(
    overrides: Any, named: str
) -> None:
    with refused(named):
        load_settings(Config, None, overrides)


def test_numbers_of_numpy_are_numbers() -> None:
    overrides = {
        "model.path": "m",
        "policy.data_parallel": np.int64(2),
        "policy.optimizer.learning_rate": np.float64(3e-7),
    }
    policy = load_settings(Config, None, overrides).policy
    assert (policy.data_parallel, policy.optimizer.learning_rate) == (2, 3e-7)


def test_other_commands_have_their_own_settings() -> None:
    assert (
        load_settings(
            SftConfig, {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, ()
        ).data.train
        == "t.jsonl"
    )


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ballast.fit(5), "config=5"),  # type: ignore[arg-type]
        (lambda: ballast.sft(b"x"), "config=b'x'"),  # type: ignore[arg-type]
        (lambda: ballast.fit({"model.path": "m"}, callbacks=5), "callbacks=5"),  # type: ignore[arg-type]
        (
            lambda: ballast.preferences({("model.path"): "m"}, callbacks=[print, 5]),
            "callbacks=",
        ),  # type: ignore[list-item]
        (lambda: ballast.fit({"model.path": "m"}, reward=[len, 5]), "reward="),  # type: ignore[arg-type]
        (lambda: ballast.fit({"model.path": "m"}, reward={len: "a"}), "reward="),  # type: ignore[dict-item]
        (lambda: ballast.fit({"model.path": "m"}, reward={len: 10**400}), "reward="),
        (lambda: ballast.generate("config.yaml", prompts=-1), "prompts=-1"),
        (lambda: ballast.generate("config.yaml", prompts="1"), "prompts='1'"),  # type: ignore[arg-type]
        (lambda: ballast.evaluate("config.yaml", output=5), "output=5"),  # type: ignore[arg-type]
        (lambda: ballast.evaluate(model="runs/none"), "--model=runs/none"),
        (
            lambda: ballast.evaluate("config.yaml", output="config.yaml"),
            "--output: config.yaml",
        ),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], named: str
) -> None:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    with refused(named):
        call()
    assert not (tmp_path / "runs").exists()
