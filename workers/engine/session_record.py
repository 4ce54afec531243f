"""SessionRecord: the sampled turns of an agent's session, which another engine can answer again.

The tree of these turns, and how they become rows, is in `workers/agents/session.py`.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.batch.placed_images import Placed
from workers.engine.requests import Response, not_sampled
from workers.template_forms import Messages


@dataclass(eq=False)
class Node:
    """A sampled turn, picklable.

    number: unique in its session, of the turn's seed. text: the answer as text. said: the answer as a
    message, empty for a completion. names: ids of its responses. parent: the number of the turn that it
    extends, or -1. given: int32, what the prompt adds to the parent's tokens. images: placed in `given`.
    messages: new ones of the request, with digests for images. asked: new text of a completion's prompt.
    base, keys: digests of the path before and with the answer. received: whether a client took the answer's
    last byte. joined: retries that received the answer too.
    replayed: whether a record answered. began, seconds: the request's arrival in seconds since the session
    opened, and until the answer's last byte.
    """

    number: int
    response: Response
    text: str
    said: dict[str, Any]
    names: list[str]
    parent: int = -1
    given: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    images: Placed = ()
    messages: Messages = field(default_factory=list)
    asked: str | None = None
    base: str = ""
    keys: list[str] = field(default_factory=list)
    received: bool = False
    joined: int = 0
    replayed: bool = False
    began: float = 0.0
    seconds: float = 0.0

    @property
    def parts(self) -> list[Response]:
        return [not_sampled(self.given, images=self.images), self.response]

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.given, self.response.ids])


@dataclass(frozen=True)
class SessionRecord:
    """What another session can answer again. rewards: by response id, "" for the session's."""

    nodes: tuple[Node, ...] = ()
    rewards: dict[str, float] = field(default_factory=dict)
