"""Reward functions that raise, hang, die or return nonsense, in real processes."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator

import cloudpickle
import psutil
import pytest

from workers.reward_process import Call, RewardFunction, RewardProcess
from workers.score import Score


def obey(response: str) -> object:
    """Do what the response says."""
    match response:
        case "raise":
            raise ValueError("no such answer")
        case "hang":
            time.sleep(1000)
        case "exit":
            os._exit(7)
        case "leave":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "nan":
            return float("nan")
        case "text":
            return "high"
    return {"reward": float(len(response)), "answer": response}


async def obey_in_time(response: str) -> object:
    if response == "late":
        await asyncio.sleep(1000)
    await asyncio.sleep(0.01)
    return obey(response)


def obey_all(responses: list[str], factor: list[float]) -> list[object]:
    return [f * len(r) if r != "raise" else obey(r) for r, f in zip(responses, factor, strict=True)]


def packed(
    *functions: Callable[..., object], columns: tuple[str, ...] = (), weight: float = 1.0
) -> list[RewardFunction]:
    return [RewardFunction(f.__name__, weight, cloudpickle.dumps(f), columns) for f in functions]


@pytest.fixture
def process() -> Iterator[Callable[..., RewardProcess]]:
    started: list[RewardProcess] = []

    def start(functions: list[RewardFunction]) -> RewardProcess:
        started.append(RewardProcess(functions, timeout_s=0.5, concurrency=4))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def run(process: RewardProcess, *responses: str) -> list[Score]:
    scores = process.run([Call(i, response, {"factor": 2.0}) for i, response in enumerate(responses)])
    assert sorted(scores) == list(range(len(responses)))
    return [scores[i] for i in range(len(responses))]


FAILURES = [
    ("raise", "obey: raised ValueError: no such answer"),
    ("hang", "it took more than reward.timeout_s=0.5 s"),
    ("exit", "it ended its process (exit code 7)"),
    ("leave", "obey: raised SystemExit: 3"),
    ("interrupt", "obey: raised KeyboardInterrupt"),
    ("nan", "obey: the reward function returned nan for 'nan'."),
    ("text", "obey: the reward function must return numbers, it returned 'high' for 'text'."),
]


def test_every_failure_costs_its_sample_alone(process: Callable) -> None:
    scores = run(process(packed(obey)), "a", *(word for word, _ in FAILURES), "exit", "ccc")
    assert [score.failure for score in scores] == ["", *(reason for _, reason in FAILURES), FAILURES[2][1], ""]
    assert [score.reward for score in scores] == [1.0, *[0.0] * (len(FAILURES) + 1), 3.0]
    assert scores[1].response == "raise"
    assert scores[-1].answer == "ccc"


def test_coroutine_functions_run_side_by_side_and_are_ended_in_time(process: Callable) -> None:
    scores = run(process(packed(obey_in_time)), "late", "a", "exit", "bb", "raise", "leave", "interrupt")
    assert [score.reward for score in scores] == [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    assert scores[5].failure == "obey_in_time: raised SystemExit: 3"
    assert scores[0].failure == "obey_in_time: took more than reward.timeout_s=0.5 s"


def test_a_batched_function_gets_all_at_once_and_each_alone_after_a_failure(process: Callable) -> None:
    scores = run(process(packed(obey_all, columns=("factor",))), "a", "raise", "bb")
    assert [score.reward for score in scores] == [2.0, 0.0, 4.0]
    assert scores[1].failure == "obey_all: raised ValueError: no such answer"


def test_several_functions_are_summed_by_weight_and_logged_each(process: Callable) -> None:
    def short(response: str) -> float:
        return -len(response)

    functions = [*packed(obey, weight=2.0), *packed(short, weight=0.5)]
    (score,) = run(process(functions), "abcd")
    assert score.reward == 2 * 4 - 0.5 * 4
    assert score.parts == {"obey": 4.0, "short": -4.0}
    assert score.answer == "abcd"


def test_the_process_ends_with_its_owner(process: Callable) -> None:
    run(owner := process(packed(obey)), "a")
    children = [child for child in psutil.Process().children() if "workers.reward_process:serve" in child.cmdline()]
    assert len(children) == 1
    owner.stop()
    assert not children[0].is_running()
