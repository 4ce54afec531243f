"""Rendering: the one place where a text or chat messages become the ids that a model reads.

    prompt of a record --cleaned--> text, or messages --Renderer.prompt_ids--> ids

    text        preceded by the tokenizer's special tokens, unless it begins with them
    messages    the chat template's text, to which the tokenizer adds nothing

Special tokens written in a text are read as such. Templates are programs that may never end, so they have a
time limit (`chat_templates.py`, which also finds and analyses them).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from workers.batch.placed_images import Image, Placed
from workers.chat_templates import (
    Template,
    check_read,
    read_template,
    time_limit,
    variables_of,
)
from workers.errors import ConfigError, DataError, describe_error
from workers.images.images import ImageSource
from workers.images.placeholders import Placeholders
from workers.template_forms import (
    ROLES,
    Messages,
    TemplateForms,
    advice,
    first_hidden,
    try_forms,
    without_nulls,
)
from workers.text_pieces import find_anchor, puts_blank
from workers.user_code.functions import TIMEOUT_SETTING
from workers.user_code.process import NoAnswerError, ask

RESERVED = ("messages", "tools", "add_generation_prompt")
"""Variables of templates that `chat_template_arguments` must leave alone."""


Options = dict[str, Any]
"""Of `apply_chat_template`: `tools`, JSON schemas, and variables of the template by name."""
# Options that this module sets.
CONTROLS = {"add_generation_prompt", "continue_final_message"}
# Characters: above any model's context, and tokenized within a minute.
LONGEST_RENDERED = 20_000_000
READ_OF_MESSAGES = {"role", "content", "tool_calls", "weight", "train"}
"""Keys of messages that need no template: `tokenized.is_trained` reads the last two."""
READ_OF_TOOLS = {*READ_OF_MESSAGES, "tool_call_id", "name"}
"""Keys of answers of tools: the last two say to which call they belong."""


def options_of(record: Mapping[str, Any], run: Options, place: str) -> Options:
    """Return the run's options, overridden by a record's `tools` and `chat_template_arguments`.

    Both columns may be JSON in a text. Raises DataError, naming the record `place`, for other values.
    """
    arguments = _read_column(record, "chat_template_arguments", dict, place)
    if arguments and (reserved := sorted(arguments.keys() & set(RESERVED))):
        raise DataError(
            f"{place} has a chat template argument {reserved[0]!r}, which is set otherwise. Leave it out."
        )
    tools = _read_column(record, "tools", list, place)
    options = (
        run
        | (arguments or {})
        | ({} if tools is None else {"tools": [_tool(tool, place) for tool in tools]})
    )
    return (
        options
        if options.get("tools")
        else {name: value for name, value in options.items() if name != "tools"}
    )


def _read_column(record: Mapping[str, Any], column: str, kind: type, place: str) -> Any:
    value = record.get(column)
    try:
        content = json.loads(value) if isinstance(value, str) else without_nulls(value)
    except ValueError:
        content = value
    if content is not None and not isinstance(content, kind):
        raise DataError(
            f"{place} has {column!r} of type {type(content).__name__}. Give a {kind.__name__}, or its JSON."
        )
    return content


def _tool(tool: Any, place: str) -> dict[str, Any]:
    tool = _read_column({"tools": tool}, "tools", dict, place)
    function = tool.get("function", tool) if tool else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{place} has a tool without a name. Give each of 'tools' a name, description and parameters."
        )
    return tool if "function" in tool else {"type": "function", "function": tool}


def _structure(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return what decides whether a template shows a message."""
    content = message.get("content") or ""
    parts = (
        [part["type"] for part in content]
        if isinstance(content, list)
        else bool(content.strip())
    )
    return (
        message["role"],
        str(parts),
        len(message.get("tool_calls") or ()),
        *sorted(message.keys()),
    )


def check_size(text: str) -> str:
    if len(text) > LONGEST_RENDERED:
        raise ValueError(
            f"the text has {len(text):,} characters, more than {LONGEST_RENDERED:,}"
        )
    return text


@dataclass
class Renderer:
    """A tokenizer with its chat template.

    vocabulary: number of the model's ids, 0 if unknown. timeout_s: of a rendering, 0 for none. continue_last:
    whether to continue a final assistant message. source: the setting that the template comes from.
    placeholders: of a model that reads images. unread: a warning for each key and role of messages that the
    template never reads.
    """

    tokenizer: Any
    vocabulary: int = 0
    timeout_s: float = 0.0
    continue_last: bool = False
    source: str = "model.path"
    placeholders: Placeholders | None = None
    unread: dict[str, str] = field(default_factory=dict)
    _forms: dict[bool, TemplateForms] = field(default_factory=dict, init=False, repr=False)
    _shown: set[Any] = field(default_factory=set, init=False, repr=False)

    @classmethod
    def with_template(
        cls, tokenizer: Any, file: str, vocabulary: int = 0, timeout_s: float = 0.0
    ) -> "Renderer":
        """Use `file`, the value of model.chat_template, unless it is empty. Raises ConfigError if it cannot
        be read.
        """
        if not file:
            return cls(tokenizer, vocabulary, timeout_s)
        tokenizer.chat_template = read_template(file)
        return cls(tokenizer, vocabulary, timeout_s, source="model.chat_template")

    def read_images(
        self, values: Iterable[Any], pixels: tuple[int, int], folder: str, place: str
    ) -> list[Image]:
        """Read a record's images. folder: of relative paths. Raises ImageError, naming `place`."""
        return [ImageSource(value, place, folder, pixels).image() for value in values]

    def expand(
        self, ids: np.ndarray, images: Sequence[Image], place: str
    ) -> tuple[np.ndarray, Placed]:
        """Replace placeholders in ids of a rendered text by the images' tokens. Raises DataError, naming
        `place`.
        """
        if self.placeholders is not None:
            return self.placeholders.expand(ids, images, place)
        if images:
            raise DataError(
                f"{place} has images, which model.path does not read. Set data.image_key to an empty text."
            )
        return ids, ()

    def images_in(self, ids: np.ndarray) -> int:
        """Return the number of placeholders."""
        return 0 if self.placeholders is None else int(np.sum(ids == self.placeholders.id))

    def prompt_ids(
        self, prompt: Any, place: str, options: Options | None = None
    ) -> np.ndarray:
        """Ids, int32 [P], of a cleaned prompt. options: of `options_of`. Raises DataError, naming `place`."""
        if isinstance(prompt, str):
            full_ids, bare = (
                self._encode(prompt, place, add_special_tokens=adds_special)
                for adds_special in (True, False)
            )
            start = next(
                (i for i in range(len(full_ids)) if full_ids[i : i + len(bare)] == bare), 0
            )
            ids = bare if bare[:start] == full_ids[:start] else [*full_ids[:start], *bare]
        else:
            options = (options or {}) | self.end(prompt, place)
            text = self.text(prompt, place, **options)
            self.check_shown(prompt, place, **options)
            ids = self.ids(text, place)
        if len(ids) == 0:
            raise DataError(f"{place} has an empty prompt.")
        return np.asarray(ids, dtype=np.int32)

    def end(self, prompt: Messages, place: str) -> dict[str, bool]:
        """Return the option for the end of a prompt. Raises DataError, naming `place`, unless it
        may end so.
        """
        if prompt[-1]["role"] != "assistant":
            return {"add_generation_prompt": True}
        if not self.continue_last:
            raise DataError(
                f"{place} ends with an assistant's message. Set data.continue_last_message=true to have it "
                "continued, or leave it out."
            )
        return {"continue_final_message": True}

    def text(self, messages: Messages, place: str, **options: Any) -> str:
        """Render cleaned messages with options of `apply_chat_template`. Raises DataError, naming `place`."""
        self._check_template(place)
        try:
            if names := options.keys() - CONTROLS:
                check_read(
                    self.tokenizer.get_chat_template(tools=options.get("tools")), names
                )
            return self._render_form(messages, **options)
        except ConfigError as error:
            raise DataError(f"{place} is not rendered: {error}") from None
        except DataError as error:
            raise DataError(
                f"{place} is not rendered by the chat template of {self.source}: {error}."
            ) from None
        except Exception as error:  # templates may raise anything
            raise DataError(
                f"{place} is not rendered by the chat template of {self.source}: {describe_error(error)}."
            ) from error

    def as_read(self, messages: Messages, where: str, options: Options) -> Messages:
        """Return cleaned messages in the template's forms, without keys that it never reads.

        Raises DataError, naming `where`, for what it cannot take.
        """
        self._check_template(where)
        words = variables_of(
            self.tokenizer.get_chat_template(tools=options.get("tools"))
        ).words
        read_keys = {"role", "content", "tool_calls", *words}
        try:
            formed = self._forms_for(options).apply(messages)
        except DataError as error:
            raise DataError(
                f"{where} is not rendered by the chat template of {self.source}: {error}."
            ) from None

        def without_unread_keys(message: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in message.items() if name in read_keys}

        return [without_unread_keys(message) for message in formed]

    def ids(self, text: str, place: str) -> list[int]:
        return self._encode(text, place, add_special_tokens=False)

    def ids_behind(self, text: str, last: int | None, place: str) -> list[int]:
        """Return ids of a text behind the id `last`, or None. Raises DataError, naming `place`."""
        anchor, start = self._anchor(text, last, place)
        return self.ids(anchor + text, place)[start:]

    def ids_and_ends(
        self, text: str, place: str, last: int | None = None
    ) -> tuple[list[int], np.ndarray]:
        """Return `ids_behind`, and where each ends in the text. Raises DataError, naming `place`."""
        if not self.tokenizer.is_fast:
            raise DataError(
                f"{place}: the tokenizer of model.path has no fast form, which tells tokens' places."
            )
        anchor, start = self._anchor(text, last, place)
        encoding = self._tokenize(
            anchor + text, place, add_special_tokens=False, return_offsets_mapping=True
        )
        ends = np.array([end for _, end in encoding["offset_mapping"][start:]], np.int64)
        return encoding["input_ids"][start:], ends - len(anchor)

    def _anchor(self, text: str, last: int | None, place: str) -> tuple[str, int]:
        """Return what a text behind an id is encoded behind, and the number of its ids."""
        if last is None or not text or not self._puts_blank:
            return "", 0
        anchor = find_anchor(self.tokenizer, partial(self.ids, place=place), text, last)
        if anchor is None:
            raise DataError(
                f"{place}: the tokenizer of model.path puts a blank before a text that follows token "
                f"{last}, {self.tokenizer.decode([last])!r}, and the text cannot be encoded without it. "
                "Give a tokenizer without a prefix space."
            )
        return anchor

    @cached_property
    def _puts_blank(self) -> bool:
        return puts_blank(self.tokenizer)

    def encode_marked(
        self, messages: Messages, place: str, **options: Any
    ) -> tuple[list[int], np.ndarray]:
        """Return ids of messages, and which the template marks as the assistant's. Raises DataError, naming
        `place`.
        """
        self.text(messages, place, **options)
        options |= {"return_dict": True, "return_assistant_tokens_mask": True}
        encoding = self._apply_template(self._forms_for(options).apply(messages), **options)
        return self.check_ids(encoding["input_ids"], place), np.array(
            encoding["assistant_masks"], dtype=bool
        )

    def check_shown(self, messages: Messages, place: str, **options: Any) -> None:
        """Raise DataError, naming `place`, if the template leaves out the content or the calls of a cleaned
        message.

        Conversations of the same roles and options are tried once.
        """
        self._check_template(place)
        try:
            self._note_unread(messages, place, options)
        except DataError as error:
            raise DataError(
                f"{place} is not rendered by the chat template of {self.source}: {error}."
            ) from None
        key = (
            *map(_structure, messages),
            *sorted((name, repr(value)[:99]) for name, value in options.items()),
        )
        if key in self._shown:
            return
        if hidden := first_hidden(partial(self._render_form, **options), messages):
            number, part = hidden
            raise DataError(
                f"{place}: the chat template of {self.source} leaves out the {part} of message "
                f"{number + 1}, of role {messages[number]['role']!r}. {advice(messages[number], part)}."
            )
        self._shown.add(key)

    def _check_template(self, place: str) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"{place} holds chat messages, but the tokenizer of model.path has no chat template."
            )

    def _note_unread(self, messages: Messages, place: str, options: Options) -> None:
        words = variables_of(
            self.tokenizer.get_chat_template(tools=options.get("tools"))
        ).words
        for message in self._forms_for(options).apply(messages):
            role = message["role"]
            if role not in words and role not in ROLES:
                self.unread.setdefault(
                    role,
                    f"{place}: the chat template of {self.source} shows the role {role!r} and does not know "
                    f"it. Rename it to one of {', '.join(ROLES)}.",
                )
            keys = {
                name for name, value in message.items() if value not in (None, "", [], {})
            }
            for name in sorted(
                keys - words - (READ_OF_TOOLS if role == "tool" else READ_OF_MESSAGES)
            ):
                self.unread.setdefault(
                    f"{role}.{name}",
                    f"{place}: the chat template of {self.source} never reads the key {name!r} of messages "
                    f"of role {role!r}. Rename or remove it.",
                )

    def _forms_for(self, options: Options) -> TemplateForms:
        has_tools = bool(options.get("tools"))
        if has_tools not in self._forms:
            tools = {"tools": options["tools"]} if has_tools else {}
            self._forms[has_tools] = try_forms(partial(self._render, **tools))
        return self._forms[has_tools]

    def _render_form(self, messages: Messages, **options: Any) -> str:
        return self._render(self._forms_for(options).apply(messages), **options)

    def _render(self, messages: Messages, **options: Any) -> str:
        return check_size(str(self._apply_template(messages, tokenize=False, **options)))

    def _apply_template(self, messages: Messages, **options: Any) -> Any:
        with time_limit(self.timeout_s, TIMEOUT_SETTING):
            return self.tokenizer.apply_chat_template(messages, **options)

    def _encode(self, text: str, place: str, **options: bool) -> list[int]:
        return list(self._tokenize(text, place, **options)["input_ids"])

    def _tokenize(self, text: str, place: str, **options: bool) -> Any:
        try:
            text.encode()  # tokenizers' errors say less about half a character
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place} cannot be encoded as Unicode: {describe_error(error)}."
            ) from None
        encoding = self.tokenizer(text, **options)
        self.check_ids(encoding["input_ids"], place)
        return encoding

    def check_ids(self, ids: list[int], place: str) -> list[int]:
        """Return the ids. Raises DataError, naming `place`, for an id that the model lacks."""
        if self.vocabulary and max(ids, default=0) >= self.vocabulary:
            raise DataError(
                f"{place} has token id {max(ids)}, {self.tokenizer.decode([max(ids)])!r}, outside the "
                f"model's vocabulary of {self.vocabulary}. Give the tokenizer that model.path was trained "
                "with."
            )
        return ids


def render_isolated(
    template: Template,
    prompts: Sequence[tuple[Messages, Options]],
    options: Options,
    tokens: Sequence[str],
    name: str,
    *,
    answered: bool,
    timeout_s: float,
) -> Any:
    """Render in a new process, and return the mapping of `TemplateFindings`, or None if only `prompts` can be
    rendered.

    options: of the run. tokens: texts of special tokens. answered: whether prompts end with a response.
    Raises ConfigError, naming `name`.
    """
    render = "workers.trials:render_prompts"
    trials = [(template.text_for(given), one, given) for one, given in prompts]
    examined = template.text_for(options), options, list(tokens)
    try:
        given = (trials, template.special_tokens, answered, examined, name)
        return ask(render, *given, timeout_s=timeout_s, setting=TIMEOUT_SETTING)
    except NoAnswerError as error:
        raise ConfigError(
            f"{name} {error} on the first {len(prompts)} prompts. Fix the template."
        ) from None
