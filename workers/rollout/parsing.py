"""Parsing: the policy's turn as reasoning, content and tool calls, by vLLM's own parsers.

    turn ids --decode--> text --reasoning parser--> reasoning, rest --tool parser--> content, calls = Turn

A template tells which parsers read what its model writes: `parsers_of`.
"""

import ast
import importlib.util
import itertools
import json
import logging
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workers.environment import Turn
from workers.errors import ConfigError, named


class Format(NamedTuple):
    """How a family of models writes calls. mark: found in its templates. call: begins each call in a response."""

    mark: str
    tools: str
    reasoning: str
    call: str


FORMATS = (
    Format("<|channel|>", "openai", "openai_gptoss", ""),
    Format("<|channel>", "gemma4", "gemma4", "<|tool_call>"),
    Format("<|tool_calls_section_begin|>", "kimi_k2", "kimi_k2", "<|tool_call_begin|>"),
    Format("<minimax:tool_call>", "minimax_m2", "minimax_m2", "<invoke"),
    Format("<seed:tool_call>", "seed_oss", "seed_oss", "<seed:tool_call>"),
    Format("<|START_ACTION|>", "cohere_command3", "cohere_command3", ""),
    Format("<|tool_call_start|>", "lfm2", "deepseek_r1", "<|tool_call_start|>"),
    Format("<｜DSML｜", "deepseek_v32", "deepseek_v3", "<｜DSML｜invoke"),
    Format("```json", "deepseek_v3", "deepseek_r1", "<｜tool▁call▁begin｜>"),
    Format("<｜tool▁calls▁begin｜>", "deepseek_v31", "deepseek_v3", "<｜tool▁call▁begin｜>"),
    Format("render_atem", "muse_glimmer", "muse_glimmer", ""),
    Format("[TOOL_CALLS]", "mistral", "mistral", "[TOOL_CALLS]"),
    Format("ipython", "llama3_json", "", '{"name":'),
    Format("<arg_key>", "glm45", "glm45", "<tool_call>"),
    Format("<function=", "qwen3_coder", "qwen3", "<tool_call>"),
    Format("<tool_call>", "hermes", "qwen3", "<tool_call>"),
)
THINKS = ("</think>", "[THINK]", "<|channel", "thinking")


def parsers_of(template: str) -> tuple[str, str]:
    """Names of vLLM's tool parser and reasoning parser for a chat template, each empty if unknown."""
    marked = (each for each in FORMATS if each.mark in template)
    found = next((each for each in marked if each.mark != "```json" or "<｜tool▁calls▁begin｜>" in template), None)
    thinks = any(mark in template for mark in THINKS)
    if found is None:
        return "", "deepseek_r1" if "</think>" in template else ""
    return found.tools, found.reasoning if thinks else ""


def known_parsers(kind: str) -> set[str]:
    """Names of vLLM's own parsers, read without importing vLLM. kind: `tool_parsers` or `reasoning`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / kind / "__init__.py").read_text(encoding="utf-8"))
    tables = (node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    return {name for table in tables for name in ast.literal_eval(table)}


class TurnParser:
    """Read the turns of an episode."""

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str, options: dict[str, Any]) -> None:
        """options: of the chat template, with `tools`. Empty names are found from the template, or mean no parser.

        Raises ConfigError for a given parser that vLLM lacks or that does not suit the tokenizer.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}], tools=options.get("tools") or None
        )
        self._arguments = {name: value for name, value in options.items() if name != "tools"}
        self._opens = partial(_generation_prompt, tokenizer, options)
        self._numbers = itertools.count(1)
        found = parsers_of(tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else "")
        self._tools = self._usable("tool_parser", tool_parser, found[0])
        self._reasoning = self._usable("reasoning_parser", reasoning_parser, found[1])
        self._call_mark = next((each.call for each in FORMATS if each.tools == self._tools), "")

    def _usable(self, kind: str, given: str, found: str) -> str:
        name = given or found
        try:
            self._parser(name, "") if kind == "tool_parser" else self._parser("", name)
        except Exception as error:  # each parser has its own errors for a tokenizer without its tokens
            if not given:
                return ""
            raise ConfigError(
                f"rollout.{kind}={given}: vLLM cannot use it with the tokenizer of model.path ({named(error)}). Name "
                "the model's parser."
            ) from None
        return name

    def _parser(self, tools: str, reasoning: str) -> Any:
        """A new parser, because vLLM's keep a turn's state, or None."""
        from vllm.parser import ParserManager

        harmony = "openai" in tools or "openai" in reasoning
        made = ParserManager.get_parser(tools or None, reasoning or None, enable_auto_tools=True, is_harmony=harmony)
        return made and made(self._tokenizer, self._request.tools, chat_template_kwargs=self._arguments)

    def turn(self, ids: np.ndarray, finished: bool) -> Turn:
        """Parse a turn's ids. finished: whether the policy ended it, so that the last token may be an end token."""
        added = self._tokenizer.added_tokens_decoder
        ends = finished and len(ids) > 0 and int(ids[-1]) in added and added[int(ids[-1])].special
        plain, text, said = (
            str(self._tokenizer.decode(part.tolist(), skip_special_tokens=skip))
            for part, skip in ((ids, True), (ids, False), (ids[:-1] if ends else ids, False))
        )
        parser = self._parser(self._tools, self._reasoning if self._thinks(said) else "")
        if parser is None:
            return Turn(plain, text, said)
        with _Failures() as failures:
            try:
                found = parser.parse(said, self._request, enable_auto_tools=True, model_output_token_ids=ids.tolist())
            except Exception as error:  # a model may write any text
                failures.found.append(error)
                found = None, said, None
        reasoning, content, calls = found[0] or "", found[1] or "", found[2] or []
        rest = said.partition(reasoning)[2] if reasoning else said
        if not failures.found and not (self._call_mark and rest.count(self._call_mark) > len(calls)):
            errors = []
        else:
            why = f": {named(failures.found[0])}" if failures.found else ""
            errors = [f"a tool call could not be read{why}"]
        return Turn(plain, text, content, reasoning, [self._call(call, said) for call in calls], errors)

    def _thinks(self, said: str) -> bool:
        """Whether the turn holds reasoning. vLLM takes a text without any mark for unfinished reasoning."""
        start, end = self._marks
        return not (start and end) or start in said or end in said or start in self._opens().rpartition(end)[2]

    @cached_property
    def _marks(self) -> tuple[str, str]:
        parser = getattr(self._parser("", self._reasoning), "reasoning_parser", None)
        start, end = (getattr(parser, f"reasoning_{side}_str", None) or "" for side in ("start", "end"))
        return start.strip(), end.strip()

    def _call(self, call: Any, said: str) -> dict[str, Any]:
        """The call as in chat messages. An id that the model did not write is a number, the same in every run."""
        number = next(self._numbers)
        try:
            arguments = json.loads(call.arguments)
        except (TypeError, ValueError):
            arguments = None
        return {
            "id": call.id if call.id and call.id in said else f"call{number:05}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": arguments if isinstance(arguments, dict) else call.arguments or "",
            },
        }


def _generation_prompt(tokenizer: Any, options: dict[str, Any]) -> str:
    """What the template writes before a turn, with what comes before, or "" if it fails."""
    messages = [{"role": "user", "content": ""}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except Exception:  # templates may raise anything
        return ""


class _Failures(logging.Handler):
    """Collect the exceptions that vLLM's parsers log, instead of their tracebacks in the engine's log."""

    def __enter__(self) -> "_Failures":
        self.found: list[BaseException] = []
        self._loggers = [logging.getLogger(name) for name in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning")]
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
