"""Environments that raise, hang, die or answer nonsense, in real processes."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from tests.end_to_end.processes import living
from tests.workers.user_code.test_rewards import write_everywhere
from workers.environment import Observation
from workers.errors import EpisodeError
from workers.user_code.environments import PLAYER, EnvironmentPool


class Obedient:
    """Does what the response says; counts its turns."""

    def reset(self, record: dict[str, Any]) -> Any:
        self.turns = 0
        return self.obey(record["opening"])

    def step(self, response: str) -> Any:
        self.turns += 1
        return self.obey(response)

    def obey(self, word: str) -> Any:
        match word:
            case "raise":
                raise ValueError("no such move")
            case "hang":
                time.sleep(1000)
            case "exit":
                os._exit(7)
            case "number":
                return 3
            case "a number":
                write_everywhere(b"5\n")
            case "large":
                return Observation("x", reward=10**400)
            case "nan":
                return Observation("x", reward=float("nan"))
            case "nothing":
                return None
            case "undecided":
                return Observation("x", done=1)
            case "bytes":
                return Observation(b"x")
            case "unprintable":
                return Observation([{"role": "user", "content": object()}])
        return (
            Observation(f"{word}{self.turns}", reward=0.5, parts={"pid": os.getpid()})
            if word != "go"
            else "go"
        )


class Patient:
    """The same, by coroutine functions."""

    async def reset(self, record: dict[str, Any]) -> Any:
        await asyncio.sleep(0.01)

    async def step(self, response: str) -> Any:
        await asyncio.sleep(1000 if response == "hang" else 0.01)
        return Observation(response.upper(), done=True)


class Closing:
    """Writes what happens to it into a file, as a connection or a sandbox would be opened and closed."""

    def reset(self, record: dict[str, Any]) -> Any:
        self.log = Path(record["opening"])
        self.write("open")
        if self.log.name.startswith("reset"):
            self.obey(self.log.suffix[1:])

    def step(self, response: str) -> Any:
        self.write(response)
        self.obey(response)
        return Observation("x", done=response == "done")

    def close(self) -> None:
        self.write("close")

    def write(self, word: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{word} ")

    def obey(self, word: str) -> None:
        match word:
            case "raise":
                raise ValueError("no such move")
            case "hang":
                time.sleep(1000)


class ClosingLate(Closing):
    """The same, by coroutine functions. A step that is ended writes that, before the environment closes."""

    async def step(self, response: str) -> Any:
        self.write(response)
        if response != "hang":
            self.obey(response)
            return Observation("x", done=response == "done")
        try:
            await asyncio.gather(asyncio.sleep(1000), asyncio.sleep(1000))
        except asyncio.CancelledError:
            self.write("cancelled")

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        self.write("close")


class FailingToClose(Closing):
    def close(self) -> None:
        self.write("close")
        raise OSError("the sandbox is gone")


def pool_of(environment: type) -> EnvironmentPool:
    return EnvironmentPool(cloudpickle.dumps(environment), timeout_s=2.0)


def sources() -> list[psutil.Process]:
    """The source processes of this process' pools; an engine of another test may have its own."""
    return [child for child in psutil.Process().children() if PLAYER in child.cmdline()]


async def episode(pool: EnvironmentPool, *words: str, opening: str = "go") -> list[Any]:
    """What came of every word, or the failure that ended the episode."""
    answers: list[Any] = []
    try:
        async with pool.episode() as environment:
            answers.append(await environment.reset({"opening": opening}))
            for word in words:
                answers.append(await environment.step(word))
    except EpisodeError as failure:
        answers.append(str(failure))
    return answers


def together(pool: EnvironmentPool, *episodes: Any) -> list[list[Any]]:
    """All episodes side by side; then the pool ends."""

    async def gather() -> Any:
        try:
            return await asyncio.gather(*episodes)
        finally:
            await pool.stop()

    return asyncio.run(gather())


FAILURES = [
    ("raise", "step raised ValueError: no such move"),
    ("hang", "step took more than reward.timeout_s=2 s"),
    ("exit", "step ended its process"),
    ("a number", "step ended its process (killed: it wrote to our connection)"),
    ("large", "the reward of an Observation must be a finite float32 number, not 100"),
    ("number", "step must return a workers.environment.Observation, it returned 3."),
    ("nothing", "step must return a workers.environment.Observation, it returned None."),
    ("nan", "the reward of an Observation must be a finite float32 number, not nan"),
    ("undecided", "the done of an Observation must be true or false, not 1."),
    ("bytes", "the text that step returns must be a string or chat messages, not b'x'."),
    (
        "unprintable",
        "step raised TypeError: Object of type object is not JSON serializable",
    ),
]


def test_every_way_to_fail_costs_that_episode_alone() -> None:
    """All at once, beside an episode that outlives them."""
    pool = pool_of(Obedient)
    failing = [episode(pool, "a", word) for word, _ in FAILURES]
    *failed, good = together(pool, *failing, episode(pool, *"abcdef"))
    for answers, (_, reason) in zip(failed, FAILURES, strict=True):
        assert answers[-1].startswith(reason) and len(answers[-1]) < 400
    assert [answers[1].text for answers in failed] == ["a1"] * len(FAILURES)
    assert [observation.text for observation in good[1:]] == [
        "a1",
        "b2",
        "c3",
        "d4",
        "e5",
        "f6",
    ]
    assert sum(observation.reward for observation in good[1:]) == 3.0


def test_a_reset_or_the_import_may_fail_too() -> None:
    pool = pool_of(Obedient)
    openings = ["raise", "exit", "number", "nothing"]
    answers = together(pool, *(episode(pool, "a", opening=opening) for opening in openings))
    assert [answer[0] for answer in answers] == [
        "reset raised ValueError: no such move",
        "reset ended its process",
        "the text that reset returns must be a string or chat messages, not 3.",
        "",
    ]
    pool = EnvironmentPool(b"nonsense", timeout_s=2.0)
    (answers,) = together(pool, episode(pool, "a"))
    assert answers == ["the import of rollout.environment ended its process (exit code 1)"]


def test_processes_are_used_again_unless_their_episode_failed() -> None:
    pool = pool_of(Obedient)

    async def one_after_another() -> list[Any]:
        return [await episode(pool, *words) for words in ("a", "b", ("c", "raise"), "d")]

    (answers,) = together(pool, one_after_another())
    pids = [answer[1].parts["pid"] for answer in answers]
    assert pids[0] == pids[1] == pids[2] != pids[3]
    # Nothing is left of the last episode.
    assert [answer[1].text for answer in answers] == ["a1", "b1", "c1", "d1"]


def test_coroutine_functions_are_awaited_and_ended_in_time() -> None:
    pool = pool_of(Patient)
    good, late = together(pool, episode(pool, "a"), episode(pool, "hang"))
    assert good == ["", Observation("A", done=True, parts={})]
    assert late == ["", "step took more than reward.timeout_s=2 s"]


def test_a_killed_source_process_is_started_again() -> None:
    pool = pool_of(Obedient)

    async def kill_between() -> list[Any]:
        await episode(pool, "a")
        for source in sources():
            source.kill()
        await asyncio.sleep(0.5)
        return await episode(pool, "b")

    (answers,) = together(pool, kill_between())
    assert answers[1].text == "b1"


def test_all_processes_end_with_the_pool_even_one_that_hangs() -> None:
    pool = EnvironmentPool(cloudpickle.dumps(Obedient), timeout_s=60.0)
    mine: list[psutil.Process] = []

    async def look() -> list[Any]:
        while not any(len(source.children()) == 2 for source in sources()):
            await asyncio.sleep(0.1)
        [source] = sources()
        mine.extend([source, *source.children()])
        await pool.stop()
        return []

    together(pool, episode(pool, "a"), episode(pool, "hang"), look())
    assert len(mine) == 3
    assert living([process.pid for process in mine], seconds=5) == []


ENDINGS = {  # words of the policy, and what the environment saw
    "finished": (["done"], "open done close "),
    "limit": (["go", "go"], "open go go close "),
    "raise": (["go", "raise"], "open go raise close "),
    "hang": (["hang"], "open hang close "),
    "cancelled": (["go", "wait"], "open go close "),
    "cancelled in a step": (["hang"], "open hang close "),
    "reset.raise": ([], "open close "),
    "reset.hang": ([], "open close "),
}


async def play_words(pool: EnvironmentPool, log: Path, words: list[str]) -> None:
    async with pool.episode() as environment:
        await environment.reset({"opening": str(log)})
        for word in words:
            await (asyncio.sleep(1000) if word == "wait" else environment.step(word))


async def play_and_end(
    pool: EnvironmentPool, log: Path, words: list[str], seen: str
) -> None:
    """seen: by the environment, before it closes."""
    playing = asyncio.create_task(play_words(pool, log, words))
    if log.name.startswith("cancelled"):
        await asyncio.to_thread(wait_for, log, seen)
        playing.cancel()
    await playing


@pytest.mark.parametrize("environment", [Closing, ClosingLate])
def test_an_environment_is_closed_once_however_its_episode_ends(
    environment: type, tmp_path: Path
) -> None:
    pool = EnvironmentPool(cloudpickle.dumps(environment), timeout_s=1.5)

    async def play_all() -> list[Any]:
        plays = [
            play_and_end(pool, tmp_path / name, words, log.removesuffix("close "))
            for name, (words, log) in ENDINGS.items()
        ]
        results = await asyncio.gather(*plays, return_exceptions=True)
        await pool.stop()
        return results

    results = asyncio.run(play_all())
    for (name, (words, log)), result in zip(ENDINGS.items(), results, strict=True):
        seen = (tmp_path / name).read_text()
        assert seen.replace("cancelled ", "") == log, name
        assert ("cancelled" in seen) == (environment is ClosingLate and "hang" in words), (
            name
        )
        failure = asyncio.CancelledError if name.startswith("cancelled") else EpisodeError
        assert isinstance(
            result, type(None) if name in ("finished", "limit") else failure
        ), name


def test_an_environment_that_fails_to_close_costs_no_sample(
    tmp_path: Path, capfd: Any
) -> None:
    pool = pool_of(FailingToClose)
    good, failed = together(
        pool,
        episode(pool, "go", opening=str(tmp_path / "a")),
        episode(pool, "raise", opening=str(tmp_path / "b")),
    )
    assert good[-1] == Observation("x", parts={})
    assert failed[-1] == "step raised ValueError: no such move"
    assert capfd.readouterr().err.count("close raised OSError: the sandbox is gone") == 2


@pytest.mark.parametrize("word", ["go", "hang"])
def test_an_environment_is_closed_when_the_process_of_its_engine_is_killed(
    word: str, tmp_path: Path
) -> None:
    """word: whether the environment waits for the policy or is busy."""
    log = tmp_path / "log"
    engine = os.fork()
    if not engine:
        pool = EnvironmentPool(cloudpickle.dumps(Closing), timeout_s=60.0)
        asyncio.run(play_words(pool, log, [word, "wait"]))
    wait_for(log, f"open {word} ")
    os.kill(engine, signal.SIGKILL)
    os.waitpid(engine, 0)
    wait_for(log, f"open {word} close ")


def wait_for(log: Path, text: str) -> None:
    for _ in range(1000):
        if log.exists() and log.read_text() == text:
            return
        time.sleep(0.01)
    raise AssertionError(log.read_text())
