"""Make the ids of requests: the turn that a request extends, and the ids of its new text.

messages --PromptRenderer.messages--> cleaned messages --read--> what they extend, and the whole prompt
a completion's text or ids --read_text--> the same
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from workers.agents.message_forms import MessageForms
from workers.agents.session import Session, SessionPrompt
from workers.agents.session_requests import WHERE, OpenSession, RenderedPrompt
from workers.chat_messages import clean_prompt
from workers.chat_templates import variables_of
from workers.engine.requests import STOP, Response, join_responses, not_sampled
from workers.engine.session_record import Node
from workers.environment import Turn
from workers.episodes.conversation import Conversation
from workers.errors import DataError, EpisodeError
from workers.image_parts import image_parts, with_image_parts
from workers.rendering import CONTROLS, RESERVED, Messages, Options, Renderer
from workers.template_forms import IMAGE_PART

# Kinds of parts in OpenAI's Responses.
KINDS = {
    "input_text": "text",
    "output_text": "text",
    "input_image": "image_url",
}


class PromptRenderer:
    """Make the ids of requests."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._forms = MessageForms(renderer)
        self._named = set[str]()

    def messages(self, raw_messages: Sequence[Any]) -> Messages:
        """Return a chat's messages, cleaned, with data: URLs in their images' parts. Raises DataError."""
        if not raw_messages:
            raise DataError("the request has no messages.")
        messages: Messages = clean_prompt(
            [chat_message(message) for message in raw_messages], WHERE
        )
        urls = [part.get("image") for part in image_parts(messages)]
        if not all(isinstance(url, str) and url.startswith("data:") for url in urls):
            raise DataError(
                "the request has an image that is not a data: URL, and nothing is fetched or read for "
                "agents. Send data:image/png;base64,..."
            )
        if urls and self._renderer.placeholders is None:
            raise DataError(
                "the request has images, which the model does not read. Send text alone."
            )
        return messages

    def read(
        self, opened: OpenSession, messages: Messages, options: Options
    ) -> RenderedPrompt:
        """Read a chat. Raises DataError if the template cannot render it."""
        images = [opened.image(part["image"]) for part in image_parts(messages)]
        messages = with_image_parts(
            messages, [IMAGE_PART | {"image": image} for image in images]
        )
        digests = [IMAGE_PART | {"digest": f"{image.digest:016x}"} for image in images]
        bare = with_image_parts(messages, [IMAGE_PART] * len(images))
        forms = with_image_parts(self._forms.of(bare, WHERE, options), digests)
        session_request = replace(
            opened.session.find(forms, options),
            messages=with_image_parts(messages, digests),
        )
        if session_request.parent is not None:
            try:
                following = self._following(
                    session_request, session_request.parent, messages, options
                )
                return session_request, join_responses(
                    [opened.session.whole(session_request.parent), following]
                )
            except EpisodeError:  # such as two turns of the assistant in sequence
                session_request = replace(session_request, parent=None, covered=0)
        prompt = Conversation(self._renderer, [], options).open(
            opened.session.whole(None), messages
        )
        self._name_unread()
        return session_request, prompt

    def _name_unread(self) -> None:
        for key in self._renderer.unread.keys() - self._named:
            self._named.add(key)
            logging.getLogger(__name__).warning(
                "Agents' requests: %s", self._renderer.unread[key]
            )

    def _following(
        self,
        session_request: SessionPrompt,
        parent: Node,
        messages: Messages,
        options: Options,
    ) -> Response:
        """Return the new messages, rendered behind stand-ins for turns."""
        earlier_messages = messages[: session_request.covered]
        opening = list(
            takewhile(lambda message: message["role"] != "assistant", earlier_messages)
        )
        opening = with_image_parts(opening, [IMAGE_PART] * len(image_parts(opening)))
        calls = earlier_messages[-1].get("tool_calls") or ()
        ended = parent.response.finish_reason == STOP
        # Without an end token of its own.
        turn = parent.response if ended else replace(parent.response, stop_string=True)
        conversation = Conversation(self._renderer, opening, options)
        return conversation.observe(
            turn, Turn("", tool_calls=calls), messages[session_request.covered :]
        )[0]

    def read_text(self, session: Session, prompt: Any) -> RenderedPrompt:
        """Read a prompt of a completion, a text or ids."""
        if not isinstance(prompt, str):
            ids = np.asarray(prompt, np.int32)
            session_request = session.find_ids(ids)
            return session_request, not_sampled(
                ids, images=session.whole(session_request.parent).images
            )
        session_request = session.find_text(prompt)
        if session_request.parent is None:
            return session_request, not_sampled(self._renderer.prompt_ids(prompt, WHERE))
        history = session.whole(session_request.parent)
        rest = self._renderer.ids_behind(
            session_request.text or "", int(history.ids[-1]), WHERE
        )
        return session_request, join_responses(
            [history, not_sampled(np.asarray(rest, np.int32))]
        )

    def options(
        self, of_session: Options, request: Any, tools: Sequence[Any] | None
    ) -> Options:
        """Return the session's options, with the client's tools and variables that the template reads."""
        template_arguments = getattr(request, "chat_template_kwargs", None) or {}
        options = {name: value for name, value in of_session.items() if name != "tools"}
        if template_arguments:
            template = self._renderer.tokenizer.get_chat_template(tools=tools or None)
            names = variables_of(template).arguments - {
                *CONTROLS,
                *RESERVED,
                "chat_template",
                "tokenize",
            }
            options |= {
                name: value for name, value in template_arguments.items() if name in names
            }
        return options | (
            {"tools": [_without_strict(tool) for tool in tools]} if tools else {}
        )


def chat_message(message: Any) -> dict[str, Any]:
    """Return a message of a request in the form that templates read."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    filled_fields = {name: value for name, value in fields.items() if value is not None}
    if reasoning := filled_fields.pop("reasoning", None):
        filled_fields["reasoning_content"] = reasoning
    content = filled_fields.get("content", "")
    if isinstance(content, (list, tuple)):
        content = [
            part | {"type": KINDS.get(str(kind := part.get("type")), kind)}
            for part in map(dict, content)
        ]
    return filled_fields | {
        "role": "system" if filled_fields["role"] == "developer" else filled_fields["role"],
        "content": content,
    }


def _without_strict(tool: Any) -> dict[str, Any]:
    function = {
        name: value
        for name, value in tool["function"].items()
        if name != "strict" and value is not None
    }
    return {**tool, "function": function}
