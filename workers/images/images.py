"""Images of records: reading, resizing, and their bytes.

    path, bytes, data: URL, PIL's --read_image--> RGB --resized: data.image_pixels--> Image

The forms that a batch carries are in `workers/batch/placed_images.py`.
"""

import base64
import hashlib
import io
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.batch.placed_images import Image
from workers.errors import ImageError, describe_error

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""Pillow's names of what is read. For EPS it would start Ghostscript on an agent's bytes."""


@dataclass(frozen=True)
class ImageSource:
    """An image where a record says it is: `Image.data` until the image is needed.

    folder: of relative paths. pixels: fewest and most, see `resize_image`. where: names the record in errors.
    """

    value: Any = field(repr=False)
    where: str
    folder: str = ""
    pixels: tuple[int, int] = (0, 2**20)

    def open(self) -> "PIL.Image.Image":
        return resize_image(read_image(self.value, self.where, self.folder), *self.pixels)

    def png(self) -> bytes:
        return png_of(self.open())

    @property
    def name(self) -> str:
        return name_of(self.value)

    def image(self) -> Image:
        """Decode the image once, for its digest. Raises as `read_image`."""
        picture = self.open()
        return Image(digest_of(picture), *picture.size, self)


def decode_image(value: Any, place: str, pixels: tuple[int, int]) -> Image:
    """Read and resize an image that no record holds, see `ImageSource`. Raises as `read_image`."""
    picture = resize_image(read_image(value, place), *pixels)
    return Image(digest_of(picture), *picture.size, png_of(picture))


def url_of(data: Any) -> str:
    """Write `Image.data`, or one of PIL's images, as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(png_of(data)).decode()}"


def png_of(data: Any) -> bytes:
    """Return the PNG bytes of `Image.data`, of an ImageSource or one of PIL's images."""
    if isinstance(data, bytes):
        return data
    buffer = io.BytesIO()
    (data.open() if isinstance(data, ImageSource) else data).save(
        buffer, "PNG", compress_level=1
    )
    return buffer.getvalue()


def digest_of(image: "PIL.Image.Image") -> int:
    content = f"{image.width} {image.height} ".encode() + image.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) >> 1


def resize_image(image: "PIL.Image.Image", least: int, most: int) -> "PIL.Image.Image":
    """Resize an image of fewer pixels than `least` or more than `most`. Its aspect is kept."""
    width, height = image.size
    pixels = width * height
    if least <= pixels <= most:
        return image
    scale = math.sqrt(min(max(pixels, least), most) / pixels)
    rounded = math.floor if pixels > most else math.ceil
    short, long = (max(1, rounded(scale * side)) for side in sorted(image.size))
    long = min(long, most // short)
    return image.resize((short, long) if width < height else (long, short))


def read_image(value: Any, place: str, folder: str = "") -> "PIL.Image.Image":
    """Read an image as RGB: upright, and on white where it is transparent.

    value: a path, a data: URL, bytes, PIL's image, or `bytes` and `path` as `datasets` writes them. folder:
    of relative paths. Raises ImageError, naming the record `place`.
    """
    import PIL.Image
    import PIL.ImageOps

    name = name_of(value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            if isinstance(value, PIL.Image.Image):
                picture = value
            else:
                picture = PIL.Image.open(_file(value, place, folder), formats=FORMATS)
            if picture.format not in (None, *FORMATS):
                raise ImageError(
                    f"{place}: {name} is in format {picture.format}. Write it as PNG or JPEG."
                )
            if getattr(picture, "is_animated", False):
                raise ImageError(f"{place}: {name} is animated. Give one of its frames.")
            return _on_white(PIL.ImageOps.exif_transpose(picture))
    except PIL.UnidentifiedImageError:
        formats = ", ".join(FORMATS)
        raise ImageError(
            f"{place}: {name} is not an image in a format of {formats}. Write it as PNG."
        ) from None
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        raise ImageError(
            f"{place}: {name} is too large to be read: {error}. Make it smaller."
        ) from None
    except ImageError:
        raise
    except Exception as error:  # Pillow raises many types for broken files
        raise ImageError(
            f"{place}: {name} cannot be read as an image: {describe_error(error)}."
        ) from None


def _on_white(image: "PIL.Image.Image") -> "PIL.Image.Image":
    import PIL.Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    white = PIL.Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


def _file(value: Any, place: str, folder: str) -> Any:
    """Return a path or a buffer that Pillow opens."""
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str):
        raise ImageError(
            f"{place} has an image of type {type(value).__name__}. Give a path, bytes or a data: URL."
        )
    if value.startswith("data:"):
        return io.BytesIO(base64.b64decode(value.partition(",")[2]))
    if "://" in value:
        raise ImageError(
            f"{place}: {name_of(value)} is a URL, and images are not fetched. Give a path."
        )
    if not (path := Path(folder, value)).is_file():
        raise ImageError(
            f"{place}: there is no image {path}. Relative paths start at the folder of the data."
        )
    return path


def name_of(value: Any) -> str:
    """Name a record's image in texts: by its file, or `image`."""
    path = value.get("path") if isinstance(value, dict) else value
    if not isinstance(path, str) or path.startswith("data:"):
        return "image"
    return Path(path).name[-80:] or "image"
