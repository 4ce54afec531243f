"""`--dry-run --json`: every section that is printed has its key, and a refusal has its parts."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from controller import fit, preferences, reward_model, sft
from controller.preflight.page import error_record
from workers.errors import ConfigError

CLUSTER = ("--cluster", "nodes=1,gpus=8,gpu=H100", "--no-measure", "resources.device=cuda")
FACTS: dict[str, set[str]] = {
    "configuration": {"settings"},
    "placement": {"device", "pools", "roles", "reserved"},
    "sizes": {"steps", "longest_sequence", "folder", "sequences_per_step"},
    "automatic": {"choices"},
    "caps": {"passes"},
    "notes": set(),
    "inputs": {"tokens"},
    "cluster": {"nodes", "gpus", "nodes_of_ranks"},
    "memory": {"fits"},
    "time": {"phases", "step", "tokens_per_second", "limit"},
}
"""Facts of each section, beside its lines."""


def titles_of(text: str) -> list[str]:
    return [
        re.split(r"[,:]", title)[0]
        for title in re.findall(r"^== (.*) ==$", text, re.MULTILINE)
    ]


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("== ")]


SFT_SETTINGS = """\
model: {path: model}
data: {train: sft.jsonl, max_tokens: 64}
batch: {sequences_per_step: 4}
run: {steps: 2}
resources: {device: cpu}
"""
CASES: dict[str, tuple[Callable[[list[str]], int], tuple[str, ...]]] = {
    "fit": (fit.main, ("--config", "config.yaml", "--all", "rollout.replicas=2")),
    "fit on a cluster": (fit.main, ("--config", "config.yaml", *CLUSTER)),
    "sft": (sft.main, ("--config", "sft.yaml")),
}


@pytest.mark.parametrize("name", CASES)
def test_every_printed_section_has_its_key_and_its_lines(
    name: str, workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first case waits for torch, which a dry run imports to compare numerics."""
    (workspace / "sft.jsonl").write_text(
        json.dumps({"prompt": "1+1=", "response": "2"}) + "\n"
    )
    (workspace / "sft.yaml").write_text(SFT_SETTINGS)
    main, arguments = CASES[name]
    command = [*arguments, "--dry-run"]
    assert main(command) == 0
    text = capfd.readouterr().out
    assert main([*command, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document.pop("exit_code"), document.pop("errors")) == (0, [])
    assert list(document) == titles_of(text)
    assert [
        line for section in document.values() for line in section["lines"] if line
    ] == lines_of(text)
    for name, section in document.items():
        assert FACTS[name] <= section.keys(), name
    assert document["placement"]["reserved"]["CPU"] > 0
    assert document["inputs"]["tokens"][0]["count"] == 1


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "fit": fit.main,
    "sft": sft.main,
    "preferences": preferences.main,
    "reward-model": reward_model.main,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_refused_configuration_is_an_object_of_every_command(
    name: str, workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (workspace / "small.yaml").write_text(
        "model: {path: model}\nresources: {device: cpu}\n"
    )
    overrides = ["data.train=gone.jsonl", "policy.optimizer.warmup_steps=-1"]
    for word in overrides:
        arguments = ["--config", "small.yaml", "--dry-run", "--json", word]
        assert COMMANDS[name](arguments) == 2
        out, err = capfd.readouterr()
        document = json.loads(out)
        assert document["exit_code"] == 2
        assert err.count("error: ") == len(document["errors"])
        for error in document["errors"]:
            assert error.keys() == {"type", "setting", "value", "problem", "fix", "text"}
        assert word.partition("=")[0] in [error["setting"] for error in document["errors"]]


def test_json_without_a_dry_run_is_refused(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fit.main(["--config", "config.yaml", "--json"]) == 2
    (error,) = json.loads(capfd.readouterr().out)["errors"]
    assert (error["setting"], error["fix"]) == ("--json", "Add --dry-run")


@pytest.mark.parametrize(
    ("text", "setting", "value", "problem", "fix"),
    [
        ("a.b=1: too small. Raise it.", None, None, "a.b=1: too small", "Raise it"),
        ("run.dir=a: b: full. Make room.", "run.dir", "a", "b: full", "Make room"),
        (
            "run.steps=-1: must be at least 0.",
            "run.steps",
            "-1",
            "must be at least 0",
            None,
        ),
        ("data.train must be set.", "data.train", None, "must be set", None),
        (
            "policy.data_parallel=9 is more than 8. Lower it.",
            "policy.data_parallel",
            "9",
            "is more than 8",
            "Lower it",
        ),
        (
            "rollout.agent_command=python a.py: failed. Mend it.",
            "rollout.agent_command",
            "python a.py",
            "failed",
            "Mend it",
        ),
        ("--step=9: no samples. Give 1.", "--step", "9", "no samples", "Give 1"),
        (
            "train.jsonl:3: not JSON. Mend it.",
            None,
            None,
            "train.jsonl:3: not JSON",
            "Mend it",
        ),
        ("runs/a: in use.", None, None, "runs/a: in use", None),
    ],
)
def test_an_error_has_its_parts(
    text: str, setting: str | None, value: str | None, problem: str, fix: str | None
) -> None:
    record = error_record(ConfigError(text))
    assert (record["setting"], record["value"], record["problem"], record["fix"]) == (
        setting,
        value,
        problem,
        fix,
    )
    assert record["text"] == text
