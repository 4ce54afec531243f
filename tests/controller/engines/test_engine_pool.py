"""EnginePool over scripted actors: what the driver does when samples fail and engines die. Real
Ray, no vLLM.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import ray

from controller.engines.engine_pool import EnginePool, PartialResponses, Sample
from controller.engines.fleet import RestartBudget
from tests.controller.engines.generation import generate
from tests.end_to_end.processes import living
from workers.batch.dataproto import DataProto
from workers.config.roles import RolloutConfig, SamplingConfig
from workers.engine.requests import ERROR, Response, SampleRequest, SampleResult
from workers.errors import RolloutError

TOKEN = Response(np.ones(1, np.int32), np.zeros(1, np.float32), np.ones(1, np.int32))


@ray.remote(num_cpus=0, max_concurrency=1000)
class ScriptedEngine:
    """Answers every request with its seed as the only token, one by one, except as told.

    script: uid -> what happens: "fail", "die" (the process), "freeze" (the process), "raise" (the stream),
    "hang" (for good, and health with it), "think" (for 3 s, in health), two of them ("think and die"), or
    another when it is tried again ("fail, then answer"). One that was started in another's place has no
    script.
    """

    def __init__(self, index: int, script: dict[str, str]) -> None:
        self.index = index
        self.hung = False
        self.script = script
        self.tries: Counter[str] = Counter()
        self.running = self.most_running = 0
        self.loaded: list[tuple[int, int]] = []
        self.asked = 0
        self.unfinished: dict[int, Response] = {}

    async def start(self) -> None:
        if self.script.get("start") == "raise":
            raise ValueError("no such model")

    async def generate(
        self, requests: list[SampleRequest], sampling: SamplingConfig
    ) -> AsyncIterator[DataProto | list[SampleResult]]:
        self.running += len(requests)
        self.most_running = max(self.most_running, self.running)
        for request in requests:
            self.unfinished[request.attempt] = TOKEN.after(request.begun)
            await asyncio.sleep(0.002)
            action = self.next_action(request.uid)
            self.hung = action == "hang"
            if self.hung:
                await asyncio.sleep(1000)
            if "think" in action:
                await asyncio.sleep(3)
            block, result = self.answer(request, action)
            self.running -= 1
            yield block
            yield [result]

    def next_action(self, uid: str) -> str:
        actions = self.script.get(uid, "").split(", then ")
        self.tries[uid] += 1
        return actions[min(self.tries[uid], len(actions)) - 1]

    def answer(self, request: SampleRequest, action: str) -> tuple[DataProto, SampleResult]:
        if "die" in action:
            os._exit(1)
        if action == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if action == "raise":
            raise RuntimeError("engine dead")
        tokens = len(request.prompt_ids)
        response = self.unfinished.pop(request.attempt)
        if "fail" in action:
            reason = f"refused by {self.index}"
            return DataProto.from_rows([]), SampleResult(
                request.uid,
                request.sample,
                tokens,
                0,
                ERROR,
                weight_version=-1,
                error=reason,
            )
        block = DataProto.from_rows(
            [{"input_ids": np.array([request.seed], dtype=np.int32)}]
        )
        version = self.loaded[-1][1] if self.loaded else 0
        return block, SampleResult(
            request.uid,
            request.sample,
            tokens,
            len(response.ids),
            "stop",
            weight_version=version,
            row=0,
        )

    async def alive(self) -> None:
        pass

    async def partial_responses(self) -> dict[int, Response]:
        return dict(self.unfinished)

    async def health(self) -> None:
        self.asked += 1
        if self.hung:
            await asyncio.sleep(1000)

    async def update_weights(self, payload: np.ndarray, version: int) -> None:
        if self.script.get("weights") == "die":
            os._exit(1)
        if self.script.get("weights") == "refuse":
            raise RolloutError("not of this model")
        self.loaded.append((int(payload.sum()), version))

    async def facts(self) -> dict[str, Any]:
        return {
            "tries": self.tries,
            "most_running": self.most_running,
            "loaded": self.loaded,
            "asked": self.asked,
            "pid": os.getpid(),
        }

    async def stop(self) -> None:
        pass


class Scripted:
    """Scripted engines and the EnginePool over them. alike: engines in the place of others have their scripts
    too.
    """

    def __init__(
        self,
        scripts: list[dict[str, str]],
        restarts: int = 4,
        alike: bool = False,
        **settings: Any,
    ) -> None:
        self.said: list[str] = []
        options = {"by_transfer": settings.pop("by_transfer", False)}
        self.pool = EnginePool(
            lambda replica, attempt: ScriptedEngine.remote(
                replica, scripts[replica] if alike or not attempt else {}
            ),
            RolloutConfig(replicas=len(scripts), **settings),
            RestartBudget(restarts),
            log=self.said.append,
            **options,
        )
        self.pool.start()

    def facts(self, replica: int) -> dict[str, Any]:
        return ray.get(self.pool.actors[replica].facts.remote())

    def sample(self, uids: str, samples: int = 1) -> list[Sample]:
        """A round of which no sample is dropped or tried again."""
        finished, router = generate(
            self.pool, requests_for(uids, samples), SamplingConfig()
        )
        assert (router.dropped, router.retried) == ([], [])
        return finished


@pytest.fixture
def engines(ray_session: None) -> Iterator[Any]:
    found: list[Scripted] = []

    def start(*scripts: dict[str, str], **settings: Any) -> Scripted:
        found.append(Scripted(list(scripts), **settings))
        if not any("start" in script for script in scripts):
            found[-1].pool.wait_started()
        return found[-1]

    yield start
    for started in found:
        started.pool.stop()


def requests_for(uids: str, samples: int = 1) -> list[SampleRequest]:
    pairs = [(uid, sample) for uid in uids for sample in range(samples)]
    return [
        SampleRequest(u, s, np.arange(3, dtype=np.int32), seed=i)
        for i, (u, s) in enumerate(pairs)
    ]


def tokens_of(finished: list[Sample]) -> list[int]:
    return [
        int(ray.get(block).row(result.row)["input_ids"][0]) for result, block in finished
    ]


def versions_of(finished: list[Sample]) -> set[int]:
    return {result.weight_version for result, _ in finished}


def test_results_come_in_the_order_of_the_requests_and_no_engine_has_more_than_max_concurrent(
    engines,
) -> None:
    requests = requests_for("abcdefghij", samples=2)
    seen: list[tuple[str, int]] = []
    started = engines({}, {}, {}, max_concurrent=3)
    finished, router = generate(
        started.pool,
        requests,
        SamplingConfig(),
        lambda results, block: seen.extend(result.key for result in results),
    )
    assert [result.key for result, _ in finished] == [request.key for request in requests]
    assert tokens_of(finished) == [request.seed for request in requests]
    assert sorted(seen) == sorted(request.key for request in requests)
    assert router.dropped == router.retried == []
    assert [started.facts(replica)["most_running"] for replica in range(3)] == [3] * 3


def test_a_failing_sample_is_tried_elsewhere_and_then_dropped_alone(engines) -> None:
    script = {"b": "fail", "c": "fail, then answer"}
    started = engines(script, script, max_retries=2)
    finished, router = generate(started.pool, requests_for("abd"), SamplingConfig())
    assert [result.uid for result, _ in finished] == ["a", "d"]
    assert [(result.uid, result.finish_reason) for result in router.dropped] == [
        ("b", ERROR)
    ]
    assert len(router.retried) == 2
    assert sorted(started.facts(replica)["tries"]["b"] for replica in (0, 1)) == [1, 2]
    finished, router = generate(engines(script).pool, requests_for("c"), SamplingConfig())
    assert (len(finished), router.dropped, len(router.retried)) == (1, [], 1)


WEIGHTS = np.full(3, 2, dtype=np.uint8)  # their sum is 6


@pytest.mark.parametrize("end", ["die", "raise", "hang", "freeze"])
def test_the_requests_of_a_lost_engine_go_to_the_others_and_a_new_one_takes_its_place(
    engines, end: str
) -> None:
    started = engines({"h": end}, {}, max_concurrent=16, max_retries=0, hang_timeout_s=1)
    pool = started.pool
    pool.update_weights(ray.put(WEIGHTS), version=5)
    doomed = started.facts(0)["pid"]
    fatal_first = requests_for("habcdefgijkl")  # the first request goes to replica 0
    seen: Counter[Any] = Counter()
    finished, router = generate(
        pool,
        fatal_first,
        SamplingConfig(),
        lambda results, block: seen.update(result.key for result in results),
    )
    assert tokens_of(finished) == list(range(12))
    assert set(seen.values()) == {1}
    assert router.dropped == router.retried == []
    assert pool.fleet.budget.engines == 1
    assert len(started.said) == 1 and "rollout replica 0 was lost" in started.said[0]
    assert living([doomed]) == []
    while 0 not in pool.fleet.serving:
        started.sample("z")
    assert versions_of(started.sample("habcdefgijkl")) == {5}
    assert started.facts(0)["loaded"] == [(6, 5)] and started.facts(0)["most_running"] > 0


@pytest.mark.parametrize(
    ("script", "rounds", "tokens"),
    [
        ("think and die", 1, 2),
        ("think and fail, then die", 1, 1),
        ("think, then die", 2, 1),
    ],
)
def test_a_lost_engines_request_goes_on_from_its_own_tokens_alone(
    engines, monkeypatch: pytest.MonkeyPatch, script: str, rounds: int, tokens: int
) -> None:
    """A seed comes again: in another try, or in each validation, whose weights differ.

    The engine is asked for what it has begun while it thinks, and dies before it is asked again.
    """
    started = engines({"a": script}, max_retries=1)
    ask = PartialResponses.look

    def ask_once(partial: PartialResponses, actors: Any) -> None:
        if actors and not partial._asked:
            ask(partial, actors)

    monkeypatch.setattr("controller.engines.engine_pool.LOOK_SECONDS", 0.0)
    monkeypatch.setattr(PartialResponses, "look", ask_once)
    for _ in range(rounds):
        finished, _ = generate(started.pool, requests_for("a"), SamplingConfig())
    assert [result.response_tokens for result, _ in finished] == [tokens]
    assert started.pool.fleet.budget.engines == 1


def test_requests_of_two_generations_are_told_apart(engines) -> None:
    pool = engines({}).pool
    generations = [pool.begin(SamplingConfig(), lambda *_: None) for _ in range(2)]
    attempts = set[int]()
    for generation in generations:
        generation.router.submit(requests_for("ab"))
        attempts |= {request.attempt for request in generation.router.assign([0])[0]}
    assert len(attempts) == 4


def test_a_round_waits_for_the_engine_in_the_only_ones_place_and_it_samples_with_the_current_weights(
    engines,
) -> None:
    started = engines({"b": "die"})
    started.pool.update_weights(ray.put(WEIGHTS), version=3)
    finished = started.sample("abc")
    assert [result.uid for result, _ in finished] == ["a", "b", "c"]
    assert versions_of(finished) == {3}


def test_an_engine_that_is_slow_but_answers_is_kept(engines) -> None:
    started = engines({"a": "think"}, hang_timeout_s=1)
    started.sample("a")
    assert started.pool.fleet.budget.engines == 0
    assert started.facts(0)["asked"] >= 1


def test_an_answer_that_came_while_nobody_looked_is_not_late_and_new_weights_end_draining(
    engines,
) -> None:
    """The health of replica 0 is asked at the end of a round, and its answer read after the next weights."""
    started = engines({"a": "think"}, {"b": "think"}, hang_timeout_s=1)
    pool = started.pool
    pool.note_progress(0)
    time.sleep(1.2)
    pool.check_deadlines({0})
    assert pool.fleet.serving == [1]
    time.sleep(1.5)
    pool.update_weights(ray.put(WEIGHTS), version=1)
    pool.check_deadlines(())
    assert pool.fleet.serving == [0, 1] and started.said == []


def test_an_engine_lost_between_rounds_is_replaced_at_the_next_weights(engines) -> None:
    started = engines({"weights": "die"}, {})
    started.pool.update_weights(ray.put(WEIGHTS), version=2)
    assert 1 in started.pool.fleet.serving
    assert versions_of(started.sample("ab")) == {2}
    assert started.pool.fleet.budget.engines == 1


@pytest.mark.parametrize(
    ("uids", "restarts", "used", "reason"),
    [
        ("a", 0, 0, "run.max_restarts=0"),
        ("a", 9, 1, "2 engines in a row died before they finished"),
        # The first one's death does not count.
        ("ba", 9, 2, "2 engines in a row died before they finished"),
    ],
)
def test_past_the_budget_or_when_no_engine_finishes_a_sample_the_cause_comes_first(
    engines, uids: str, restarts: int, used: int, reason: str
) -> None:
    started = engines({"a": "raise"}, restarts=restarts, alike=True, max_concurrent=1)
    with pytest.raises(
        RolloutError,
        match=f"^rollout replica 0 was lost: RuntimeError: engine dead; .*{reason}",
    ):
        started.sample(uids)
    assert started.pool.fleet.budget.engines == used


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_died_or_hangs_while_weights_are_sent_is_noticed(
    engines, number: int
) -> None:
    started = engines({}, {}, hang_timeout_s=2, by_transfer=True)
    started.pool.check_alive()
    os.kill(started.facts(1)["pid"], number)
    started.pool.check_alive()
    assert started.pool.fleet.budget.engines == 1
    assert started.pool.present == ((0, 0),)  # its replacement waits for the next transfer


def test_weights_reach_every_engine_and_what_is_refused_or_cannot_start_is_named(
    engines,
) -> None:
    started = engines({}, {})
    started.pool.update_weights(ray.put(WEIGHTS), version=5)
    assert [started.facts(replica)["loaded"] for replica in (0, 1)] == [[(6, 5)], [(6, 5)]]
    with pytest.raises(RolloutError, match="not of this model"):
        engines({"weights": "refuse"}).pool.update_weights(ray.put(WEIGHTS), version=1)
    with pytest.raises(RolloutError, match=r"rollout replica 1 .*ValueError: no such"):
        engines({}, {"start": "raise"}).pool.wait_started()
