"""Records as token ids, with a mask of the tokens to learn.

    record --sft_examples, preference_examples--> (prompt, response), ... --example_row--> Row

    text prompt, text response                                 learned: the response and <eos>
    chat messages, template with {% generation %} marks        learned: what the template marks in the response
    chat messages, template without marks                      learned: what each assistant message adds to the tokens

T tokens of a sequence.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from controller.data.records import Record
from workers.errors import DataError
from workers.rendering import Messages, Options, Renderer, cleaned, options_of

Row = dict[str, np.ndarray]
"""`input_ids` int32 [T], `loss_mask` bool [T]."""


class Example(NamedTuple):
    """A prompt and its response: two texts, or two lists of chat messages, rendered with `options`."""

    prompt: Any
    response: Any
    options: Options = {}  # noqa: RUF012 (never changed)


MARKS = re.compile(r"\{%-?\s*generation\b")


def with_options(examples: Iterable[Example], record: Record, run: Options, where: str) -> tuple[Example, ...]:
    """Give chat examples the run's options, and the record's. Raises DataError."""
    return tuple(
        example._replace(options=options_of(record, run, where)) if isinstance(example.response, list) else example
        for example in examples
    )


def sft_examples(record: Record, keys: tuple[str, str, str], where: str) -> tuple[Example]:
    """Return a record's conversation, or its prompt and response. keys: their columns. Raises DataError."""
    messages, prompt, response = keys
    if record.get(messages) is not None:
        return (Example([], _messages(record[messages], where)),)
    if missing := [key for key in (prompt, response) if key not in record]:
        raise DataError(
            f"{where} has neither {messages!r} nor {missing[0]!r}. Set data.messages_key, or data.prompt_key and "
            "data.response_key, to its columns."
        )
    return (_example(record[prompt], record[response], where),)


def preference_examples(record: Record, keys: tuple[str, str, str], where: str) -> tuple[Example, Example]:
    """Return the chosen and the rejected example. keys: columns of the prompt, the chosen, the rejected response.

    Without a prompt, both are conversations whose common first messages are the prompt. Raises DataError.
    """
    prompt_key, *response_keys = keys
    if missing := [key for key in response_keys if key not in record]:
        raise DataError(f"{where} has no {missing[0]!r}. Set data.chosen_key and data.rejected_key to its columns.")
    chosen, rejected = (record[key] for key in response_keys)
    prompt = record.get(prompt_key)
    if prompt is None:
        prompt = _common_start(chosen, rejected, where)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return _example(prompt, chosen, where), _example(prompt, rejected, where)


def _common_start(chosen: Any, rejected: Any, where: str) -> Messages:
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise DataError(f"{where} has no prompt. Set data.prompt_key to its column.")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(chosen), len(rejected)) - 1)
    if same == 0:
        raise DataError(f"{where} has no prompt, and its chosen and rejected messages begin differently.")
    return list(chosen[:same])


def _example(prompt: Any, response: Any, where: str) -> Example:
    if isinstance(prompt, str) and isinstance(response, str):
        return Example(prompt, response)
    if isinstance(prompt, str):
        raise DataError(f"{where} has a text as prompt, and a response of type {type(response).__name__}.")
    if isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    prompt, response = _messages(prompt, where), _messages(response, where)
    if prompt[-1]["role"] == response[0]["role"] == "assistant":
        raise DataError(
            f"{where} has a prompt that ends with an assistant's message, behind which the response would be another. "
            "Begin the response with that message's text."
        )
    return Example(prompt, response)


def _messages(value: Any, where: str) -> Messages:
    if not isinstance(value, list):
        raise DataError(f"{where} has a value of type {type(value).__name__} in place of a list of chat messages.")
    if not value:
        raise DataError(f"{where} has an empty list of chat messages.")
    return list(cleaned(value, where))


def example_row(renderer: Renderer, example: Example, where: str) -> Row:
    """Tokenize prompt and response. The response's text, or all its assistant turns, are learned.

    Raises DataError if no token is learned, or if rendering does not show which tokens are the assistant's.
    """
    prompt, response, options = example
    if isinstance(response, str):
        return _text_row(renderer, prompt, response, where)
    return _chat_row(renderer, [*prompt, *response], len(prompt), where, options)


def _text_row(renderer: Renderer, prompt: str, response: str, where: str) -> Row:
    end = renderer.tokenizer.eos_token_id
    if end is None:
        raise DataError(f"{where}: the tokenizer of model.path has no end-of-sequence token to end a response with.")
    before, learned = renderer.prompt_ids(prompt, where), renderer.ids(response, where)
    learned += [end] * (learned[-1:] != [end])
    return _row([*before.tolist(), *learned], [False] * len(before) + [True] * len(learned), where)


def _chat_row(renderer: Renderer, messages: Messages, first: int, where: str, options: Options) -> Row:
    if not MARKS.search(str(renderer.tokenizer.chat_template)):
        return _row_by_prefixes(renderer, messages, first, where, options)
    ids, learned = renderer.marked(messages, where, **options)
    if first:
        learned[: _length_of_start(renderer, messages[:first], ids, where, options, turn_follows=True)] = False
    return _row(ids, learned, where)


def _row_by_prefixes(renderer: Renderer, messages: Messages, first: int, where: str, options: Options) -> Row:
    ids = renderer.ids(renderer.text(messages, where, **options), where)
    learned = np.zeros(len(ids), dtype=bool)
    for index in range(first, len(messages)):
        if messages[index]["role"] == "assistant":
            start = _length_of_start(renderer, messages[:index], ids, where, options, turn_follows=True)
            stop = _length_of_start(renderer, messages[: index + 1], ids, where, options, turn_follows=False)
            learned[start:stop] = True
    return _row(ids, learned, where)


def _length_of_start(
    renderer: Renderer, messages: Messages, ids: Sequence[int], where: str, options: Options, *, turn_follows: bool
) -> int:
    """Return the tokens of the first messages. Raises DataError unless `ids` begins with them."""
    if not messages:
        return 0
    start = renderer.ids(renderer.text(messages, where, **options, add_generation_prompt=turn_follows), where)
    if list(ids[: len(start)]) != start:
        raise DataError(
            f"{where}: the chat template of model.path renders messages differently when others follow, so that the "
            "assistant's tokens cannot be told. Give the template {% generation %} marks."
        )
    return len(start)


def _row(ids: Sequence[int], learned: Any, where: str) -> Row:
    mask = np.array(learned, dtype=bool)
    mask[:1] = False  # nothing predicts the first token
    if not mask.any():
        raise DataError(f"{where} has no token to learn: an assistant's turn, or a response, is needed.")
    return {"input_ids": np.asarray(ids, dtype=np.int32), "loss_mask": mask}
