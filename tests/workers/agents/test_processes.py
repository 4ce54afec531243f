"""Agents that raise, hang, die, grow or answer nonsense, in real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from tests.end_to_end.processes import living
from workers.agents.processes import RUNNER, AgentPool, session_variables
from workers.batch.score import Score
from workers.errors import EpisodeError
from workers.user_code.session_keys import new_session_key

VARIABLES = session_variables(
    "http://127.0.0.1:1/s/a/v1", "http://127.0.0.1:1/s/a", "secret"
)


def hide_process(pid_file: str) -> None:
    """Start a process in a session of its own, whose parent ends."""
    start = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2).pid)"
    Path(pid_file).write_bytes(
        subprocess.run([sys.executable, "-c", start], check=True, stdout=-1).stdout
    )


async def obey(record: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Do what the record says."""
    match record["do"]:
        case "raise":
            raise ValueError("no key")
        case "exit":
            os._exit(7)
        case "hang":
            await asyncio.sleep(1000)
        case "hide":  # a process whose parent ends, in a session of its own
            hide_process(record["pid_file"])
        case "kill" | "segfault" | "leave" as way:
            hide_process(record["pid_file"])
            os.kill(
                os.getpid(),
                {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "leave": 0}[way],
            )
            os._exit(0)
        case "grow":
            held = bytearray(300 * 2**20)
            time.sleep(1000 + len(held))
        case "spread":
            for _ in range(9):
                subprocess.Popen(["sleep", "1000"])
            time.sleep(1000)
    return record["value"]


def tell(record: dict[str, Any], base_url: str, api_key: str) -> Any:
    found = [
        base_url,
        api_key,
        *(os.environ[name] for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL")),
    ]
    return {
        "reward": 1,
        "right": found
        == [VARIABLES["OPENAI_BASE_URL"], "secret", *found[:1], base_url[:-3]],
    }


def played(
    agent: Any,
    *records: dict[str, Any],
    memory_gib: float = 0.25,
    timeout_s: float = 3.0,
    variables: dict[str, str] = VARIABLES,
) -> list[Any]:
    """What came of each record, all at once: a score, None, or why it failed."""

    async def one(pool: AgentPool, record: dict[str, Any]) -> Any:
        try:
            return await pool.run(record, variables)
        except EpisodeError as failure:
            return str(failure)

    async def all_of_them() -> list[Any]:
        packed = agent if isinstance(agent, str) else cloudpickle.dumps(agent)
        pool = AgentPool(packed, timeout_s, memory_gib=memory_gib, processes=8)
        try:
            return await asyncio.gather(*(one(pool, record) for record in records))
        finally:
            (source,) = (
                child for child in psutil.Process().children() if RUNNER in child.cmdline()
            )
            assert living([child.pid for child in source.children(recursive=True)]) == []
            await pool.stop()

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("way", ["hide", "kill", "segfault", "leave"])
def test_processes_of_an_agent_end_with_its_session_however_it_ends(
    way: str, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    (end,) = played(obey, {"do": way, "value": 1.0, "pid_file": str(pid_file)})
    assert end == Score(1.0, "") if way == "hide" else "ended its process" in end
    pid = int(pid_file.read_text())
    for _ in range(100):  # a keeper whose session is over kills on its own
        if not living([pid]):
            break
        time.sleep(0.05)
    assert living([pid]) == []


def test_an_agent_costs_its_session_alone_and_leaves_no_process() -> None:
    records = [
        {"do": word, "value": None} for word in ("raise", "exit", "hang", "grow", "spread")
    ]
    values = [
        {"do": "", "value": value}
        for value in (0.5, None, {"reward": 2, "tries": 3}, {"tries": 3}, "much")
    ]
    *failed, number, nothing, mapping, unnamed, text = played(obey, *records, *values)
    raised, died, late, grown, spread = failed
    assert "ValueError: no key" in raised and "ended its process" in died
    assert "rollout.agent_timeout_s=3" in late
    assert (
        "rollout.agent_memory_gib=0.25" in grown and "rollout.agent_processes=8" in spread
    )
    assert (number, nothing, mapping) == (
        Score(0.5, ""),
        None,
        Score(2.0, "", {"tries": 3.0}),
    )
    assert "'reward'" in unnamed and "'much'" in text


def test_a_function_finds_its_session_in_arguments_and_environment() -> None:
    assert played(tell, {}) == [Score(1.0, "", {"right": 1.0})]


COMMAND = """
import json, os, sys
record = json.load(sys.stdin)
print("said", record["prompt"], os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"])
print(record["last"])
sys.exit(record["code"])
"""


def test_a_command_reads_the_record_and_prints_the_reward_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "agent.py").write_text(COMMAND)
    long = '{"reward": 0.25,' + " " * 200_000 + '"steps": 2}'
    lasts = [
        json.dumps({"reward": 0.25, "steps": 2}),
        "3",
        "",
        '{"steps": 2}',
        '{"reward": NaN}',
        long + "\n\n",
    ]
    records = [{"prompt": "1+1=", "last": last, "code": 0} for last in lasts] + [
        {"prompt": "é", "last": "", "code": 3}
    ]
    found = played(f"{sys.executable} '{tmp_path}/agent.py'", *records)
    assert found[:4] == [Score(0.25, "", {"steps": 2.0}), None, None, None]
    assert "finite" in found[4] and "exit status 3" in found[6]
    assert found[5] == found[0]
    assert "said 1+1= secret http://127.0.0.1:1/s/a/v1" in capfd.readouterr().out


ENDS = {
    "sys.exit(3)": "exit status 3",
    "sys.exit('no such price')": "exit status 1: no such price",
    "raise ValueError('no answer\\nin two lines')": "exit status 1: ValueError: no answer in two lines",
    "import openai": "openai.py shadows the package openai. Rename it)",
    "import openai.gone": "openai.py shadows the package openai. Rename it)",
    "os.kill(os.getpid(), 9)": "SIGKILL: 9>",
    "sys.exit(os.environ['OPENAI_API_KEY'])": "exit status 1: session-key-...",
}


def test_a_command_that_fails_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # A file of the user in the place of a package.
    (tmp_path / "openai.py").write_text("from openai import OpenAI")
    (tmp_path / "agent.py").write_text(
        "import json, os, sys\nexec(json.load(sys.stdin)['do'])"
    )
    variables = session_variables(
        "http://127.0.0.1:1/s/a/v1", "http://127.0.0.1:1/s/a", new_session_key()
    )
    found = played(
        f"{sys.executable} '{tmp_path}/agent.py'",
        *({"do": do} for do in ENDS),
        variables=variables,
    )
    for failure, end in zip(found, ENDS.values(), strict=True):
        assert end in failure, failure
    assert "in two lines" in capfd.readouterr().err


async def tell_key(record: dict[str, Any], base_url: str, api_key: str) -> float:
    print("the key is", api_key, flush=True)
    raise ValueError(api_key)


def test_a_key_that_an_agent_prints_or_raises_is_hidden(
    capfd: pytest.CaptureFixture[str],
) -> None:
    key = new_session_key()
    variables = session_variables(
        "http://127.0.0.1:1/s/a/v1", "http://127.0.0.1:1/s/a", key
    )
    (failure,) = played(tell_key, {}, variables=variables)
    shown = "".join(capfd.readouterr())
    assert (
        "the key is session-key-..." in shown and "ValueError: session-key-..." in failure
    )
    assert key not in shown and key not in failure


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_agents_keep_hosts_that_either_name_excludes_from_a_proxy(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "inner.example")
    variables = session_variables(
        "http://127.0.0.1:1/s/a/v1", "http://127.0.0.1:1/s/a", "secret"
    )
    assert variables["NO_PROXY"] == variables["no_proxy"] == "inner.example,127.0.0.1"
