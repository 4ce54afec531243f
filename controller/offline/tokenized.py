"""Records as token ids, with a mask of the tokens that are learned.

text prompt + response + <eos>                             the response and <eos>
chat messages --template with {% generation %} marks-->    what it marks
chat messages --template without-->                        what each assistant message adds to the tokens before it

T tokens of a sequence.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from controller.data import rendered, tokenize
from controller.records import Record
from workers.errors import DataError

Row = dict[str, np.ndarray]
"""`input_ids` int32 [T], `loss_mask` bool [T]."""
Messages = list[dict[str, Any]]
MARKS = re.compile(r"\{%-?\s*generation\b")


def conversation_row(tokenizer: Any, messages: Any, where: str) -> Row:
    """All assistant turns of a conversation are learned.

    Raises DataError, naming the record `where`, if there is none, or if its tokens cannot be told.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} needs a list of chat messages, not {type(messages).__name__}.")
    return _chat_row(tokenizer, messages, 0, where)


def response_row(tokenizer: Any, prompt: Any, response: Any, where: str) -> Row:
    """The response to a prompt is learned: a text, or chat messages behind those of the prompt.

    Raises DataError as `conversation_row` does, and for a response of another form than the prompt's.
    """
    if isinstance(prompt, list):
        if not isinstance(response, (str, list)):
            raise DataError(f"{where} has a response of type {type(response).__name__}; a string or chat messages.")
        return _chat_row(tokenizer, _answered(prompt, response), len(prompt), where)
    if not isinstance(response, str):
        raise DataError(f"{where} has a text as prompt, and a response of type {type(response).__name__}.")
    if tokenizer.eos_token_id is None:
        raise DataError(f"{where}: the tokenizer of model.path has no end-of-sequence token to end a response with.")
    before = tokenize(tokenizer, prompt, where=where)
    learned = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return _row([*before.tolist(), *learned], [False] * len(before) + [True] * len(learned), where)


def conversations(record: Record, messages: str, prompt: str, *responses: str) -> list[Any]:
    """What of a record goes through a chat template: nothing of texts. The others are columns, as of `record_row`."""
    if messages in record:
        return [record[messages]]
    given, found = record.get(prompt), [record[key] for key in responses if isinstance(record.get(key), (str, list))]
    if given is None:
        return [response for response in found if isinstance(response, list)]
    return [_answered(given, response) for response in found] if isinstance(given, list) else []


def _answered(prompt: Messages, response: str | Messages) -> Messages:
    return [*prompt, *([{"role": "assistant", "content": response}] if isinstance(response, str) else response)]


def record_row(tokenizer: Any, record: Record, keys: tuple[str, str, str], where: str) -> Row:
    """A record of supervised fine-tuning. keys: columns of the conversation, the prompt, the response."""
    messages, prompt, response = keys
    if messages in record:
        return conversation_row(tokenizer, record[messages], where)
    if missing := [key for key in (prompt, response) if key not in record]:
        raise DataError(
            f"{where} has neither {messages!r} nor {missing[0]!r}; set data.messages_key, or data.prompt_key and "
            "data.response_key, to its columns."
        )
    return response_row(tokenizer, record[prompt], record[response], where)


def pair_rows(tokenizer: Any, record: Record, keys: tuple[str, str, str], where: str) -> tuple[Row, Row]:
    """The chosen and the rejected sequence of a record. keys: columns of the prompt, the chosen, the rejected one.

    Without a prompt's column both are whole conversations, whose first equal messages are the prompt.
    """
    prompt_key, *response_keys = keys
    if missing := [key for key in response_keys if key not in record]:
        raise DataError(f"{where} has no {missing[0]!r}; set data.chosen_key and data.rejected_key to its columns.")
    chosen, rejected = (record[key] for key in response_keys)
    prompt = record.get(prompt_key)
    if prompt is None:
        prompt = _common_start(chosen, rejected, where)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return response_row(tokenizer, prompt, chosen, where), response_row(tokenizer, prompt, rejected, where)


def _common_start(chosen: Any, rejected: Any, where: str) -> Messages:
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise DataError(f"{where} has no prompt; set data.prompt_key to its column.")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    if same == 0:
        raise DataError(f"{where} has no prompt, and its chosen and rejected messages begin differently.")
    return list(chosen[:same])


def _chat_row(tokenizer: Any, messages: Messages, first: int, where: str) -> Row:
    """Assistant turns from message `first` on are learned."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise DataError(f"{where} holds chat messages, but the tokenizer of model.path has no chat template.")
    if not MARKS.search(str(template)):
        return _row_by_prefixes(tokenizer, messages, first, where)
    found = rendered(tokenizer, messages, where, return_dict=True, return_assistant_tokens_mask=True)
    ids, learned = found["input_ids"], np.array(found["assistant_masks"], dtype=bool)
    if first:
        learned[: _length_of_start(tokenizer, messages[:first], ids, where, turn_follows=True)] = False
    return _row(ids, learned, where)


def _row_by_prefixes(tokenizer: Any, messages: Messages, first: int, where: str) -> Row:
    ids = rendered(tokenizer, messages, where)
    learned = np.zeros(len(ids), dtype=bool)
    for index in range(first, len(messages)):
        if messages[index].get("role") == "assistant":
            start = _length_of_start(tokenizer, messages[:index], ids, where, turn_follows=True)
            stop = _length_of_start(tokenizer, messages[: index + 1], ids, where, turn_follows=False)
            learned[start:stop] = True
    return _row(ids, learned, where)


def _length_of_start(tokenizer: Any, messages: Messages, ids: Sequence[int], where: str, *, turn_follows: bool) -> int:
    """Tokens of the first messages, which the whole conversation `ids` begins with, or its mask would be wrong."""
    if not messages:
        return 0
    start = rendered(tokenizer, messages, where, add_generation_prompt=turn_follows)
    if list(ids[: len(start)]) != list(start):
        raise DataError(
            f"{where}: the chat template of model.path renders messages differently when others follow, so that the "
            "assistant's tokens cannot be told; give the template {% generation %} marks."
        )
    return len(start)


def _row(ids: Sequence[int], learned: Any, where: str) -> Row:
    mask = np.array(learned, dtype=bool)
    mask[:1] = False  # nothing predicts the first token
    if not mask.any():
        raise DataError(f"{where} has no token to learn: an assistant's turn, or a response, is needed.")
    return {"input_ids": np.asarray(ids, dtype=np.int32), "loss_mask": mask}
