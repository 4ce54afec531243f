"""Names of vLLM's parsers, found without importing vLLM: all of them, and those that suit a chat template."""

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple


class Format(NamedTuple):
    """How a family of models writes calls. mark: found in its templates. call: begins each call in a
    response.
    """

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
    Format(
        "<｜tool▁calls▁begin｜>", "deepseek_v31", "deepseek_v3", "<｜tool▁call▁begin｜>"
    ),
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
    marked = (candidate for candidate in FORMATS if candidate.mark in template)
    template_format = next(
        (
            candidate
            for candidate in marked
            if candidate.mark != "```json" or "<｜tool▁calls▁begin｜>" in template
        ),
        None,
    )
    thinks = any(mark in template for mark in THINKS)
    if template_format is None:
        return "", "deepseek_r1" if "</think>" in template else ""
    return template_format.tools, template_format.reasoning if thinks else ""


def known_parsers(kind: str) -> set[str]:
    """Names of vLLM's own parsers, read without importing vLLM. kind: `tool_parser` or `reasoning_parser`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = "tool_parsers" if kind == "tool_parser" else "reasoning"
    file = Path(spec.submodule_search_locations[0]) / folder / "__init__.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tables = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    )
    return {name for table in tables for name in ast.literal_eval(table)}
