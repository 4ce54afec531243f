"""One form for all messages that a chat template renders alike, for the digests of histories.

    "1 1"   [text "1 1"]   [text "1", text " 1"] --> "1 1" if the template writes parts one behind the other
                                                     else as they are: a line for each, or the first alone

Each shape of a message is tried once, on texts with blanks around them.
"""

from typing import Any

from workers.errors import DataError
from workers.rendering import Messages, Options, Renderer
from workers.template_forms import IMAGE_PART

QUESTION = {"role": "user", "content": "question"}
CALL = {
    "type": "function",
    "id": "call00000",
    "function": {"name": "add", "arguments": {"a": "1"}},
}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
AROUND: dict[str, tuple[Messages, Messages]] = {
    "system": ([], [QUESTION]),  # some templates write it into the user's turn
    "assistant": ([QUESTION], [QUESTION]),
    "tool": ([QUESTION, CALLING], []),
}
"""Messages that templates want before and behind one of a role."""


class MessageForms:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._joins: dict[tuple[Any, ...], bool] = {}

    def of(self, messages: Messages, where: str, options: Options) -> Messages:
        """Return messages, whose images are bare, in one form for all that are rendered alike.

        Raises DataError, naming `where`, for what the template cannot take.
        """
        return [
            self._message(message, options)
            for message in self._renderer.as_read(messages, where, options)
        ]

    def _message(self, message: dict[str, Any], options: Options) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        shape = tuple(
            bool(part["text"]) if part["type"] == "text" else None for part in content
        )
        others = sorted(
            (name, repr(value)) for name, value in options.items() if name != "tools"
        )
        key = (message["role"], shape, bool(options.get("tools")), *others)
        if key not in self._joins:
            self._joins[key] = self._writes_parts_joined(message["role"], shape, options)
        return message | {"content": _join_texts(content)} if self._joins[key] else message

    def _writes_parts_joined(
        self, role: str, shape: tuple[bool | None, ...], options: Options
    ) -> bool:
        texts = [
            f" probe {place} \n" if is_filled else ""
            for place, is_filled in enumerate(shape)
        ]
        parts = [
            IMAGE_PART if is_filled is None else {"type": "text", "text": text}
            for is_filled, text in zip(shape, texts, strict=True)
        ]
        before, behind = AROUND.get(role, ([], []))
        try:
            rendered, joined = (
                self._renderer.text(
                    [*before, {"role": role, "content": content}, *behind],
                    "a probe",
                    **options,
                )
                for content in (parts, _join_texts(parts))
            )
        except DataError:
            return False
        shown = [
            text.strip() for is_filled, text in zip(shape, texts, strict=True) if is_filled
        ]
        return rendered == joined and all(text in rendered for text in shown)


def _join_texts(content: list[dict[str, Any]]) -> Any:
    """Join neighbouring texts. Without images, to a text."""
    joined: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = part | {"text": joined[-1]["text"] + part["text"]}
        elif part["type"] != "text" or part["text"]:
            joined.append(part)
    if all(part["type"] == "text" for part in joined):
        return "".join(part["text"] for part in joined)
    return joined
