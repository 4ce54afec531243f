"""Agents: what is refused before anything starts."""

from pathlib import Path

import pytest

from controller.config import load
from controller.lifecycle.input_lines import tried_lines
from controller.lifecycle.inputs import try_inputs
from controller.preflight.checks import check
from tests.controller.config_workspace import write_workspace
from tests.refusals import refused, refused_rows
from workers.config.roles import GATEWAY_KEY

AGENT = ["rollout.agent=agent.py:run", "rollout.max_turns=2", 'reward.function=""']


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(
        "def run(record, base_url, api_key): ...\nclass Mine: ...\n"
    )
    return write_workspace(tmp_path)


def test_an_agent_needs_no_reward_function_and_may_be_a_command(file: Path) -> None:
    config = load(
        file, [*AGENT, "rollout.gateway.max_request_mib=2", "rollout.agent_memory_gib=0.5"]
    )
    check(config)
    assert config.longest_sequence == config.max_model_tokens == 32 + 2 * 64
    check(
        load(
            file, [*AGENT, "rollout.agent=", "rollout.agent_command=python agent.py --fast"]
        )
    )
    check(
        load(
            file,
            [
                *AGENT,
                "rollout.max_model_tokens=300",
                "policy.max_tokens_per_micro_batch=300",
            ],
        )
    )


def test_a_dry_run_imports_the_agent_and_names_it(file: Path) -> None:
    lines = "\n".join(tried_lines(config := load(file, AGENT), try_inputs(config)))
    assert "agent.py:run: imported" in lines
    command = load(
        file, [*AGENT, "rollout.agent=", "rollout.agent_command=python agent.py"]
    )
    assert "python agent.py: started" in "\n".join(
        tried_lines(command, try_inputs(command))
    )
    for text in (
        "raise ValueError('no')",
        "def run(record): ...",
        "def run(record, base_url, api_key, more): ...",
    ):
        (file.parent / "agent.py").write_text(f"{text}\ndef other(): ...\n")
        with refused("rollout.agent"):
            try_inputs(config)


def test_agents_elsewhere_need_a_secret_and_have_no_processes_here(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = [*AGENT, "rollout.agent=http", "rollout.gateway.port=8123"]
    for key in ("", "short"):
        monkeypatch.setenv(GATEWAY_KEY, key)
        with refused("rollout.agent=http"):
            check(load(file, elsewhere))
    monkeypatch.setenv(GATEWAY_KEY, "a secret of agents")
    check(load(file, elsewhere))
    with refused("rollout.agent_memory_gib"):
        check(load(file, [*elsewhere, "rollout.agent_memory_gib=5"]))


@refused_rows("""
rollout.agent=agent.py:walk
rollout.agent=agents.py:run
rollout.agent=agent.py
rollout.environment rollout.environment=agent.py:Mine
rollout.tools rollout.tools=agent.py
rollout.agent_command rollout.agent_command=python
rollout.agent_command rollout.agent= "rollout.agent_command=python 'agent.py"
rollout.agent_command rollout.agent= rollout.agent_command=python_of_nobody
rollout.gateway.port=8123
rollout.history=template
rollout.max_tool_calls=3
rollout.sampling.max_thinking_tokens=8
data.system_prompt=x
data.continue_last_message=true
algorithm.advantage=gae
algorithm.advantage=gigpo
algorithm.credit=turn
algorithm.credit=turn algorithm.advantage=reinforce_plus_plus
algorithm.gamma_per=turn
algorithm.gamma_per=turn algorithm.advantage=reinforce_plus_plus
reward.overlong_tokens=4
algorithm.loss.name=gspo
algorithm.loss.rollout_correction.weights=sequence
rollout.max_model_tokens=300 policy.max_tokens_per_micro_batch=299
""")
def test_settings_that_agents_make_impossible(
    file: Path, named: str, overrides: list[str]
) -> None:
    with refused(named):
        check(load(file, [*AGENT, *overrides]))


@refused_rows("""
rollout.gateway.max_request_mib=2
rollout.agent_timeout_s=5
rollout.agent_memory_gib=5
rollout.agent_processes=5
""")
def test_settings_without_an_agent(file: Path, named: str, overrides: list[str]) -> None:
    with refused(named):
        check(load(file, overrides))
