"""Run reward functions under conditions, in a process of their own.

ProbedRewards(functions, Conditions(network=False)) --UserProcess--> Probe: changes clock or network,
    then unpickles the functions --> scores as `RewardProcess.run`, and what the process holds
"""

import datetime
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.batch.score import Score
from workers.errors import BallastError
from workers.user_code.process import START_SECONDS, NoAnswerError, UserProcess
from workers.user_code.rewards import Call, RewardFunction, RewardProcess, Scorer

MEASURE = "measure"  # a request in place of calls
MOST_ENDED = 2  # calls of a policy that hang or end the process, each for seconds
NETWORK_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.sendto")
PROCESS_EVENTS = ("subprocess.Popen", "os.system", "os.fork", "os.posix_spawn")


@dataclass(frozen=True)
class Conditions:
    """frozen_time: seconds since 1970 that every clock shows, or None. network: whether it can be reached."""

    frozen_time: float | None = None
    network: bool = True


@dataclass(frozen=True)
class Holdings:
    """What a process holds. blocks: of Python's allocator. seconds: of each call since the last measurement.

    addresses: that it tried to reach. started: programs and copies that it started.
    """

    files: int
    sockets: int
    children: int
    resident: int
    blocks: int
    seconds: list[float] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    started: int = 0


class ProbedRewards(RewardProcess):
    """A `RewardProcess` under conditions, whose process can be measured."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        conditions: Conditions,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(functions, timeout_s=timeout_s, concurrency=1, quiet=True)
        self._conditions = conditions

    def run(self, calls: Sequence[Call]) -> dict[int, Score]:
        """Return scores by number. After MOST_ENDED calls that ended the process, the others have none."""
        scores: dict[int, Score] = {}
        if len(calls) > 1:
            self._try(calls, scores)
        ended = 0
        for call in calls:  # alone, because any call left may have ended the process
            if (
                ended < MOST_ENDED
                and call.number not in scores
                and (reason := self._try([call], scores))
            ):
                scores[call.number] = Score(0.0, call.response, failure=reason)
                ended += 1
        return scores

    def _ensure_started(self) -> UserProcess:
        if self._process is None:
            settings = (
                self._conditions,
                self._functions,
                self._timeout_s,
                self._concurrency,
            )
            self._process = UserProcess(
                "ballast.certify.probe:Probe", *settings, quiet=True
            )
            self._process.receive(START_SECONDS)
        return self._process

    def measure(self) -> Holdings | None:
        """Return what the process holds, or None if it has ended."""
        try:
            process = self._ensure_started()
            process.send(MEASURE)
            return Holdings(**process.receive(START_SECONDS))
        except (NoAnswerError, BallastError):
            self.stop()
            return None


# The code below runs in the process.


class Probe(Scorer):
    def __init__(
        self,
        conditions: Conditions,
        functions: list[RewardFunction],
        timeout_s: float,
        concurrency: int,
    ) -> None:
        self._addresses: set[str] = set()
        self._started = 0
        self._seconds: list[float] = []
        self._clock = time.perf_counter
        self._network = conditions.network
        sys.addaudithook(self._hear)
        if conditions.frozen_time is not None:
            freeze_clocks(conditions.frozen_time)
        super().__init__(functions, timeout_s, concurrency)

    def __call__(self, request: Any, reply: Callable[[Any], None]) -> None:
        if request == MEASURE:
            reply(self._holdings())
        else:
            super().__call__(request, reply)

    async def _score(self, call: Call, batched: dict[RewardFunction, Any]) -> Any:
        start = self._clock()
        score = await super()._score(call, batched)
        self._seconds.append(self._clock() - start)
        return score

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in PROCESS_EVENTS:
            self._started += 1
        if event not in NETWORK_EVENTS:
            return
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[-1]
        if isinstance(address, (str, bytes)) and event != "socket.getaddrinfo":
            return  # a socket of this machine's files
        self._addresses.add(str(address)[:100])
        if not self._network:
            raise OSError(f"no network: certify cut off {address}")

    def _holdings(self) -> dict[str, Any]:
        import psutil

        seconds = self._seconds
        self._seconds = []
        gc.collect()
        links = list(map(_link, os.listdir("/proc/self/fd")))
        process = psutil.Process()
        return {
            "files": len(links),
            "sockets": sum(link.startswith("socket:") for link in links),
            "children": len(process.children(recursive=True)),
            "resident": process.memory_info().rss,
            "blocks": sys.getallocatedblocks(),
            "seconds": seconds,
            "addresses": sorted(self._addresses),
            "started": self._started,
        }


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def freeze_clocks(now: float) -> None:
    """Let `time.time` and `datetime` show one moment. Elapsed time, such as `time.monotonic`, goes on."""
    time.time = lambda: now
    time.time_ns = lambda: int(now * 1e9)
    localtime, gmtime, strftime = time.localtime, time.gmtime, time.strftime
    time.localtime = lambda seconds=None: localtime(now if seconds is None else seconds)
    time.gmtime = lambda seconds=None: gmtime(now if seconds is None else seconds)
    time.strftime = lambda form, moment=None: strftime(
        form, localtime(now) if moment is None else moment
    )

    class FrozenDatetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "FrozenDatetime":
            return cls.fromtimestamp(now, tz)

        @classmethod
        def utcnow(cls) -> "FrozenDatetime":
            return cls.fromtimestamp(now, datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> "FrozenDatetime":
            return cls.fromtimestamp(now)

    class FrozenDate(datetime.date):
        @classmethod
        def today(cls) -> "FrozenDate":
            return cls.fromtimestamp(now)

    vars(datetime).update(datetime=FrozenDatetime, date=FrozenDate)
