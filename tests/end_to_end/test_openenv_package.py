"""A run that names an environment's package, as a command: nothing is left of its servers when it is killed."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.end_to_end.processes import marked_environment, settings_file, stopped
from tests.workers.openenv.package import write_wheel
from tests.workers.rollout import agent_model

pytestmark = pytest.mark.slow
PROMPTS, SAMPLES = 4, 2


def test_a_killed_run_leaves_no_server_of_its_package(tmp_path: Path) -> None:
    package = f"openenv:{write_wheel(tmp_path / 'package')}"
    agent_model.save(tmp_path / "model")
    settings = [
        f"run.dir={tmp_path / 'runs'}",
        "run.name=package",
        "run.steps=1000",
        f"model.path={tmp_path / 'model'}",
        f"data.train={package}?seeds=8&prompt=Count.",
        "data.max_prompt_tokens=512",
        f"batch.prompts_per_step={PROMPTS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.environment={package}",
        "rollout.history=keep",
        "rollout.tool_parser=hermes",
        "rollout.max_turns=2",
        "rollout.max_episode_tokens=256",
        "rollout.sampling.max_new_tokens=24",
        "rollout.cpu_kv_cache_gib=0.25",
        "policy.max_tokens_per_micro_batch=1024",
        "resources.dashboard=false",
    ]
    fit = [sys.executable, "-m", "controller.fit", *settings_file(tmp_path), *settings]
    environment = marked_environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    killed = stopped(signal.SIGKILL, "step    2/", fit, environment)
    assert (killed.code, killed.left) == (-signal.SIGKILL, [])
    folder = tmp_path / "runs" / "package"
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    first = next(line for line in lines if "rollout/samples" in line)
    assert (first["rollout/samples"], first["reward/failures"]) == (PROMPTS * SAMPLES, 0)
    assert first["rollout/turns_mean"] >= 1
    samples = (folder / "samples.jsonl").read_text()
    assert samples.count("user: Count.") and "count_action" in samples
