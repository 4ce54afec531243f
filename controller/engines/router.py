"""Decide which engine takes which request and how failed requests are retried, without I/O or Ray.

    submit -> waiting --assign--> outstanding on a replica --finish--> gone
                 ^                     |
                 +---- failed (a retry), replica_lost (free) ----+---- failed too often --> dropped

`controller.engines.fleet` decides which replicas may be given requests.

Invariants: every submitted request is waiting, outstanding on exactly one replica, finished or dropped. No
replica holds more than `max_concurrent`. No request fails more than `1 + max_retries` times.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from workers.engine.requests import Response, SampleRequest, SampleResult
from workers.engine.session_record import SessionRecord
from workers.errors import DataError

Key = tuple[str, int]


@dataclass
class _Ticket:
    """failed_on: the replica of each failed attempt."""

    request: SampleRequest
    failed_on: list[int] = field(default_factory=list)


@dataclass
class _Replica:
    outstanding: dict[Key, _Ticket] = field(default_factory=dict)
    tokens: int = 0  # prompt tokens of `outstanding`

    def load(self) -> tuple[int, int]:
        return len(self.outstanding), self.tokens

    def put(self, ticket: _Ticket) -> None:
        self.outstanding[ticket.request.key] = ticket
        self.tokens += len(ticket.request.prompt_ids)

    def take(self, key: Key) -> _Ticket:
        ticket = self.outstanding.pop(key)
        self.tokens -= len(ticket.request.prompt_ids)
        return ticket


class Router:
    """State of a generation's requests.

    dropped: last failure of each dropped sample. retried: failures after which a sample was tried again.
    """

    def __init__(
        self,
        replicas: int,
        max_concurrent: int,
        max_retries: int,
        attempts: Iterator[int] | None = None,
    ) -> None:
        """attempts: counts those of all generations of a pool, None for this one's alone."""
        self.max_concurrent = max_concurrent
        self.max_retries = max_retries
        self.dropped: list[SampleResult] = []
        self.retried: list[SampleResult] = []
        self._replicas = [_Replica() for _ in range(replicas)]
        self._waiting: deque[_Ticket] = deque()
        self._keys: set[Key] = set()
        self._attempts = itertools.count() if attempts is None else attempts

    @property
    def done(self) -> bool:
        return not self._waiting and not any(
            replica.outstanding for replica in self._replicas
        )

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def unfinished(self) -> list[SampleRequest]:
        outstanding = [
            ticket for replica in self._replicas for ticket in replica.outstanding.values()
        ]
        return [ticket.request for ticket in (*outstanding, *self._waiting)]

    def outstanding(self, replica: int) -> int:
        return len(self._replicas[replica].outstanding)

    def submit(self, requests: Iterable[SampleRequest]) -> None:
        """Queue requests. Raises DataError if a (uid, sample) is pending already."""
        for request in requests:
            if request.key in self._keys:
                raise DataError(
                    f"sample {request.sample} of prompt {request.uid!r} was requested twice at a time."
                )
            self._keys.add(request.key)
            self._waiting.append(_Ticket(request))

    def assign(self, serving: Collection[int]) -> dict[int, list[SampleRequest]]:
        """Give waiting requests, in order, each to the least loaded replica of `serving` with room.

        Load is the number of outstanding requests, then their prompt tokens. A failed request waits for a
        replica that it has not failed on, as long as one serves.
        """
        assigned: dict[int, list[SampleRequest]] = {}
        leftovers: deque[_Ticket] = deque()
        heap = [
            (*self._replicas[i].load(), i)
            for i in serving
            if self.outstanding(i) < self.max_concurrent
        ]
        heapify(heap)
        while self._waiting and heap:
            ticket = self._waiting.popleft()
            passed = []
            allowed = (
                _allowed_replicas(ticket, set(serving)) if ticket.failed_on else serving
            )
            while heap and heap[0][-1] not in allowed:
                passed.append(heappop(heap))
            if heap:
                index = heappop(heap)[-1]
                ticket.request = replace(ticket.request, attempt=next(self._attempts))
                self._replicas[index].put(ticket)
                assigned.setdefault(index, []).append(ticket.request)
                if self.outstanding(index) < self.max_concurrent:
                    heappush(heap, (*self._replicas[index].load(), index))
            else:
                leftovers.append(ticket)
            for entry in passed:
                heappush(heap, entry)
        self._waiting.extendleft(reversed(leftovers))
        return assigned

    def finish(self, replica: int, result: SampleResult) -> SampleRequest:
        """Return the request. Raises KeyError if it was not outstanding there."""
        request = self._replicas[replica].take(result.key).request
        self._keys.remove(result.key)
        return request

    def retry_or_drop(self, replica: int, result: SampleResult) -> SampleRequest:
        """Retry or drop a failed request, and return it. Raises KeyError if it was not outstanding there."""
        ticket = self._replicas[replica].take(result.key)
        request = ticket.request
        ticket.failed_on.append(replica)
        if len(ticket.failed_on) > self.max_retries:
            self.dropped.append(result)
            self._keys.remove(result.key)
            return request
        self.retried.append(result)
        ticket.request = replace(request, failures=len(ticket.failed_on))
        later = (
            place
            for place, other_ticket in enumerate(self._waiting)
            if other_ticket.request.priority > ticket.request.priority
        )
        self._waiting.insert(next(later, len(self._waiting)), ticket)
        return request

    def take_dropped(self) -> list[SampleResult]:
        dropped = self.dropped
        self.dropped = []
        return dropped

    def take_retried(self) -> list[SampleResult]:
        retried = self.retried
        self.retried = []
        return retried

    def replica_lost(
        self, replica: int, responses: Mapping[int, Response | SessionRecord]
    ) -> None:
        """Put the lost replica's requests at the head of the queue, without counting a retry.

        responses: partial responses and sessions by attempt, from which they are continued. Not by seed: each
        validation has the last one's, and clients may give all requests one.
        """
        lost, self._replicas[replica] = self._replicas[replica], _Replica()
        for ticket in lost.outstanding.values():
            if (response := responses.get(ticket.request.attempt)) is not None:
                ticket.request = replace(ticket.request, begun=response)
        self._waiting.extendleft(reversed(list(lost.outstanding.values())))


def _allowed_replicas(ticket: _Ticket, serving: set[int]) -> set[int]:
    return serving - set(ticket.failed_on) or serving
