"""A session's tree as text: every turn once, what became of it, and nothing that a terminal would obey."""

import io
import json

import numpy as np
import pytest
import rich.console

from controller.observability.recorded_values import as_recorded
from controller.observability.session_tree import Entry, draw_tree, entries, headline
from controller.observability.step_metrics import session_metrics
from tests.controller.observability.recorded_sessions import CHAIN, FORKED, node
from workers.agents.session import Session
from workers.engine.requests import Response

EPISODE = {
    "prompt": "add",
    "turns": [{"policy": "4"}, {"environment": "no"}, {"policy": "5"}],
    "reward": 1.0,
}


def row(nodes: list, **facts) -> dict:
    return {
        "uid": "12",
        "sample": 3,
        "reward": 1.0,
        "seconds": 4.2,
        "session": as_recorded(nodes, 20_000),
    } | facts


def text_of(found: dict) -> str:
    console = rich.console.Console(file=io.StringIO(), width=80)
    console.print(draw_tree(found, "step 7, session 3"))
    return console.file.getvalue()


def test_a_path_is_drawn_as_a_list_and_branches_behind_it() -> None:
    found = entries(row(FORKED, advantage=-0.5))
    assert [entry.who for entry in found] == [
        "user",
        "turn 1",
        "user",
        "turn 3",
        "user",
        "turn 5",
        "branch",
        "branch",
    ]
    turns = {
        entry.who: entry
        for entry in (*found, *found[6].under, *found[7].under)
        if entry.who.startswith("turn")
    }
    assert "replayed" in turns["turn 1"].facts and "retried 2x" in turns["turn 3"].facts
    assert "dropped" in turns["turn 2"].facts and "advantage" not in turns["turn 2"].facts
    assert (
        "reward 0.500" in turns["turn 5"].facts
        and "advantage -0.500" in turns["turn 5"].facts
    )
    assert [(entry.text, [under.text for under in entry.under]) for entry in found[6:]] == [
        ("after turn 1", ["go", "abandoned"]),
        ("from the start", ["in short", "compacted"]),
    ]


def played(session: Session, *messages: str) -> None:
    """An answer of two tokens to a chat of a user's and the policy's messages in turn."""
    roles = ["user" if place % 2 == 0 else "assistant" for place in range(len(messages))]
    asked = session.find(
        [
            {"role": role, "content": text}
            for role, text in zip(roles, messages, strict=True)
        ]
    )
    begun = session.ids(asked.parent) if asked.parent else np.empty(0, np.int32)
    ids = np.append(begun, [len(text) for text in messages[asked.covered :]]).astype(
        np.int32
    )
    if session.claim_recorded(asked, ids) is None:
        response = Response(np.int32([7, 8]), np.float32([-1.0, -0.5]), np.int32([3, 3]))
        with session.sampling() as number:
            session.add(
                asked,
                ids,
                response,
                number=number,
                message={"role": "assistant", "content": f"to {messages[-1]}"},
            )
    session.nodes[-1].received = True


def test_what_a_session_tells_is_drawn_and_counted() -> None:
    first = Session("a", max_turns=9)
    for messages in (("one",), ("one", "to one", "three"), ("one", "to one", "other")):
        played(first, *messages)
    again = Session("a", max_turns=9, record=first.snapshot())
    played(again, "one")
    played(again, "one", "to one", "three")
    told = json.loads(json.dumps(again.describe_turns()))
    found = entries(row(told))
    assert [entry.text for entry in found] == [
        "one",
        "to one",
        "three",
        "to three",
        "after turn 1",
    ]
    assert [
        ("replayed" in entry.facts, "dropped" in entry.facts) for entry in found[1::2]
    ] == [(True, False)] * 2
    assert "dropped" in found[4].under[1].facts
    counted = session_metrics([told], np.ones(1))
    assert (counted["session/dropped_turns"], counted["session/branches"]) == (1, 2)
    assert (counted["session/sampled_tokens"], counted["session/replayed_share"]) == (
        6,
        2 / 3,
    )


def test_messages_are_texts_with_reasoning_and_calls() -> None:
    texts = [entry.text for entry in entries(row(CHAIN))]
    assert texts == [
        "be brief",
        "how many?[image]",
        "hm",
        "7",
        '(reasoning) a number\nsql({"query": "select 1"})',
        "1",
        "seven",
    ]
    assert "version 3-4" in entries(row(CHAIN))[4].facts
    assert (
        headline(row(CHAIN)) == "turns 3, branches 1, tokens 30, reward 1.000, seconds 4.2"
    )


def test_advantages_of_turns_stand_with_them() -> None:
    found = entries(row(FORKED, advantage=0.0, advantages=[1.0, 2.0, 3.0, 4.0]))
    facts = {entry.who: entry.facts for entry in found if entry.who.startswith("turn")}
    assert [
        "+1.000" in facts["turn 1"],
        "+2.000" in facts["turn 3"],
        "+3.000" in facts["turn 5"],
    ] == [True] * 3


def test_an_episode_and_a_response_are_trees_of_one_path() -> None:
    assert entries(EPISODE) == [
        Entry("prompt", "add"), Entry("policy", "4"), Entry("environment", "no"), Entry("policy", "5")
    ]  # fmt: skip
    assert headline(EPISODE) == "turns 2, reward 1.000"
    assert entries({"prompt": "add", "response": "4"}) == [
        Entry("prompt", "add"),
        Entry("policy", "4"),
    ]


@pytest.mark.parametrize(
    "found",
    [
        row(CHAIN),
        row([node(0, None, "x" * 200)]),
        row(FORKED, failure="agent: it died " * 20),
        EPISODE,
    ],
)
def test_a_tree_fits_80_columns_without_escapes(found: dict) -> None:
    lines = text_of(found).splitlines()
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)


def test_neither_control_characters_nor_secrets_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789abcdef")
    said = "\x1b[2Jgone\x07 \u202eback 0123456789abcdef\nnext"
    assert (
        entries(row([node(0, None, said)]))[0].text
        == "\ufffd[2Jgone\ufffd \ufffdback [hidden]\nnext"
    )


def test_a_long_chain_and_long_texts_stay_short() -> None:
    chain = [
        node(number, number - 1 if number else None, "x" * 5_000, ("tool", "y" * 5_000))
        for number in range(2_000)
    ]
    recorded = as_recorded(chain, 20_000)
    assert (
        sum(
            len(each["said"].partition(" ...")[0])
            + len(each["messages"][0]["content"].partition(" ...")[0])
            for each in recorded
        )
        <= 20_000
    )
    assert len(entries(row(chain))) == 4_000


def test_sessions_are_counted() -> None:
    """Of both: 8 turns and 2 retries that joined; 5 turns are leaves, 2 roots begin a session."""
    found = session_metrics([CHAIN, (), FORKED], np.array([4.0, 1.0, 6.0]))
    assert found == {
        "session/continued_share": 0.4,
        "session/branched_share": 0.2,
        "session/retried_share": 0.2,
        "session/replayed_share": 0.1,
        "session/branches": 2.0,
        "session/dropped_turns": 0.5,
        "session/sampled_tokens": 40.0,
        "session/agent_s": (4.0 - 1.5 + 6.0 - 2.25)
        / 2,  # two requests of the second ran at once for 0.25 s
    }
    assert session_metrics([(), ()], np.zeros(2)) == {}
