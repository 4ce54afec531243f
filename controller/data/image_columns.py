"""Find images that a model would never see: marks in texts of records without images, and columns that nobody
reads.

records, texts that the model reads --blind_images--> refused, or a warning
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from controller.config import TrainingConfig
from controller.config.model_files import read_model_files
from controller.data.records import Record
from workers.errors import DataError
from workers.image_parts import IMAGE_IN_TEXT

COMPARED = 100  # first records whose columns are looked at
_NAME = re.compile(
    r"(image|img|picture|photo|screenshot)s?([_-]?(path|url|file|byte)s?)?", re.IGNORECASE
)
_OTHER_MEDIA = re.compile(r"(video|audio)s?([_-]?(path|url|file|byte)s?)?", re.IGNORECASE)
_ANY_FILE = re.compile(r"\S*\.\w{2,4}")
_FILE = re.compile(
    r"data:image/|.*\.(png|jpe?g|webp|gif|bmp|tiff?)", re.IGNORECASE | re.DOTALL
)
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM")


def reads_images(config: TrainingConfig) -> bool:
    return "vision_config" in read_model_files(config.model.path, "model.path").description


def texts_of(prompt: Any) -> Iterator[str]:
    """Yield the texts of a prompt, or of cleaned chat messages."""
    if isinstance(prompt, str):
        yield prompt
        return
    for message in prompt:
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        yield from (part.get("text") or "" for part in parts)


def blind_images(
    path: str,
    records: Sequence[Record],
    read: Iterable[tuple[bool, Iterable[str]]],
    image_key: str,
) -> list[str]:
    """Return a warning if no record has images though a column holds some.

    read: of each record, whether it has images, and the texts that the model reads. Raises DataError for a
    mark in the texts of a record without images.
    """
    columns = image_columns(records, image_key)
    has_images = False
    for number, (with_images, texts) in enumerate(read, start=1):
        has_images |= with_images
        if not with_images and any(IMAGE_IN_TEXT in text for text in texts):
            column = (
                f"data.image_key to {columns[0]!r}"
                if columns
                else "data.image_key to the column of images"
            )
            raise DataError(
                f"{path} record {number} has {IMAGE_IN_TEXT} in a text, and no image in its column "
                f"data.image_key={image_key!r}. Set {column}, or remove the mark."
            )
    if has_images or not columns:
        return []
    names = ", ".join(map(repr, columns))
    return [
        f"{path}: no record has an image in data.image_key={image_key!r}, and the images in {names} are not "
        "read. Set data.image_key to that column"
    ]


def image_columns(records: Sequence[Record], image_key: str) -> list[str]:
    """Name the columns, other than `image_key`, whose values look like images in one of the first records."""
    return [
        name
        for name in columns_where(looks_like_images, records[:COMPARED])
        if name != image_key
    ]


def columns_where(
    matches: Callable[[str, Any], bool], records: Sequence[Record]
) -> list[str]:
    """Name the columns for which `matches(name, value)` holds in a record, in the order of the records."""
    holds: dict[str, bool] = {}
    for record in records:
        for name, value in record.items():
            holds[name] = holds.get(name, False) or matches(name, value)
    return [name for name, holds_somewhere in holds.items() if holds_somewhere]


def looks_like_other_media(name: str, value: Any) -> bool:
    """Return whether a column holds videos or sounds, which no model here reads."""
    if not _OTHER_MEDIA.fullmatch(name):
        return False
    if isinstance(value, (list, tuple)):
        return any(looks_like_other_media(name, item) for item in value[:1])
    return bool(_ANY_FILE.fullmatch(value)) if isinstance(value, str) else bool(value)


def looks_like_images(name: str, value: Any) -> bool:
    if looks_like_other_media(name, value):
        return False
    if isinstance(value, (list, tuple)):
        return any(looks_like_images(name, item) for item in value[:1])
    if isinstance(value, Mapping):
        return {"bytes", "path"} >= value.keys() and any(map(bool, value.values()))
    if isinstance(value, bytes):
        return value.startswith(_MAGIC)
    return (
        isinstance(value, str)
        and bool(_NAME.fullmatch(name))
        and bool(_FILE.fullmatch(value))
    )
