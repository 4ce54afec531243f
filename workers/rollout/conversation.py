"""Conversation: the text of an episode, for the environment and for the chat template. Only new text is encoded.

    turn ids --response--> text for Environment.step
    text of an observation --observation_ids--> the ids that follow the turn

With chat messages, the new text is the part that the template renders after the end of the policy's turn:

    rendered with the turn last              ...<assistant>four<end>\n
    rendered with the observation behind it  ...<assistant>four<end>\n<user>Sure?<end>\n<assistant>
    encoded                                                        \n<user>Sure?<end>\n<assistant>
"""

import numpy as np

from workers.environment import Text
from workers.errors import ConfigError, EpisodeError
from workers.rendering import Messages, Renderer, cleaned


class Conversation:
    """The messages or the text of one episode."""

    def __init__(self, renderer: Renderer, prompt: Text, model: str) -> None:
        """`prompt`: as it was tokenized, including its system message. `model`: names the template in errors."""
        self._renderer, self._tokenizer, self._model = renderer, renderer.tokenizer, model
        self._messages = list(prompt) if isinstance(prompt, list) else None

    def opened(self, prompt_ids: np.ndarray, opening: Text) -> np.ndarray:
        """The prompt, int32, extended by the environment's opening. Raises EpisodeError as `observation_ids` does."""
        if not opening:
            return prompt_ids
        if self._messages is None:
            return np.concatenate([prompt_ids, self._encode(_text_only(opening))])
        self._messages += _as_messages(opening)
        return self._encode(self._render(self._messages, add_generation_prompt=True))

    def response(self, ids: np.ndarray) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def observation_ids(self, turn_ids: np.ndarray, observation: Text) -> np.ndarray:
        """Ids, int32, of an observation after a turn that ended with the end-of-sequence token.

        Raises EpisodeError if messages follow a text, or the template has no suffix for them.
        """
        if self._messages is None:
            return self._encode(_text_only(observation))
        turn = {"role": "assistant", "content": self.response(turn_ids)}
        before = self._render([*self._messages, turn], add_generation_prompt=False)
        self._messages += [turn, *_as_messages(observation)]
        after = self._render(self._messages, add_generation_prompt=True)
        end = str(self._tokenizer.decode(turn_ids[-1:].tolist()))
        return self._encode(appended_text(before, after, end, self._model))

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self._renderer.ids(text, "the conversation"), dtype=np.int32)

    def _render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        return self._renderer.text(messages, "the conversation", add_generation_prompt=add_generation_prompt)


def appended_text(before: str, after: str, end: str, model: str) -> str:
    """Return the part of `after` that follows the `end` token of the turn that `before` ends with.

    Raises EpisodeError, naming the model, if `before` has no `end`, or `after` changes earlier text.
    """
    if not after.startswith(before):
        raise EpisodeError(
            f"the chat template of {model} renders earlier messages differently when others follow, so that turns "
            "cannot be continued token by token. Give the model a template that only appends"
        )
    _, found, tail = before.rpartition(end)
    if not found:
        raise EpisodeError(
            f"the chat template of {model} does not end an assistant's message with {end!r}, the token that ends a turn"
        )
    return tail + after[len(before) :]


def check_template(renderer: Renderer, model: str) -> None:
    """Raise ConfigError if the chat template cannot continue a turn, tried on a made-up conversation."""
    conversation = Conversation(renderer, [{"role": "user", "content": "one"}], model)
    turn = np.asarray([*renderer.ids("two", "the conversation"), renderer.tokenizer.eos_token_id], np.int32)
    try:
        conversation.observation_ids(turn, "three")
    except EpisodeError as failure:
        raise ConfigError(f"rollout.environment: {failure}.") from None


def _text_only(observation: Text) -> str:
    if not isinstance(observation, str):
        raise EpisodeError("the environment returned chat messages, but the prompt is a text")
    return observation


def _as_messages(observation: Text) -> Messages:
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    return list(cleaned(messages, "the environment's answer"))
