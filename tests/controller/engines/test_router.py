"""The router as a state machine: nothing lost, nothing twice, bounds hold; and its single decisions."""

from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controller.engines.router import Router
from tests.refusals import refused
from workers.engine.requests import ERROR, Response, SampleRequest, SampleResult
from workers.errors import DataError

MAX_CONCURRENT, MAX_RETRIES, REPLICAS = 3, 2, 4


def request(uid: str, sample: int = 0, tokens: int = 4) -> SampleRequest:
    return SampleRequest(uid, sample, np.zeros(tokens, dtype=np.int32), seed=0)


def success(uid: str, sample: int = 0) -> SampleResult:
    return SampleResult(uid, sample, 4, 5, "stop", weight_version=0, row=0)


def failure(uid: str, sample: int = 0, reason: str = "bad") -> SampleResult:
    return SampleResult(uid, sample, 4, 0, ERROR, weight_version=-1, error=reason)


class RouterMachine(RuleBasedStateMachine):
    """Keeps its own books beside the router's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(REPLICAS, MAX_CONCURRENT, MAX_RETRIES)
        self.submitted: set[str] = set()
        self.at: dict[str, int] = {}
        self.finished: set[str] = set()
        self.failures: dict[str, int] = {}
        self.attempts: set[int] = set()
        self.lost: set[int] = set()

    @rule(sizes=st.lists(st.integers(1, 9), max_size=8))
    def submit(self, sizes: list[int]) -> None:
        names = [f"p{len(self.submitted) + i}" for i in range(len(sizes))]
        self.router.submit(
            [request(name, tokens=size) for name, size in zip(names, sizes, strict=True)]
        )
        self.submitted |= set(names)

    @rule()
    def assign(self) -> None:
        for replica, requests in self.router.assign(
            set(range(REPLICAS)) - self.lost
        ).items():
            assert replica not in self.lost
            for given in requests:
                assert given.uid not in self.at
                assert given.session == "0" * 16 + (
                    f".{n}" if (n := self.failures.get(given.uid)) else ""
                )
                self.at[given.uid] = replica
                assert given.attempt not in self.attempts
                self.attempts.add(given.attempt)

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.at)))
        self.router.finish(self.at.pop(name), success(name))
        self.finished.add(name)

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.at)))
        self.router.retry_or_drop(self.at.pop(name), failure(name))
        self.failures[name] = self.failures.get(name, 0) + 1

    @precondition(lambda self: len(self.lost) < REPLICAS - 1)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(set(range(REPLICAS)) - self.lost)))
        self.router.replica_lost(replica, {})
        self.lost.add(replica)
        self.at = {name: where for name, where in self.at.items() if where != replica}

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        self.lost.remove(data.draw(st.sampled_from(sorted(self.lost))))

    @invariant()
    def bounds_hold(self) -> None:
        for replica in range(REPLICAS):
            assert self.router.outstanding(replica) == sum(
                where == replica for where in self.at.values()
            )
            assert self.router.outstanding(replica) <= MAX_CONCURRENT

    @invariant()
    def dropped_are_those_that_failed_too_often(self) -> None:
        over = {name for name, count in self.failures.items() if count > MAX_RETRIES}
        assert sorted(result.uid for result in self.router.dropped) == sorted(over)
        assert len(self.router.retried) == sum(self.failures.values()) - len(over)

    def teardown(self) -> None:
        """Let the rest succeed: then every request came out exactly once."""
        for _ in range(len(self.submitted) + 1):
            self.assign()
            for name, replica in sorted(self.at.items()):
                self.router.finish(replica, success(name))
                self.finished.add(name)
            self.at = {}
        dropped = {result.uid for result in self.router.dropped}
        assert self.router.done
        assert self.finished | dropped == self.submitted
        assert not self.finished & dropped


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_each_request_goes_to_the_least_loaded_replica_tokens_breaking_ties() -> None:
    router = Router(2, max_concurrent=8, max_retries=0)
    router.submit(
        [
            request("long", tokens=9),
            request("b", tokens=2),
            request("c", tokens=2),
            request("d", tokens=2),
        ]
    )
    assigned = router.assign({0, 1})
    assert [r.uid for r in assigned[0]] == ["long", "d"]
    assert [r.uid for r in assigned[1]] == ["b", "c"]


def test_a_failed_request_waits_for_another_replica_rather_than_return_to_the_same() -> (
    None
):
    router = Router(2, max_concurrent=1, max_retries=1)
    router.submit([request("a"), request("b")])
    assert set(router.assign({0, 1})) == {0, 1}
    router.retry_or_drop(0, failure("a"))
    assert router.assign({0, 1}) == {}
    router.finish(1, success("b"))
    assert [r.uid for r in router.assign({0, 1})[1]] == ["a"]


def test_the_only_replica_gets_a_failed_request_again_and_the_last_reason_is_kept() -> None:
    router = Router(1, max_concurrent=1, max_retries=1)
    router.submit([request("a")])
    for reason in ("first", "second"):
        assert [r.uid for r in router.assign({0})[0]] == ["a"]
        router.retry_or_drop(0, failure("a", reason=reason))
    assert router.done
    assert [result.error for result in router.dropped] == ["second"]
    assert len(router.retried) == 1


def test_a_lost_replicas_requests_go_first_and_on_after_their_beginnings_and_cost_no_retry() -> (
    None
):
    router = Router(2, max_concurrent=1, max_retries=0)
    router.submit([request(name) for name in "abc"])  # of one seed
    attempts = [assigned[0].attempt for assigned in router.assign({0, 1}).values()]
    begun = Response(
        np.array([7], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    )
    router.replica_lost(0, dict.fromkeys(attempts, begun))
    router.finish(1, success("b"))
    ((again,),) = router.assign({1}).values()
    assert (again.uid, again.begun, router.dropped) == ("a", begun, [])
    # A new engine in the lost one's place.
    assert [r.uid for r in router.assign({0, 1})[0]] == ["c"]


def test_the_same_sample_twice_is_refused_by_name() -> None:
    router = Router(1, max_concurrent=1, max_retries=0)
    with refused("sample 3 of prompt 'a'", DataError):
        router.submit([request("a", 3), request("a", 3)])


def test_a_request_that_failed_goes_before_those_of_less_priority() -> None:
    router = Router(1, max_concurrent=1, max_retries=1)
    router.submit(
        [replace(request(name), priority=priority) for priority, name in enumerate("abc")]
    )
    router.assign({0})
    router.retry_or_drop(0, failure("a"))
    assert [router.assign({0})[0][0].uid, router.waiting] == ["a", 2]
