"""Thinking budgets: reasoning that is still open after so many tokens of a turn is closed, and the answer
sampled.

    prompt | first tokens of the turn | </think> | answer          rollout.sampling.max_thinking_tokens
             sampled                    inserted   sampled         loss_mask: True, False, True

The policy chose neither to end the thought nor how, so inserted tokens are not trained.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workers.config.roles import SamplingConfig
from workers.engine.requests import INSERTED, STOP, Response, not_sampled
from workers.episodes.parser_names import parsers_of
from workers.episodes.parsing import TAIL, TurnParser
from workers.errors import ConfigError
from workers.rendering import Renderer

MARKS = "<think>", "</think>"  # of reasoning, where no parser is given or found


class Thinking:
    """Know where the reasoning of a turn begins and ends."""

    def __init__(self, tokenizer: Any, reasoning_parser: str) -> None:
        """reasoning_parser: see TurnParser. Raises ConfigError as it does, and if its reasoning has no end
        marker.
        """
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        start, end = TurnParser(tokenizer, "", reasoning_parser, {}).marks
        template = str(getattr(tokenizer, "chat_template", None) or "")
        parser = reasoning_parser or parsers_of(template)[1]
        if parser and not end and MARKS[1] not in template:
            raise ConfigError(
                f"sampling.max_thinking_tokens: rollout.reasoning_parser={parser} knows no text that ends "
                "reasoning. Set 0, or another parser."
            )
        self._start, self._end = (start, end) if end else MARKS

    def _text(self, ids: np.ndarray) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def is_open(self, prompt_ids: np.ndarray, ids: np.ndarray) -> bool:
        """Whether a turn that begins with `ids` has begun to reason, there or in the prompt's end, and not
        ended.
        """
        text = self._text(ids)
        prompt_opens = self._text(prompt_ids[-TAIL:]).rstrip().endswith(self._start)
        return (prompt_opens or self._start in text) and self._end not in text

    def closing(self, sampling: SamplingConfig, last: int | None = None) -> Response:
        """Return the tokens to insert behind the id `last`. Raises ConfigError if they do not end the
        reasoning.
        """
        text = sampling.end_of_thinking or self._end
        ids = self._renderer.ids_behind(text, last, "sampling.end_of_thinking")
        if self._end not in text:
            raise ConfigError(
                f"end_of_thinking={text!r}: it lacks {self._end}, which ends the reasoning. Add it."
            )
        return not_sampled(np.asarray(ids, np.int32), INSERTED)

    def stop_at_text(self, turn: Response, place: int, texts: Sequence[str]) -> Response:
        """Cut a turn that was sampled in two requests at a text of `sampling.stop` on both sides
        of `place`.
        """
        longest = max(map(len, texts), default=0)  # a token has a character at least
        for end in range(
            place + 1, min(place + longest, len(turn.ids)) + 1 if longest else 0
        ):
            if any(
                text in self._text(turn.ids[max(0, place - longest) : end])
                for text in texts
            ):
                parts = {
                    name: getattr(turn, name)[:end]
                    for name in ("ids", "log_probs", "versions")
                }
                return replace(turn, **parts, finish_reason=STOP, stop_string=True)
        return turn
