"""Servers of OpenEnv: their tools as prompts, and sessions that are played, fail, wait and end."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.openenv.stand_in import StandIn, serving
from workers.environment import Turn
from workers.errors import ConfigError, EpisodeError
from workers.openenv.environment import pack_server_environment
from workers.openenv.tasks import records as read_tasks
from workers.user_code.environments import EnvironmentPool
from workers.user_code.task_sources import task_records


@pytest.fixture(params=[True, False], ids=["typed", "tools"])
def counting(request: pytest.FixtureRequest) -> Iterator[tuple[StandIn, str]]:
    stand_in = StandIn(typed=request.param)
    with serving(stand_in) as url:
        yield stand_in, url


@pytest.fixture
def typed() -> Iterator[tuple[StandIn, str]]:
    stand_in = StandIn(typed=True)
    with serving(stand_in) as url:
        yield stand_in, url


def call(record: dict[str, Any], name: str = "", **arguments: Any) -> Turn:
    function = {
        "name": name or record["tools"][0]["function"]["name"],
        "arguments": arguments,
    }
    return Turn("", tool_calls=[{"id": "1", "function": function}])


async def play(pool: EnvironmentPool, record: dict[str, Any], *turns: Turn) -> list[Any]:
    """Return what came of the reset and every turn, or the failure that ended the episode."""
    answers: list[Any] = []
    try:
        async with pool.episode() as environment:
            answers.append(await environment.reset(record))
            for turn in turns:
                answers.append(await environment.step(turn))
    except EpisodeError as failure:
        answers.append(str(failure))
    return answers


def play_all(
    url: str, *episodes: tuple[dict[str, Any], list[Turn]], seconds: float = 20.0
) -> list[Any]:
    pool = EnvironmentPool(pack_server_environment(f"openenv:{url}"), timeout_s=seconds)

    async def gather() -> Any:
        try:
            return await asyncio.gather(
                *(play(pool, record, *turns) for record, turns in episodes)
            )
        finally:
            await pool.stop()

    return list(asyncio.run(gather()))


def wait_for_no_session(stand_in: StandIn) -> None:
    for _ in range(500):
        if not stand_in.open_sessions:
            return
        time.sleep(0.01)
    raise AssertionError(f"{stand_in.open_sessions} sessions are open")


def test_a_session_is_played_by_tools(counting: tuple[StandIn, str]) -> None:
    stand_in, url = counting
    records = task_records(f"openenv:{url}?seeds=2")
    assert [record["prompt"][0]["content"] for record in records] == [
        "Count above ten."
    ] * 2
    (tool,) = records[0]["tools"]
    assert tool["function"]["name"] == ("count_action" if stand_in.typed else "count")
    assert "metadata" not in tool["function"]["parameters"]["properties"]
    turns = [call(records[1], by=3), call(records[1], by=None), call(records[1], by=9)]
    ((opening, first, wrong, last),) = play_all(url, (records[1], turns))
    assert json.loads(opening) == 0 and stand_in.seeds[-1] == 1
    assert (
        first.text[0]["role"] == "tool"
        and first.text[0]["content"] == "3"
        and not first.done
    )
    assert (first.reward, wrong.reward, last.reward) == (3.0, 0.0, 9.0) and last.done
    assert "by: should be a number" in wrong.text[0]["content"]
    wait_for_no_session(stand_in)


def test_a_turn_without_a_call_ends_the_episode_and_one_in_error_does_not(
    typed: tuple[StandIn, str],
) -> None:
    stand_in, url = typed
    (record,) = task_records(f"openenv:{url}?seeds=1&prompt=Go")
    assert record["prompt"][0]["content"] == "Go"
    unreadable = Turn("x", errors=["the call is no JSON"])
    ((_, unread, unknown, end),) = play_all(
        url, (record, [unreadable, call(record, "other", by=1), Turn("x")])
    )
    assert "Write the call again" in unread.text[0]["content"] and not unread.done
    assert "count_action" in unknown.text[0]["content"] and unknown.reward == 0
    assert end.done and end.reward == 0
    wait_for_no_session(stand_in)
    assert stand_in.closed_by_message == 1
    assert stand_in.found_nobody == 0, "a server's close of the session is waited for"


def test_a_server_that_fails_costs_its_sample_and_every_session_ends(
    typed: tuple[StandIn, str],
) -> None:
    """Beside a good one, at once."""
    stand_in, url = typed
    (record,) = task_records(f"openenv:{url}?seeds=1")
    words = ["crash", "raise", "nan", "text", "hang"]
    episodes = [(record, [call(record, by=word)]) for word in words]
    *failed, good = play_all(url, *episodes, (record, [call(record, by=11)]), seconds=2.0)
    reasons = [
        "ended the session",
        "division by zero",
        "not a finite number",
        "no JSON",
        "reward.timeout_s",
    ]
    for word, reason, answers in zip(words, reasons, failed, strict=True):
        assert reason in answers[-1], word
    assert good[-1].done and good[-1].reward == 11.0
    wait_for_no_session(stand_in)


def test_samples_wait_for_a_session_of_a_full_server() -> None:
    stand_in = StandIn(typed=True, most=1)
    with serving(stand_in) as url:
        (record,) = task_records(f"openenv:{url}?seeds=1")
        answers = play_all(url, *[(record, [call(record, by=11)])] * 3)
        assert [answer[-1].reward for answer in answers] == [11.0] * 3


def test_a_sample_waits_for_a_full_server_no_longer_than_its_time() -> None:
    with serving(StandIn(typed=False)) as url:
        (record,) = task_records(f"openenv:{url}?seeds=1")
    with serving(StandIn(typed=False, most=0)) as url:
        ((failure,),) = play_all(url, (record, []), seconds=1.0)
    assert "reset took more than reward.timeout_s=1" in failure


def test_calls_of_a_turn_are_made_in_order_until_the_episode_is_done(
    typed: tuple[StandIn, str],
) -> None:
    """Their rewards are added, and the one of the reset: 0.5 + 6 + 7, and not 100."""
    _, url = typed
    (record,) = task_records(f"openenv:{url}?seeds=1")
    task = record["task"] | {"reset": {"reward": 0.5}}
    calls = [
        {
            "id": str(number),
            "function": {"name": "count_action", "arguments": {"by": number}},
        }
        for number in (6, 7, 100)
    ]
    ((opening, turn),) = play_all(
        url, (record | {"task": task}, [Turn("", tool_calls=calls)])
    )
    assert opening == "0", "metadata is not read"
    assert (turn.reward, turn.done) == (13.5, True)
    assert [message["content"] for message in turn.text] == ["6", "13"]


def test_records_of_a_file_get_the_tools_and_say_what_reset_takes(
    typed: tuple[StandIn, str], tmp_path: Path
) -> None:
    _, url = typed
    file = tmp_path / "prompts.jsonl"
    prompt = [{"role": "user", "content": "Count."}]
    rows = [{"prompt": prompt, "reset": {"from": 8}, "level": 2}, {"prompt": prompt}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = task_records(f"openenv:{url}?file={file}")
    assert [set(record) for record in records] == [
        {"prompt", "level", "tools", "task"},
        {"prompt", "tools", "task"},
    ]
    answers = play_all(url, *((record, [call(record, by=3)]) for record in records))
    assert [(answer[0], answer[1].done) for answer in answers] == [
        ("8", True),
        ("0", False),
    ]
    file.write_text('{"prompt": "x", "reset": 3}\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_tasks(f"openenv:{url}?file={file}")
