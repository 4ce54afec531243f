"""What users write by mistake: a dry run refuses it as a run would, with code 2 and one line."""

from pathlib import Path

import pytest

from tests.controller.bad_inputs import BadInput, check_refused, rows

RECORD = '{"prompt": "1+1=", "solution": "2"}\n'


def append(file: str, text: str) -> object:
    """Writes `text` behind what the workspace's file holds."""

    def write(folder: Path) -> None:
        with (folder / file).open("a") as opened:
            opened.write(text)

    return write


DATA = (
    BadInput("truncated line", ["train.jsonl:2 is not JSON"], write=append("train.jsonl", '{"prompt": "1+')),
    BadInput("record without prompt", ["train.jsonl:2 has no 'prompt'"], write=append("train.jsonl", '{"x": 1}')),
    BadInput(
        "prompt of another type",
        ["train.jsonl record 2", "int"],
        write=append("train.jsonl", '{"prompt": 7, "solution": "2"}'),
    ),
    BadInput(
        "column missing later",
        ["train.jsonl", "record 2 lacks ['solution']"],
        write=append("train.jsonl", '{"prompt": "1+1="}'),
    ),
    BadInput(
        "nested thousands deep",
        ["train.jsonl:2", "nested more than 100 deep"],
        write=append("train.jsonl", '{"prompt": "x", "solution": ' + "[" * 5000 + "]" * 5000 + "}"),
    ),
    BadInput(
        "nested hundreds deep",
        ["train.jsonl:2", "nested more than 100 deep"],
        write=append("train.jsonl", '{"prompt": "x", "solution": ' + "[" * 400 + "]" * 400 + "}"),
    ),
    BadInput(
        "torn validation data",
        ["validation.jsonl:2 is not JSON"],
        write=append("validation.jsonl", "{"),
    ),
    BadInput("file name of 300 characters", ["data.train", "File name too long"], [f"data.train={'x' * 300}.jsonl"]),
)

SETTINGS = (
    BadInput("run name of 300 characters", ["run.name", "300", "255"], [f"run.name={'x' * 300}"]),
    BadInput("number beyond all memory", ["policy.max_tokens", "at most"], [f"policy.max_tokens={'9' * 23}"]),
    BadInput("seed beyond 64 bits", ["run.seed", "at most"], [f"run.seed={2**64}"]),
    BadInput("override nested thousands deep", ["rollout.engine"], [f"rollout.engine={'[' * 5000}{']' * 5000}"]),
    BadInput(
        "file nested thousands deep",
        ["config.yaml", "nested"],
        write=lambda folder: (folder / "config.yaml").write_text(f"run: {'[' * 5000}{']' * 5000}"),
    ),
)


@rows(*SETTINGS, *DATA)
def test_a_dry_run_refuses_it_in_one_line(
    case: BadInput, workspace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(case, workspace, capfd, monkeypatch, "--dry-run")
