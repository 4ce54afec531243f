"""History: the next prompt as the chat template makes it, with the sampled ids where it shows what the policy
wrote.

    message of a turn --opaque--> the same with stand-ins --template--> text --next_prompt--> texts, ids

    sampled  <think>2 + 2.</think>four<end>
    rendered <user>2 + 2?<end><assistant>STAND-IN<end><user>Sure?<end><assistant>
    parts    <user>2 + 2?<end><assistant>four<end><user>Sure?<end><assistant>     four<end>: as it was sampled

The template never reads what the policy wrote, so nothing in it can be mistaken for the template's. Added
tokens such as `</think>` stay in place, for templates that look for them.
"""

import os
import re
import uuid
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from workers.engine.requests import Response, not_sampled
from workers.text_pieces import decode_behind

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates look for a message's thoughts."""


class SampledTurn:
    """The ids of a turn, and their text behind the id `last`."""

    def __init__(self, ids: np.ndarray, tokenizer: Any, last: int | None = None) -> None:
        self.ids = ids
        self._last = last
        self._tokenizer = tokenizer
        self._places = dict[int, int]()

    @cached_property
    def text(self) -> str:
        return self._until(len(self.ids))

    def _until(self, token: int) -> str:
        return decode_behind(self._tokenizer, self.ids[:token].tolist(), self._last)

    def place(self, token: int) -> int:
        """Return the index in the text at which a token begins. Tokens of one character begin together."""
        if token not in self._places:
            text = self._until(token)
            self._places[token] = len(
                text if self.text.startswith(text) else text.rstrip("\ufffd")
            )
        return self._places[token]

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bounds of the whole tokens in text[start:stop]."""
        bounds = range(len(self.ids) + 1)
        first = bisect_left(bounds, start, key=self.place) if start else 0
        last = (
            bisect_left(bounds, stop, key=self.place)
            if stop < len(self.text)
            else len(self.ids)
        )
        if self.place(last) > stop:
            last = bisect_left(bounds, self.place(last - 1), key=self.place)
        return first, last

    def between_added(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the texts between added tokens in text[start:stop]."""
        added = self._tokenizer.added_tokens_decoder
        for token, token_id in enumerate(self.ids.tolist()):
            if token_id in added and start <= (place := self.place(token)) < stop:
                yield start, place
                start = self.place(token + 1)
        yield start, stop


@dataclass
class Block:
    """Shows a part of a turn: rendered[start : start + length] is text[at : at + length] of the turn."""

    turn: int
    start: int
    at: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def with_space_ahead(self, rendered: str, text: str, low: int) -> "Block":
        """Return the block with the white space ahead that both texts have, down to rendered[low]: tokens
        begin with it.
        """
        most = max(0, min(self.start - low, self.at))
        ahead = rendered[self.start - most : self.start]
        behind = text[self.at - most : self.at]
        same = len(os.path.commonprefix([ahead[::-1], behind[::-1]]))  # noqa: RUF071
        space = min(same, len(ahead) - len(ahead.rstrip()))
        return Block(self.turn, self.start - space, self.at - space, self.length + space)

    def precedes(self, other: "Block", rendered: str, text: str) -> bool:
        """Return whether the same stands between both in the rendered text as in the turn's."""
        same_distance = other.at - self.at == other.start - self.start
        return (
            same_distance and rendered[self.start : other.start] == text[self.at : other.at]
        )


@dataclass
class History:
    """What the policy wrote in an episode. row: the text of the current row.

    cut_tokens: sampled tokens of which the template keeps a part, which is encoded anew.
    """

    tokenizer: Any
    row: str
    prompt: Response
    turns: list[SampledTurn] = field(default_factory=list)
    cut_tokens: int = 0

    def __post_init__(self) -> None:
        self._first = self.row
        self._mark = f"sampled {uuid.uuid4().hex}"
        self._shown: dict[
            str, tuple[int, int, int]
        ] = {}  # turn, start and stop of a stand-in's text

    def opaque(
        self, message: dict[str, Any], ids: np.ndarray, last: int | None = None
    ) -> dict[str, Any]:
        """Add a turn, behind the id `last`. Returns its message with stand-ins for texts, between their first
        and last white space.
        """
        self.turns.append(turn := SampledTurn(ids, self.tokenizer, last))
        self.row += turn.text
        message = dict(message)
        behind = 0
        # In the order in which models write them.
        for name in ("reasoning_content", "content"):
            text = message.get(name)
            if text and (start := turn.text.find(text, behind)) >= 0:
                behind = start + len(text)
                message[name] = self._hide(turn, start, behind)
        return message | {
            name: thought
            for name in REASONING
            if (thought := message.get("reasoning_content"))
        }

    def _hide(self, turn: SampledTurn, start: int, stop: int) -> str:
        masked_text = ""
        for first, last in turn.between_added(start, stop):
            part = turn.text[first:last]
            leading_space, core, trailing_space = (
                part.partition(part.strip()) if part.strip() else (part, "", "")
            )
            if core:
                stand_in = f"{self._mark}-{len(self._shown)}."
                at = first + len(leading_space)
                self._shown[stand_in] = (len(self.turns) - 1, at, at + len(core))
                core = stand_in
            masked_text += turn.text[start:first] + leading_space + core + trailing_space
            start = last
        return masked_text

    def next_prompt(self, rendered: str) -> tuple[str, list[str | Response] | None]:
        """Return what `rendered` appends to the row, or else the parts of a new row. Either is
        the row then.
        """
        text = ""
        blocks = list[Block]()
        for part in re.split(rf"({self._mark}-\d+\.)", rendered):
            if part in self._shown:
                number, start, stop = self._shown[part]
                blocks.append(Block(number, len(text), start, stop - start))
                part = self.turns[number].text[start:stop]
            text += part
        row = self.row
        self.row = text
        return (
            (text[len(row) :], None)
            if text.startswith(row)
            else ("", self._parts(text, blocks))
        )

    def _parts(self, text: str, blocks: list[Block]) -> list[str | Response]:
        parts = list[str | Response]()
        done = 0
        for block in self._widen(text, blocks):
            turn = self.turns[block.turn]
            first, last = turn.tokens(block.at, block.at + block.length)
            start, stop = (
                block.start + turn.place(token) - block.at for token in (first, last)
            )
            self.cut_tokens += (start > block.start) + (start <= stop < block.stop)
            if first < last and start >= done:
                parts += [text[done:start], not_sampled(turn.ids[first:last])]
                done = stop
        return [
            self.prompt if part == self._first else part for part in (*parts, text[done:])
        ]

    def _widen(self, text: str, blocks: list[Block]) -> Iterator[Block]:
        """Join the blocks of each turn, and with what the policy wrote around them, if the template shows it
        too.
        """
        low = 0
        for number, turn in enumerate(self.turns):
            turn_blocks = [
                block.with_space_ahead(text, turn.text, low)
                for block in blocks
                if block.turn == number
            ]
            high = next((block.start for block in blocks if block.turn > number), len(text))
            if not turn_blocks:
                start = text.find(turn.text, low, high)
                turn_blocks = (
                    [Block(number, start, 0, len(turn.text))] if start >= 0 else []
                )
            ends = (
                [Block(number, turn_blocks[0].start - turn_blocks[0].at, 0, 0)]
                if turn_blocks and turn_blocks[0].start - turn_blocks[0].at >= low
                else []
            )
            turn_end = (
                turn_blocks[-1].start - turn_blocks[-1].at + len(turn.text)
                if turn_blocks
                else low
            )
            joined = list[Block]()
            for block in [
                *ends,
                *turn_blocks,
                *([Block(number, turn_end, len(turn.text), 0)] if turn_end <= high else []),
            ]:
                if joined and joined[-1].precedes(block, text, turn.text):
                    joined[-1].length = block.stop - joined[-1].start
                else:
                    joined.append(block)
            yield from (block for block in joined if block.length)
            low = joined[-1].stop if joined else low
