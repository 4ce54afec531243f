"""An environment: the other side of a conversation with the policy. One object plays one episode.

    environment = Environment()                           in a separate process
    prompt += await environment.reset(record)             may be empty
    while turns and tokens are left:
        response = await policy(prompt)                   includes the end-of-sequence token
        observation = await environment.step(response)    a Turn: the text, and what vLLM's parsers find in it
        reward += observation.reward
        if observation.done:
            break
        prompt += response + observation.text             token ids: sampled tokens are never tokenized again
    await environment.close()                             if it has one, however the episode ends

Users write the class. It needs neither Ray, torch nor vLLM.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workers.batch.score import is_finite
from workers.errors import DataError, quote
from workers.images.images import url_of

Text = str | list[dict[str, Any]]
"""A text, or chat messages where the prompt is a list of these."""


class Turn(str):
    """A turn of the policy: a string without special tokens, and its parts as vLLM's server would return
    them.

    text: with special tokens. content: without reasoning and calls. tool_calls: as in chat messages, with
    arguments that are a dict, or a str if they are not a JSON object. errors: why calls in the text could not
    be read.
    """

    text: str
    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    errors: list[str]

    def __new__(
        cls,
        plain: str,
        text: str = "",
        content: str = "",
        reasoning: str = "",
        tool_calls: Sequence[dict[str, Any]] = (),
        errors: Sequence[str] = (),
    ) -> "Turn":
        turn = super().__new__(cls, plain)
        turn.text = text
        turn.content = content
        turn.reasoning = reasoning
        turn.tool_calls = list(tool_calls)
        turn.errors = list(errors)
        return turn

    def message(self) -> dict[str, Any]:
        """The assistant's chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


@dataclass(frozen=True)
class Observation:
    """An environment's answer to one turn.

    text: the policy's next input, unused if `done`. In a chat, messages or one user message's text. Their
    contents may hold images: parts {"type": "image", "image": one of PIL's, bytes or a path}. reward: of this
    turn, summed over an episode. parts: numbers to log, of which an episode's last value counts.
    """

    text: Text = ""
    reward: float = 0.0
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Interface of a class named by rollout.environment. Its methods may be coroutine functions.

    A class may also have `close(self) -> None`, and `solve(self) -> Observation` for `ballast certify`.
    """

    def reset(self, record: dict[str, Any]) -> Text | Awaitable[Text | None] | None:
        """Begin an episode on a record of the data. Returns text to append to its prompt."""

    def step(self, response: Turn) -> Observation | Awaitable[Observation]:
        """Answer the policy's turn."""


def as_opening(value: Any) -> Text:
    """Return `value` of `reset`. Raises DataError unless it is text, messages or None."""
    return _check_text(value or "", "reset")


def as_observation(value: Any) -> dict[str, Any]:
    """Fields of the Observation that `step` returned. Raises DataError for another value or a wrong type."""
    if not isinstance(value, Observation):
        raise DataError(
            f"step must return a workers.environment.Observation, it returned {quote(value)}."
        )
    if not isinstance(value.done, bool):
        raise DataError(
            f"the done of an Observation must be true or false, not {quote(value.done)}."
        )
    for name, number in {"reward": value.reward, **value.parts}.items():
        if not isinstance(number, (int, float)) or not is_finite(number):
            raise DataError(
                f"the {name} of an Observation must be a finite float32 number, not {quote(number)}."
            )
    parts = {str(name): float(part) for name, part in value.parts.items()}
    text = _check_text(value.text, "step")
    return {"text": text, "reward": float(value.reward), "done": value.done, "parts": parts}


def as_text(said: Text) -> str:
    return (
        said if isinstance(said, str) else "\n".join(_content(message) for message in said)
    )


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content", "")
    parts = content if isinstance(content, list) else [content]
    return "".join(
        str(part.get("text", "<image>")) if isinstance(part, dict) else str(part)
        for part in parts
    )


def _check_text(value: Any, method: str) -> Text:
    messages = isinstance(value, list) and all(
        isinstance(message, dict) for message in value
    )
    if not isinstance(value, str) and not messages:
        raise DataError(
            f"the text that {method} returns must be a string or chat messages, not {quote(value)}."
        )
    return value if isinstance(value, str) else [_with_urls(message) for message in value]


def _with_urls(message: dict[str, Any]) -> dict[str, Any]:
    """Write the images of a message, which travels as JSON, as data: URLs."""
    content = message.get("content")
    return (
        message | {"content": [_with_url(part) for part in content]}
        if isinstance(content, list)
        else message
    )


def _with_url(part: Any) -> Any:
    image = part.get("image") if isinstance(part, dict) else None
    if image is None or isinstance(image, str):
        return part
    return part | {"image": url_of(image)}
