"""Messages of clients that show the images of `vision_families.pictures`."""

from typing import Any

from tests.workers.vision_families import pictures
from workers.images.images import decode_image, url_of

PIXELS = (0, 2**20)
URLS = [url_of(picture) for picture in pictures()]
IMAGES = [decode_image(url, "a test", PIXELS) for url in URLS]


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asks(*content: str | int) -> dict[str, Any]:
    """A user's message. Numbers are images."""
    parts = [
        image_part(URLS[part]) if isinstance(part, int) else {"type": "text", "text": part}
        for part in content
    ]
    return {"role": "user", "content": parts}
