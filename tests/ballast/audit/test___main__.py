"""The command: exit codes, the page, JSON, and one line for what cannot be read."""

import json
from pathlib import Path

import numpy as np
import pytest

from ballast.audit.__main__ import main
from ballast.audit.bundle import Bundle
from ballast.audit.bundle_files import write_bundle
from ballast.audit.checks import CHECKS
from tests.ballast.audit.faults import FAULTS, with_facts, with_rows, with_tokens
from tests.ballast.audit.steps import clean_step


def write_run(folder: Path, *steps: Bundle) -> Path:
    for number, step in enumerate(steps, start=1):
        write_bundle(folder / f"step-{number}", with_facts(step, step=number))
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert len(output.err.splitlines()) == 1
    return output.err


def test_a_clean_step_exits_with_0_and_a_line_for_each_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_run(tmp_path, clean_step()))]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[-1] == f"{len(CHECKS)} passed, 0 failed, 0 unknown"
    for name in CHECKS:
        assert f"ok       {name}\n" in page
    assert max(map(len, page.splitlines())) <= 80


def test_a_fault_exits_with_1_and_json_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS["sampler one token late"]
    folder = write_run(tmp_path, clean_step(), fault.plant(clean_step()))
    assert main([str(folder), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["wrong"] is True
    wrong = []
    for step in record["steps"]:
        failed = [finding for finding in step["findings"] if finding["verdict"] == "failed"]
        wrong += [(step["step"], finding["name"], finding["cause"]) for finding in failed]
    assert (2, fault.check, fault.cause) in wrong
    assert {step for step, _, _ in wrong} == {2}
    assert main([str(folder), "--step", "1"]) == 0
    assert main([str(folder / "step-1" / "step.json")]) == 0


def test_columns_that_no_check_reads_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = clean_step()
    bundle = with_tokens(bundle, entropies=np.zeros(bundle.token_count))
    assert (
        main([str(write_run(tmp_path, with_rows(bundle, level=bundle.rows["group"])))]) == 0
    )
    assert "no check reads: entropies, level" in capsys.readouterr().out


def test_two_runs_that_differ_by_one_reward_part_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = clean_step().rows["rewards"].copy()
    rewards[6] += 1
    first = write_run(tmp_path / "a", clean_step(), clean_step())
    second = write_run(
        tmp_path / "b", clean_step(), with_rows(clean_step(), rewards=rewards)
    )
    assert main([str(first), str(second), "--json"]) == 1
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert (difference["step"], difference["stage"], difference["row"]) == (2, "rewards", 6)
    assert main([str(first), str(second)]) == 1
    assert "they part at step 2, in rewards" in capsys.readouterr().out
    assert main([str(first), str(first)]) == 0
    assert "equal to the bit" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", clean_step())
    assert "no such file" in refusal(capsys, str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    assert "neither a bundle nor a recorded run" in refusal(capsys, str(tmp_path / "empty"))
    assert "--step=4" in refusal(capsys, str(folder), "--step", "4")
    assert "one path to check" in refusal(capsys, str(folder), str(folder), str(folder))
    path = folder / "step-1" / "tokens.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "not a whole safetensors file" in refusal(capsys, str(folder))
    (tmp_path / "a" / "step-1" / "step.json").write_text(
        '{"format": "ballast-step", "version": 9}'
    )
    assert "version=9" in refusal(capsys, str(folder))
