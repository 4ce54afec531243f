"""Point 2, second half: what of a record does nobody read, and what does the model read?

columns, fields of messages --read by template, reward or Ballast?--> findings
records --tokenizer and template, in another process--> the first prompt, lengths
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ballast.certify.certificate import Certificate
from ballast.certify.findings import Finding, Level
from ballast.certify.subject import Subject
from controller.config import Config
from controller.data.image_columns import COMPARED
from controller.data.records import Record
from controller.data.unread_columns import CHATS, names_in, unread_columns
from controller.lifecycle.tokenized_inputs import reads_records
from workers.errors import ConfigError, DataError, quote
from workers.template_forms import FOREIGN_ROLES, ROLES, parse_json
from workers.user_code.process import NoAnswerError, ask

MOST_RENDERED = 10_000  # records
RENDER_SECONDS = 120.0
MEANT_TO_ACT = {
    *(
        "weight",
        "train",
        "trainable",
        "loss_mask",
        "mask",
        "reasoning",
        "reasoning_content",
        "thinking",
    ),
    *(
        "system",
        "system_prompt",
        "instruction",
        "context",
        "hint",
        "image",
        "images",
        "tools",
        "difficulty",
    ),
}
"""Columns that whoever wrote them meant to act on training."""
READ_IN_PROMPTS = {"role", "content", "tool_calls", "tool_call_id", "name"}
"""Fields of messages that need no template. Prompts are not trained, so `weight` and `train` do nothing."""


def check_prompts(subject: Subject, certificate: Certificate) -> None:
    """Name what nobody reads, and render the prompts where a tokenizer is there."""
    if reads_records(subject.config):
        certificate.skip(
            "unread columns", "an environment, agent, tool or sampler takes whole records"
        )
    else:
        certificate.add(*_unread_columns(subject))
    certificate.add(*_messages(subject))
    if subject.has_tokenizer:
        _render(subject, certificate)
    else:
        certificate.skip(
            "rendered prompts",
            f"model.path={subject.config.model.path} has no tokenizer here",
        )


def _unread_columns(subject: Subject) -> list[Finding]:
    data = subject.train | subject.held_out
    names = dict.fromkeys(
        name for rows in data.values() for row in rows[:COMPARED] for name in row
    )
    read = names_in(subject.config, names) | {
        name for f in subject.functions for name in f.columns
    }
    if any(isinstance(row[subject.prompt_key], list) for row in subject.records[:COMPARED]):
        read |= CHATS
    place = next(iter(data))
    findings = []
    for warning in unread_columns(data, read):
        findings.append(
            Finding(
                "data.unread_column",
                Level.LIKELY,
                f"{warning}.",
                place,
                "It has no effect. Name it in data.prompt_key or another data.*_key, or remove it.",
            )
        )
    unread = [name for name in names if name not in read]
    acting = [name for name in unread if name in MEANT_TO_ACT]
    if acting and not findings:
        findings.append(
            Finding(
                "data.unread_column",
                Level.LIKELY,
                f"Nothing reads the columns {', '.join(map(repr, acting))}: no setting, template or reward.",
                place,
                "Set a data.*_key to it, make it a parameter of the reward, or remove it.",
            )
        )
    answer = subject.answer_key.partition(".")[0]
    if answer in unread and subject.functions and not subject.config.uses_judge:
        findings.append(
            Finding(
                "reward.ignores_answer",
                Level.LIKELY,
                f"The reward never reads the records' answers in {answer!r}.",
                ", ".join(subject.config.reward.weights),
                f"Take `{answer}` as a parameter of the reward, unless it scores only the form.",
            )
        )
    others = [name for name in unread if name not in acting and name != answer]
    if others:
        findings.append(
            Finding(
                "data.unread_columns",
                Level.NOTE,
                f"Nothing reads the columns {', '.join(map(repr, others))}.",
                place,
                "Remove them if they were meant to act.",
            )
        )
    return findings


def _numbered_messages(subject: Subject) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield each chat message with its place, and whether it is the last of its prompt."""
    for path, rows in (subject.train | subject.held_out).items():
        for number, row in enumerate(rows, start=1):
            prompt = row[subject.prompt_key]
            for position, message in enumerate(prompt if isinstance(prompt, list) else []):
                yield f"{path} record {number}", message, position == len(prompt) - 1


def _messages(subject: Subject) -> list[Finding]:
    """Name roles and fields of messages that nothing reads, as far as that needs no template."""
    problems: dict[tuple[str, Level, str, str], list[str]] = {}
    unread = "data.message_field_unread"
    for place, message, is_last in _numbered_messages(subject):
        role = message["role"]
        if role not in ROLES and role not in FOREIGN_ROLES:
            advice = f"Rename it to one of {', '.join(ROLES)}, unless the chat template knows it."
            key = (
                "data.unknown_role",
                Level.LIKELY,
                f"have a message of role {role!r}",
                advice,
            )
            problems.setdefault(key, []).append(place)
        for name in sorted(message.keys() - READ_IN_PROMPTS):
            level = (
                Level.NOTE
                if subject.has_tokenizer and name not in MEANT_TO_ACT
                else Level.LIKELY
            )
            advice = "It has no effect on prompts. Put a text into the content, or remove the field."
            key = (
                unread,
                level,
                f"have a message with the field {name!r}, which few templates read",
                advice,
            )
            problems.setdefault(key, []).append(place)
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, str):
                is_json = isinstance(parse_json(arguments), dict)
                kind = "JSON in a text" if is_json else "a text other than a JSON object"
                advice = "Write the arguments as a mapping."
                level = Level.NOTE if is_json else Level.CERTAIN
                key = (
                    "data.tool_arguments_text",
                    level,
                    f"have a call of a tool whose arguments are {kind}",
                    advice,
                )
                problems.setdefault(key, []).append(place)
        if (
            is_last
            and role == "assistant"
            and not subject.config.data.continue_last_message
        ):
            advice = (
                "Remove the response from the prompt, or set data.continue_last_message."
            )
            key = (
                "data.ends_with_response",
                Level.CERTAIN,
                "end with a message of the assistant",
                advice,
            )
            problems.setdefault(key, []).append(place)
    findings = []
    for (name, level, problem, advice), places in problems.items():
        different = list(dict.fromkeys(places))
        text = f"{len(different):,} records {problem}."
        findings.append(Finding(name, level, text, ", ".join(different[:3]), advice))
    return findings


def _render(subject: Subject, certificate: Certificate) -> None:
    """Render and tokenize the prompts in another process, because a chat template is a program."""
    for path, rows in subject.train.items():
        stride = -(-len(rows) // MOST_RENDERED)
        some = rows[::stride]
        arguments = (subject.config, subject.tools.schemas, path, some)
        try:
            rendered = ask(
                "ballast.certify.prompt_checks:render",
                *arguments,
                timeout_s=RENDER_SECONDS,
                setting="",
            )
        except (ConfigError, DataError, NoAnswerError) as error:
            certificate.add(
                Finding(
                    "data.prompt_refused",
                    Level.CERTAIN,
                    f"The prompts cannot be rendered: {error}",
                    path,
                    "Correct the records or the template: the run would stop here.",
                )
            )
            continue
        certificate.first_prompt = certificate.first_prompt or rendered["first"]
        certificate.add(*_of_rendered(subject.config, path, rendered, len(some)))
        lengths = rendered["lengths"]
        row = {"file": path[-30:], "least": min(lengths), "median": int(np.median(lengths))}
        row |= {"p99": int(np.percentile(lengths, 99)), "most": max(lengths)}
        row |= {
            "cap": subject.config.data.max_prompt_tokens,
            "above": rendered["dropped"] + rendered["cut"],
        }
        certificate.add_table(
            "prompt tokens", [*certificate.tables.get("prompt tokens", []), row]
        )
        certificate.add_coverage(
            "rendered prompts", f"{len(some):,} of {len(rows):,} records of {path}"
        )


def _of_rendered(
    config: Config, path: str, rendered: dict[str, Any], count: int
) -> list[Finding]:
    findings = []
    changed = rendered["dropped"] + rendered["cut"]
    if changed:
        findings.append(
            Finding(
                "data.prompts_above_cap",
                Level.LIKELY,
                f"{changed:,} of {count:,} prompts have more tokens than data.max_prompt_tokens="
                f"{config.data.max_prompt_tokens}.",
                path,
                f"Raise it, or accept data.overlong_prompts={config.data.overlong_prompts}.",
            )
        )
    if rendered["unread"]:
        findings.append(
            Finding(
                "data.message_field_unread",
                Level.LIKELY,
                rendered["unread"][0],
                path,
                "Rename or remove what the template does not read.",
                "; ".join(map(quote, rendered["unread"][1:])),
            )
        )
    repeated = Counter(rendered["beginnings"]).most_common(1)
    if repeated and repeated[0][1] > 1:
        findings.append(
            Finding(
                "data.two_begin_tokens",
                Level.LIKELY,
                "The first prompt begins with the same special token twice.",
                path,
                "Remove it from the texts: the tokenizer adds its own.",
                quote(rendered["first"][:60]),
            )
        )
    return findings


# The function below runs in another process.


def render(
    config: Config, schemas: Sequence[dict[str, Any]], path: str, rows: list[Record]
) -> dict[str, Any]:
    """Return the first prompt as the model reads it, all lengths, and what the template never reads."""
    from controller.data.prompts import PromptDataset
    from controller.lifecycle.tokenized_inputs import prompt_renderer

    renderer, rules = prompt_renderer(config, schemas, lambda text: None)
    dataset = PromptDataset(
        rows, renderer, rules, shuffle=False, name=path, log=lambda text: None
    )
    ids = next(iter(dataset)).ids.tolist()
    special = set(renderer.tokenizer.all_special_ids)
    return {
        "first": renderer.tokenizer.decode(ids),
        "lengths": [int(length) for length in dataset.lengths],
        "dropped": dataset.dropped,
        "cut": dataset.truncated,
        "unread": list(renderer.unread.values()),
        "beginnings": ids[:2] if ids[0] in special else [],
    }
