"""Reward functions that raise, hang, die or return nonsense, in real processes."""

import asyncio
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from workers.batch.score import Score
from workers.user_code.rewards import Call, RewardFunction, RewardProcess


class UnprintableError(Exception):
    """Its text raises."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def write_everywhere(text: bytes) -> None:
    """Write to every socket of this process, whoever it belongs to."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, text)
        except OSError:
            pass


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
        case "part of a frame":
            write_everywhere(bytes(2))
            time.sleep(1000)
        case "no frame":
            write_everywhere(b"a library says hello")
        case "long":
            raise ValueError("x" * 10**7)
        case "unprintable":
            raise UnprintableError
        case "an unprintable value":
            return UnprintableError()
        case "a long value":
            return "x" * 10**7
        case "a long answer":
            return {"reward": 1.0, "answer": "x" * 2**25}
        case "a large number":
            return 10**400
        case "beyond float32":
            return 1e300
        case "a part that is none":
            return {"reward": 1.0, "exact": float("nan")}
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
    return [
        f * len(r) if r != "raise" else obey(r)
        for r, f in zip(responses, factor, strict=True)
    ]


def packed(
    *functions: Callable[..., object], columns: tuple[str, ...] = (), weight: float = 1.0
) -> list[RewardFunction]:
    return [
        RewardFunction(f.__name__, weight, cloudpickle.dumps(f), columns) for f in functions
    ]


@pytest.fixture
def process() -> Iterator[Callable[..., RewardProcess]]:
    started: list[RewardProcess] = []

    def start(functions: list[RewardFunction]) -> RewardProcess:
        started.append(RewardProcess(functions, timeout_s=2, concurrency=4))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def run(process: RewardProcess, *responses: str) -> list[Score]:
    scores = process.run(
        [Call(i, response, {"factor": 2.0}) for i, response in enumerate(responses)]
    )
    assert sorted(scores) == list(range(len(responses)))
    return [scores[i] for i in range(len(responses))]


FAILURES = [
    ("raise", "obey: raised ValueError: no such answer"),
    ("hang", "it took more than reward.timeout_s=2 s"),
    ("exit", "it ended its process (exit code 7)"),
    ("leave", "obey: raised SystemExit: 3"),
    ("interrupt", "obey: raised KeyboardInterrupt"),
    ("part of a frame", "it took more than reward.timeout_s=2 s"),
    ("no frame", "it ended its process (killed: it wrote to our connection)"),
    ("long", "obey: raised ValueError: xxx"),
    ("unprintable", "obey: raised UnprintableError"),
    (
        "a long answer",
        "it ended its process (killed: its answer has more than 16,777,216 bytes)",
    ),
    *(
        (
            word,
            f"obey: the reward function must return finite float32 numbers, it returned {value}",
        )
        for word, value in (
            ("a large number", "1000"),
            ("beyond float32", "1e+300"),
            ("a part that is none", "{'exact': nan, 'reward': 1.0}"),
            ("nan", "nan for 'nan'"),
            ("text", "'high' for 'text'"),
            ("a long value", "'xxx"),
            ("an unprintable value", "<UnprintableError instance"),
        )
    ),
]


def test_every_failure_costs_its_sample_alone(process: Callable) -> None:
    scores = run(process(packed(obey)), "a", *(word for word, _ in FAILURES), "exit", "ccc")
    for score, reason in zip(
        scores, ["", *(reason for _, reason in FAILURES), FAILURES[2][1], ""], strict=True
    ):
        assert score.failure.startswith(reason) and len(score.failure) < 400
        assert bool(score.failure) == bool(reason)
    assert [score.reward for score in scores] == [1.0, *[0.0] * (len(FAILURES) + 1), 3.0]
    assert scores[1].response == "raise"
    assert scores[-1].answer == "ccc"


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, int]
) -> object:
    # What one call writes, another one does not read.
    extra_info["calls"] = extra_info.get("calls", 0) + 1
    return {
        "score": float(solution_str == ground_truth),
        "acc": extra_info["calls"] == 1,
        "pred": data_source,
    }


@pytest.mark.parametrize(
    "truth",
    [{"ground_truth": "4"}, {"reward_model": {"ground_truth": "4", "style": "rule"}}],
)
@pytest.mark.parametrize("extra", [{}, {"extra_info": None}, {"extra_info": {"index": 3}}])
def test_verls_compute_score_runs_as_it_is(
    process: Callable, truth: dict[str, object], extra: dict[str, object]
) -> None:
    columns = {"data_source": "gsm8k"} | truth | extra
    functions = packed(compute_score, columns=tuple(columns))
    scores = process(functions).run(
        [Call(number, text, columns) for number, text in enumerate("445")]
    )
    assert [score.failure for score in scores.values()] == [""] * 3
    assert [score.reward for score in scores.values()] == [1.0, 1.0, 0.0]
    assert [(score.parts, score.answer) for score in scores.values()] == [
        ({"acc": 1.0}, "gsm8k")
    ] * 3


def test_half_a_character_of_a_function_stays_in_its_process(process: Callable) -> None:
    def halves(response: str) -> dict[str, object]:
        if response == "raises":
            raise ValueError("y\udfff")
        return {"reward": 1, "answer": "x\ud800", "z\ud800": 2}

    found, failed = run(process(packed(halves)), "a", "raises")
    assert (found.answer, found.parts, failed.failure) == (
        "x?",
        {"z?": 2.0},
        "halves: raised ValueError: y\\udfff",
    )


def test_coroutine_functions_run_side_by_side_and_are_ended_in_time(
    process: Callable,
) -> None:
    scores = run(
        process(packed(obey_in_time)),
        "late",
        "a",
        "exit",
        "bb",
        "raise",
        "leave",
        "interrupt",
    )
    assert [score.reward for score in scores] == [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0]
    assert scores[5].failure == "obey_in_time: raised SystemExit: 3"
    assert scores[0].failure == "obey_in_time: took more than reward.timeout_s=2 s"


def test_what_a_function_prints_is_shown_and_cut(
    process: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    def talk(response: str) -> float:
        print("scored")
        print("x" * 10**7)
        print("one more word\n" * 10**6, file=sys.stderr)
        return 1.0

    run(talking := process(packed(talk)), "a", "b", "c")
    talking.stop()
    shown = capsys.readouterr()
    assert shown.out.startswith("scored\nxxx")
    for text in shown.out, shown.err:
        assert 10**5 < len(text) < 2 * 10**6
        assert "more than 1,000,000 bytes" in text.splitlines()[-1]


def test_a_batched_function_gets_all_at_once_and_each_alone_after_a_failure(
    process: Callable,
) -> None:
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
