"""Records as examples: a prompt and its response, with options, labels and images. No tokens yet."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from controller.config.offline import RewardDataConfig
from controller.data.records import Record
from workers.chat_messages import check_not_blank, clean_prompt, messages_in
from workers.errors import DataError
from workers.image_parts import with_images
from workers.images.images import ImageSource
from workers.rendering import Messages, Options, options_of


class Example(NamedTuple):
    """A prompt and its response: two texts, or two lists of chat messages, rendered with `options`.

    label: the response's score, or the margin of its pair. steps: characters up to each step's end, and its
    label.
    images: of both, in order.
    """

    prompt: Any
    response: Any
    options: Options = {}  # noqa: RUF012 (never changed)
    label: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()
    images: tuple[ImageSource, ...] = ()


def with_options(
    examples: Iterable[Example], record: Record, run: Options, place: str
) -> tuple[Example, ...]:
    """Give chat examples the run's options, and the record's. Raises DataError."""
    return tuple(
        example._replace(options=options_of(record, run, place))
        if isinstance(example.response, list)
        else example
        for example in examples
    )


def reading_images(
    examples: Iterable[Example],
    column: Any,
    pixels: tuple[int, int],
    folder: str,
    place: str,
) -> tuple[Example, ...]:
    """Give each example its images, from `column` or its messages. See `ImageSource`. Raises DataError."""
    new_examples = []
    for example in examples:
        is_text = isinstance(example.response, str)
        first = len(example.prompt)
        messages, values = with_images(
            "" if is_text else [*example.prompt, *example.response], column, place
        )
        images = tuple(ImageSource(value, place, folder, pixels) for value in values)
        changes = (
            {} if is_text else {"prompt": messages[:first], "response": messages[first:]}
        )
        new_examples.append(example._replace(images=images, **changes))
    return tuple(new_examples)


def sft_examples(record: Record, keys: tuple[str, str, str], place: str) -> tuple[Example]:
    """Return a record's conversation, or its prompt and response. keys: their columns. Raises DataError."""
    messages, prompt, response = keys
    if record.get(messages) is not None:
        return (Example([], _messages(record[messages], place)),)
    if missing := [key for key in (prompt, response) if key not in record]:
        raise DataError(
            f"{place} has neither {messages!r} nor {missing[0]!r}. Set data.messages_key, or "
            "data.prompt_key and data.response_key, to its columns."
        )
    return (_example(record[prompt], record[response], place),)


def preference_examples(
    record: Record, keys: tuple[str, str, str], place: str
) -> tuple[Example, Example]:
    """Return the chosen and the rejected example. keys: columns of the prompt, the chosen, the rejected
    response.

    Without a prompt, both are conversations whose common first messages are the prompt. With one, they may be
    whole conversations that begin with it (as in UltraFeedback). Raises DataError.
    """
    prompt_key, *response_keys = keys
    if missing := [key for key in response_keys if key not in record]:
        raise DataError(
            f"{place} has no {missing[0]!r}. Set data.chosen_key and data.rejected_key to its columns."
        )
    chosen, rejected = (record[key] for key in response_keys)
    chosen = messages_in(chosen)
    rejected = messages_in(rejected)
    prompt = messages_in(record.get(prompt_key))
    if _is_conversation(chosen) and _is_conversation(rejected):
        start = _start_of_conversations(prompt, chosen, rejected, place)
        if start:
            prompt = start
            chosen = chosen[len(start) :]
            rejected = rejected[len(start) :]
        elif isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
    elif prompt is None:
        raise DataError(
            f"{place} has no prompt in {prompt_key!r}. Set data.prompt_key to its column, or give the "
            "chosen and the rejected conversation as chat messages, which hold it."
        )
    return _example(prompt, chosen, place), _example(prompt, rejected, place)


def _is_conversation(response: Any) -> bool:
    return isinstance(response, list) and all(
        isinstance(message, dict) for message in response
    )


def reward_examples(
    record: Record, data: RewardDataConfig, loss: str, place: str
) -> tuple[Example, ...]:
    """Return a pair with its margin, a response with its score, or one with its steps and their labels.

    Raises DataError.
    """
    if loss == "bradley_terry":
        pair = preference_examples(
            record, (data.prompt_key, data.chosen_key, data.rejected_key), place
        )
        margin = record.get(data.margin_key)
        return pair[0]._replace(
            label=0.0 if margin is None else _number(margin, data.margin_key, place)
        ), pair[1]
    keys = (
        (data.response_key, data.score_key)
        if loss == "regression"
        else (data.steps_key, data.labels_key)
    )
    if missing := [key for key in (data.prompt_key, *keys) if record.get(key) is None]:
        raise DataError(
            f"{place} has no {missing[0]!r}. Set the data.*_key settings to its columns."
        )
    prompt, response, label = (record[key] for key in (data.prompt_key, *keys))
    if loss == "regression":
        return (
            _example(prompt, response, place)._replace(
                label=_number(label, keys[1], place)
            ),
        )
    return (_stepwise(prompt, response, label, data.step_separator, place),)


def _number(value: Any, key: str, place: str) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{place} has {key}={value!r:.80}. Give a finite number.")
    return float(value)


def _stepwise(prompt: Any, steps: Any, labels: Any, separator: str, place: str) -> Example:
    lists = (
        isinstance(steps, list)
        and isinstance(labels, list)
        and len(steps) == len(labels) > 0
    )
    if not lists or not all(isinstance(step, str) and step for step in steps):
        raise DataError(
            f"{place} needs a list of steps, which are texts, and as many labels. Correct them."
        )
    numbers = [_number(label, "a label", place) for label in labels]
    if not all(0 <= number <= 1 for number in numbers):
        raise DataError(
            f"{place} has the labels {numbers!r:.80}. Give numbers from 0 to 1."
        )
    labelled_ends = []
    end = 0
    for step, number in zip(steps, numbers, strict=True):
        end += len(step)
        labelled_ends.append((end, number))
        end += len(separator)
    example = _example(prompt, separator.join(steps), place)
    return example._replace(steps=tuple(labelled_ends))


def _start_of_conversations(
    prompt: Any, chosen: Messages, rejected: Messages, place: str
) -> Messages:
    """Return the messages of the prompt with which both lists begin, or none if they are answers alone.

    prompt: messages, a text that one of the common messages holds, or None. Raises DataError.
    """
    if isinstance(prompt, list):
        sides = [
            clean_prompt(side[: len(prompt)], place)
            for side in (chosen, rejected)
            if len(side) > len(prompt)
        ]
        return prompt if sides == [clean_prompt(prompt, place)] * 2 else []
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = next(
        (i for i, (one, rejected_message) in pairs if one != rejected_message),
        min(len(chosen), len(rejected)) - 1,
    )
    start = list(chosen[:common])
    if prompt is None and not start:
        raise DataError(
            f"{place} has no prompt, and its chosen and rejected messages begin differently."
        )
    begin_with = {
        message.get("role") for side in (chosen, rejected) for message in side[:1]
    }
    texts = [message.get("content") for message in start]
    if isinstance(prompt, str) and begin_with != {"assistant"} and prompt not in texts:
        raise DataError(
            f"{place}: its prompt is in none of the messages with which its chosen and rejected "
            "conversations begin. Set data.prompt_key='' to take their common messages as the prompt."
        )
    return start


def _example(prompt: Any, response: Any, place: str) -> Example:
    if (messages := messages_in(prompt)) is not prompt:
        prompt = messages
        response = messages_in(response)
    if isinstance(prompt, str) and prompt.isspace():
        raise DataError(f"{place} has an empty prompt.")
    if isinstance(prompt, str) and isinstance(response, str):
        return Example(prompt, response)
    if isinstance(prompt, str):
        raise DataError(
            f"{place} has a text as prompt, and a response of type {type(response).__name__}."
        )
    if isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    prompt = _messages(prompt, place)
    response = _messages(response, place)
    check_not_blank(prompt, place)
    if prompt[-1]["role"] == response[0]["role"] == "assistant":
        raise DataError(
            f"{place} has a prompt that ends with an assistant's message, behind which the response would "
            "be another. Begin the response with that message's text."
        )
    return Example(prompt, response)


def _messages(value: Any, place: str) -> Messages:
    value = messages_in(value)
    if not isinstance(value, list):
        raise DataError(
            f"{place} has a value of type {type(value).__name__} in place of a list of chat messages."
        )
    if not value:
        raise DataError(f"{place} has an empty list of chat messages.")
    return list(clean_prompt(value, place))
