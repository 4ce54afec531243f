"""Which characters are learned, against an oracle that marks every text of a conversation and renders it once
more.

    messages     ask1 | say1 | ask2                  marked     ^ask1~ | ^say1~ | ^ask2~
    rendering    <user>ask1<assistant>say1<end>...              where each character of a text stands, whatever it is

A turn begins behind what its header shares with the generation prompt, and stops where a conversation that
ends with it does. Between these, every character is learned, and no other.
"""

import json
import re
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from controller.offline.examples import sft_examples, with_options
from controller.offline.tokenized import example_row
from tests.controller.offline.test_stock_templates import (
    SPECIAL,
    TEMPLATES,
    TOOLS,
    UNMARKED,
    WITHOUT_TOOLS,
    renderer,
    with_text,
)
from workers.chat_templates import variables_of
from workers.rendering import Renderer

OPEN, CLOSE = "^", "~"
PIECE = re.compile(rf"{SPECIAL.pattern}|</?\w+>|.", re.DOTALL)
KINDS = {
    "plain": ("user", "say", "user", "say"),
    "thoughts": ("user", "thought", "user", "thought"),
    "calls": ("user", "call", "tool", "say", "user", "say"),
    "both": ("user", "thoughtful call", "tool", "thought"),
}


def conversation(kind: str, *, marks: bool) -> list[dict[str, Any]]:
    def text(words: str) -> str:
        return f"{OPEN}{words}{CLOSE}" if marks else words

    messages: list[dict[str, Any]] = []
    for number, name in enumerate(KINDS[kind]):
        if name == "user":
            messages.append({"role": "user", "content": text(f"ask say{number}?")})
        elif name == "tool":
            answer = {"role": "tool", "tool_call_id": "call00001", "name": "add"}
            messages.append(answer | {"content": text(f"got say{number}")})
        else:
            thoughts = (
                {"reasoning_content": text(f"ask me{number}")} if "thought" in name else {}
            )
            function = {"name": "add", "arguments": {"a": text(f"got{number}")}}
            calls = {
                "tool_calls": [
                    {"type": "function", "id": "call00001", "function": function}
                ]
            }
            content = {"content": "" if "call" in name else text(f"say it,\nask{number}.")}
            messages.append(
                {"role": "assistant"}
                | content
                | thoughts
                | (calls if "call" in name else {})
            )
    return messages


@dataclass
class Oracle:
    """text: the rendering. texts: bounds of every text in it with its message, which is found by
    its marks.
    """

    made: Renderer
    options: dict[str, Any]
    messages: list[dict[str, Any]]

    def render(self, stop: int, **options: Any) -> str:
        return self.made.text(self.messages[:stop], "x", **self.options, **options)

    def located(self, stop: int) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendering of the first messages without marks, and the bounds of the texts in it."""
        text, bounds, begun = "", list[tuple[int, int]](), 0
        for character in self.render(stop):
            if character == OPEN:
                begun = len(text)
            elif character == CLOSE:
                bounds.append((begun, len(text)))
            else:
                text += character
        return text, bounds

    def opening(self) -> str:
        question = [{"role": "user", "content": "question"}]
        before = self.made.text(question, "x", **self.options)
        opened = self.made.text(question, "x", **self.options, add_generation_prompt=True)
        return opened[len(common(before, opened)) :]

    def learned(self) -> tuple[str, np.ndarray]:
        """Return the rendering, and which of its characters are the policy's."""
        whole, bounds = self.located(len(self.messages))
        learned, at, opening = np.zeros(len(whole), bool), 0, self.opening()
        for place, message in enumerate(self.messages):
            said = json.dumps(message).replace("\\n", "\n")
            shown = [bound for bound in bounds[at:] if whole[slice(*bound)] in said][
                : said.count(OPEN)
            ]
            if message["role"] == "assistant":
                previous = bounds[at - 1][1] if at else 0
                start = previous + header_length(whole[previous : shown[0][0]], opening)
                alone, alone_bounds = self.located(place + 1)
                rest = whole[shown[-1][1] :]
                closing = common(alone[alone_bounds[-1][1] :], rest)
                if not SPECIAL.search(closing) and (following := SPECIAL.search(rest)):
                    # Its end depends on what follows, or begins that.
                    closing = rest[: following.end()]
                learned[start : shown[-1][1] + len(closing)] = True
            at += len(shown)
        return whole, learned


def header_length(header: str, opening: str) -> int:
    """Return where the policy begins in the text between its first word and the word ahead."""
    if not opening.strip():
        return len(header.rstrip(" "))  # a blank is the policy's, as tokens begin with it
    role = opening.partition("<think>")[0].strip()
    if role not in header:
        # Behind a tool's answer, where some templates begin no turn. What opens a thought is the policy's.
        return len(re.sub(r"<\|channel>thought\n$", "", header))
    begin = header.rindex(role)
    empty = re.search(r"<think></think>", header)
    if "<think>" in opening and empty and not header[begin:].startswith(opening):
        return empty.end()  # the template's own, where the prompt opens thoughts
    return begin + len(common(header[begin:], opening))


def common(one: str, other: str) -> str:
    """Return the common beginning, in whole special tokens and tags."""
    pairs = zip(PIECE.findall(one), PIECE.findall(other), strict=False)
    return "".join(piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.drawn(48, covers=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNMARKED)
def test_the_characters_of_turns_are_learned_and_no_other(name: str, kind: str) -> None:
    made, has_calls = renderer(TEMPLATES[name]), "call" in KINDS[kind][1]
    if has_calls and name in WITHOUT_TOOLS:
        return
    plain, marked = (conversation(kind, marks=marks) for marks in (False, True))
    if "+ tool['function']['arguments'] +" in TEMPLATES[name]:
        plain, marked = (
            json.loads(json.dumps(each), object_hook=with_text) for each in (plain, marked)
        )
    reads_tools = has_calls and "tools" in variables_of(TEMPLATES[name]).read
    record = {"messages": plain} | ({"tools": TOOLS} if reads_tools else {})
    (example,) = with_options(
        sft_examples(record, ("messages", "prompt", "response"), kind), record, {}, kind
    )
    row = example_row(made, example, kind, "all")
    pieces = [made.tokenizer.decode([token]) for token in row["input_ids"].tolist()]
    whole, learned = Oracle(made, {"tools": TOOLS} if reads_tools else {}, marked).learned()
    assert "".join(pieces) == whole
    mask = np.repeat(row["loss_mask"], [len(piece) for piece in pieces])
    assert shown(whole, mask) == shown(whole, learned)


def shown(text: str, mask: np.ndarray) -> str:
    return "".join(
        f"[{character}]" if is_learned else character
        for character, is_learned in zip(text, mask, strict=True)
    )
