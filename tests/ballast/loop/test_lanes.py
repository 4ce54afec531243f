"""Training and sampling side by side: which calls wait for which, on engines that answer after some pumps."""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.loop.lanes import Lanes

SECONDS = 20.0


@dataclass
class Round:
    left: int
    pool: "Pool"
    done: bool = False
    adapter: int = 0

    def begin(self) -> "Round":
        self.pool.rounds.append(self)
        return self

    def end(self) -> None:
        self.pool.rounds.remove(self)

    def result(self) -> None:
        return None


@dataclass
class Pool:
    """Its rounds end after as many pumps as they have `left`."""

    rounds: list[Round] = field(default_factory=list)

    def pump(self, timeout_s: float) -> None:
        for each in self.rounds:
            each.left -= 1
            each.done = each.left <= 0
        time.sleep(1e-4)


CALLS = st.one_of(
    st.tuples(st.just("sample"), st.sampled_from(["a", "b", ""]), st.integers(1, 4)),
    st.tuples(st.just("both"), st.sampled_from(["a", "b", None]), st.just(0)),
    st.tuples(st.just("train"), st.none(), st.just(0)),
)


def meet(one: str | None, other: str | None) -> bool:
    return None in (one, other) or one == other


@given(st.lists(CALLS, max_size=12), st.booleans())
def test_calls_of_a_policy_keep_their_order_and_publishing_meets_no_samples(
    calls: list[tuple[str, Any, int]], colocated: bool
) -> None:
    pool = Pool()
    lanes = Lanes(pool, colocated=colocated)  # type: ignore[arg-type]
    going_on, order, problems = set[int](), list[int](), list[str]()
    lock = threading.Lock()

    def begins(number: int) -> None:
        kind, policy, _ = calls[number]
        with lock:
            for other in going_on:
                kinds = {kind, calls[other][0]}
                apart = not colocated and (
                    kinds == {"sample", "train"} or not meet(policy, calls[other][1])
                )
                if kinds != {"sample"} and not ("sample" in kinds and apart):
                    problems.append(f"{calls[number]} beside {calls[other]}")
            going_on.add(number)
            order.append(number)

    def ends(number: int) -> None:
        with lock:
            going_on.remove(number)

    @dataclass
    class Watched(Round):
        number: int = 0

        def begin(self) -> "Watched":
            begins(self.number)
            self.pool.rounds.append(self)
            return self

        def end(self) -> None:
            super().end()
            ends(self.number)

    def work(number: int) -> None:
        begins(number)
        time.sleep(1e-4)
        ends(number)

    futures: list[Future[Any]] = []
    for number, (kind, policy, pumps) in enumerate(calls):
        if kind == "sample":
            begin: Any = Watched(pumps, pool, number=number).begin
            futures.append(lanes.sample(begin, policy))
        elif kind == "train":
            futures.append(lanes.train(lambda number=number: work(number)))  # type: ignore[misc]
        else:
            futures.append(lanes.both(lambda number=number: work(number), policy))  # type: ignore[misc]
    for future in futures:
        future.result(SECONDS)
    lanes.close()
    assert not problems
    for later, (kind, policy, _) in enumerate(calls):
        for earlier, (first, of_first, _) in enumerate(calls[:later]):
            trains = "sample" not in (kind, first)
            if trains or ("both" in (kind, first) and meet(policy, of_first)):
                assert order.index(earlier) < order.index(later)


PUBLISHING = st.lists(
    st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(1, 6)), max_size=14
)


@given(PUBLISHING, st.integers(1, 3))
def test_samples_are_of_the_weights_published_before_them_and_none_goes_on_without_its_version(
    calls: list[tuple[bool, str, int]], kept: int
) -> None:
    """calls: whether it publishes, the policy, and how long samples take."""
    pool, published = Pool(), dict[str, list[int]](a=[0], b=[0])
    lanes = Lanes(pool, colocated=False)  # type: ignore[arg-type]
    going_on, found, problems = list[tuple[str, int]](), dict[int, int](), list[str]()

    def replaced(policy: str) -> list[int]:
        return published[policy][: max(0, len(published[policy]) + 1 - kept)]

    def publish(policy: str, number: int) -> None:
        gone = replaced(policy)
        problems.extend(
            f"{each} goes on" for each in going_on if each[0] == policy and each[1] in gone
        )
        published[policy] = [*published[policy][len(gone) :], number]

    @dataclass
    class Versioned(Round):
        policy: str = ""
        number: int = 0

        def begin(self) -> "Versioned":
            self.adapter = found[self.number] = published[self.policy][-1]
            going_on.append((self.policy, self.adapter))
            self.pool.rounds.append(self)
            return self

        def end(self) -> None:
            super().end()
            going_on.remove((self.policy, self.adapter))

    futures: list[Future[Any]] = []
    for number, (publishes, policy, pumps) in enumerate(calls, start=1):
        if publishes:
            work = partial(publish, policy, number)
            futures.append(lanes.both(work, policy, partial(replaced, policy)))
        else:
            begin: Any = Versioned(pumps, pool, policy=policy, number=number).begin
            futures.append(lanes.sample(begin, policy))
    for future in futures:
        future.result(SECONDS)
    lanes.close()
    assert not problems
    newest = dict.fromkeys("ab", 0)
    for number, (publishes, policy, _) in enumerate(calls, start=1):
        if publishes:
            newest[policy] = number
        else:
            assert found[number] == newest[policy]


def test_a_policy_is_published_beside_its_samples_if_engines_keep_their_version() -> None:
    pool = Pool()
    lanes = Lanes(pool, colocated=False)  # type: ignore[arg-type]
    endless = Round(2**60, pool, adapter=1)
    sampled = lanes.sample(endless.begin, "a")  # type: ignore[arg-type]
    assert lanes.both(lambda: 2, "a", list).result(SECONDS) == 2
    later = lanes.both(lambda: 3, "a", lambda: [1])
    with pytest.raises(TimeoutError):
        later.result(0.2)
    endless.left = 1
    assert later.result(SECONDS) == 3 and sampled.done()
    lanes.close()


def test_samples_of_another_policy_go_on_while_one_is_published() -> None:
    pool = Pool()
    lanes = Lanes(pool, colocated=False)  # type: ignore[arg-type]
    trained = threading.Event()
    endless = Round(2**60, pool)
    other = lanes.sample(endless.begin, "b")  # type: ignore[arg-type]
    lanes.train(trained.wait)
    published = lanes.both(lambda: 1, "a")
    after = lanes.sample(Round(3, pool).begin, "a")  # type: ignore[arg-type]
    beside = lanes.sample(Round(3, pool).begin, "b")  # type: ignore[arg-type]
    beside.result(SECONDS)
    assert not published.done() and not after.done()
    trained.set()
    assert published.result(SECONDS) == 1
    after.result(SECONDS)
    validated = lanes.both(lambda: 2)
    with pytest.raises(TimeoutError):
        validated.result(0.2)
    endless.left = 1
    assert validated.result(SECONDS) == 2 and other.done()
    lanes.close()
