"""A run whose samples are sessions of an agent: a plain loop of OpenAI's client, in a file that knows nothing
of us.
"""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ballast.pages.show import main as show
from ballast.sampling_commands import evaluate, generate
from controller.observability.report import write_report
from tests.end_to_end.test_whole_loop import run_loop
from tests.json_lines import read_lines
from tests.workers.rollout import agent_model
from tests.workers.sandbox.conftest import bubblewrap_starts, needs_bubblewrap

pytestmark = pytest.mark.usefixtures("ray_session")
AGENT = '''
import json
import os

import openai

NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "mul")]


def run(record, base_url, api_key):
    """Ask, answer calls, ask again. Some sessions forget their history in between, one in four dies."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages, calls = list(record["prompt"]), 0
    for turn in range(3):
        answer = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0].message
        if record["number"] % 4 == 0:
            os._exit(1)
        if record["number"] % 4 == 1:
            messages = [*record["prompt"], {"role": "user", "content": f"Turn {turn} is over. Again."}]
            continue
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            calls += 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": call.function.arguments})
    return {"reward": len(messages) / 10, "calls": calls}
'''

COUNTING = """
import openai


def run(record, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    answer = client.chat.completions.create(model="any", messages=record["prompt"]).choices[0].message.content
    with open(FILE, "a") as file:
        print(reward := sum(map(ord, answer)) / 1000, file=file)
    return reward
"""
ASK = """
record=$(cat)
body=$(printf '%s' "$record" | sed 's/^{"prompt"/{"messages"/; s/, "number".*/, "model": "any"}/')
answer=$(curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
    -H "Content-Type: application/json" -d "$body") || exit 1
echo "$answer"
"""
COMMAND = ASK + """echo '{"reward": 0.5, "asked": 1}'"""
COUNTING_COMMAND = ASK + """echo '{"reward": '$((${#answer} % 5))', "asked": 1}'"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a run with the agent."""
    folder = tmp_path_factory.mktemp("agent")
    agent_model.save(folder / "model")
    (folder / "agent.py").write_text(AGENT)
    records = [
        {"prompt": [{"role": "user", "content": f"What is {n} + 3?"}], "number": n}
        for n in range(64)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    return [
        *(
            f"run.dir={folder / 'runs'}",
            f"model.path={folder / 'model'}",
            f"data.train={folder / 'train.jsonl'}",
        ),
        *(
            "run.steps=2",
            "batch.prompts_per_step=4",
            "rollout.samples_per_prompt=3",
            "data.shuffle=false",
        ),
        *(
            "rollout.cpu_kv_cache_gib=0.25",
            "rollout.sampling.max_new_tokens=64",
            "rollout.max_turns=3",
        ),
        *(
            "data.max_prompt_tokens=128",
            "rollout.max_episode_tokens=512",
            "policy.max_tokens_per_micro_batch=1280",
        ),
        *(
            f"rollout.agent={folder / 'agent.py'}:run",
            "policy.optimizer.learning_rate=1e-5",
        ),
    ]


def test_a_run_trains_on_the_sampled_tokens_of_an_agents_sessions(
    agent: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_loop([*agent, "run.name=agent"])
    for step in run.outcome.steps:
        assert step["policy/rollout_mismatch_max"] < 1e-4
        assert (step["rollout/samples"], step["reward/failures"]) == (12, 3)
        assert step["rollout/rows_per_sample"] == 1 + 2 * 3 / 12
        assert step["rollout/turns_mean"] > 1 and step["reward/calls"] > 0
        assert step["session/branches"] == step["rollout/rows_per_sample"]
        assert (
            step["session/sampled_tokens"] == step["rollout/response_tokens_mean"]
            and step["session/agent_s"] > 0
        )
    scores = list(run.rollout.by_sample.values())
    failed = [int(score.failure.startswith("agent: ")) for score in scores]
    assert 0 < sum(failed) < len(failed) and not any(
        score.reward for score in scores if score.failure
    )
    trained = run.rollout.rows.gather()
    sampled = [row["loss_mask"].sum() for row in map(trained.row, range(len(trained)))]
    told = [[node["tokens"] for node in score.session if node["kept"]] for score in scores]
    assert sum(sampled) == sum(map(sum, told))
    assert run.proto.columns["response_tokens"].tolist() == [sum(tokens) for tokens in told]
    folder = agent[0].removeprefix("run.dir=") + "/agent"
    capsys.readouterr()
    recorded = read_lines(Path(folder, "samples.jsonl"))
    assert all("advantage" in row for row in recorded), (
        "no response has a reward of its own"
    )
    assert show([folder, "--step", "2"]) == 0
    (forked, *_) = [
        line.split()[0]
        for line in capsys.readouterr().out.splitlines()[2:]
        if line.split()[2] == "3"
    ]
    assert show([folder, "--step", "2", "--session", forked]) == 0
    shown = capsys.readouterr().out
    assert shown.count("branch from the start") == 2 and shown.count("What is 5 + 3?") == 3
    assert shown.count("version 1, log-prob -") == 3 and "advantage" in shown
    assert "branch" in write_report(Path(folder)).read_text()


def sandbox_settings(folder: Path) -> list[str]:
    """Run the command in a sandbox, if this machine makes any, whose user may read the folder."""
    if not bubblewrap_starts():
        return []
    for parent in [folder, *folder.parents[:3]]:
        parent.chmod(0o755)
    return [f"rollout.sandbox.kind=bubblewrap:{folder}"]


def test_a_command_of_any_language_samples_from_a_configuration(
    agent: list[str], tmp_path: Path
) -> None:
    """The record's prompt is a file of its own that a shell reads; the reward is the last line that it
    prints.
    """
    (tmp_path / "agent.sh").write_text(COMMAND)
    settings = OmegaConf.from_dotlist(
        [setting for setting in agent if not setting.startswith("rollout.agent=")]
    )
    settings.data.validation, settings.validation = settings.data.train, {"prompts": 4}
    OmegaConf.save(settings, tmp_path / "config.yaml")
    given = [
        "--config",
        str(tmp_path / "config.yaml"),
        f"rollout.agent_command=sh {tmp_path / 'agent.sh'}",
    ]
    assert evaluate.main([*given, f"--output={tmp_path / 'evaluated'}"]) == 0
    found = json.loads((tmp_path / "evaluated" / "metrics.json").read_text())
    assert (
        found["samples"],
        found["failed_rewards"],
        found["metrics"]["reward"]["value"],
    ) == (4, 0, 0.5)
    given += [
        f"--output={tmp_path / 'samples'}",
        "--prompts=4",
        "rollout.samples_per_prompt=1",
    ]
    given += sandbox_settings(tmp_path)
    assert generate.main(given) == 0
    lines = read_lines(tmp_path / "samples" / "samples.jsonl")
    assert sorted((line["uid"], line["sample"]) for line in lines) == [
        (str(uid), 0) for uid in range(4)
    ]
    for line in lines:
        assert (line["reward"], line["parts"]) == (
            0.5,
            {"asked": 1.0},
        ) and "failure" not in line
        assert line["response_tokens"] == len(line["response_ids"]) > 0


@needs_bubblewrap
@pytest.mark.slow
def test_a_run_trains_on_sessions_of_a_command_in_a_sandbox(
    agent: list[str], tmp_path: Path
) -> None:
    """Only here do a policy's updates follow a command that reaches the gateway by the sandbox's relay."""
    (tmp_path / "agent.sh").write_text(COUNTING_COMMAND)
    others = [setting for setting in agent if not setting.startswith("rollout.agent=")]
    command = f"rollout.agent_command=sh {tmp_path / 'agent.sh'}"
    sandbox = sandbox_settings(tmp_path)
    run = run_loop([*others, command, *sandbox, "run.name=sandboxed"])
    assert len(run.outcome.steps) == 2
    for step in run.outcome.steps:
        assert (step["reward/failures"], step["reward/asked"]) == (0, 1)
        assert step["policy/rollout_mismatch_max"] < 1e-4
        assert 0 < step["reward/mean"] < 4 and step["policy/grad_norm"] > 0


def test_remax_compares_with_a_greedy_session_of_the_same_agent(
    agent: list[str], tmp_path: Path
) -> None:
    """All prompts are alike, and so are their greedy sessions, which come after the samples."""
    (tmp_path / "agent.py").write_text(f"FILE = {str(tmp_path / 'rewards')!r}\n{COUNTING}")
    (tmp_path / "train.jsonl").write_text(
        8 * '{"prompt": [{"role": "user", "content": "Count."}]}\n'
    )
    settings = [
        *agent,
        f"data.train={tmp_path / 'train.jsonl'}",
        f"rollout.agent={tmp_path / 'agent.py'}:run",
    ]
    run = run_loop(
        [*settings, "run.name=remax", "run.steps=1", "algorithm.advantage=remax"]
    )
    (step,) = run.outcome.steps
    rewards = [float(line) for line in (tmp_path / "rewards").read_text().splitlines()]
    assert (
        step["reward/mean"] == pytest.approx(sum(rewards[:12]) / 12)
        and len(set(rewards[:12])) > 1
    )
    assert rewards[12:16] == pytest.approx([step["reward/greedy"]] * 4)
    assert step["policy/rollout_mismatch_max"] < 1e-4
