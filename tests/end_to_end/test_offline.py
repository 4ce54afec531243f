"""`controller.sft` and `controller.preferences` on a real Ray, over several ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.offline.local_run import (
    OF_COMMAND,
    SETTINGS,
    run_offline,
    write_offline_workspace,
)
from tests.end_to_end.processes import MARK, ROOT, all_end, marked_environment

PLANS = {
    "1 rank": [],
    "2 ranks": ["policy.data_parallel=2", "policy.max_tokens_per_micro_batch=100"],
    "2 ranks, padded": ["policy.data_parallel=2", "model.layout=padded"],
    "context parallel": [
        "policy.parallel.context_parallel=2",
        "policy.parallel.context_parallel_method=ring",
    ],
    "by micro-step": [  # two ranks for sequences above 48 tokens
        "policy.parallel.context_parallel=2",
        "policy.parallel.context_parallel_degree=auto",
        "policy.max_tokens_per_micro_batch=48",
    ],
}


def test_the_command_trains_over_two_ranks_and_leaves_a_model_and_no_process(
    tmp_path: Path,
) -> None:
    write_offline_workspace(tmp_path)
    (tmp_path / "mine.yaml").write_text("run: {name: mine}\n")
    environment = marked_environment() | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "controller.sft",
        "--config",
        "mine.yaml",
        *SETTINGS,
        *OF_COMMAND["sft"],
    ]
    command += ["policy.data_parallel=2", "model.gradient_checkpointing=auto", "-v"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert "starting actors: 2 policy" in done.stdout
    assert "model.gradient_checkpointing=auto: none in all layers" in done.stdout  # on CPUs
    (step,) = [line for line in done.stdout.splitlines() if line.startswith("step 3/3  ")]
    assert len(step) <= 80 and "planned" in step  # -v shows it
    folder = tmp_path / "runs" / "mine"
    assert all(
        (folder / name).exists()
        for name in ("model/config.json", "report.html", "summary.json")
    )
    log = (folder / "run.log").read_text()
    assert (
        log.startswith("=== ")
        and re.search("\nstep 3/3  .*epoch", log)
        and "\x1b" not in log
    )
    assert set(re.findall(r"^\((.+) pid=", log, re.M)) <= {
        "policy dp=0",
        "policy dp=1",
        "raylet",
    }
    assert all_end(environment[MARK]) == []


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("command", ["sft", "preferences"])
def test_c7_curves_do_not_depend_on_ranks_layout_and_context_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_offline_workspace(tmp_path)
    curves = []
    for number, plan in enumerate(PLANS.values()):
        # Ray's processes began in another working directory.
        places = [f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'runs'}"]
        outcome = run_offline(
            command, f"run-{number}", "data.validation=held_out.jsonl", *places, *plan
        )
        curves.append(
            [*(step["policy/loss"] for step in outcome.steps), outcome.after["loss"]]
        )
    assert abs(curves[0][-1] - curves[0][0]) > 1e-3, (
        "the steps change what is to be compared"
    )
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-6)
