"""Sessions without an engine: what extends what, which tokens are trained where, rewards, and answers from
records.
"""

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refused
from tests.workers.rollout.sessions import (
    TURNS,
    Agent,
    Turn,
    ids,
    message,
    prompt_of,
    response,
)
from workers.agents.session import Session
from workers.engine.branches import branches_of
from workers.engine.session_record import Node
from workers.errors import DataError, EpisodeError

REWARDS = st.lists(
    st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 2.0])), min_size=10, max_size=10
)


def kept_by(turns: list[Turn]) -> tuple[dict[int, list[int]], list[int]]:
    """The path to each kept turn and the leaves, by their places in the list."""
    parents = [
        -1 if turn[0] < 0 or not place else turn[0] % place
        for place, turn in enumerate(turns)
    ]
    kept = [place for place, turn in enumerate(turns) if turn[3] or place in parents]
    paths: dict[int, list[int]] = {-1: []}
    for place in range(len(turns)):
        paths[place] = [*paths[parents[place]], place]
    return paths, [
        place for place in kept if not any(parents[other] == place for other in kept)
    ]


@given(TURNS, REWARDS)
def test_each_path_is_a_row_and_each_token_is_trained_once_with_the_mean_of_its_leaves(
    turns: list[Turn], rewards: list[float | None]
) -> None:
    session = Session("s", max_turns=20)
    agent = Agent(session).play(turns)
    nodes = [node for node, _ in agent.turns]
    paths, leaves = kept_by(turns)
    below = [
        [leaf for leaf in leaves if place in paths[leaf]] for place in range(len(turns))
    ]
    assert [node in session.kept for node in nodes] == [bool(found) for found in below]
    if not leaves:
        assert (session.turns, session.value, session.transcript) == ([], None, [])
        return
    rows = session.rows()
    whole = [
        part
        for place, node in enumerate(nodes)
        if below[place]
        for part in (node.given, node.response.ids)
    ]
    assert np.array_equal(rows[0]["input_ids"], np.concatenate(whole))
    assert len(rows) == (1 if len(leaves) == 1 else 1 + len(leaves))
    trained = rows[-len(leaves) :]
    for leaf, row in zip(leaves, trained, strict=True):
        parts = [
            part
            for place in paths[leaf]
            for part in (nodes[place].given, nodes[place].response.ids)
        ]
        assert np.array_equal(row["input_ids"], np.concatenate(parts))
        mask = row["loss_mask"]
        assert np.array_equal(
            row["rollout_log_probs"][mask], -row["input_ids"][mask] / np.float32(8)
        )
        assert np.array_equal(mask, row["weight_versions"] >= 0)
    tokens = np.concatenate(
        [row["input_ids"][row["loss_mask"]] for row in trained]
    ).tolist()
    expected = [
        token
        for place, node in enumerate(nodes)
        if below[place]
        for token in node.response.ids.tolist()
    ]
    assert (
        sorted(tokens)
        == sorted(expected)
        == np.sort(rows[0]["input_ids"][rows[0]["loss_mask"]]).tolist()
    )
    assert (
        session.response_tokens
        == len(tokens)
        == sum(count for _, count in session.version_tokens)
    )
    assert (
        session.prompt_tokens + session.response_tokens + session.observation_tokens
        == len(rows[0]["input_ids"])
    )

    session.reward(1.0)
    own = {
        place: reward
        for place, reward in enumerate(rewards[: len(turns)])
        if reward is not None
    }
    for place, reward in own.items():
        session.reward(reward, f"id{place}")
    of_leaf = {
        leaf: ([1.0] + [own[place] for place in paths[leaf] if place in own])[-1]
        for leaf in leaves
    }
    assert session.value == pytest.approx(np.mean([of_leaf[leaf] for leaf in leaves]))
    offsets = {
        int(nodes[p].response.ids[0]): np.mean([of_leaf[x] for x in found])
        for p, found in enumerate(below)
        if found
    }
    position = 0
    for sampled, offset, _ in session.credit():  # in the order of the rows' trained tokens
        assert offset == pytest.approx(offsets[tokens[position]] - session.value)
        assert tokens[position : position + sampled] == list(
            range(tokens[position], tokens[position] + sampled)
        )
        position += sampled
    assert position == len(tokens)
    told = session.describe_turns()
    assert [each["kept"] for each in told] == [bool(found) for found in below]
    order = [
        int(nodes[p].response.ids[0])
        for p in sorted(
            below and [p for p, b in enumerate(below) if b], key=lambda p: told[p]["turn"]
        )
    ]
    assert order == [t for t in tokens if t in offsets]
    assert json.loads(json.dumps(told)) == told


@given(TURNS, st.booleans())
def test_an_agent_that_starts_again_is_answered_from_the_record(
    turns: list[Turn], twice: bool
) -> None:
    """Turns that it does not reach again are dropped, and nothing is sampled for those that it does."""
    first = Session("s", max_turns=20)
    Agent(first).play(turns)
    first.reward(3.0)
    record = pickle.loads(pickle.dumps(first.snapshot()))
    if twice:  # lost again before anything was asked
        record = Session("s", max_turns=20, record=record).snapshot()
    again = [(turn[0], *turn[1:3], True) for turn in turns]
    session = Session("s", max_turns=20, record=record)
    agent = Agent(session, first=5_000).play(again)
    assert (agent.sampled, session.value) == (0, None)
    assert [node.number for node, _ in agent.turns] == list(range(len(turns)))
    complete = Session("s", max_turns=20)
    Agent(complete).play(again)
    for row, expected in zip(session.rows(), complete.rows(), strict=True):
        assert all(np.array_equal(row[name], expected[name]) for name in expected)
    assert all(told["replayed"] for told in session.describe_turns())
    partly = Session("s", max_turns=20, record=record)
    part = Agent(partly, first=5_000).play(again[: len(turns) // 2])
    assert part.sampled == 0 and len(partly.kept) == len(turns) // 2 == sum(
        told["kept"] for told in partly.describe_turns()
    )
    assert len(partly.describe_turns()) == len(partly.snapshot().nodes) == len(turns)
    node = part.ask(-1, 4, 2)  # another prompt than any recorded one
    assert part.sampled == 1 and node.number == len(turns)


@given(TURNS)
def test_an_agent_that_goes_on_keeps_what_it_received(turns: list[Turn]) -> None:
    first = Session("s", max_turns=20)
    agent = Agent(first).play(turns)
    first.reward(3.0)
    session = Session(
        "s", max_turns=20, record=pickle.loads(pickle.dumps(first.snapshot())), goes_on=True
    )
    assert [node.number for node in session.kept] == [node.number for node in first.kept]
    assert session.value == first.value
    last, messages = agent.turns[-1]
    asked = session.find([*messages, message("user", [3])])
    assert asked.parent is not None and asked.parent.number == last.number
    with session.sampling() as number:
        node = session.add(
            asked,
            prompt_of(session, asked),
            response([4_000]),
            number=number,
            message=message("assistant", [4_000]),
        )
    assert (node.number, node.parent) == (len(turns), last.number)
    # Though nobody may have received it.
    assert last.number in [each.number for each in session.kept]


CALL = {
    "type": "function",
    "id": "a",
    "function": {"name": "sum", "arguments": '{"b": [1, 2], "a": {"y": 1, "x": 2}}'},
}
SAID = {
    "role": "assistant",
    "content": " Let me see.\n",
    "reasoning": "hm",
    "tool_calls": [CALL, CALL],
}


def changed_call(**function: Any) -> dict[str, Any]:
    return CALL | {"id": "other", "function": CALL["function"] | function}


@pytest.mark.parametrize(
    ("answer", "matches"),
    [
        ([SAID], True),
        (
            [
                {
                    "role": "assistant",
                    "content": "Let me see.",
                    "tool_calls": [CALL, CALL],
                    "reasoning_content": "other",
                }
            ],
            True,
        ),
        (
            [
                SAID
                | {
                    "content": [
                        {"type": "text", "text": "Let me"},
                        {"type": "output_text", "text": "see."},
                    ]
                }
            ],
            True,
        ),
        (
            [
                SAID
                | {
                    "tool_calls": [
                        CALL,
                        changed_call(arguments={"a": {"x": 2, "y": 1}, "b": [1, 2]}),
                    ]
                }
            ],
            True,
        ),
        # One answer as several messages.
        ([SAID | {"tool_calls": None}, SAID | {"content": None}], True),
        ([{"role": "assistant", "content": "streamed"}], True),  # known by `also`
        ([SAID | {"tool_calls": [CALL]}], False),
        ([SAID | {"tool_calls": [CALL, changed_call(name="max")]}], False),
        ([SAID | {"tool_calls": [CALL, changed_call(arguments='{"a": 1')]}], False),
        ([SAID | {"content": "Let me see!"}], False),
        (
            [
                SAID
                | {"content": [{"type": "image_url", "image_url": {"url": "Letmesee."}}]}
            ],
            False,
        ),
        ([], False),
    ],
)
def test_a_history_extends_the_turn_that_it_repeats(
    answer: list[dict[str, Any]], matches: bool
) -> None:
    session = Session("s", max_turns=9)
    asked = session.find([message("user", [1])], ["tool"])
    node = session.add(asked, ids([1]), response([5, 6]), number=0, message=SAID)
    session.also(node, {"role": "assistant", "content": "streamed"})
    messages = [message("user", [1]), *answer, {"role": "tool", "content": "3"}]
    asked = session.find(messages, ["tool"])
    assert (asked.parent, asked.covered) == (
        (node, len(messages) - 1) if matches else (None, 0)
    )
    assert session.find(messages, []).parent is None  # tools are rendered into the prompt
    assert session.find(messages[:-1], ["tool"]).parent is None  # nothing new
    assert session.find([message("user", [2]), *messages[1:]], ["tool"]).parent is None
    # Deeper turns are found by any form of those above them.
    extended = session.find(
        [message("user", [1]), SAID, {"role": "tool", "content": "3"}], ["tool"]
    )
    deeper = session.add(
        extended,
        ids([1, 5, 6, 7]),
        response([8]),
        number=1,
        message=message("assistant", [8]),
    )
    found = session.find(
        [*messages, message("assistant", [8]), message("user", [9])], ["tool"]
    )
    assert (found.parent is deeper, found.covered == len(messages) + 1) == (
        matches,
        matches,
    )


@pytest.mark.parametrize("sampled", ["", "{}", " { } ", None, {}])
@pytest.mark.parametrize("read", ["", "{}", None, {}])
def test_a_call_without_arguments_is_the_same_in_all_its_forms(
    sampled: Any, read: Any
) -> None:
    """A call that is cut before its arguments is streamed with an empty text, and templates get a mapping."""
    session, new = Session("s", max_turns=9), message("user", [3])
    said = SAID | {"tool_calls": [changed_call(arguments=sampled)]}
    node = session.add(
        session.find([message("user", [1])]),
        ids([1]),
        response([5]),
        number=0,
        message=said,
    )
    history = [
        message("user", [1]),
        SAID | {"tool_calls": [changed_call(arguments=read)]},
        new,
    ]
    assert session.find(history).parent is node


@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    "changed", ["1 1 1 1", "1 1\n1 1 ", " 1 1\n1 1", "1 1\n\n1 1", "11\n11"]
)
def test_blanks_count_in_messages_that_the_policy_did_not_write(
    role: str, parts: bool, changed: str
) -> None:
    def history(text: str) -> list[dict[str, Any]]:
        content = [{"type": "text", "text": text}] if parts else text
        return [{"role": role, "content": content}, message("user", [2])]

    session, new = Session("s", max_turns=9), message("user", [3])
    node = session.add(
        session.find(history("1 1\n1 1")), ids([1]), response([5]), number=0, message=SAID
    )
    assert session.find([*history("1 1\n1 1"), SAID, new]).parent is node
    assert session.find([*history(changed), SAID, new]).parent is None


def test_equal_answers_are_extended_one_each() -> None:
    session, said = Session("s", max_turns=9), message("assistant", [1])
    asked = session.find([message("user", [1])])
    nodes = [
        session.add(asked, ids([1]), response([5 + n]), number=n, message=said)
        for n in range(2)
    ]
    messages, parents = [*asked.messages, said, message("user", [2])], []
    for n in range(2):
        found = session.find(messages)
        assert found.parent is not None
        parents.append(found.parent)
        session.add(
            found,
            prompt_of(session, found),
            response([7]),
            number=2 + n,
            message=message("assistant", [7]),
        )
    assert {*parents} == {*nodes}


@given(
    st.lists(
        st.tuples(st.integers(-1, 5), st.booleans(), st.text("ab", min_size=1, max_size=3)),
        max_size=6,
    )
)
def test_completions_extend_what_their_prompt_repeats(
    steps: list[tuple[int, bool, str]],
) -> None:
    """By its text, or by its ids, whichever it is."""
    session = Session("s", max_turns=9)
    nodes, texts = list[Node](), list[str]()
    for number, (place, by_ids, new) in enumerate(steps):
        parent = nodes[place % number] if place >= 0 and number else None
        before = texts[nodes.index(parent)] if parent else "p" * (number + 1)
        if by_ids:
            prompt_ids = np.concatenate(
                [
                    session.ids(parent) if parent else ids([number + 1]),
                    ids([*map(ord, new)]),
                ]
            )
            asked = session.find_ids(prompt_ids)
            assert asked.parent is parent
        else:
            asked = session.find_text(before + new)
            assert asked.parent is parent or (parent and parent.asked is None)
            assert (
                texts[nodes.index(asked.parent)] if asked.parent else ""
            ) + asked.text == before + new
            begun = session.ids(asked.parent) if asked.parent else ids([50 + number])
            prompt_ids = np.concatenate([begun, ids([*map(ord, new)])])
        node = session.add(
            asked, prompt_ids, response([200 + number]), number=number, text=f"<{number}>"
        )
        nodes.append(node)
        texts.append(before + new + node.text)
        # An answer that goes on.
        assert not by_ids or session.find_ids(session.ids(node)).parent is node


def test_limits_and_wrong_rewards_are_refused() -> None:
    session = Session("s", max_turns=2)
    with session.sampling() as first, session.sampling() as second:
        assert (first, second) == (0, 1)
        with refused("rollout.max_turns=2", EpisodeError), session.sampling():
            pass
    asked = session.find([message("user", [1])])
    for number in range(2):  # those that failed count no more
        with session.sampling() as place:
            node = session.add(
                asked, ids([1]), response([5]), number=place, name=f"id{number}"
            )
            node.received = True
    with refused("rollout.max_turns=2", EpisodeError), session.sampling():
        pass
    for value, name in (
        ("1", ""),
        (True, ""),
        (float("nan"), ""),
        (1e39, "id0"),
        (None, "id0"),
        (1.0, "id2"),
    ):
        with refused("response_id" if name == "id2" else "reward", DataError):
            session.reward(value, name)
    session.reward(1, "id0")
    assert session.value is None  # a leaf has none
    session.reward(2, "id1")
    assert session.value == 1.5
    asked = replace(session.find([message("user", [1])]), parent=node)
    with pytest.raises(DataError):
        session.add(asked, ids([1, 6, 7]), response([5]), number=9)
    with pytest.raises(DataError):
        session.add(asked, ids([1, 5]), response([]), number=9)


def test_rows_of_a_sub_agent_share_their_own_prompt() -> None:
    """Those that begin with the sample's prompt share it with the other samples."""
    session = Session("s", max_turns=9)
    agent = Agent(session)
    for extended in (-1, 0, 0):
        agent.ask(extended, 20, 30)
    prompts = [[message("system", range(100, 140)), message("user", [2])]]
    for number in range(2):
        asked = session.find(prompts[0])
        node = session.add(
            asked, prompt_of(session, asked), response([900 + number]), number=9 + number
        )
        node.received = True
    rows = session.rows()
    branches = branches_of(rows, session.prompt_tokens)
    assert [each.prompt_tokens for each in branches] == [24, 24, 41, 41]
    assert branches[0].prompt_hash == branches[1].prompt_hash == session.prompt_hash
    assert branches[2].prompt_hash == branches[3].prompt_hash != session.prompt_hash
