"""Records as token ids, with a mask of the tokens to learn.

    record --examples: sft_examples, preference_examples, ...--> Example, ...
    Example --example_row, scored_row--> Row

    text prompt, text response                            learned: the response and <eos>
    chat messages, template with {% generation %} marks   learned: what the template marks in the response
    chat messages, template without marks                 learned: what the policy would say in the text

T tokens of a sequence.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from controller.offline.examples import Example
from workers.batch.placed_images import Placed
from workers.errors import DataError
from workers.images.placeholders import spread
from workers.rendering import Messages, Options, Renderer

Row = dict[str, np.ndarray]
"""`input_ids` int32 [T], `loss_mask` bool [T], and with labels of steps `label` float64 [T]."""


ALL_TURNS, LAST_TURN = "all", "last"
MARKS = re.compile(r"\{%-?\s*generation\b")


def expand_images(
    renderer: Renderer, row: Row, example: Example, place: str
) -> tuple[Row, Placed]:
    """Give a row its images' tokens, of which none is learned. Raises as `Renderer.expand`."""
    ids, placed = renderer.expand(
        row["input_ids"], [source.image() for source in example.images], place
    )
    return {name: spread(values, placed) for name, values in row.items()} | {
        "input_ids": ids
    }, placed


def example_row(
    renderer: Renderer, example: Example, place: str, train_on: str = ALL_TURNS
) -> Row:
    """Tokenize prompt and response. The response's text, or its assistant turns, are learned: all, or the
    last.

    Raises DataError if no token is learned, or if rendering does not show which tokens are the assistant's.
    """
    if isinstance(example.response, str):
        return _text_row(renderer, example.prompt, example.response, place)
    messages = [*example.prompt, *example.response]
    trained = [
        is_trained(message, number, place)
        for number, message in enumerate(messages, start=1)
    ]
    turns = []
    for number in range(len(example.prompt), len(messages)):
        if messages[number]["role"] == "assistant":
            turns.append(number)
    if train_on != ALL_TURNS:
        turns = turns[-1:]
    turns = [turn for turn in turns if trained[turn]]
    renderer.check_shown(messages, place, **example.options)
    return _chat_row(renderer, messages, turns, example.options, place)


def is_trained(message: dict[str, Any], number: int, place: str) -> bool:
    """Whether a message's `weight` (OpenAI) and `train` (axolotl) let it be learned. Raises DataError if they
    cannot be honoured.
    """
    for name in ("weight", "train"):
        value = message.get(name)
        if value is not None and (
            not isinstance(value, (bool, int, float)) or value not in (0, 1)
        ):
            raise DataError(
                f"{place}: message {number} has {name}={value!r:.80}. Give 0 or 1, false or true."
            )
        if value and message["role"] != "assistant":
            raise DataError(
                f"{place}: message {number}, of role {message['role']!r}, has {name}={value!r}, and only the "
                "assistant's messages are learned. Remove it."
            )
    return all(message.get(name) in (None, 1) for name in ("weight", "train"))


def scored_row(renderer: Renderer, example: Example, record_place: str) -> Row:
    """Tokenize up to the response's end token, and mark it: a reward model is read there. Raises as
    `example_row`.

    Steps before the last one are marked at their own last tokens, all with their labels.
    """
    full_row = example_row(renderer, example, record_place, LAST_TURN)
    learned = np.flatnonzero(full_row["loss_mask"]).tolist()
    decode = renderer.tokenizer.decode
    # Sampled responses end with the end token, and templates write a line break behind it.
    end = next(
        (
            place
            for place in reversed(learned)
            if decode([full_row["input_ids"][place]]).strip()
        ),
        learned[-1],
    )
    row = {
        "input_ids": full_row["input_ids"][: end + 1],
        "loss_mask": np.arange(end + 1) == end,
    }
    if not example.steps:
        return row
    places = [*_step_places(renderer, example, record_place)[:-1].tolist(), end]
    if any(one >= next_place for one, next_place in itertools.pairwise(places)):
        raise DataError(
            f"{record_place} has two steps that end in one token. Change data.step_separator."
        )
    row["label"] = np.zeros(end + 1)
    row["loss_mask"][places], row["label"][places] = (
        True,
        [label for _, label in example.steps],
    )
    return row


def _step_places(renderer: Renderer, example: Example, place: str) -> np.ndarray:
    prompt_length = 0
    text = example.response
    start = 0
    last = None
    if isinstance(text, str):
        prompt = renderer.prompt_ids(example.prompt, place)
        prompt_length = len(prompt)
        last = int(prompt[-1])
    else:
        text = renderer.text([*example.prompt, *example.response], place, **example.options)
        start = text.rfind(example.response[0]["content"])
    if start < 0:
        raise DataError(
            f"{place}: the chat template of model.path changes the steps, so they are not found. Fix it."
        )
    ends = renderer.ids_and_ends(text, place, last)[1]
    return prompt_length + np.searchsorted(ends, [start + end for end, _ in example.steps])


def _text_row(renderer: Renderer, prompt: str, response: str, place: str) -> Row:
    end = renderer.tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"{place}: the tokenizer of model.path has no end-of-sequence token to end a response with."
        )
    prompt_ids = renderer.prompt_ids(prompt, place)
    learned = renderer.ids_behind(response, int(prompt_ids[-1]), place)
    learned += [end] * (learned[-1:] != [end])
    return _row(
        [*prompt_ids.tolist(), *learned],
        [False] * len(prompt_ids) + [True] * len(learned),
        place,
    )


def _chat_row(
    renderer: Renderer,
    messages: Messages,
    turns: Sequence[int],
    options: Options,
    place: str,
) -> Row:
    def render(messages: Messages, *, add_generation_prompt: bool = False) -> str:
        return renderer.text(
            messages, place, **options, add_generation_prompt=add_generation_prompt
        )

    marked = turns and MARKS.search(str(renderer.tokenizer.chat_template))
    spoken = [
        number for number, message in enumerate(messages) if message["role"] == "assistant"
    ]
    if marked and spoken == turns:
        return _row(*renderer.encode_marked(messages, place, **options), place)
    full_text = render(messages)
    ids, ends = renderer.ids_and_ends(full_text, place)
    if marked:
        learned = renderer.encode_marked(messages, place, **options)[1]
        learned &= ends > _span(render, messages, turns[0], full_text, place)[0]
        for turn in spoken:
            if turn > turns[0] and turn not in turns:
                start, stop = _span(render, messages, turn, full_text, place)
                learned &= (ends <= start) | (ends > stop)
        return _row(ids, learned, place)
    learned = np.zeros(len(ids), dtype=bool)
    special = [
        token
        for token, added in renderer.tokenizer.added_tokens_decoder.items()
        if added.special
    ]
    for turn in turns:
        start, stop = _span(render, messages, turn, full_text, place)
        learned |= (ends > start) & (ends <= stop)
        following = int(np.searchsorted(ends, stop, side="right"))
        closing = int(np.searchsorted(ends, len(full_text[: ends[following - 1]].rstrip())))
        if (
            following < len(ids)
            and ids[closing] not in special
            and ids[following] in special
        ):
            # The end of a turn, where it depends on what follows, or begins that.
            learned[following] = True
    return _row(ids, learned, place)


def _span(
    render: Callable[..., str], messages: Messages, turn: int, full_text: str, place: str
) -> tuple[int, int]:
    """Return where the text of an assistant's message begins and stops in `full_text`, the rendering of all
    messages.

    It begins behind the generation prompt, where that is how the turn begins. Otherwise, and where a template
    renders the message differently when others follow, such as without thoughts, a stand-in for it shows the
    text around it, and a stand-in for the message ahead where its header begins. The text around must be the
    same in `full_text`.
    """
    alone = render(messages[: turn + 1])
    text = "stand-in"
    prompted, opening = _generation_prompt(render, messages, turn)
    if (
        turn
        and opening.strip()
        and alone.startswith(prompted)
        and full_text.startswith(alone)
    ):
        return len(prompted), len(alone)
    while text in full_text:
        text += "-"
    plain = {"role": "assistant", "content": text}
    for stand_in in _stand_ins(messages[turn], text):
        try:
            text_before, _, text_after = render(
                [*messages[:turn], stand_in, *messages[turn + 1 :]]
            ).rpartition(text)
            end = render([*messages[:turn], stand_in]).rpartition(text)[2]
            between = _between(render, messages, turn, stand_in, text)
            if opening.strip() and opening in between:
                header = between[: between.rindex(opening) + len(opening)]
            else:
                header = _common(between, _between(render, messages, turn, plain, text))
        except DataError:  # templates refuse some forms of a call
            continue
        if not opening.strip():
            # A blank belongs to the policy, as tokens begin with it.
            header = header.rstrip(" ")
        previous = len(text_before) - len(between)
        start = len(_common(full_text, text_before[: previous + len(header)]))
        rest = text_after[len(_common(end, text_after)) :]
        if (
            text_before.endswith(between)
            and start >= previous
            and full_text[start:].endswith(rest)
        ):
            return start, len(full_text) - len(rest)
    raise DataError(
        f"{place}: the chat template of model.path renders other messages differently when message "
        f"{turn + 1} changes, "
        "so that the assistant's tokens cannot be told. Give the template {% generation %} marks."
    )


def _stand_ins(message: dict[str, Any], text: str) -> Iterator[dict[str, Any]]:
    if message.get("tool_calls"):
        *earlier, last = message["tool_calls"]
        call = last | {
            "function": last.get("function", last) | {"arguments": {"value": text}}
        }
        yield {"role": "assistant", "content": "", "tool_calls": [*earlier, call]}
    yield {"role": "assistant", "content": text}


def _generation_prompt(
    render: Callable[..., str], messages: Messages, turn: int
) -> tuple[str, str]:
    """Return the prompt of an assistant's message, and what the template adds to the messages ahead for it.

    Templates add nothing behind an assistant, and some refuse an empty prompt: a question shows it then.
    """
    prompted = added = ""
    if turn:
        prompted = render(messages[:turn], add_generation_prompt=True)
        added = prompted[len(_common(render(messages[:turn]), prompted)) :]
    if not added.strip() and (turn == 0 or messages[turn - 1]["role"] == "assistant"):
        question: Messages = [{"role": "user", "content": "question"}]
        question_prompt = render(question, add_generation_prompt=True)
        added = question_prompt[len(_common(render(question), question_prompt)) :]
    return prompted, added


def _between(
    render: Callable[..., str],
    messages: Messages,
    turn: int,
    stand_in: dict[str, Any],
    text: str,
) -> str:
    """Return the text between the content of the message ahead of a stand-in, and the stand-in's text."""
    ahead = messages[:turn]
    marker = f"before-{text}-"
    if turn:
        ahead = [*messages[: turn - 1], messages[turn - 1] | {"content": marker}]
    text_before = render([*ahead, stand_in, *messages[turn + 1 :]]).rpartition(text)[0]
    return text_before.rpartition(marker)[2]


def _common(*texts: str) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071 (texts, not paths)


def _row(ids: Sequence[int], learned: Any, place: str) -> Row:
    mask = np.array(learned, dtype=bool)
    mask[:1] = False  # nothing predicts the first token
    if not mask.any():
        raise DataError(
            f"{place} has no token to learn: an assistant's turn, or a response, is needed."
        )
    return {"input_ids": np.asarray(ids, dtype=np.int32), "loss_mask": mask}
