"""Parsing: the policy's turn as reasoning, content and tool calls, by vLLM's own parsers.

turn ids --decode--> text --reasoning parser--> reasoning, rest --tool parser--> content, calls = Turn
"""

import itertools
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from workers.environment import Turn
from workers.episodes.parser_names import FORMATS, parsers_of
from workers.errors import ConfigError, describe_error

TAIL = 32
"""Tokens at a prompt's end that show whether it opens the reasoning."""


class TurnParser:
    """Read the turns of an episode."""

    def __init__(
        self,
        tokenizer: Any,
        tool_parser: str,
        reasoning_parser: str,
        options: dict[str, Any],
    ) -> None:
        """options: of the chat template, with `tools`. Empty names are found from the template, or mean no
        parser.

        Raises ConfigError for a given parser that vLLM lacks or that does not suit the tokenizer.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        messages = [{"role": "user", "content": ""}]
        tools = options.get("tools") or None
        self._tokenizer = tokenizer
        try:
            self._request = ChatCompletionRequest(messages=messages, tools=tools)
        # A record's schemas may be malformed, and most parsers only need the names.
        except ValueError:
            tools = [
                {"type": "function", "function": {"name": tool["function"]["name"]}}
                for tool in tools or ()
            ]
            self._request = ChatCompletionRequest(messages=messages, tools=tools)
        self._arguments = {
            name: value for name, value in options.items() if name != "tools"
        }
        self._numbers = itertools.count(1)
        parsers = parsers_of(_template(tokenizer, options))
        self._tools = self._usable("tool_parser", tool_parser, parsers[0])
        self._reasoning = self._usable("reasoning_parser", reasoning_parser, parsers[1])
        self._call_mark = next(
            (
                template_format.call
                for template_format in FORMATS
                if template_format.tools == self._tools
            ),
            "",
        )

    def _usable(self, kind: str, configured_name: str, detected_name: str) -> str:
        name = configured_name or detected_name
        try:
            self._parser(name, "") if kind == "tool_parser" else self._parser("", name)
        except (
            Exception
        ) as error:  # each parser has its own errors for a tokenizer without its tokens
            if not configured_name:
                return ""
            raise ConfigError(
                f"rollout.{kind}={configured_name}: vLLM cannot use it with the tokenizer of model.path "
                f"({describe_error(error)}). Name the model's parser."
            ) from None
        return name

    @property
    def names(self) -> tuple[str, str]:
        """vLLM's names of the parsers of calls and of reasoning, empty for none."""
        return self._tools, self._reasoning

    def _parser(self, tools: str, reasoning: str) -> Any:
        """A new parser, because vLLM's keep a turn's state, or None."""
        from vllm.parser import ParserManager

        harmony = "openai" in tools or "openai" in reasoning
        parser_class = ParserManager.get_parser(
            tools or None, reasoning or None, enable_auto_tools=True, is_harmony=harmony
        )
        return parser_class and parser_class(
            self._tokenizer, self._request.tools, chat_template_kwargs=self._arguments
        )

    def turn(self, ids: np.ndarray, finished: bool, before: np.ndarray) -> Turn:
        """Parse a turn's ids. finished: whether the policy ended it, so that the last token may be an end
        token. before: the last `TAIL` ids of its prompt, which may open the reasoning.
        """
        added = self._tokenizer.added_tokens_decoder
        ends = (
            finished
            and len(ids) > 0
            and int(ids[-1]) in added
            and added[int(ids[-1])].special
        )
        plain, text, body = (
            str(self._tokenizer.decode(part.tolist(), skip_special_tokens=skip))
            for part, skip in (
                (ids, True),
                (ids, False),
                (ids[:-1] if ends else ids, False),
            )
        )
        parser = self._parser(
            self._tools, self._reasoning if self._thinks(body, before) else ""
        )
        if parser is None:
            return Turn(plain, text, body)
        with _Failures() as failures:
            try:
                parts = parser.parse(
                    body,
                    self._request,
                    enable_auto_tools=True,
                    model_output_token_ids=ids.tolist(),
                )
            except Exception as error:  # a model may write any text
                failures.found.append(error)
                parts = None, body, None
        reasoning = parts[0] or ""
        content = parts[1] or ""
        calls = parts[2] or []
        rest = body.partition(reasoning)[2] if reasoning else body
        if not failures.found and not (
            self._call_mark and rest.count(self._call_mark) > len(calls)
        ):
            errors = []
        else:
            why = f": {describe_error(failures.found[0])}" if failures.found else ""
            errors = [f"a tool call could not be read{why}"]
        return Turn(
            plain,
            text,
            content,
            reasoning,
            [self._call(call, body) for call in calls],
            errors,
        )

    def _thinks(self, body: str, before: np.ndarray) -> bool:
        """Whether the turn holds reasoning. vLLM takes a text without any mark for unfinished reasoning."""
        start, end = self.marks
        if not (start and end) or start in body or end in body:
            return True
        return opens_reasoning(self._tokenizer, before, self.marks)

    @cached_property
    def marks(self) -> tuple[str, str]:
        parser = getattr(self._parser("", self._reasoning), "reasoning_parser", None)
        start, end = (
            getattr(parser, f"reasoning_{side}_str", None) or ""
            for side in ("start", "end")
        )
        return start.strip(), end.strip()

    def _call(self, call: Any, body: str) -> dict[str, Any]:
        """The call as in chat messages. An id that the model did not write is a number, the same in every
        run.
        """
        number = next(self._numbers)
        try:
            arguments = json.loads(call.arguments)
        except (TypeError, ValueError):
            arguments = None
        return {
            "id": call.id if call.id and call.id in body else f"call{number:05}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": arguments
                if isinstance(arguments, dict)
                else call.arguments or "",
            },
        }


def _template(tokenizer: Any, options: dict[str, Any]) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=options.get("tools")))
    except ValueError:  # it has none
        return ""


def opens_reasoning(
    tokenizer: Any, prompt_ids: Sequence[int] | np.ndarray, marks: tuple[str, str]
) -> bool:
    """Return whether a prompt ends within reasoning. A template may open it only after some messages."""
    start, end = marks
    tail = [int(token) for token in prompt_ids[-TAIL:]]
    return start in str(tokenizer.decode(tail)).rpartition(end)[2]


class _Failures(logging.Handler):
    """Collect the exceptions that vLLM's parsers log, instead of their tracebacks in the engine's log."""

    def __enter__(self) -> "_Failures":
        self.found: list[BaseException] = []
        self._loggers = [
            logging.getLogger(name)
            for name in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning")
        ]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
            logger.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.found.append(record.exc_info[1])
