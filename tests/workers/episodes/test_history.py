"""The next prompt with every stock chat template: as the template renders it, with the ids that
were sampled.
"""

import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.rollout import stock_templates as stock
from workers.chat_templates import variables_of
from workers.engine.requests import STOP, Response, not_sampled
from workers.environment import Turn
from workers.episodes.conversation import Conversation
from workers.episodes.history import History, SampledTurn
from workers.errors import DataError, EpisodeError
from workers.rendering import Messages, Renderer

PARAMETERS = {name: {"type": "integer", "description": name} for name in ("a", "b")}
FUNCTION = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": PARAMETERS},
}
TOOLS = [
    {
        "type": "function",
        "function": FUNCTION | {"parameters": FUNCTION["parameters"] | {"required": ["a"]}},
    }
]
CALL = {
    "type": "function",
    "id": "callid001",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
ASKED = [{"role": "user", "content": "2 + 2?"}]
ANSWERS = {
    "user": [{"role": "user", "content": 'Sure? é "4"'}],
    "tool": [{"role": "tool", "content": "4", "name": "add", "tool_call_id": "callid001"}],
}
KINDS = ("plain", "thinking", "tool call")
WITHOUT_TOOLS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
"""Templates that refuse a tool's answer, or drop it."""
CALLS_ALONE = ("gptoss", "gemma4", "diffusion_gemma")
"""Templates that take a call or a content, or show the content behind the tool's answer."""
GLM_ENDS = {"user": "<|user|>", "tool": "<|observation|>"}


class Case(NamedTuple):
    template: str
    role: str
    kind: str
    with_tools: bool = False

    @property
    def options(self) -> dict[str, Any]:
        reads = "tools" in variables_of(stock.source(self.template)).read
        calls = self.with_tools or self.role == "tool" or self.kind == "tool call"
        return {"tools": TOOLS} if reads and calls else {}

    @property
    def said(self) -> Turn:
        """The turn that comes before the answer. A tool answers a call."""
        calls = [CALL] if self.role == "tool" or self.kind == "tool call" else []
        alone = calls and self.template.startswith(CALLS_ALONE)
        content = "" if self.kind == "tool call" or alone else "Four é."
        return Turn("", "", content, "Hm.\nSo." if self.kind == "thinking" else "", calls)

    def render(self, messages: Messages, *, answered: bool = False) -> str:
        """As the template renders it for a server."""
        for message in messages:
            if thought := message.get("reasoning_content"):
                message |= {"reasoning": thought, "thinking": thought}
        options = self.options | {"add_generation_prompt": not answered}
        try:
            return Renderer(stock.tokenizer(self.template)).text(messages, "x", **options)
        except DataError:
            function = CALL[("function")] | {
                "arguments": json.dumps(CALL["function"]["arguments"])
            }  # type: ignore[index,operator]
            texts = [
                m
                | (
                    {"tool_calls": [CALL | {"function": function}]}
                    if "tool_calls" in m
                    else {}
                )
                for m in messages
            ]
            return Renderer(stock.tokenizer(self.template)).text(texts, "x", **options)

    @property
    def sampled(self) -> str:
        return self.sampled_after(ASKED)

    def sampled_after(self, messages: Messages) -> str:
        """The turn as a model writes it that was trained on the template's last messages, with its end."""
        prompt, whole = (
            self.render(messages),
            self.render([*messages, self.said.message()], answered=True),
        )
        written = whole[len(os.path.commonprefix([prompt, whole])) :].rstrip("\n")  # noqa: RUF071
        return written + (GLM_ENDS[self.role] if self.template == "glm4moe" else "")


CASES = [
    Case(name, role, kind) for name in stock.NAMES for role in ANSWERS for kind in KINDS
]


def sampled(turn: np.ndarray) -> Response:
    numbers = np.zeros(len(turn))
    return Response(turn, numbers.astype(np.float32), numbers.astype(np.int32), STOP)


class Played(NamedTuple):
    """Ids of the prompt, of what follows the turn, and of the next prompt. branch: whether that is a row of
    its own.
    """

    prompt: np.ndarray
    following: np.ndarray
    ids: np.ndarray
    text: str
    branch: bool
    conversation: Conversation


def played(case: Case, turn: np.ndarray, said: Turn, *, rewrites: bool) -> Played:
    tokenizer = stock.tokenizer(case.template)
    renderer = Renderer(tokenizer)
    conversation = Conversation(renderer, ASKED, case.options, rewrites=rewrites)
    asked = not_sampled(np.array(renderer.ids(case.render(ASKED), "x"), np.int32))
    prompt = conversation.open(asked, "").ids
    following, branch = conversation.observe(sampled(turn), said, ANSWERS[case.role])
    ids = np.concatenate([prompt, turn, following.ids]) if branch is None else branch.ids
    return Played(
        prompt,
        following.ids,
        ids,
        tokenizer.decode(ids.tolist()),
        branch is not None,
        conversation,
    )


@cache
def outcome(case: Case) -> tuple[str, str]:
    """What becomes of a case with `keep` and with `template`."""
    tokenizer = stock.tokenizer(case.template)
    turn = stock.apart(tokenizer, case.sampled)
    if case.role == "tool" and case.template in WITHOUT_TOOLS:
        for rewrites in (False, True):
            with pytest.raises(EpisodeError):
                played(case, turn, case.said, rewrites=rewrites)
        return "refused", "refused"
    keep, served = (
        played(case, turn, case.said, rewrites=rewrites) for rewrites in (False, True)
    )
    rendered = case.render([*ASKED, case.said.message(), *ANSWERS[case.role]])
    appends = rendered.startswith(tokenizer.decode([*keep.prompt, *turn]))
    # Sampled tokens stay as they are, and the rest is what the template says behind them.
    assert keep.ids.tolist() == [
        *keep.prompt.tolist(),
        *turn.tolist(),
        *keep.following.tolist(),
    ]
    assert rendered.endswith(tokenizer.decode(keep.following.tolist()))
    assert stock.shows(tokenizer, keep.following, ANSWERS[case.role][0]["content"])
    assert served.text == rendered
    assert served.branch != appends
    if appends:
        assert served.ids.tolist() == keep.ids.tolist()
    for part in (case.said.content, case.said.reasoning):
        if part and part in rendered:
            assert contains(served.ids, stock.apart(tokenizer, part))
    return "appended", "appended" if appends else "rewritten"


def contains(ids: np.ndarray, part: np.ndarray) -> bool:
    return any(np.array_equal(ids[at : at + len(part)], part) for at in range(len(ids)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:3]))
def test_each_stock_template_continues_each_turn_in_both_ways(case: Case) -> None:
    outcome(case)


@pytest.mark.parametrize("name", stock.NAMES)
def test_each_prompt_of_a_long_conversation_is_the_templates(name: str) -> None:
    """A call, a thought and another call, with answers, as the template renders them, with the tokens of each
    turn.
    """
    answered = (
        [("user", "thinking")] * 3
        if name in WITHOUT_TOOLS
        else [("tool", KINDS[2]), ("user", "thinking")] * 2
    )
    tokenizer, messages = stock.tokenizer(name), list(ASKED)
    for number, (role, kind) in enumerate(answered):
        case = Case(name, role, kind, name not in WITHOUT_TOOLS)
        if not number:
            conversation = Conversation(
                Renderer(tokenizer), ASKED, case.options, rewrites=True
            )
            asked = not_sampled(
                np.array(Renderer(tokenizer).ids(case.render(ASKED), "x"), np.int32)
            )
            prompt = conversation.open(asked, "").ids
        turn = stock.apart(tokenizer, case.sampled_after(messages))
        following, branch = conversation.observe(sampled(turn), case.said, ANSWERS[role])
        messages += [case.said.message(), *ANSWERS[role]]
        prompt = (
            np.concatenate([prompt, turn, following.ids]) if branch is None else branch.ids
        )
        assert tokenizer.decode(prompt.tolist()) == case.render(messages)
        assert contains(prompt, stock.apart(tokenizer, case.said.content))
    assert (conversation.refused, conversation.cut_tokens) == (False, 0)


def test_a_token_that_the_template_shows_in_part_is_encoded_anew_and_counted() -> None:
    """GLM's template strips a content, of which the last token holds a full stop and a line break."""
    case, tokenizer = Case("glm4moe", "user", "thinking"), stock.tokenizer("glm4moe")
    stop = tokenizer(".\n", add_special_tokens=False)["input_ids"]
    assert len(stop) == 1
    turn = np.array(
        [
            *stock.apart(tokenizer, "\n<think>Hm</think>\nfour😀"),
            *stop,
            *stock.apart(tokenizer, "<|user|>"),
        ]
    )
    said = Turn("", "", "\nfour😀.\n", "Hm")
    found = played(case, turn.astype(np.int32), said, rewrites=True)
    assert (found.branch, found.conversation.cut_tokens) == (True, 1)
    assert found.text == case.render([*ASKED, said.message(), *ANSWERS["user"]])
    assert contains(found.ids, stock.apart(tokenizer, "four😀."))


class Characters:
    """A tokenizer of one token a character, and `<end>`, which is an added token."""

    added_tokens_decoder: ClassVar = {0: "<end>"}

    def ids(self, text: str) -> np.ndarray:
        return np.array(
            [0 if part == "<end>" else ord(part) for part in re.findall("<end>|.", text)]
        )

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(self.added_tokens_decoder.get(number, chr(number)) for number in ids)


@pytest.mark.parametrize(
    ("start", "stop", "whole", "between"),
    [
        (0, 8, (0, 4), [(0, 1), (6, 8)]),
        (0, 1, (0, 1), [(0, 1)]),  # an added token at the stop is outside
        (0, 6, (0, 2), [(0, 1), (6, 6)]),
        (1, 6, (1, 2), [(1, 1), (6, 6)]),
        (2, 7, (2, 3), [(2, 7)]),
        (6, 8, (2, 4), [(6, 8)]),
    ],
)
def test_a_part_of_a_turn_has_whole_tokens_and_is_split_at_added_ones(
    start: int, stop: int, whole: tuple[int, int], between: list[tuple[int, int]]
) -> None:
    tokenizer = Characters()
    turn = SampledTurn(tokenizer.ids("a<end>bc"), tokenizer)
    assert turn.tokens(start, stop) == whole
    assert list(turn.between_added(start, stop)) == between


class Pieces:
    """A tokenizer of words with several characters."""

    words = ("a", "bc", "def")

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(self.words[number] for number in ids)


@given(st.lists(st.integers(0, 2), max_size=8), st.data())
def test_whole_tokens_of_a_part_begin_and_end_within_it(
    ids: list[int], data: st.DataObject
) -> None:
    turn = SampledTurn(np.array(ids, np.int32), Pieces())
    begins = [0, *np.cumsum([len(Pieces.words[number]) for number in ids]).tolist()]
    start = data.draw(st.integers(0, len(turn.text)))
    stop = data.draw(st.integers(start, len(turn.text)))
    assert [turn.place(token) for token in range(len(ids) + 1)] == begins
    first, last = turn.tokens(start, stop)
    assert begins[first] == min(begin for begin in begins if begin >= start)
    assert begins[last] == max(begin for begin in begins if begin <= stop)


def next_parts(turns: Sequence[tuple[str, str]], prompt: str) -> list[str | list[str]]:
    """The parts of the next prompt: a text, or a list with what was sampled.

    turns: each turn's content, and what was sampled. prompt: with the places of the contents.
    """
    tokenizer = Characters()
    history = History(tokenizer, "Q:", not_sampled(tokenizer.ids("Q:")))
    contents = [
        history.opaque({"content": content}, tokenizer.ids(text))["content"]
        for content, text in turns
    ]
    assert not any("H" in content for content in contents)
    _, parts = history.next_prompt(prompt.format(*contents))
    return [
        part if isinstance(part, str) else [tokenizer.decode(part.ids.tolist())]
        for part in parts or ()
    ]


@pytest.mark.parametrize("written", ["Hm", " Hm ", "H<end>m", "<end>"])
@pytest.mark.parametrize("before", ["", "<end>:"])
@pytest.mark.parametrize("behind", ["A:", ""])
def test_a_turn_that_the_template_shows_whole_stays_one_part(
    written: str, before: str, behind: str
) -> None:
    """With what the policy wrote before and behind the text, such as its end token, and wherever it begins and
    ends.
    """
    turn = f"{before}{written}<end>"
    prompt = f"another Q:{before}{{}}<end>{behind}"
    assert next_parts([(written, turn)], prompt) == ["another Q:", [turn], behind]


THINKING = [("Hm", "thoughts  Hm<end>")]
TWO = ("two", "thoughts  two<end>")
# Of a turn without its thoughts: the white space that both texts have.
SHOWN = [
    (THINKING, "another Q:  {}<end>A:", ["another Q:", ["  Hm<end>"], "A:"]),
    (THINKING, "another Q:\n {}<end>A:", ["another Q:\n", [" Hm<end>"], "A:"]),
    (THINKING, "another Q:s  {}<end>A:", ["another Q:s", ["  Hm<end>"], "A:"]),
    # A turn that the template leaves out takes nothing from the next.
    ([("", "<end>."), TWO], "thoughts  {1}<end>A:", ["", [TWO[1]], "A:"]),
    ([("one", "one<end>."), TWO], "thoughts  {1}<end>A:", ["", [TWO[1]], "A:"]),
    # A turn before an earlier one is text, or the prompt would say twice what stands between both.
    (
        [("one", "one<end>"), ("two", "two<end>")],
        "latest {1}<end>earlier {0}<end>A:",
        ["latest two<end>earlier ", ["one"], "<end>A:"],
    ),
    # Turns without a text between them.
    (
        [("one", "one"), ("two", "two")],
        "again {}{}A:",
        ["again ", ["one"], "", ["two"], "A:"],
    ),
]


@pytest.mark.parametrize(("turns", "prompt", "parts"), SHOWN)
def test_a_turn_keeps_the_ids_of_what_the_template_shows_of_it(
    turns: list[tuple[str, str]], prompt: str, parts: list[str | list[str]]
) -> None:
    assert next_parts(turns, prompt) == parts


class Words(Characters):
    """A tokenizer whose token 1 is `ab`."""

    def decode(self, ids: list[int], **_: bool) -> str:
        return super().decode(ids).replace(chr(1), "ab")


def test_a_text_without_a_whole_token_of_the_turn_is_not_split() -> None:
    """Two parts would be encoded apart, and so as other tokens."""
    history = History(Words(), "Q:", not_sampled(Characters().ids("Q:")))
    message = history.opaque({"content": "a"}, np.array([1]))
    parts = history.next_prompt(f"another Q:{message['content']} A:")[1]
    assert parts == ["another Q:a A:"]
    assert history.cut_tokens == 1


def test_the_page_of_templates_says_so() -> None:
    from tests.workers.rollout.history_page import page

    assert Path("docs/templates.md").read_text(encoding="utf-8") == page(), "run: make docs"


MARKERS = [
    "<|im_end|>",
    "<|im_start|>",
    "</think>",
    "<think>",
    "<|im_end|>\n<|im_start|>user\n",
    "{{ messages }}",
]
MARKERS += [
    "{% for %}",
    "<tool_call>",
    "stand-in 1",
    "sampled",
    "<eos>",
    "\n\n",
    ".\n",
    "é😀",
    "<|end|>",
    "[/INST]",
]
TEXTS = st.lists(
    st.sampled_from(MARKERS) | st.text(max_size=6), min_size=1, max_size=5
).map("".join)


@given(st.sampled_from(stock.NAMES), TEXTS, st.booleans())
def test_no_response_changes_what_is_said_around_it(
    name: str, text: str, rewrites: bool
) -> None:
    """Neither with plain characters that look like markers, nor with real markers, and each token stays as
    sampled.
    """
    case, tokenizer = Case(name, "user", "plain"), stock.tokenizer(name)
    end = stock.apart(tokenizer, case.sampled)[-1:]
    four, plain = (
        np.concatenate([stock.apart(tokenizer, part) for part in each])
        for each in ("four", f"x{text}x")
    )
    marked = stock.apart(tokenizer, f"x{text}x")
    expected = played(case, np.append(four, end), Turn("", "", "four"), rewrites=rewrites)
    found = played(
        case, np.append(plain, end), Turn("", "", f"x{text}x"), rewrites=rewrites
    )
    assert found.following.tolist() == expected.following.tolist()
    at = next(
        at
        for at in range(len(expected.ids))
        if expected.ids[at : at + 4].tolist() == four.tolist()
    )
    around = expected.ids[:at].tolist(), expected.ids[at + 4 :].tolist()
    assert found.ids.tolist() == [*around[0], *plain.tolist(), *around[1]]
    again = played(case, np.append(marked, end), Turn("", "", f"x{text}x"), rewrites=False)
    assert (
        again.following.tolist()
        == played(case, np.append(four, end), Turn(""), rewrites=False).following.tolist()
    )
