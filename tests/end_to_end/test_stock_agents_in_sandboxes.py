"""Five stock agents play the sessions of a whole run, each in a bubblewrap sandbox."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_whole_loop import run_loop
from tests.workers.rollout import agent_model
from tests.workers.sandbox.conftest import needs_bubblewrap
from tests.workers.sandbox.test_stock_agents import AGENTS, PACKAGES

pytestmark = [needs_bubblewrap, pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
CLIENTS = ("curl", "openai_client", "openai_agents", "pydantic_ai", "smolagents")
COMMAND = """
record=$(cat)
case "$record" in
*'"client": "curl"'*)
    body='{"model": "any", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}'
    curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
        -H "Content-Type: application/json" -d "$body" || exit 1
    echo
    [ -e SECRET ] && hidden=0 || hidden=1
    echo "{\\"reward\\": 1, \\"curl\\": 1, \\"hidden\\": $hidden}" ;;
*) printf '%s' "$record" | PYTHONPATH=PACKAGES python3 FOLDER/play.py ;;
esac
"""
PLAY = """
name = RECORD["client"]
try:
    globals()[name]()
except Exception as error:  # the policy may call what does not exist, or never end
    if type(error).__module__.partition(".")[0] not in ("agents", "pydantic_ai", "smolagents"):
        raise
print(json.dumps({"reward": 1, name: 1, "hidden": int(not os.path.exists("SECRET"))}))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the sandbox's user reads. Another pytest may close the folders above tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def write_agents(folder: Path, secret: Path) -> None:
    command = COMMAND.replace("PACKAGES", PACKAGES).replace("FOLDER", str(folder))
    (folder / "agent.sh").write_text(command.replace("SECRET", str(secret)))
    (folder / "play.py").write_text(AGENTS + PLAY.replace("SECRET", str(secret)))


def test_five_stock_agents_play_a_run_in_sandboxes(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a file of the machine")
    for parent in [tmp_path, *tmp_path.parents[:3]]:
        parent.chmod(0o755)  # it is not the modes that hide it
    write_agents(folder, secret)
    agent_model.save(tmp_path / "model")
    records = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} + 3?"}],
            "question": f"What is {number} + 3?",
            "client": CLIENTS[number % len(CLIENTS)],
        }
        for number in range(64)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    run = run_loop(
        [
            f"run.dir={tmp_path / 'runs'}",
            "run.steps=1",
            f"model.path={tmp_path / 'model'}",
            f"data.train={tmp_path / 'train.jsonl'}",
            "data.shuffle=false",
            "data.max_prompt_tokens=512",
            f"batch.prompts_per_step={len(CLIENTS)}",
            "rollout.samples_per_prompt=2",
            "rollout.cpu_kv_cache_gib=0.25",
            "rollout.sampling.max_new_tokens=48",
            "rollout.tool_parser=hermes",
            "rollout.max_turns=8",
            "rollout.max_episode_tokens=1024",
            "rollout.max_concurrent=3",
            f"rollout.agent_command=sh {folder / 'agent.sh'}",
            "rollout.agent_timeout_s=300",
            f"rollout.sandbox.kind=bubblewrap:{PACKAGES}:{folder}",
            "rollout.sandbox.memory_gib=4",
            "rollout.sandbox.processes=128",
            "policy.max_tokens_per_micro_batch=2048",
        ]
    )
    (step,) = run.outcome.steps
    assert (step["rollout/samples"], step["reward/failures"]) == (10, 0)
    assert step["reward/mean"] == 1 and step["reward/hidden"] == 1
    assert step["policy/rollout_mismatch_max"] < 1e-4
    played = dict.fromkeys(CLIENTS, 0)
    for score in run.rollout.by_sample.values():
        assert not score.failure and score.parts["hidden"] == 1 and score.session
        for name in CLIENTS:
            played[name] += name in score.parts
    assert all(played.values()), played
