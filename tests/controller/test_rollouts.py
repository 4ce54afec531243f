"""Rollouts over scripted actors: what the driver does when samples fail and engines die. Real Ray, no vLLM."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import ray

from controller.rollouts import RolloutRound, Rollouts
from workers.config import RolloutConfig, SamplingConfig
from workers.errors import RolloutError
from workers.remote_batch import TokenBlock
from workers.rollout.requests import ERROR, SampleRequest, SampleResult


@ray.remote(num_cpus=0, max_concurrency=1000)
class ScriptedEngine:
    """Answers every request with its seed as the only token, one by one, except as told.

    script: uid -> what happens: "fail" (always), "fail once", "die" (the process), "raise" (the stream).
    """

    def __init__(self, index: int, script: dict[str, str]) -> None:
        self.index = index
        self.script = script
        self.tries: Counter[str] = Counter()
        self.running = self.most_running = 0
        self.loaded: list[tuple[int, int]] = []

    async def start(self) -> None:
        if self.script.get("start") == "raise":
            raise ValueError("no such model")

    async def generate(
        self, requests: list[SampleRequest], sampling: SamplingConfig
    ) -> AsyncIterator[TokenBlock | list[SampleResult]]:
        self.running += len(requests)
        self.most_running = max(self.most_running, self.running)
        for request in requests:
            await asyncio.sleep(0.002)
            block, result = self.answer(request)
            self.running -= 1
            yield block
            yield [result]

    def answer(self, request: SampleRequest) -> tuple[TokenBlock, SampleResult]:
        self.tries[request.uid] += 1
        action = self.script.get(request.uid)
        if action == "die":
            os._exit(1)
        if action == "raise":
            raise RuntimeError("engine dead")
        tokens = len(request.prompt_ids)
        if action == "fail" or (action == "fail once" and self.tries[request.uid] == 1):
            reason = f"refused by {self.index}"
            return TokenBlock.from_rows([]), SampleResult(
                request.uid, request.sample, tokens, 0, ERROR, weight_version=-1, error=reason
            )
        block = TokenBlock.from_rows([{"input_ids": np.array([request.seed], dtype=np.int32)}])
        return block, SampleResult(request.uid, request.sample, tokens, 1, "stop", weight_version=0, row=0)

    async def update_weights(self, payload: np.ndarray, version: int) -> None:
        self.loaded.append((int(payload.sum()), version))

    async def facts(self) -> dict[str, Any]:
        return {"tries": self.tries, "most_running": self.most_running, "loaded": self.loaded}

    async def stop(self) -> None:
        pass


class Fleet:
    """Scripted engines and the Rollouts over them."""

    def __init__(self, scripts: list[dict[str, str]], **settings: Any) -> None:
        self.actors = [ScriptedEngine.remote(index, script) for index, script in enumerate(scripts)]
        self.rollouts = Rollouts(self.actors, RolloutConfig(replicas=len(scripts), **settings))

    def facts(self, replica: int) -> dict[str, Any]:
        return ray.get(self.actors[replica].facts.remote())


@pytest.fixture
def fleet(ray_session: None) -> Iterator[Any]:
    fleets: list[Fleet] = []

    def start(scripts: list[dict[str, str]], **settings: Any) -> Fleet:
        fleets.append(Fleet(scripts, **settings))
        return fleets[-1]

    yield start
    for started in fleets:
        started.rollouts.stop()


def requests_for(uids: list[str], samples: int = 2) -> list[SampleRequest]:
    pairs = [(uid, sample) for uid in uids for sample in range(samples)]
    return [SampleRequest(u, s, np.arange(3, dtype=np.int32), seed=i) for i, (u, s) in enumerate(pairs)]


def tokens_of(finished: RolloutRound) -> list[int]:
    blocks = zip(finished.blocks, finished.results, strict=True)
    return [int(ray.get(block).row(result.row)["input_ids"][0]) for block, result in blocks]


def test_results_come_in_the_order_of_the_requests_each_with_its_own_block(fleet) -> None:
    requests = requests_for([f"p{i}" for i in range(10)])
    seen: list[tuple[str, int]] = []
    finished = fleet([{}, {}, {}], max_concurrent=4).rollouts.generate(
        requests, SamplingConfig(), lambda results, block: seen.extend(result.key for result in results)
    )
    assert [result.key for result in finished.results] == [request.key for request in requests]
    assert tokens_of(finished) == [request.seed for request in requests]
    assert sorted(seen) == sorted(request.key for request in requests)
    assert finished.dropped == [] and finished.retried == 0


def test_an_engine_never_has_more_than_max_concurrent(fleet) -> None:
    started = fleet([{}, {}], max_concurrent=3)
    started.rollouts.generate(requests_for([f"p{i}" for i in range(20)]), SamplingConfig())
    assert [started.facts(replica)["most_running"] for replica in (0, 1)] == [3, 3]


def test_a_failing_sample_is_tried_elsewhere_and_then_dropped_alone(fleet) -> None:
    script = {"bad": "fail"}
    started = fleet([script, script], max_retries=2)
    finished = started.rollouts.generate(requests_for(["good", "bad", "fine"], samples=1), SamplingConfig())
    assert [result.uid for result in finished.results] == ["good", "fine"]
    assert [(result.uid, result.finish_reason) for result in finished.dropped] == [("bad", ERROR)]
    assert finished.retried == 2
    tries = [started.facts(replica)["tries"]["bad"] for replica in (0, 1)]
    assert sorted(tries) == [1, 2]


def test_a_sample_that_fails_once_is_found_on_the_second_try(fleet) -> None:
    finished = fleet([{"a": "fail once"}]).rollouts.generate(requests_for(["a"], samples=1), SamplingConfig())
    assert [result.uid for result in finished.results] == ["a"]
    assert (len(finished.dropped), finished.retried) == (0, 1)


@pytest.mark.parametrize("end", ["die", "raise"])
def test_the_requests_of_a_lost_engine_go_to_the_others_and_so_do_later_rounds(fleet, end: str) -> None:
    started = fleet([{"p7": end}, {}], max_concurrent=16, max_retries=0)
    requests = requests_for([f"p{i}" for i in range(12)], samples=1)
    fatal_first = requests[7:8] + requests[:7] + requests[8:]  # the first request goes to replica 0
    finished = started.rollouts.generate(fatal_first, SamplingConfig())
    assert sorted(tokens_of(finished)) == list(range(12))
    assert finished.dropped == []
    assert started.rollouts.living == [1]
    again = started.rollouts.generate(requests, SamplingConfig())
    assert tokens_of(again) == list(range(12))


def test_no_engine_left_is_an_error_that_names_the_cause(fleet) -> None:
    started = fleet([{"a": "raise"}, {"a": "raise"}])
    with pytest.raises(RolloutError, match=r"no rollout engine is left of rollout.replicas=2.*engine dead"):
        started.rollouts.generate(requests_for(["a"], samples=1), SamplingConfig())


def test_weights_reach_every_engine_and_a_failed_start_names_its_replica(fleet) -> None:
    started = fleet([{}, {}])
    started.rollouts.update_weights(ray.put(np.full(3, 2, dtype=np.uint8)), version=5)
    assert [started.facts(replica)["loaded"] for replica in (0, 1)] == [[(6, 5)], [(6, 5)]]
    with pytest.raises(RolloutError, match="rollout replica 1 failed while starting its engine: ValueError: no such"):
        fleet([{}, {"start": "raise"}]).rollouts.start().result()
