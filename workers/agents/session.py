"""Session: a sample that an agent plays through the gateway, as a tree of sampled turns. No HTTP, no vLLM.

    request --find--> SessionPrompt: the recorded turn that it extends, and the rest
    SessionPrompt --prompt ids--> add --> Node

    system, user | turn 1 | tool | turn 2                   row 1
                          | compacted | turn 3              row 2: turn 1 is its context
    other system | turn 4                                   row 3: a sub-agent

Each path from a root to a leaf is a row. Each sampled token is trained in the first row that holds it.
Nobody's text is encoded twice: a prompt that extends a turn begins with its ids.

A leaf's reward r is its deepest turn's with an override, or else the session's. The sample's reward R is the
mean over the leaves. A turn's offset is the mean of r - R over the leaves below it. A turn that no client
received and nothing extends is dropped.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from workers.agents.message_texts import canonical, digest, exact
from workers.batch.placed_images import Placed, keys
from workers.batch.score import is_finite
from workers.engine.requests import Response, join_responses, not_sampled
from workers.engine.session_record import Node, SessionRecord
from workers.episodes.episode import SampledTurns
from workers.errors import DataError, EpisodeError, quote
from workers.rendering import Messages

S = TypeVar("S", str, bytes)


@dataclass(frozen=True)
class SessionPrompt:
    """A request. covered: messages up to and with the answer of `parent`. base: digest of all of them.

    text: of a completion, what follows `parent`.
    """

    messages: Messages
    covered: int = 0
    parent: Node | None = None
    base: str = ""
    text: str | None = None


class Session(SampledTurns):
    """The tree of one sample. nodes: in order of completion, parents before children. full: no
    turn was left.
    """

    def __init__(
        self,
        name: str,
        *,
        max_turns: int,
        record: SessionRecord | None = None,
        goes_on: bool = False,
    ) -> None:
        """record: turns to answer again. goes_on: whether the agent has seen the received ones, which then
        count.

        An agent that starts again reaches a recorded turn by asking for it.
        """
        record = record or SessionRecord()
        self.name = name
        self.max_turns = max_turns
        self.full = False
        self.nodes: list[Node] = []
        self._under_way = 0
        self._rewards = dict(record.rewards) if goes_on else {}
        self._paths: dict[str, list[Node]] = {}  # by digest
        recorded = [
            replace(node, names=[*node.names], keys=[*node.keys]) for node in record.nodes
        ]
        self._by_number = {node.number: node for node in recorded}
        self._extended = {node.parent for node in recorded} if goes_on else set()
        self._unclaimed = dict(self._by_number)
        self._numbers = itertools.count(1 + max(self._by_number, default=-1))
        for node in recorded if goes_on else ():
            self._know(node)
            if node.received or node.number in self._extended:
                self._claim(node)

    def path(self, node: Node | None) -> list[Node]:
        """Return the nodes from the root to this one."""
        path = [node] if node else []
        while path and path[-1].parent >= 0:
            path.append(self._by_number[path[-1].parent])
        return path[::-1]

    def whole(self, node: Node | None) -> Response:
        """Return all tokens up to the answer's last, with their images, as they are read. None is before the
        first.
        """
        return join_responses(
            [
                not_sampled(np.empty(0, np.int32)),
                *(p for n in self.path(node) for p in n.parts),
            ]
        )

    def ids(self, node: Node) -> np.ndarray:
        """Return the ids of `whole`, int32."""
        return self.whole(node).ids

    # --- requests

    def find(self, messages: Messages, tools: Any = None) -> SessionPrompt:
        """Find the longest recorded path that a chat extends. tools: with all else that changes its
        rendering.
        """
        state = digest("", json.dumps(tools, sort_keys=True, default=str))
        prefix = state
        answers = list[dict[str, Any]]()
        nodes = list[Node]()
        covered = 0
        for place, message in enumerate(messages, 1):
            if message.get("role") != "assistant":
                prefix = state
                answers = []
            elif not answers:
                prefix = state
                answers = [message]
            else:  # some clients cut an answer into several messages
                answers.append(message)
            # Clients change the form of the policy's answers only. All of other messages is what a prompt
            # says.
            state = digest(state, exact(message))
            answer_key = digest(prefix, canonical(*answers)) if answers else ""
            if answers and place < len(messages) and answer_key in self._paths:
                nodes = self._paths[answer_key]
                covered = place
                state = nodes[-1].keys[0]
        return SessionPrompt(messages, covered, self._newest(nodes), state)

    def find_text(self, prompt: str) -> SessionPrompt:
        """Find the longest recorded text with which the prompt of a completion begins."""
        parent, rest = self._follow(
            prompt, lambda node: None if node.asked is None else node.asked + node.text
        )
        return SessionPrompt([], parent=parent, text=rest)

    def find_ids(self, prompt_ids: np.ndarray) -> SessionPrompt:
        """Find the longest recorded path with which a prompt of ids, int32, begins."""
        return SessionPrompt(
            [],
            parent=self._follow(prompt_ids.tobytes(), lambda node: node.ids.tobytes())[0],
        )

    def _follow(
        self, prompt: S, addition: Callable[[Node], S | None]
    ) -> tuple[Node | None, S]:
        """Return the deepest node whose path begins the prompt, and the rest. addition: what a node adds to
        its parent.
        """
        parent = None
        rest = prompt
        while True:
            above = parent.number if parent else -1
            below = {
                node: addition(node)
                for node in [*self._by_number.values()]
                if node.parent == above
            }
            node = self._newest(
                [node for node, text in below.items() if text and rest.startswith(text)]
            )
            if node is None:
                return parent, rest
            parent = node
            rest = rest[len(below[node] or "") :]

    def _newest(self, nodes: Sequence[Node]) -> Node | None:
        """The newest, of those that nothing extends if there are some: clients with equal answers extend one
        each.
        """
        free = [node for node in nodes if node.number not in self._extended]
        return (free or nodes)[-1] if nodes else None

    @contextmanager
    def sampling(self) -> Iterator[int]:
        """Reserve a turn, and yield its number. Raises EpisodeError if rollout.max_turns are sampled or under
        way.
        """
        if len(self.nodes) + self._under_way >= self.max_turns:
            self.full = True
            raise EpisodeError(
                f"rollout.max_turns={self.max_turns}: the session has sampled as many turns. Raise it, or "
                "end the agent earlier."
            )
        self._under_way += 1
        try:
            yield next(self._numbers)
        finally:
            self._under_way -= 1

    def add(
        self,
        request: SessionPrompt,
        prompt_ids: np.ndarray,
        response: Response,
        *,
        number: int,
        message: dict[str, Any] | None = None,
        text: str = "",
        name: str = "",
        images: Placed = (),
    ) -> Node:
        """Add the answer to a request. Raises DataError if it is empty, or prompt_ids do not extend
        `request.parent`.

        number: of `sampling`. message: the assistant's message, None for a completion. name: the response's
        id.
        images: placed in prompt_ids.
        """
        if not response.sampled_tokens:
            raise DataError("an answer has no sampled token.")
        node = Node(
            number,
            response,
            text,
            {} if message is None else message,
            [name] if name else [],
        )
        self._join(node, request, prompt_ids, images)
        return node

    def claim_recorded(
        self, request: SessionPrompt, prompt_ids: np.ndarray, images: Placed = ()
    ) -> Node | None:
        """Claim the record's answer to a prompt of these ids and images, which then needs no sampling."""
        parent, addition = self._split_prompt(request, prompt_ids, images)
        read = keys(addition.ids, addition.images)
        same = (
            candidate
            for candidate in self._unclaimed.values()
            if candidate.parent == parent
        )
        node = next(
            (
                candidate
                for candidate in same
                if np.array_equal(keys(candidate.given, candidate.images), read)
            ),
            None,
        )
        if node is not None:
            del self._unclaimed[node.number]
            node.replayed, node.received, node.joined = True, False, 0
            self._join(node, request, prompt_ids, images)
        return node

    def also(self, node: Node, message: dict[str, Any]) -> None:
        """Let requests that hold `message` extend the node, such as what a stream sent where a parser reads
        otherwise.
        """
        key = digest(node.base, canonical(message))
        if key not in node.keys:
            node.keys.append(key)
        self._know(node)

    def _know(self, node: Node) -> None:
        for key in node.keys:
            if node not in self._paths.setdefault(key, []):
                self._paths[key].append(node)

    def _split_prompt(
        self, request: SessionPrompt, prompt_ids: np.ndarray, images: Placed
    ) -> tuple[int, Response]:
        """Return the number of the parent, and what the prompt adds to its tokens."""
        prefix = self.whole(request.parent)
        start = len(prefix.ids)
        if not np.array_equal(
            keys(prefix.ids, prefix.images), keys(prompt_ids, images)[:start]
        ):
            raise DataError(
                "a prompt does not begin with the ids of the turn that it extends."
            )
        new = tuple(
            replace(image, first=image.first - start)
            for image in images
            if image.first >= start
        )
        return request.parent.number if request.parent else -1, not_sampled(
            prompt_ids[start:], images=new
        )

    def _join(
        self, node: Node, request: SessionPrompt, prompt_ids: np.ndarray, images: Placed
    ) -> None:
        node.parent, addition = self._split_prompt(request, prompt_ids, images)
        node.given = addition.ids
        node.images = addition.images
        node.messages = request.messages[request.covered :]
        node.asked = request.text
        node.base = request.base
        if node.said:
            self.also(node, node.said)
        if request.parent:
            self._claim(request.parent)
            self._extended.add(node.parent)
        self._by_number[node.number] = node
        self.nodes.append(node)

    def _claim(self, node: Node) -> None:
        for ancestor in self.path(node):
            if self._unclaimed.pop(ancestor.number, None):
                self.nodes.append(ancestor)
                self._extended.add(ancestor.parent)

    # --- the tree

    @property
    def kept(self) -> list[Node]:
        """Nodes to train on, in order of completion."""
        return [
            node for node in self.nodes if node.received or node.number in self._extended
        ]

    @property
    def leaves(self) -> list[Node]:
        nodes = self.kept
        inner = {node.parent for node in nodes}
        return [node for node in nodes if node.number not in inner]

    @property
    def turns(self) -> list[Response]:  # type: ignore[override]
        return [node.response for node in self.kept]

    @property
    def _said(self) -> list[Response]:  # type: ignore[override]
        return [part for node in self.kept for part in node.parts]

    @property
    def _parts(self) -> list[list[Response]]:  # type: ignore[override]
        """All of the session, and its paths if it has several."""
        paths = []
        seen = set[Node]()
        for leaf in self.leaves:
            path = self.path(leaf)
            paths.append(
                [
                    part
                    for n in path
                    for part in ([join_responses(n.parts)] if n in seen else n.parts)
                ]
            )
            seen.update(path)
        return paths if len(paths) == 1 else [self._said, *paths]

    @property
    def transcript(self) -> Messages:
        """The messages of the path to the last kept turn, with the policy's, empty for completions."""
        path = self.path(self.kept[-1]) if self.kept else []
        return [
            message
            for node in path
            for message in (*node.messages, *([node.said] if node.said else []))
        ]

    # --- rewards

    def reward(self, value: Any, response_id: str = "") -> None:
        """Set the session's reward, or that of the leaves below a response. Raises DataError for wrong
        values.
        """
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not is_finite(value)
        ):
            raise DataError(f"reward={quote(value)}: expected a finite float32 number.")
        if response_id and not any(
            response_id in node.names for node in self._by_number.values()
        ):
            raise DataError(
                f"response_id={quote(response_id)}: not a response of this session. Use an answer's id."
            )
        self._rewards[response_id] = float(value)

    @property
    def value(self) -> float | None:
        """The sample's reward: the mean over the leaves, None while one of them has none."""
        rewards = [self._of_leaf(leaf) for leaf in self.leaves]
        known_rewards = [reward for reward in rewards if reward is not None]
        if not known_rewards or len(known_rewards) < len(rewards):
            return None
        # Without overrides exactly the session's reward: a mean may round, and leave offsets.
        return (
            known_rewards[0]
            if len(set(known_rewards)) == 1
            else math.fsum(known_rewards) / len(known_rewards)
        )

    def _of_leaf(self, leaf: Node) -> float | None:
        overrides = (self._override(node) for node in reversed(self.path(leaf)))
        return next(
            (reward for reward in overrides if reward is not None), self._rewards.get("")
        )

    def _override(self, node: Node) -> float | None:
        return next(
            (self._rewards[name] for name in reversed(node.names) if name in self._rewards),
            None,
        )

    def credit(self) -> tuple[tuple[int, float, int], ...]:
        """Return (sampled tokens, offset, 0) of each kept turn, in the order in which rows train them."""
        value = self.value or 0.0
        offsets = []
        for node, rewards in self._below().items():
            offset = math.fsum((reward or 0.0) - value for reward in rewards) / len(rewards)
            offsets.append((node.response.sampled_tokens, offset, 0))
        return tuple(offsets)

    def _below(self) -> dict[Node, list[float | None]]:
        """Rewards of the leaves below each kept node, in the order in which rows train nodes."""
        below: dict[Node, list[float | None]] = {}
        for leaf in self.leaves:
            reward = self._of_leaf(leaf)
            for node in self.path(leaf):
                below.setdefault(node, []).append(reward)
        return below

    # --- records

    @property
    def known(self) -> int:
        """Number of turns, with those of the record that nobody reached yet."""
        return len(self._by_number)

    def snapshot(self, nodes: Sequence[Node] | None = None) -> SessionRecord:
        """Return these turns, or all known ones."""
        return SessionRecord(
            tuple(map(replace, nodes or self._by_number.values())), dict(self._rewards)
        )

    def describe_turns(self) -> list[dict[str, Any]]:
        """Return the turns for the run's files, as JSON, in order of completion, and then those that nobody
        reached.

        turn: the place in `credit`, None if not trained. log_prob: the mean over its tokens.
        """
        places = {node: place for place, node in enumerate(self._below())}
        return [
            _describe_turn(node, self._override(node), places.get(node))
            for node in (*self.nodes, *self._unclaimed.values())
        ]


def _describe_turn(node: Node, reward: float | None, turn: int | None) -> dict[str, Any]:
    response = node.response
    sampled = node.response.versions >= 0
    versions = response.versions[sampled]
    same = ("number", "finish_reason", "replayed", "joined", "began", "seconds")
    return {
        **{
            name: getattr(response if name == "finish_reason" else node, name)
            for name in same
        },
        "parent": node.parent if node.parent >= 0 else None,
        "messages": node.messages
        if node.asked is None
        else [{"role": "prompt", "content": node.asked}],
        "said": node.said or {"role": "assistant", "content": node.text},
        "given_tokens": len(node.given),
        "tokens": response.sampled_tokens,
        "log_prob": float(response.log_probs[sampled].mean()),
        "versions": [int(versions.min()), int(versions.max())],
        "kept": turn is not None,
        "reward": reward,
        "turn": turn,
    }
