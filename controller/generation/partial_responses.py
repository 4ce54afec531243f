"""PartialResponses: what responses have so far, kept so that a lost engine's are continued and not begun again.

engines --every few seconds--> references, one an engine --engine lost--> requests with what was sampled
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from workers.rollout.requests import PartialResponse

LOOK_SECONDS = 5.0  # between two looks at an engine
ANSWER_SECONDS = 5.0


class PartialResponses:
    """The last known responses of each engine. They stay in the object store until they are needed."""

    def __init__(self) -> None:
        self._asked: dict[int, ray.ObjectRef] = {}
        self._known: dict[int, ray.ObjectRef] = {}
        self._looked = time.monotonic()

    def look(self, actors: Mapping[int, Any]) -> None:
        """Ask these engines, by replica, if it is time to; returns at once."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for replica, ref in list(self._asked.items()):
            if ray.wait([ref], timeout=0, fetch_local=False)[0]:
                self._known[replica] = self._asked.pop(replica)
        for replica in actors.keys() - self._asked.keys():
            self._asked[replica] = actors[replica].partial_responses.remote()

    def last(self, replica: int) -> dict[int, PartialResponse]:
        """The known parts of a lost engine's responses, by seed; forgotten afterwards."""
        refs = [self._known.pop(replica, None), self._asked.pop(replica, None)]
        return _read([ref for ref in refs if ref is not None], timeout_s=0.1)

    def now(self, actors: Mapping[int, Any]) -> dict[int, PartialResponse]:
        """Ask these engines and wait for their answers, ANSWER_SECONDS at most; by seed."""
        return _read([actor.partial_responses.remote() for actor in actors.values()], timeout_s=ANSWER_SECONDS)


def _read(refs: list[ray.ObjectRef], timeout_s: float) -> dict[int, PartialResponse]:
    found: dict[int, PartialResponse] = {}
    if refs:
        for ref in ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]:
            with suppress(RayError):  # of an engine that died, or whose node is gone: its responses begin again
                found |= ray.get(ref)
    return found
