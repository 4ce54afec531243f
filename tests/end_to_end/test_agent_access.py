"""What docs/security.md promises of agents that a run starts: who can reach an engine, and with which key."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ballast.sampling_commands import generate
from tests.end_to_end.test_agents import agent

__all__ = ["agent"]
pytestmark = pytest.mark.usefixtures("ray_session")

SPY = '''
import json
import os
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil

FOLDER = Path(__FOLDER__)


def status(url, key):
    try:
        return urlopen(Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=30).status
    except HTTPError as error:
        return error.code


def meet(number, access):
    """Write our access down, and return that of the other session, while both are open."""
    (FOLDER / f"part-{number}").write_text(json.dumps(access))
    (FOLDER / f"part-{number}").rename(FOLDER / f"access-{number}")
    other = FOLDER / f"access-{1 - number}"
    while not other.exists():
        time.sleep(0.1)
    return json.loads(other.read_text())


def run(record, base_url, api_key):
    import openai

    other = meet(record["number"], [base_url, api_key])
    server = base_url.partition("/s/")[0]
    found = {
        "own": status(f"{base_url}/models", api_key),
        "wrong key": status(f"{base_url}/models", api_key[:-1]),
        "no key": status(f"{base_url}/models", ""),
        "other session": status(f"{other[0]}/models", api_key),
        "other route": status(f"{server}/v1/models", api_key),
        "metrics": status(f"{server}/metrics", api_key),
        "key of the environment": os.environ["OPENAI_API_KEY"] == api_key,
    }
    actor = next(each for each in psutil.Process().parents() if "ray::" in each.name() + " ".join(each.cmdline()))
    sockets = [each.laddr for each in actor.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    found["gateway"] = [each.ip for each in sockets if str(each.port) == server.rpartition(":")[2]]
    (FOLDER / f"found-{record['number']}").write_text(json.dumps(found))
    messages = [{"role": "user", "content": "Hello"}]
    openai.OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(model="any", messages=messages)
    return 1.0
'''


def test_an_agent_reaches_its_own_session_alone_and_no_key_is_written(
    agent: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spy.py").write_text(SPY.replace("__FOLDER__", repr(str(tmp_path))))
    settings = OmegaConf.from_dotlist(
        [setting for setting in agent if not setting.startswith("rollout.agent=")]
    )
    OmegaConf.save(settings, tmp_path / "config.yaml")
    output = tmp_path / "samples"
    given = ["--config", str(tmp_path / "config.yaml"), f"--output={output}", "--prompts=2"]
    assert (
        generate.main(
            [
                *given,
                f"rollout.agent={tmp_path / 'spy.py'}:run",
                "rollout.samples_per_prompt=1",
            ]
        )
        == 0
    )
    refused = dict.fromkeys(("wrong key", "no key", "other session"), 401) | dict.fromkeys(
        ("other route", "metrics"), 404
    )
    expected = {
        "own": 200,
        **refused,
        "key of the environment": True,
        "gateway": ["127.0.0.1"],
    }
    assert [
        json.loads((tmp_path / f"found-{number}").read_text()) for number in range(2)
    ] == [expected] * 2
    keys = [
        json.loads((tmp_path / f"access-{number}").read_text())[1] for number in range(2)
    ]
    written = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    said = "".join(capfd.readouterr())
    assert len({*keys}) == 2 and min(map(len, keys)) > 40 and written
    assert not any(
        key in said or any(key.encode() in content for content in written) for key in keys
    )
