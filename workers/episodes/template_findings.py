"""Findings about a chat template: what it makes of an assistant's turn when another message follows.

    messages --render--> text read and sampled so far (seen), and the same with a message behind (after)
    after begins with seen: appends     else: rewrites, with the change     not rendered or shown: refuses

Templates are programs: `workers.trials.render_prompts` calls this in a separate process.
"""

import difflib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workers.errors import describe_error
from workers.rendering import Messages, Options

ANSWER, THOUGHT, RESULT, RULE = "ANSWER", "THOUGHT", "RESULT", "RULE"
TURNS = {
    "user": ("plain", "reasoning", "calls", "both"),
    "tool": ("calls", "both"),
    "tools": ("calls", "both"),
}
"""Kinds of turns that each role may follow: with reasoning, calls, or both. `tools`: two messages
of `tool`.
"""
REASONED = ("reasoning", "both")
CALLING = ("calls", "both")
APPENDS, REWRITES, REFUSES = "appends", "rewrites", "refuses"
TOKEN = re.compile(r"<(?!/)[^<>\s]+>|</s>|\[/?[A-Z_]+\]")
WORD = re.compile(rf"{TOKEN.pattern}|\w+|\s+|.", re.DOTALL)
LONGEST_CHANGE = 160  # characters
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "description": "A."}},
    "required": ["a"],
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": SCHEMA},
}
Render = Callable[[Messages, bool, Options], str]
"""(messages, add_generation_prompt, options) -> text. Raises anything."""


@dataclass(frozen=True)
class Following:
    """One case. role, turn: of TURNS, the role of the message that follows, and the kind of the turn.

    change: of the text, if the template rewrites, or the reason why it refuses.
    """

    role: str
    turn: str
    outcome: str
    change: str = ""


@dataclass(frozen=True)
class TemplateFindings:
    """begin: text that opens a turn. ends: texts of tokens that end a turn, with the kinds of turns that they
    end.

    bos: how often the text begins with bos_token. arguments: that the template reads, `tools` among them.
    system: an answered conversation that begins with a system message, which some templates move into the
    last user's turn.
    """

    cases: tuple[Following, ...]
    begin: str
    ends: Mapping[str, list[str]]
    bos: int
    arguments: tuple[str, ...]
    system: Following

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "TemplateFindings":
        cases = tuple(Following(**case) for case in fields["cases"])
        return cls(**{**fields, "cases": cases, "system": Following(**fields["system"])})

    @property
    def system_matters(self) -> bool:
        """Whether a system message at the beginning changes what happens to a plain answer."""
        plain = next(
            case for case in self.cases if (case.role, case.turn) == ("user", "plain")
        )
        return (self.system.outcome, self.system.change) != (plain.outcome, plain.change)

    @property
    def refuses(self) -> bool:
        return any(case.outcome == REFUSES for case in self.cases)


def template_findings(
    render: Render,
    arguments: tuple[str, ...],
    options: Options,
    bos: str = "",
    tokens: Sequence[str] = (),
) -> TemplateFindings:
    """Try the template on made-up conversations.

    options: for each of them. tokens: texts of special tokens, by default what looks like them. Raises what
    `render` raises of a prompt alone.
    """
    is_token = (
        re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
        if tokens
        else TOKEN
    )
    prompt = [{"role": "user", "content": "QUESTION"}]
    opened, closed = (render(prompt, begin, options) for begin in (True, False))
    times = 0
    while bos and opened.startswith(bos * (times + 1)):
        times += 1
    with_tools = {"tools": [TOOL]} | options if "tools" in arguments else options
    cases: list[Following] = []
    ends: dict[str, list[str]] = {}
    for role, turns in TURNS.items():
        for turn in turns:
            case, end = _case(
                render,
                prompt,
                role,
                turn,
                with_tools if turn in CALLING else options,
                is_token,
            )
            cases.append(case)
            if end and turn not in ends.setdefault(end, []):
                ends[end].append(turn)
    begin = opened.removeprefix(closed) if opened.startswith(closed) else opened
    system = _with_system(render, prompt, options, is_token)
    return TemplateFindings(tuple(cases), begin, ends, times, arguments, system)


def _with_system(
    render: Render, prompt: Messages, options: Options, is_token: re.Pattern[str]
) -> Following:
    messages = [{"role": "system", "content": RULE}, *prompt]
    try:
        if RULE not in render(messages, True, options):
            return Following(
                "system", "plain", REFUSES, "does not show a message of role system"
            )
        case, _ = _case(render, messages, "user", "plain", options, is_token)
    except Exception as error:  # templates may raise anything
        return Following("system", "plain", REFUSES, f"raises {describe_error(error)}")
    return replace(case, role="system")


def _case(
    render: Render,
    prompt: Messages,
    role: str,
    turn: str,
    options: Options,
    is_token: re.Pattern[str],
) -> tuple[Following, str]:
    """Return the case, and the text of the token that ends the turn."""
    outcome = REFUSES
    change = ""
    calls = [f"call{n:05}" for n in range(1 + (role == "tools"))]
    answers = [{"role": "user", "content": f"{RESULT}0"}]
    if role != "user":
        answers = [
            {"role": "tool", "name": "add", "tool_call_id": call, "content": f"{RESULT}{n}"}
            for n, call in enumerate(calls)
        ]
    read = render(prompt, True, options)
    for message in _turns(turn, calls):
        try:
            turn_text = render([*prompt, message], False, options)
            answered_text = render([*prompt, message, *answers], True, options)
        except Exception as error:  # templates may raise anything
            change = change or f"raises {describe_error(error)}"
            continue
        if any(answer["content"] not in answered_text for answer in answers):
            change = f"does not show a message of role {answers[0]['role']}"
        elif ANSWER not in turn_text:
            outcome = REWRITES
            change = (
                "leaves calls out" if "tool_calls" in message else "leaves the turn out"
            )
        elif turn in REASONED and THOUGHT not in turn_text:
            outcome = REWRITES
            change = "leaves reasoning out"
        else:
            seen, again, end = _compare(
                read, turn_text, answered_text, is_token, reasoned=turn in REASONED
            )
            change = "" if answered_text.startswith(seen) else _change(seen, again)
            return Following(role, turn, REWRITES if change else APPENDS, change), end
    return Following(role, turn, outcome, change), ""


def _turns(turn: str, calls: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the turn in each form in which templates read it."""
    content = "" if turn in CALLING else ANSWER
    thoughts = [
        {"reasoning_content": THOUGHT},
        {"thinking": THOUGHT},
        {"reasoning": THOUGHT},
    ]
    thoughts.append({"content": f"<think>\n{THOUGHT}\n</think>\n\n{content}"})
    for thought in thoughts if turn in REASONED else [{}]:
        message = {"role": "assistant", "content": content} | thought
        if content:
            yield message
            continue
        for arguments in ({"a": ANSWER}, json.dumps({"a": ANSWER})):
            functions = [
                {"id": call, "function": {"name": "add", "arguments": arguments}}
                for call in calls
            ]
            yield message | {
                "tool_calls": [{"type": "function"} | function for function in functions]
            }


def _compare(
    read: str,
    turn_text: str,
    answered_text: str,
    is_token: re.Pattern[str],
    *,
    reasoned: bool,
) -> tuple[str, str, str]:
    """Return what the policy has read and sampled, the template's text of the same later, and the end token's
    text.
    """
    context, _, tail = turn_text.rpartition(ANSWER)
    later_context, _, following = answered_text.rpartition(ANSWER)
    shared = os.path.commonprefix([tail, following])  # noqa: RUF071 (texts, not paths)
    turn_tokens = [*is_token.finditer(shared)] or [*is_token.finditer(tail)]
    theirs = [*is_token.finditer(following.partition(RESULT)[0])]
    end_tokens = turn_tokens[-1:] or theirs[:1]  # some turns end with the next role's token
    tail = tail[: turn_tokens[-1].end()] if turn_tokens else shared
    length = len(tail) if following.startswith(tail) else theirs[0].end() if theirs else 0
    if not context.startswith(read):
        words = zip(WORD.findall(read), WORD.findall(context), strict=False)
        same = len(
            "".join(
                one
                for one, context_word in itertools.takewhile(
                    lambda pair: pair[0] == pair[1], words
                )
            )
        )
        context = read + context[same:]
    if (
        not reasoned
        and later_context.startswith(read)
        and context[len(read) :].endswith(later_context[len(read) :])
    ):
        # A policy that does not think does not write empty thoughts.
        context = later_context
    return (
        context + ANSWER + tail,
        later_context + ANSWER + following[:length],
        end_tokens[0].group() if end_tokens else "",
    )


def _change(seen: str, again: str) -> str:
    one = WORD.findall(seen)
    new_words = WORD.findall(again)
    changes = []
    for kind, i, j, k, m in difflib.SequenceMatcher(
        None, one, new_words, autojunk=False
    ).get_opcodes():
        old = "".join(one[i:j])
        new = "".join(new_words[k:m])
        if kind != "equal":
            words = {"delete": f"removes {old!r}", "insert": f"adds {new!r}"}
            changes.append(words.get(kind, f"replaces {old!r} by {new!r}"))
    text = ", ".join(changes)
    return text if len(text) <= LONGEST_CHANGE else f"{text[:LONGEST_CHANGE]}..."
