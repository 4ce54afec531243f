"""Images in prompts: parts of chat messages, and where a text names them. Nothing is read or decoded here."""

from collections.abc import Sequence
from typing import Any

from workers.errors import DataError
from workers.images.images import url_of
from workers.template_forms import IMAGE_PART, Messages

IMAGE_IN_TEXT = "<image>"


def with_images(prompt: Any, column: Any, place: str) -> tuple[Any, list[Any]]:
    """Return a cleaned prompt with bare parts for its images, and the images, in order.

    column: the record's images, or one. Texts of messages then hold `<image>` where they have no part for it.
    Raises DataError, naming `place`, for images in both.
    """
    images = [] if column is None else column if isinstance(column, list) else [column]
    if isinstance(prompt, str):
        return prompt, images
    parts = image_parts(prompt)
    inside = [part["image"] for part in parts if "image" in part]
    if inside and images:
        raise DataError(
            f"{place} has images in its messages and in data.image_key. Give them once."
        )
    splits = bool(images) and not parts
    return [
        m | {"content": _bare(m["content"], splits)} if "content" in m else m
        for m in prompt
    ], inside or images


def image_parts(messages: Messages) -> list[dict[str, Any]]:
    """Return the parts of cleaned messages that are images, in order."""
    contents = [
        message["content"]
        for message in messages
        if isinstance(message.get("content"), list)
    ]
    return [part for content in contents for part in content if part["type"] == "image"]


def with_image_parts(messages: Messages, parts: Sequence[dict[str, Any]]) -> Messages:
    """Replace the image parts of cleaned messages, in order."""
    remaining_parts = iter(parts)

    def changed(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            next(remaining_parts) if part["type"] == "image" else part for part in content
        ]

    return [
        m | {"content": changed(m["content"])} if "content" in m else m for m in messages
    ]


def with_urls(
    record: dict[str, Any], prompt_key: str, image_key: str, images: Sequence[bytes]
) -> dict[str, Any]:
    """Write a record's images, PNG bytes, as data: URLs: in their column, and in the parts of its
    messages.
    """
    urls = [url_of(image) for image in images]
    prompt = record[prompt_key]
    if isinstance(prompt, list):
        prompt = with_image_parts(
            prompt, [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        )
    return record | {prompt_key: prompt, image_key: urls}


def _bare(content: Any, splits: bool) -> Any:
    if isinstance(content, list):
        return [IMAGE_PART if part["type"] == "image" else part for part in content]
    if not splits or IMAGE_IN_TEXT not in content:
        return content
    texts = [
        [{"type": "text", "text": text}] if text else []
        for text in content.split(IMAGE_IN_TEXT)
    ]
    return [*texts[0], *(part for text in texts[1:] for part in (IMAGE_PART, *text))]
