"""ElasticEnginePool: an added engine has the weights before it serves, and a lost one time to find room."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from controller.engines.elastic_pool import ElasticEnginePool
from controller.engines.fleet import READY, RestartBudget
from tests.controller.stand_ins.local_ray import LocalRay
from workers.config.roles import RolloutConfig
from workers.errors import RolloutError

ROOM_SECONDS = 100.0


class Engine:
    """A rollout actor that only loads weights."""

    def __init__(self) -> None:
        self.loaded: list[tuple[object, int]] = []

    def start(self) -> None:
        pass

    def update_weights(self, weights: object, version: int) -> None:
        self.loaded.append((weights, version))


class CountedRooms:
    """Rooms of a cluster with a number of free ones. Released rooms are gone."""

    def __init__(self, minimum: int) -> None:
        self.free = 0
        self.replicas = set(range(minimum))
        self._granted = set(self.replicas)

    def is_granted(self, replica: int) -> bool:
        if self.free and replica not in self._granted:
            self.free -= 1
            self._granted.add(replica)
        return replica in self._granted

    def request(self, replica: int) -> None:
        self.replicas.add(replica)

    def release(self, replica: int) -> None:
        self.replicas.remove(replica)
        self._granted.discard(replica)


class Clock:
    """Seconds that pass when somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("controller.engines.elastic_pool.time", clock)
    return clock


Pool = Callable[[str], tuple[ElasticEnginePool, CountedRooms]]


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Pool:
    LocalRay({}).install(monkeypatch)

    def make_actor(replica: int, attempt: int) -> Any:
        return ray.remote(Engine).options(name=f"rollout {replica} {attempt}").remote()

    def make_pool(replicas: str) -> tuple[ElasticEnginePool, CountedRooms]:
        config = RolloutConfig(replicas=replicas)
        rooms = CountedRooms(config.engine_range.minimum)
        pool = ElasticEnginePool(
            make_actor, config, rooms, room_timeout_s=ROOM_SECONDS, budget=RestartBudget(10)
        )
        pool.start()
        pool.wait_started()
        pool.adjust()
        return pool, rooms

    return make_pool


def look(pool: ElasticEnginePool, clock: Clock, times: int = 1) -> None:
    """Wait, as a round without results does."""
    for _ in range(times):
        clock.now += 1.0
        pool.wait([])
        pool.check_deadlines(())


def test_an_added_engine_serves_once_it_has_the_current_weights(
    make_pool: Pool, clock: Clock
) -> None:
    pool, rooms = make_pool("1..2")
    pool.update_weights(ray.put("first"), 1)
    pool.update_weights(ray.put("second"), 2)
    rooms.free = 1
    look(pool, clock)
    assert pool.words == "2 of 1..2 engines"
    assert pool.fleet.serving == [0]
    look(pool, clock)
    assert pool.actors[1].instance.loaded == [("second", 2)]
    look(pool, clock)
    assert pool.fleet.serving == [0, 1]


def test_updates_do_not_wait_for_an_engine_that_starts(
    make_pool: Pool, clock: Clock
) -> None:
    pool, rooms = make_pool("1..2")
    rooms.free = 1
    look(pool, clock)
    pool.update_weights(ray.put("weights"), 1)
    assert 0 in pool.fleet.serving
    look(pool, clock, times=3)
    assert pool.actors[1].instance.loaded[-1] == ("weights", 1)
    assert pool.fleet.serving == [0, 1]


@pytest.mark.parametrize("quiet_s", [0.0, 100 * ROOM_SECONDS])
def test_a_run_below_its_minimum_waits_as_long_as_it_says(
    make_pool: Pool, clock: Clock, quiet_s: float
) -> None:
    """Also if nobody looked for a long time before, as in an update of an hour."""
    pool, _ = make_pool("1..2")
    clock.now += quiet_s
    pool.fleet.mark_finished_samples(0)
    pool.lose(0, "its node is gone")
    look(pool, clock, times=45)  # without an engine, each wait sleeps for a second
    with pytest.raises(
        RolloutError, match=r"^rollout\.replicas=1\.\.2: 0 of 1\.\.2 engines"
    ):
        look(pool, clock, times=10)


def test_room_in_time_ends_the_wait(make_pool: Pool, clock: Clock) -> None:
    pool, rooms = make_pool("1..2")
    pool.fleet.mark_finished_samples(0)
    pool.lose(0, "its node is gone")
    look(pool, clock, times=40)
    rooms.free = 1
    look(pool, clock, times=200)
    assert len(pool.fleet.in_state(*READY)) == 1
    assert pool.expects_engines is False


def test_nothing_is_asked_of_a_cluster_that_has_given_the_maximum(
    make_pool: Pool, clock: Clock
) -> None:
    pool, rooms = make_pool("1..3")
    rooms.free = 2
    look(pool, clock, times=4)
    assert len(pool.fleet.serving) == 3
    calls = SimpleNamespace(count=0)

    def count(replica: int) -> bool:
        calls.count += 1
        return True

    rooms.is_granted = count  # type: ignore[method-assign]
    look(pool, clock, times=5)
    assert calls.count == 0
