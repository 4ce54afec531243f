"""The command: exit codes, the page, certificate.json, and where a dry run and a report show it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ballast.certify.__main__ import main
from ballast.certify.certificate import Certificate
from ballast.certify.findings import Finding, Level
from ballast.certify.page import WIDTH, page_lines
from controller.config import load
from controller.lifecycle.input_lines import certificate_lines
from controller.observability.certificates import read_certificate
from controller.observability.report_tables import certificate_table
from tests.ballast.certify.planted_rewards import HACKED, RIGHT

GOOD = [
    {"prompt": f"How much is {n} + {7 * n}?", "answer": str(8 * n)} for n in range(1, 20)
]


def write_inputs(folder: Path, source: str) -> list[str]:
    (folder / "reward.py").write_text(source)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, GOOD)))
    return [
        "--quick",
        "--reward",
        f"{folder}/reward.py:reward",
        "--data",
        f"{folder}/data.jsonl",
    ]


def test_a_clean_task_exits_with_0_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(write_inputs(tmp_path, RIGHT)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("level quick, about a minute")
    assert max(map(len, lines[1:-1])) <= WIDTH
    content = json.loads((tmp_path / "certificate.json").read_text())
    assert content["level"] == "quick"
    assert content["data"] == [f"{tmp_path}/data.jsonl"]


def test_a_configuration_without_a_model_is_certified_by_its_parts(tmp_path: Path) -> None:
    write_inputs(tmp_path, RIGHT)
    reward = {"function": f"{tmp_path}/reward.py:reward"}
    configuration = {"data": {"train": f"{tmp_path}/data.jsonl"}, "reward": reward}
    (tmp_path / "mine.yaml").write_text(json.dumps(configuration))
    assert main(["--quick", f"{tmp_path}/mine.yaml"]) == 0


def test_a_certain_defect_exits_with_1_and_users_code_runs_elsewhere(
    tmp_path: Path,
) -> None:
    source = f"import os\nassert os.getpid() != {os.getpid()}\n" + HACKED["reward.constant"]
    assert main(write_inputs(tmp_path, source)) == 1
    findings = json.loads((tmp_path / "certificate.json").read_text())["findings"]
    assert [row["name"] for row in findings if row["level"] == "certain"] == [
        "reward.constant"
    ]


def test_what_a_reward_prints_stays_out_of_the_json(tmp_path: Path) -> None:
    """Of a process: its stdout is what a program reads."""
    source = RIGHT.replace("def reward(", "print('loaded', flush=True)\n\n\ndef reward(", 1)
    assert "loaded" in source
    command = [
        sys.executable,
        "-m",
        "ballast",
        "certify",
        *write_inputs(tmp_path, source),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["level"] == "quick"
    assert "loaded" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--quick"],
        ["missing.yaml"],
        ["--reward", "missing.py:reward", "--data", "data.jsonl"],
        ["--reward", "workers.reward_functions:exact_match"],
        ["--reward", "workers.reward_functions:exact_match", "--data", "missing.jsonl"],
        [
            "--reward",
            "workers.reward_functions:exact_match",
            "--data",
            "data.jsonl",
            "--answer-key",
            "none",
        ],
    ],
)
def test_what_cannot_be_read_exits_with_2_and_a_line(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_inputs(tmp_path, RIGHT)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "certificate.json").exists()


def certificate_of(path: Path) -> Certificate:
    certificate = Certificate("mine.yaml", "quick", [str(path)])
    certificate.add(
        Finding(
            "reward.constant", Level.CERTAIN, "A " * 200, "x" * 200, "b", "c\n\x1b[31m" * 99
        )
    )
    certificate.add_table("panel", [{"policy": "p" * 70, "mean": 0.5, "spread": 0.25}])
    certificate.add_coverage("data", "all records", "paraphrases")
    certificate.skip("tools", "none")
    return certificate


def test_the_page_has_80_columns_and_steers_no_terminal() -> None:
    lines = page_lines(certificate_of(Path("data.jsonl")))
    assert max(map(len, lines)) <= WIDTH
    assert all(line.isprintable() for line in lines)


def test_a_dry_run_shows_the_certificate_of_its_data(workspace: Path) -> None:
    config = load(workspace / "config.yaml")
    data = next(iter(config.data.weights))
    assert certificate_lines(config) == []
    file = Path(data).with_name("certificate.json")
    file.write_text(json.dumps(certificate_of(Path(data)).to_json()))
    (line,) = certificate_lines(config)
    assert "1 certain defect, 0 likely, 0 notes: reward.constant" in line
    os.utime(file, (1, 1))
    certificate = read_certificate([data])
    assert certificate is not None
    assert certificate.is_older


def test_a_report_shows_the_certificate(workspace: Path) -> None:
    config = load(workspace / "config.yaml")
    data = next(iter(config.data.weights))
    assert certificate_table(config) == []
    Path(data).with_name("certificate.json").write_text(
        json.dumps(certificate_of(Path(data)).to_json())
    )
    (table,) = certificate_table(config)
    assert [row["name"] for row in table.rows] == ["reward.constant"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"findings": 3}', '{"findings": [3], "data": []}']
)
def test_a_file_that_is_no_certificate_is_left_alone(content: str, workspace: Path) -> None:
    config = load(workspace / "config.yaml")
    Path(next(iter(config.data.weights))).with_name("certificate.json").write_text(content)
    assert certificate_lines(config) == []
