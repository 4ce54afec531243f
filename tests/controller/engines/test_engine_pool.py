"""EnginePool over scripted actors: what the driver does when samples fail and engines die. Real Ray, no vLLM."""

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

from controller.engines.engine_pool import EnginePool, RolloutBatch
from controller.engines.fleet import RestartBudget
from tests.end_to_end.processes import living
from workers.config import RolloutConfig, SamplingConfig
from workers.dataproto import DataProto
from workers.errors import LostError, RolloutError
from workers.rollout.requests import ERROR, PartialResponse, SampleRequest, SampleResult


@ray.remote(num_cpus=0, max_concurrency=1000)
class ScriptedEngine:
    """Answers every request with its seed as the only token, one by one, except as told.

    script: uid -> what happens: "fail" (always), "fail once", "die" (the process), "freeze" (the process), "raise" (the
    stream), "hang" (for good, and health with it), "think" (for 3 s, in health). One that was started in another's
    place has no script.
    """

    def __init__(self, index: int, script: dict[str, str]) -> None:
        self.index = index
        self.hung = False
        self.script = script
        self.tries: Counter[str] = Counter()
        self.running = self.most_running = 0
        self.loaded: list[tuple[int, int]] = []
        self.asked = 0

    async def start(self) -> None:
        if self.script.get("start") == "raise":
            raise ValueError("no such model")

    async def generate(
        self, requests: list[SampleRequest], sampling: SamplingConfig
    ) -> AsyncIterator[DataProto | list[SampleResult]]:
        self.running += len(requests)
        self.most_running = max(self.most_running, self.running)
        for request in requests:
            await asyncio.sleep(0.002)
            self.hung = self.script.get(request.uid) == "hang"
            if self.hung:
                await asyncio.sleep(1000)
            if self.script.get(request.uid) == "think":
                await asyncio.sleep(3)
            block, result = self.answer(request)
            self.running -= 1
            yield block
            yield [result]

    def answer(self, request: SampleRequest) -> tuple[DataProto, SampleResult]:
        self.tries[request.uid] += 1
        action = self.script.get(request.uid)
        if action == "die":
            os._exit(1)
        if action == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if action == "raise":
            raise RuntimeError("engine dead")
        tokens = len(request.prompt_ids)
        if action == "fail" or (action == "fail once" and self.tries[request.uid] == 1):
            reason = f"refused by {self.index}"
            return DataProto.from_rows([]), SampleResult(
                request.uid, request.sample, tokens, 0, ERROR, weight_version=-1, error=reason
            )
        block = DataProto.from_rows([{"input_ids": np.array([request.seed], dtype=np.int32)}])
        version = self.loaded[-1][1] if self.loaded else 0
        return block, SampleResult(request.uid, request.sample, tokens, 1, "stop", weight_version=version, row=0)

    async def alive(self) -> None:
        pass

    async def partial_responses(self) -> dict[int, PartialResponse]:
        return {}

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


class Fleet:
    """Scripted engines and the EnginePool over them."""

    def __init__(
        self,
        scripts: list[dict[str, str]],
        restarts: int = 4,
        started: bool = True,
        alike: bool = False,
        **settings: Any,
    ) -> None:
        """alike: engines in the place of others have their scripts too."""
        self.said: list[str] = []
        self.rollouts = EnginePool(
            lambda replica, attempt: ScriptedEngine.remote(replica, scripts[replica] if alike or not attempt else {}),
            RolloutConfig(replicas=len(scripts), **settings),
            RestartBudget(restarts),
            log=self.said.append,
        )
        self.pending = self.rollouts.start()
        if started:
            self.pending.result()

    def facts(self, replica: int) -> dict[str, Any]:
        return ray.get(self.rollouts.actors[replica].facts.remote())


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


def tokens_of(finished: RolloutBatch) -> list[int]:
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


WEIGHTS = np.full(3, 2, dtype=np.uint8)  # their sum is 6


@pytest.mark.parametrize("end", ["die", "raise", "hang", "freeze"])
def test_the_requests_of_a_lost_engine_go_to_the_others_and_a_new_one_takes_its_place(fleet, end: str) -> None:
    started = fleet([{"p7": end}, {}], max_concurrent=16, max_retries=0, hang_timeout_s=1)
    started.rollouts.update_weights(ray.put(WEIGHTS), version=5)
    doomed = started.facts(0)["pid"]
    requests = requests_for([f"p{i}" for i in range(12)], samples=1)
    fatal_first = requests[7:8] + requests[:7] + requests[8:]  # the first request goes to replica 0
    seen: Counter[Any] = Counter()
    finished = started.rollouts.generate(
        fatal_first, SamplingConfig(), lambda results, block: seen.update(result.key for result in results)
    )
    assert sorted(tokens_of(finished)) == list(range(12))
    assert set(seen.values()) == {1}
    assert finished.dropped == [] and finished.retried == 0
    assert started.rollouts.fleet.budget.engines == 1
    assert len(started.said) == 1 and "rollout replica 0 was lost" in started.said[0]
    assert living([doomed]) == []
    while 0 not in started.rollouts.fleet.serving:
        started.rollouts.generate(requests_for(["again"]), SamplingConfig())
    again = started.rollouts.generate(requests, SamplingConfig())
    assert {result.weight_version for result in again.results} == {5}
    assert started.facts(0)["loaded"] == [(6, 5)] and started.facts(0)["most_running"] > 0


def test_a_round_waits_for_the_engine_in_the_only_ones_place_and_it_samples_with_the_current_weights(fleet) -> None:
    started = fleet([{"b": "die"}])
    started.rollouts.update_weights(ray.put(WEIGHTS), version=3)
    finished = started.rollouts.generate(requests_for(["a", "b", "c"], samples=1), SamplingConfig())
    assert [result.uid for result in finished.results] == ["a", "b", "c"]
    assert {result.weight_version for result in finished.results} == {3}


def test_an_engine_that_is_slow_but_answers_is_kept(fleet) -> None:
    started = fleet([{"a": "think"}], hang_timeout_s=1)
    finished = started.rollouts.generate(requests_for(["a"], samples=1), SamplingConfig())
    assert len(finished.results) == 1
    assert started.rollouts.fleet.budget.engines == 0
    assert started.facts(0)["asked"] >= 1


def test_an_answer_that_came_while_nobody_looked_is_not_late_and_new_weights_end_draining(fleet) -> None:
    """The health of replica 0 is asked at the end of a round, and its answer read after the next weights."""
    started = fleet([{"a": "think"}, {"b": "think"}], hang_timeout_s=1)
    engines = started.rollouts
    engines.progressed(0)
    time.sleep(1.2)
    engines.check_deadlines({0})
    assert started.rollouts.fleet.serving == [1]
    time.sleep(1.5)
    started.rollouts.update_weights(ray.put(WEIGHTS), version=1)
    engines.check_deadlines(())
    assert started.rollouts.fleet.serving == [0, 1] and started.said == []


def test_an_engine_lost_between_rounds_is_replaced_at_the_next_weights(fleet) -> None:
    started = fleet([{"weights": "die"}, {}])
    started.rollouts.update_weights(ray.put(WEIGHTS), version=2)
    assert 1 in started.rollouts.fleet.serving
    finished = started.rollouts.generate(requests_for(["a", "b"]), SamplingConfig())
    assert {result.weight_version for result in finished.results} == {2}
    assert started.rollouts.fleet.budget.engines == 1


def test_past_the_budget_the_cause_comes_first(fleet) -> None:
    started = fleet([{"a": "raise"}, {"a": "raise"}], restarts=0)
    message = r"^rollout replica 0 was lost: RuntimeError: engine dead; all of run.max_restarts=0 are used up\.$"
    with pytest.raises(RolloutError, match=message):
        started.rollouts.generate(requests_for(["a"], samples=1), SamplingConfig())


@pytest.mark.parametrize("uid", ["a", "b"])
def test_engines_that_die_twice_before_they_finish_a_sample_are_given_up(fleet, uid: str) -> None:
    """The first engine of the second case has finished one: not its death is the reason."""
    started = fleet([{uid: "raise"}], restarts=9, alike=True, max_concurrent=1)
    message = r"^rollout replica 0 was lost: RuntimeError: engine dead; 2 engines in a row died before they finished"
    with pytest.raises(RolloutError, match=message):
        started.rollouts.generate(requests_for(["a", "b"], samples=1), SamplingConfig())
    assert started.rollouts.fleet.budget.engines == (1 if uid == "a" else 2)


def test_engines_that_cannot_be_replaced_alone_end_the_round_as_lost(ray_session: None) -> None:
    rollouts = EnginePool(
        lambda replica, attempt: ScriptedEngine.remote(replica, {"a": "die"}),
        RolloutConfig(replicas=1),
        replaceable=False,
    )
    rollouts.start().result()
    with pytest.raises(LostError, match=r"rollout replica 0 was lost: .*ActorDied"):
        rollouts.generate(requests_for(["a"], samples=1), SamplingConfig())
    rollouts.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_died_or_hangs_while_weights_are_sent_is_noticed(ray_session: None, number: int) -> None:
    rollouts = EnginePool(
        lambda replica, attempt: ScriptedEngine.remote(replica, {}),
        RolloutConfig(replicas=2, hang_timeout_s=2),
        replaceable=False,
    )
    rollouts.start().result()
    rollouts.check_alive()
    os.kill(ray.get(rollouts.actors[1].facts.remote())["pid"], number)
    with pytest.raises(LostError, match="rollout replica 1 was lost"):
        rollouts.check_alive()
    rollouts.stop()


def test_weights_reach_every_engine_and_what_is_refused_or_cannot_start_is_named(fleet) -> None:
    started = fleet([{}, {}])
    started.rollouts.update_weights(ray.put(WEIGHTS), version=5)
    assert [started.facts(replica)["loaded"] for replica in (0, 1)] == [[(6, 5)], [(6, 5)]]
    with pytest.raises(RolloutError, match="not of this model"):
        fleet([{"weights": "refuse"}]).rollouts.update_weights(ray.put(WEIGHTS), version=1)
    with pytest.raises(RolloutError, match="rollout replica 1 failed while starting its engine: ValueError: no such"):
        fleet([{}, {"start": "raise"}], started=False).pending.result()
