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
from workers.errors import ConfigError


def test_a_mapping_is_the_file_with_the_same_content(tmp_path: Path) -> None:
    file = write_workspace(tmp_path)
    from_mapping = load_settings(Config, yaml.safe_load(file.read_text()), ())
    assert to_yaml(from_mapping) == to_yaml(load(file))


def test_overrides_are_texts_whole_keys_or_sections(tmp_path: Path) -> None:
    file = write_workspace(tmp_path)
    wanted = to_yaml(load(file, ["policy.max_tokens=8192", "rollout.engine={max_num_seqs: 3}", "model.path=a/b"]))
    texts = ["policy.max_tokens=8192", "rollout.engine={max_num_seqs: 3}", "model.path=a/b"]
    keys = {"policy.max_tokens": 8192, "rollout.engine": {"max_num_seqs": 3}, "model.path": Path("a/b")}
    sections = {"policy": {"max_tokens": 8192}, "rollout": {"engine": {"max_num_seqs": 3}}, "model": {"path": "a/b"}}
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
    assert load_settings(Config, None, {"model.path": "m", "data.system_prompt": text}).data.system_prompt == text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"policy.ranks": "two"}, r"policy\.ranks must be a whole number"),
        ({"policy": {"rank": 2}}, r"policy\.rank is not a setting; did you mean policy\.ranks"),
        ({"data.system_prompt": "???"}, r"data\.system_prompt: \?\?\? stands for a value that is not set"),
        ({"model.path": object()}, r"model\.path must be a number, a text, true or false, not a object"),
        ({"run.seed": 10**5001}, r"run\.seed must be a number, a text, true or false, not a int"),
        ({"run.name": ITSELF}, r"run\.name: the value '&id001 "),
        (ITSELF, "a mapping of settings holds itself, or is nested too deep"),
        ("policy.ranks=2", "overrides='policy.ranks=2': expected a list of key.sub=value, or a mapping"),
        (5, "overrides=5: expected"),
        ([5], r"overrides=\[5\]: expected"),
    ],
)
def test_what_cannot_be_a_setting_is_refused_in_one_line(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(Config, None, overrides)


def test_numbers_of_numpy_are_numbers() -> None:
    overrides = {"model.path": "m", "policy.ranks": np.int64(2), "policy.optimizer.learning_rate": np.float64(3e-7)}
    policy = load_settings(Config, None, overrides).policy
    assert (policy.ranks, policy.optimizer.learning_rate) == (2, 3e-7)


def test_other_commands_have_their_own_settings() -> None:
    assert load_settings(SftConfig, {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, ()).data.train == "t.jsonl"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ballast.fit(5), "config=5: expected str or Path or Mapping or NoneType, not int"),  # type: ignore[arg-type]
        (lambda: ballast.sft(b"x"), "config=b'x': expected"),  # type: ignore[arg-type]
        (lambda: ballast.fit({"model.path": "m"}, callbacks=5), "callbacks=5: expected a list of functions"),  # type: ignore[arg-type]
        (lambda: ballast.preferences({"model.path": "m"}, callbacks=[print, 5]), "callbacks=.*: expected"),  # type: ignore[list-item]
        (lambda: ballast.fit({"model.path": "m"}, reward=[len, 5]), "reward=.*: expected a function, a list"),  # type: ignore[arg-type]
        (lambda: ballast.fit({"model.path": "m"}, reward={len: "a"}), "reward=.*: expected"),  # type: ignore[dict-item]
        (lambda: ballast.fit({"model.path": "m"}, reward={len: 10**400}), "reward=.*: expected"),
        (lambda: ballast.generate("config.yaml", prompts=-1), "prompts=-1: must be at least 0"),
        (lambda: ballast.generate("config.yaml", prompts="1"), "prompts='1': expected int"),  # type: ignore[arg-type]
        (lambda: ballast.evaluate("config.yaml", output=5), "output=5: expected"),  # type: ignore[arg-type]
        (lambda: ballast.evaluate(model="runs/none"), "--model=runs/none: there is no such run"),
        (lambda: ballast.evaluate("config.yaml", output="config.yaml"), "--output: config.yaml cannot be written"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], message: str
) -> None:
    write_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        call()
    assert not (tmp_path / "runs").exists()
