"""The proof of a card leaves no part out because of another, and says how each ended."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from controller.actors.layout import sum_reserved
from controller.config import load
from controller.preflight.checks import check
from tests.gpu.prove import __main__ as program
from tests.gpu.prove.outcome import (
    FAILED,
    LEFT_OUT,
    NOTHING_RAN,
    OUT_OF_TIME,
    PASSED,
    SECONDS,
    Outcome,
    missing_of,
    prove,
)
from tests.gpu.prove.page import BEGIN, END, save_json, section_of, write_section
from tests.gpu.prove.parts import Part, parts_of, seconds_of
from tests.gpu.prove.whole_run import settings_of
from tests.gpu.prove.workloads import WORKLOADS

PROGRAMS = {
    "passes": "from tests.gpu.prove.outcome import write_facts\nwrite_facts(tests={'passed': 3, 'failed': 0})",
    "fails": "print('first')\nraise SystemExit('largest error 0.5')",
    "crashes": "import os, signal\nprint('before', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": (
        "import subprocess, sys, time\n"
        "words = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(words, start_new_session=True)\n"
        "open('child', 'w').write(str(child.pid))\n"
        "print('loading', flush=True)\n"
        "time.sleep(600)"
    ),
    "idles": f"print('2 GPUs are needed')\nraise SystemExit({NOTHING_RAN})",
}


def part(name: str, **changes: object) -> Part:
    planted = Part(name, f"planted: {name}", f"planted_{name}", least_s=0.0, packages=())
    return replace(planted, **changes)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    for name, text in PROGRAMS.items():
        (tmp_path / f"planted_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    monkeypatch.chdir(tmp_path)
    parts = [part(name) for name in ("crashes", "fails", "hangs", "idles", "passes")]
    return [part("lacks", packages=("no_such_package",)), part("needs", gpus=2), *parts]


def test_each_part_has_a_verdict_whatever_the_others_do(
    planted: list[Part], tmp_path: Path
) -> None:
    outcomes = {}
    for index, current in enumerate(planted):
        seconds = 6.0 if current.name == "hangs" else 600.0  # its share is a third: 2 s
        outcomes[current.name] = prove(
            planted, index, seconds_left=seconds, device="cpu", gpus=1, folder=tmp_path
        )
    reasons = {
        name: (outcome.verdict, outcome.reason) for name, outcome in outcomes.items()
    }
    assert reasons == {
        "lacks": (LEFT_OUT, "not installed: no_such_package"),
        "needs": (LEFT_OUT, "needs 2 GPUs, 1 here"),
        "crashes": (FAILED, "killed by SIGSEGV, at: before"),
        "fails": (FAILED, "largest error 0.5"),
        "hangs": (OUT_OF_TIME, "ended after 2 s, at: loading"),
        "idles": (LEFT_OUT, "2 GPUs are needed"),
        "passes": (PASSED, ""),
    }
    assert outcomes["passes"].facts == {"tests": {"passed": 3, "failed": 0}}
    # In a session of its own, as Ray's processes.
    child = int((tmp_path / "child").read_text())
    while (
        psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE
    ):
        time.sleep(0.01)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("minutes", [3, 25, 90])
def test_parts_that_use_all_their_time_leave_time_to_the_others(
    device: str, minutes: int
) -> None:
    """The first parts get what they need at least, and every part of a proof of 90 minutes has time."""
    parts = parts_of(device)
    left = 60.0 * minutes
    given = []
    for index in range(len(parts)):
        given.append(seconds_of(parts[index:], left))
        left -= given[-1]
    assert left == pytest.approx(0, abs=1e-6)
    assert given[0] >= parts[0].least_s
    if minutes == 90:
        assert all(
            seconds >= part.least_s for seconds, part in zip(given, parts, strict=True)
        )


def test_time_that_a_part_leaves_is_shared_by_the_later_ones() -> None:
    parts = [part("a", share=1), part("b", share=2), part("c", share=1)]
    assert [
        seconds_of(parts, 400.0),
        seconds_of(parts[1:], 300.0),
        seconds_of(parts[1:], 390.0),
    ] == [
        100,
        200,
        260,
    ]


def test_some_parts_again_keep_what_the_others_gave(tmp_path: Path) -> None:
    outcomes = [
        Outcome("versions", "versions", PASSED),
        Outcome("quickstart", "a run", FAILED, 3, "why", {"a": [1]}),
    ]
    save_json(tmp_path / "page.json", outcomes)
    options = [
        "--device",
        "cpu",
        "--only",
        "versions",
        "--output",
        str(tmp_path / "page.md"),
    ]
    assert program.main([*options, "--folder", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "page.json").read_text())["parts"]
    assert [part["part"] for part in parts] == ["quickstart", "versions"]
    assert Outcome(**parts[0]) == outcomes[1]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_settings_of_every_run_pass_the_checks(name: str, tmp_path: Path) -> None:
    """A card's session is too short to learn there that a combination is refused."""
    WORKLOADS[name].make(tmp_path, "cpu")
    for device in ("cpu", "cuda"):
        config = load(None, settings_of(WORKLOADS[name], tmp_path, device))
        check(config)
        gpus = next(part.gpus for part in parts_of(device) if part.name == name)
        assert sum_reserved(config, "GPU") == (max(1, gpus) if device == "cuda" else 0)


def test_names_of_parts_are_unique_and_their_files_exist() -> None:
    parts = parts_of("cuda")
    assert len({part.name for part in parts}) == len(parts)
    for current in parts:
        assert Path(*current.module.split(".")).with_suffix(".py").is_file()
        if current.module.endswith("suite"):
            assert Path("tests", "gpu", f"{current.name}.py").is_file()


def test_the_section_replaces_itself_and_nothing_else(tmp_path: Path) -> None:
    facts = {
        "mismatch": [0.001, 0.002],
        "rewards": [0.25, 0.5],
        "start_s": 41.0,
        "card_idle_s": 12.0,
        "first_step_s": 9.5,
        "peak_gib": 60.2,
        "phases": {"rollout": 6.5, "update": 1.5, "step": 9.0},
        "predicted": {
            "prefill": 0.5,
            "decode": 6.0,
            "update": 1.0,
            "optimizer": 0.25,
            "step": 8.0,
        },
        "update_tokens_per_s": 20_000,
        "update_mfu": 0.31,
    }
    outcomes = [
        Outcome(
            "versions",
            "versions",
            PASSED,
            1,
            facts={"packages": {"torch": "2.13"}, "cards": ["H200"]},
        ),
        Outcome("qwen3", "a model", OUT_OF_TIME, 200, "2 of 4 steps | ended", facts),
        Outcome(
            "benchmark", "speed", PASSED, 9, facts={"text": "# card\n| size |\n| 1.5B |"}
        ),
    ]
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{BEGIN}\nold\n{END}\n\n## After\n")
    write_section(page, section_of(outcomes))
    text = page.read_text()
    write_section(page, section_of(outcomes))
    assert page.read_text() == text
    assert text.startswith("# Page\n") and text.endswith("## After\n") and "old" not in text
    for line in (
        "| qwen3 | a model | out of time | 200 | 2 of 4 steps \\| ended |",
        "| qwen3 | 0.001, 0.002 | 0.25, 0.5 | 41 | 12 | 9.5 | 9.00 | 60.2 |",
        "| rollout | 6.50 | 6.50 |",
        "| update | 1.50 | 1.25 |",
        "| 1.5B |",
    ):
        assert line in text.splitlines()
    assert missing_of(part("x", gpus=1), 0) == "needs 1 GPU, 0 here"


@pytest.mark.slow
def test_a_cpu_is_proven_too(tmp_path: Path) -> None:
    """A whole run, a model beside its prediction, a file of tests and the benchmark, small: some minutes."""
    names = ["versions", "test_shared_prefixes", "quickstart", "qwen3_0_6b", "benchmark"]
    options = [
        "--device",
        "cpu",
        "--minutes",
        "12",
        "--only",
        *names,
        "--folder",
        str(tmp_path),
    ]
    assert program.main([*options, "--output", str(tmp_path / "page.md")]) == 0
    parts = json.loads((tmp_path / "page.json").read_text())["parts"]
    assert {part["part"]: part["verdict"] for part in parts} == dict.fromkeys(names, PASSED)
    facts = {part["part"]: part["facts"] for part in parts}
    assert (
        len(facts["quickstart"]["mismatch"]) == 3
        and max(facts["quickstart"]["mismatch"]) < 1e-4
    )
    assert facts["qwen3_0_6b"]["phases"].keys() & facts["qwen3_0_6b"][
        "predicted"
    ].keys() >= {
        "update",
        "step",
    }
    assert SECONDS not in os.environ and sys.executable
