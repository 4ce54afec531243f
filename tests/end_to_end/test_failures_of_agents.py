"""Engines and the driver die under runs with agents: every session is trained once, with the tokens that it
had.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import ray

from controller.config import load
from controller.engines import engine_pool
from controller.observability.run_folder import step_file
from controller.rollout.sample_files import read_samples, read_step
from tests.end_to_end import faults
from tests.end_to_end.elsewhere import (
    KEY,
    Agents,
    agent_settings,
    free_port,
    names_of,
    unaccounted,
)
from tests.end_to_end.faults import RunWithFaults, differences, engine_pids, run_with
from tests.end_to_end.processes import ROOT, marked_environment, settings_file, stopped
from workers.config.roles import GATEWAY_KEY
from workers.engine.session_record import SessionRecord

AGENT = """
import time

import openai


def run(record, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = list(record["prompt"])
    for turn in range(3):
        answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
        messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": f"Again, {turn}."}]
        time.sleep(PAUSE * (0.2 + record["number"] % 5 / 2))
    return len(answer.content or "") / 100
"""
TWO_ENGINES = ("rollout.replicas=2", "run.steps=2")
OF_PROCESSES = ("rollout.tensor_parallel=2",)


def local(folder: Path, name: str, pause_s: float) -> list[str]:
    (folder / "agent.py").write_text(f"PAUSE = {pause_s}\n{AGENT}")
    return [*agent_settings(folder, name), f"rollout.agent={folder / 'agent.py'}:run"]


def replayed(run: RunWithFaults, step: int) -> int:
    """Turns that came from a record."""
    found = read_step(step_file(run.config.run_folder, step), put=lambda block: block)
    return sum(
        node["replayed"] for score in found.by_sample.values() for node in score.session
    )


def to_kill(pids: list[int], what: str) -> list[int]:
    """The actor, its engine's processes, or all below the actor: agents too."""
    below = [
        pid
        for pid in pids[1:]
        if what == "all" or "VLLM" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert bool(below) == (what != "actor")
    return below or pids[:1]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "more"), [("actor", ()), ("engine", OF_PROCESSES), ("all", OF_PROCESSES)]
)
def test_agents_start_again_and_get_the_turns_that_a_lost_engine_made(
    ray_session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    more: tuple[str, ...],
) -> None:
    monkeypatch.setattr(engine_pool, "LOOK_SECONDS", 0.2)

    def kill(run) -> None:
        pids, actor = engine_pids(run), run.roles.rollouts.actors[0]

        def when_a_turn_is_known() -> None:
            while not any(
                session.nodes
                for session in ray.get(actor.partial_responses.remote()).values()
            ):
                time.sleep(0.1)
            # The driver looks once a second.
            faults.send(signal.SIGKILL, to_kill(pids, what), after_s=2.5)

        threading.Thread(target=when_a_turn_is_known, daemon=True).start()

    usual = run_with([*local(tmp_path, "usual", 0.8), *TWO_ENGINES, *more], {})
    run = run_with([*local(tmp_path, "killed", 0.8), *TWO_ENGINES, *more], {2: kill})
    assert run.last["restarts/engines"] == 1
    assert differences(run, usual) == []
    assert replayed(run, 2) > 0 == replayed(usual, 2)


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_killed_run_that_generates_ahead_goes_on_with_its_agents_sessions(
    tmp_path: Path, elsewhere: bool
) -> None:
    """Killed after step 3, it resumes from the checkpoint of step 2, with sessions that were under way."""
    port, environment = free_port(), marked_environment() | {GATEWAY_KEY: KEY}
    settings = (
        agent_settings(tmp_path, "ahead")
        if elsewhere
        else local(tmp_path, "ahead", pause_s=2.0)
    )
    settings += ["run.steps=5", "batch.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    settings += ["rollout.max_staleness=2", "run.checkpoint_every=2", "run.resume=auto"]
    settings += ["rollout.agent=http", f"rollout.gateway.port={port}"] if elsewhere else []
    fit = [sys.executable, "-m", "controller.fit", *settings_file(tmp_path), *settings]
    config = load(None, settings)
    with Agents(port, threads=12 if elsewhere else 0, pause_s=2.0) as agents:
        killed = stopped(signal.SIGKILL, "step 3", fit, environment)
        assert (killed.code, killed.left) == (-signal.SIGKILL, [])
        cut = read_samples(config.run_folder / "checkpoints" / "samples" / "step-2.npz")
        again = subprocess.run(
            fit, cwd=ROOT, env=environment, text=True, capture_output=True
        )
    assert again.returncode == 0, again.stderr
    assert "going on from" in again.stdout
    lines = (config.run_folder / "lengths.jsonl").read_text().splitlines()
    trained = Counter(place for line in lines for place in json.loads(line)["prompts"])
    assert trained == dict.fromkeys(range(5 * 2), 2)
    sessions = {
        seed: found
        for seed, found in cut.partial.items()
        if isinstance(found, SessionRecord)
    }
    assert any(session.nodes for session in sessions.values())
    steps = [
        read_step(step_file(config.run_folder, step), put=lambda block: block)
        for step in (3, 4, 5)
    ]
    later = {
        name: score.session
        for rollout in steps
        for name, score in zip(
            names_of(config, rollout), rollout.by_sample.values(), strict=True
        )
    }
    for seed, session in sessions.items():
        if f"{seed:016x}" in later:
            kept = [
                node["said"]["content"] for node in later[f"{seed:016x}"] if node["kept"]
            ]
            assert [
                node.said["content"] for node in session.nodes if node.received
            ] == kept[: len(session.nodes)]
    if not elsewhere:
        found = sum(node["replayed"] for nodes in later.values() for node in nodes)
        assert found == sum(len(session.nodes) for session in sessions.values())
    else:
        assert unaccounted(config, agents, 5, cut=True) == []
