"""Sessions of a made-up agent: a message's content is its token ids as text, and no sampled id
occurs twice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from workers.agents.session import Session, SessionPrompt
from workers.engine.requests import STOP, Response
from workers.engine.session_record import Node

SAMPLED = 1_000  # ids of turns begin here, those of prompts lie below
Turn = tuple[int, int, int, bool]

TURNS: st.SearchStrategy[list[Turn]] = st.lists(
    st.tuples(st.integers(-1, 9), st.integers(1, 3), st.integers(1, 4), st.booleans()),
    min_size=1,
    max_size=10,
)
"""(which turn before it extends, or -1, new tokens of its prompt, its own tokens, whether a client received
it).
"""


def ids(numbers: Sequence[int] | range) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def message(role: str, numbers: Sequence[int] | range | np.ndarray) -> dict[str, Any]:
    return {"role": role, "content": " ".join(map(str, numbers))}


def response(numbers: Sequence[int] | range, version: int = 0) -> Response:
    tokens = ids(numbers)
    log_probs = -tokens.astype(np.float32) / 8
    return Response(tokens, log_probs, np.full(len(tokens), version, np.int32), STOP)


def prompt_of(session: Session, asked: SessionPrompt) -> np.ndarray:
    new = [
        int(word)
        for each in asked.messages[asked.covered :]
        for word in each["content"].split()
    ]
    return np.concatenate(
        [session.ids(asked.parent) if asked.parent else ids([]), ids(new)]
    )


class Agent:
    """turns: each turn's node, and its request's messages with the answer. sampled: answers that nothing
    replayed.
    """

    def __init__(self, session: Session, first: int = SAMPLED) -> None:
        self.session, self.next_id, self.sampled = session, first, 0
        self.turns: list[tuple[Node, list[dict[str, Any]]]] = []

    def play(self, turns: Sequence[Turn]) -> "Agent":
        for number, (extended, new, tokens, received) in enumerate(turns):
            self.ask(
                -1 if extended < 0 or not number else extended % number,
                new,
                tokens,
                received=received,
            )
        return self

    def ask(self, extended: int, new: int, tokens: int, *, received: bool = True) -> Node:
        """Prompts differ by the number of their turn, but those of roots begin alike."""
        number = len(self.turns)
        before = (
            self.turns[extended][1] if extended >= 0 else [message("system", range(5, 9))]
        )
        messages = [*before, message("user", [10 + number] * new)]
        asked = self.session.find(messages)
        assert asked.parent is (self.turns[extended][0] if extended >= 0 else None)
        prompt = prompt_of(self.session, asked)
        node = self.session.claim_recorded(asked, prompt)
        if node is None:
            self.sampled += 1
            answer = response(
                range(self.next_id, self.next_id + tokens), version=number % 2
            )
            self.next_id += tokens
            with self.session.sampling() as place:
                said = message("assistant", answer.ids)
                node = self.session.add(
                    asked, prompt, answer, number=place, message=said, name=f"id{number}"
                )
        node.received = received
        self.turns.append((node, [*messages, node.said]))
        return node
