"""Conversation: the text of an episode, for the environment and for the chat template. Only new text is encoded.

    turn ids --turn--> Turn for Environment.step
    text of an observation --observation_ids--> the ids that follow the turn

With chat messages, the template renders the observation behind a stand-in for the turn. The text behind the end of the
stand-in is new:

    rendered   ...<assistant>stand-in<end>\n<user>Sure?<end>\n<assistant>
    encoded                               \n<user>Sure?<end>\n<assistant>

The policy's own text is never rendered, so nothing in it can be mistaken for the template's. Sampled tokens stay as
they are, also where the template would drop an earlier turn's thoughts.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from workers.environment import Text, Turn
from workers.errors import ConfigError, DataError, EpisodeError
from workers.rendering import Messages, Options, Renderer, cleaned
from workers.rollout.parsing import TurnParser


class Conversation:
    """The messages or the text of one episode."""

    def __init__(
        self, renderer: Renderer, prompt: Text, options: Options | None = None, parser: TurnParser | None = None
    ) -> None:
        """prompt, options: as it was tokenized, including its system message. parser: of turns, None for plain text."""
        self._renderer, self._tokenizer, self._parser = renderer, renderer.tokenizer, parser
        self._messages = list(prompt) if isinstance(prompt, list) else None
        self._options = options or {}

    def opened(self, prompt_ids: np.ndarray, opening: Text) -> np.ndarray:
        """The prompt, int32, extended by the environment's opening. Raises EpisodeError as `observation_ids` does."""
        if not opening:
            return prompt_ids
        if self._messages is None:
            return np.concatenate([prompt_ids, self._encode(_text_only(opening))])
        self._messages += _as_messages(opening)
        return self._encode(self._render(self._messages))

    def turn(self, ids: np.ndarray, *, finished: bool) -> Turn:
        """The turn for the environment. finished: whether the policy ended it."""
        if self._parser is not None:
            return self._parser.turn(ids, finished)
        plain = str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
        return Turn(plain, str(self._tokenizer.decode(ids.tolist())), plain)

    def observation_ids(self, turn_ids: np.ndarray, observation: Text) -> np.ndarray:
        """Ids, int32, of an observation after a turn. Raises EpisodeError if the template cannot render it there."""
        if self._messages is None:
            return self._encode(_text_only(observation))
        end = str(self._tokenizer.decode(turn_ids[-1:].tolist()))
        self._messages, text = continued(self._render, self._messages, _as_messages(observation), end)
        return self._encode(text)

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self._renderer.ids(text, "the conversation"), dtype=np.int32)

    def _render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        options = self._options | {"add_generation_prompt": add_generation_prompt}
        return self._renderer.text(messages, "the conversation", **options)


def continued(render: Callable[..., str], messages: Messages, observation: Messages, end: str) -> tuple[Messages, str]:
    """Return the messages with a stand-in for a turn and `observation`, and the text that follows the turn's `end`.

    A turn with another end, such as a second end token, is followed by the template's end too.
    Raises EpisodeError if the template fails, or does not show the observation.
    """
    stand_in, failure = f"stand-in {len(messages)}", "the chat template does not show the observation"
    while stand_in in str(observation):
        stand_in += "-"
    for turn, following in _with_stand_ins(stand_in, observation):
        after = [*messages, turn, *following]
        try:
            _, found, text = render(after).rpartition(stand_in)
            closing = render([*messages, turn], add_generation_prompt=False).rpartition(stand_in)[2]
            shown = found and _shows(render, [*messages, turn], following)
        except DataError as error:
            failure = str(error)
            continue
        closing = os.path.commonprefix([closing, text])  # noqa: RUF071 (texts, not paths)
        if end and end in closing:
            text = text.partition(end)[2]
        elif "tool_calls" in turn or text[len(closing) :].startswith(end):
            text = text[len(closing) :].removeprefix(end)
        if shown:
            return after, text
    raise EpisodeError(f"{failure} (a message of role {observation[0]['role']} after the policy's turn)")


def _shows(render: Callable[..., str], messages: Messages, following: Messages) -> bool:
    """Whether the template shows each message, tried with contents that nothing else can hold."""
    probes = [message | {"content": f"shown {n}."} for n, message in enumerate(following)]
    text = render([*messages, *probes]).rpartition("stand-in")[2]
    return all(probe["content"] in text for probe in probes)


def _with_stand_ins(text: str, observation: Messages) -> Iterator[tuple[dict[str, Any], Messages]]:
    """Assistant's messages that show `text` last, with the observation behind.

    Before a tool's answer many templates ask for its call, with arguments in one of two forms.
    """
    answers = list(itertools.takewhile(lambda message: message["role"] == "tool", observation))
    named = [{"name": "tool", "tool_call_id": f"call{n:05}"} | answer for n, answer in enumerate(answers)]
    for arguments in ({"value": text}, json.dumps({"value": text})) if named else ():
        calls = [
            {"type": "function", "id": m["tool_call_id"], "function": {"name": m["name"], "arguments": arguments}}
            for m in named
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        yield turn, [*named, *observation[len(named) :]]
    yield {"role": "assistant", "content": text}, observation


def check_template(
    renderer: Renderer, model: str, options: Options | None = None, *, key: str, answer: Text = "three"
) -> None:
    """Raise ConfigError, naming `key`, if the template cannot show an answer to a turn, in a made-up conversation."""
    conversation = Conversation(renderer, [{"role": "user", "content": "one"}], options)
    turn = np.asarray([*renderer.ids("two", "the conversation"), renderer.tokenizer.eos_token_id], np.int32)
    try:
        conversation.observation_ids(turn, answer)
    except EpisodeError as failure:
        raise ConfigError(f"{key}: model.path={model}: {failure}.") from None


def _text_only(observation: Text) -> str:
    if not isinstance(observation, str):
        raise EpisodeError("the environment returned chat messages, but the prompt is a text")
    return observation


def _as_messages(observation: Text) -> Messages:
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    return list(cleaned(messages, "the environment's answer"))
