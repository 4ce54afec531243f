"""Conversation: the text of an episode, for the environment and for the chat template. Only new text is
encoded.

    turn ids --turn--> Turn for Environment.step
    text of an observation --observe--> the ids that follow the turn, and the next prompt if it is another

With chat messages, the template renders the observation behind a stand-in for the turn. The text behind the
end of the stand-in is new:

    rendered   ...<assistant>stand-in<end>\n<user>Sure?<end>\n<assistant>
    encoded                               \n<user>Sure?<end>\n<assistant>

The policy's own text is never rendered, so nothing in it can be mistaken for the template's. Sampled tokens
stay as they are. Where the template would drop an earlier turn's thoughts, rollout.history decides
(`History`).
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from workers.batch.placed_images import Image
from workers.chat_messages import clean_prompt
from workers.engine.requests import Response, join_responses, not_sampled
from workers.environment import Text, Turn
from workers.episodes.history import History
from workers.episodes.parsing import TAIL, TurnParser
from workers.errors import ConfigError, DataError, EpisodeError
from workers.image_parts import with_images
from workers.images.images import decode_image
from workers.rendering import Messages, Options, Renderer

WHERE = "the conversation"


class Conversation:
    """The messages or the text of one episode.

    transcript: messages with the policy's, empty for a text. cut_tokens: see `History`. refused: whether the
    template could not render a turn as a message. From there on the conversation continues as with
    `rollout.history=keep`.
    """

    def __init__(
        self,
        renderer: Renderer,
        prompt: Text,
        options: Options | None = None,
        parser: TurnParser | None = None,
        *,
        images: Sequence[Image] = (),
        pixels: tuple[int, int] = (0, 2**20),
        rewrites: bool = False,
    ) -> None:
        """prompt, options: as it was tokenized, including its system message. parser: of turns, None for
        plain text.

        images: of the prompt. pixels: `data.image_pixels`, for images of observations. rewrites: whether the
        template may change what came before, as with `rollout.history=template`.
        """
        self._renderer = renderer
        self._tokenizer = renderer.tokenizer
        self._parser = parser
        self._messages = list(prompt) if isinstance(prompt, list) else None
        self._options = options or {}
        self._rewrites = rewrites
        self._history: History | None = None
        self._images = list(images)
        self._pixels = pixels
        self._before = np.empty(0, np.int32)  # the last ids before the next turn
        self.transcript: Messages = list(self._messages or ())
        self.refused = False

    @property
    def cut_tokens(self) -> int:
        return self._history.cut_tokens if self._history else 0

    def open(self, prompt: Response, opening: Text) -> Response:
        """The prompt, extended by the environment's opening. Raises EpisodeError as `observe` does."""
        if self._messages is None:
            return self._encode([prompt, _text_only(opening)]) if opening else prompt
        if opening:
            self._messages += self._read(opening)[0]
            self.transcript = list(self._messages)
            self._renderer.check_shown(
                self._messages, WHERE, **self._options, add_generation_prompt=True
            )
            prompt = self._encode([self._render(self._messages)], self._images)
        self._before = prompt.ids[-TAIL:]
        if self._rewrites:
            self._history = History(self._tokenizer, self._render(self._messages), prompt)
        return prompt

    def turn(self, ids: np.ndarray, *, finished: bool) -> Turn:
        """The turn for the environment. finished: whether the policy ended it."""
        if self._parser is not None:
            turn = self._parser.turn(ids, finished, self._before)
        else:
            plain = str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
            turn = Turn(plain, str(self._tokenizer.decode(ids.tolist())), plain)
        if self._messages is not None:
            self.transcript.append(turn.message())
        return turn

    def observe(
        self, turn: Response, turn_text: Turn, observation: Text
    ) -> tuple[Response, Response | None]:
        """Return the tokens of an observation after a turn, and the next prompt if it changes what came
        before.

        turn_text: the turn's text.
        Raises EpisodeError if the template cannot render it there.
        """
        last = int(turn.ids[-1]) if len(turn.ids) else None
        if self._messages is None:
            return self._encode([_text_only(observation)], last=last), None
        new, images = self._read(observation)
        following = _answers(new, turn_text.tool_calls)
        self.transcript += following
        earlier_messages = self._messages
        end = (
            "" if turn.stop_string else str(self._tokenizer.decode(turn.ids[-1:].tolist()))
        )
        served = self._next_prompt(turn_text.message(), turn.ids, following)
        if served is not None and served[1] is None:
            return self._encode([served[0]], images, last=last), None
        messages, text = continue_messages(
            self._render, earlier_messages, following, end, calls=len(turn_text.tool_calls)
        )
        if served is None:
            self._messages = messages
        branch = (
            None
            if served is None or served[1] is None
            else self._encode(served[1], self._images)
        )
        return self._encode([text], images, last=last), branch

    def _next_prompt(
        self, message: dict[str, Any], ids: np.ndarray, following: Messages
    ) -> tuple[str, list[str | Response] | None] | None:
        """Return `History.next_prompt` after a turn, or None if the conversation is continued as
        with `keep`.
        """
        if self._history is None or self.refused or self._messages is None:
            return None
        last = int(self._before[-1]) if len(self._before) else None
        messages = [*self._messages, self._history.opaque(message, ids, last)]
        try:
            rendered = self._render([*messages, *following])
            self.refused = not _shows(self._render, messages, following)
        except DataError:  # such as two calls where a template takes one
            self.refused = True
        if self.refused:
            return None
        self._messages = [*messages, *following]
        return self._history.next_prompt(rendered)

    def _read(self, observation: Text) -> tuple[Messages, list[Image]]:
        """Return messages of the other side with bare parts for images, and the images. Raises
        EpisodeError.
        """
        try:
            messages, values = with_images(_as_messages(observation), None, WHERE)
            images = [
                value
                if isinstance(value, Image)
                else decode_image(value, WHERE, self._pixels)
                for value in values
            ]
        except DataError as error:
            raise EpisodeError(str(error)) from None
        self._images += images
        return messages, images

    def _encode(
        self,
        parts: Sequence[str | Response],
        images: Sequence[Image] = (),
        last: int | None = None,
    ) -> Response:
        """Encode texts, with `images` at their placeholders in order, and join them with tokens between them.

        last: the id before them.
        """
        rest_images = list(images)
        responses = list[Response]()
        for part in parts:
            if isinstance(part, str):
                ids = np.asarray(
                    self._renderer.ids_behind(part, last, WHERE), dtype=np.int32
                )
                ids, placed = self._renderer.expand(
                    ids, rest_images[: self._renderer.images_in(ids)], WHERE
                )
                part = not_sampled(ids, images=placed)
            last = int(part.ids[-1]) if len(part.ids) else last
            rest_images = rest_images[len(part.images) :]
            responses.append(part)
        if rest_images:
            raise EpisodeError(
                f"the chat template shows {len(images) - len(rest_images)} of {len(images)} images"
            )
        joined = join_responses(responses)
        self._before = joined.ids[-TAIL:]
        return joined

    def _render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        return self._renderer.text(
            messages, WHERE, **self._options, add_generation_prompt=add_generation_prompt
        )


def continue_messages(
    render: Callable[..., str],
    messages: Messages,
    observation: Messages,
    end: str,
    calls: int = 0,
) -> tuple[Messages, str]:
    """Return the messages with a stand-in for a turn and `observation`, and the text that follows the turn's
    `end`.

    calls: that the turn made.

    A turn with another end, such as a second end token, is followed by the template's end too.
    Raises EpisodeError if the template fails, or does not show the observation.
    """
    stand_in = f"stand-in {len(messages)}"
    failure = "the chat template does not show the observation"
    while stand_in in str(observation):
        stand_in += "-"
    for turn, following in _with_stand_ins(stand_in, observation, calls):
        new_messages = [*messages, turn, *following]
        try:
            _, separator, text = render(new_messages).rpartition(stand_in)
            closing = _closing(render, messages, stand_in, turn)
            is_shown = separator and _shows(render, [*messages, turn], following)
        except DataError as error:
            failure = str(error)
            continue
        closing = os.path.commonprefix([closing, text])  # noqa: RUF071 (texts, not paths)
        text = text[len(closing) :]
        if not (end and text.startswith(end)):
            if "tool_calls" in turn and not (end and end in closing):
                # Without the marks around calls.
                closing = _closing(render, messages, stand_in)
            text = (closing.partition(end)[2] if end and end in closing else closing) + text
        else:
            text = text.removeprefix(end)
        if is_shown:
            return new_messages, text
    raise EpisodeError(
        f"{failure} (a message of role {observation[0]['role']} after the policy's turn)"
    )


def _closing(
    render: Callable[..., str],
    messages: Messages,
    stand_in: str,
    turn: dict[str, Any] | None = None,
) -> str:
    """Return how the template closes a turn, of text alone if none is given."""
    turn = turn or {"role": "assistant", "content": stand_in}
    return render([*messages, turn], add_generation_prompt=False).rpartition(stand_in)[2]


def _shows(render: Callable[..., str], messages: Messages, following: Messages) -> bool:
    """Whether the template shows each message, tried with contents that nothing else can hold."""
    probes = [message | {"content": f"shown {n}."} for n, message in enumerate(following)]
    text = render([*messages, *probes]).rpartition("stand-in")[2]
    return all(probe["content"] in text for probe in probes)


def _with_stand_ins(
    text: str, observation: Messages, calls: int
) -> Iterator[tuple[dict[str, Any], Messages]]:
    """Assistant's messages that show `text` last, with the observation behind.

    Before a tool's answer many templates ask for its call.
    """
    answers = list(
        itertools.takewhile(lambda message: message["role"] == "tool", observation)
    )
    named = [
        {"name": "tool", "tool_call_id": f"call{n:05}"} | answer
        for n, answer in enumerate(answers)
    ]
    called = named or [
        {"name": "tool", "tool_call_id": f"call{n:05}"} for n in range(calls)
    ]
    if called:
        functions = [
            {"name": call["name"], "arguments": {"value": text}} for call in called
        ]
        ids = [call["tool_call_id"] for call in called]
        tool_calls = [
            {"type": "function", "id": i, "function": f}
            for i, f in zip(ids, functions, strict=True)
        ]
        yield (
            {"role": "assistant", "content": "", "tool_calls": tool_calls},
            [*named, *observation[len(named) :]],
        )
    yield {"role": "assistant", "content": text}, observation


def check_template(
    renderer: Renderer,
    model: str,
    options: Options | None = None,
    *,
    key: str,
    answer: Text = "three",
) -> None:
    """Raise ConfigError, naming `key`, if the template cannot show an answer to a turn, in a made-up
    conversation.
    """
    conversation = Conversation(renderer, [{"role": "user", "content": "one"}], options)
    turn = np.asarray(
        [*renderer.ids("two", "the conversation"), renderer.tokenizer.eos_token_id],
        np.int32,
    )
    try:
        response = Response(
            turn, np.zeros(len(turn), np.float32), np.zeros(len(turn), np.int32)
        )
        conversation.observe(response, conversation.turn(turn, finished=True), answer)
    except EpisodeError as failure:
        raise ConfigError(f"{key}: model.path={model}: {failure}.") from None


def _text_only(observation: Text) -> str:
    if not isinstance(observation, str):
        raise EpisodeError(
            "the environment returned chat messages, but the prompt is a text"
        )
    return observation


def _answers(observation: Messages, calls: Sequence[dict[str, Any]]) -> Messages:
    """Name the tools' answers as the calls that they answer, by id or in order."""
    names = {call["id"]: call["function"]["name"] for call in calls}
    order = iter(names)
    named = []
    for message in observation:
        if message["role"] == "tool":
            call = message.get("tool_call_id") or next(order, None)
            fields = {"tool_call_id": call, "name": names.get(call)}
            message = {name: value for name, value in fields.items() if value} | message
        named.append(message)
    return named


def _as_messages(observation: Text) -> Messages:
    messages = (
        [{"role": "user", "content": observation}]
        if isinstance(observation, str)
        else observation
    )
    return list(clean_prompt(messages, "the environment's answer"))
