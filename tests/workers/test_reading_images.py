"""Images of records are read as RGB, or refused in one line that names the record."""

import base64
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import DataError
from workers.images.images import (
    FORMATS,
    ImageSource,
    digest_of,
    png_of,
    read_image,
    resize_image,
)
from workers.user_code.pictures import Pictures

WHERE = "data.jsonl:3"


def _picture(width: int = 8, height: int = 6, mode: str = "RGB") -> PIL.Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype("uint8")
    return PIL.Image.fromarray(pixels).convert(mode)


def _bytes(image: PIL.Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def test_the_forms_of_an_image_are_one_image(tmp_path: Path) -> None:
    content = _bytes(_picture())
    (tmp_path / "a.png").write_bytes(content)
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    forms = [
        content,
        url,
        _picture(),
        {"bytes": content, "path": "gone.png"},
        {"bytes": None, "path": "a.png"},
        "a.png",
    ]
    found = {digest_of(read_image(form, WHERE, str(tmp_path))) for form in forms}
    assert found == {digest_of(_picture())}


def _animated() -> bytes:
    return _bytes(
        _picture(), "GIF", save_all=True, append_images=[_picture(8, 6).rotate(90)]
    )


def _huge() -> bytes:
    return _bytes(PIL.Image.new("1", (20_000, 20_000)))


def _text() -> Any:
    return b'<svg xmlns="http://www.w3.org/2000/svg"></svg>'


BAD = {
    "truncated": (lambda: _bytes(_picture(64, 64))[:2000], "read"),
    "truncated JPEG": (lambda: _bytes(_picture(64, 64), "JPEG")[:1500], "truncated"),
    "20,000 x 20,000": (_huge, "too large"),
    "animated": (_animated, "animated"),
    "SVG": (_text, "not an image"),
    # Pillow would start Ghostscript.
    "EPS": (lambda: _bytes(_picture(), "EPS"), "not an image"),
    "Pillow's EPS": (lambda: PIL.Image.open(io.BytesIO(_bytes(_picture(), "EPS"))), "EPS"),
    "ICO": (lambda: _bytes(_picture(), "ICO"), "not an image"),
    "empty": (lambda: b"", "not an image"),
    "missing": (lambda: "gone.png", "there is no image"),
    "URL": (lambda: "https://example.org/a.png", "URL"),
    "broken URL": (lambda: "data:image/png;base64,!", "image"),
    "number": (lambda: 7, "int"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_in_one_line(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    make, word = BAD[name]
    value = make()
    recwarn.clear()  # of Pillow, as it writes what is tried
    with pytest.raises(DataError) as failure:
        read_image(value, WHERE)
    text = str(failure.value)
    # Not what other threads warn of.
    pillows = [warning for warning in recwarn if "PIL" in warning.filename]
    assert text.startswith(WHERE) and word in text and "\n" not in text and not pillows


@pytest.mark.parametrize("form", FORMATS)
def test_an_image_of_each_format_is_read(form: str) -> None:
    assert read_image(_bytes(_picture(), form), WHERE).size == (8, 6)


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "P"])
def test_other_colours_become_rgb(mode: str) -> None:
    found = read_image(
        _bytes(_picture(mode=mode), "JPEG" if mode == "CMYK" else "PNG"), WHERE
    )
    assert found.mode == "RGB" and found.size == (8, 6)


def test_one_pixel_is_an_image() -> None:
    assert read_image(_bytes(_picture(1, 1)), WHERE).size == (1, 1)


def test_transparent_parts_become_white_and_photos_upright() -> None:
    clear = PIL.Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert read_image(_bytes(clear), WHERE).getpixel((0, 0)) == (255, 255, 255)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    assert read_image(_bytes(_picture(), "JPEG", exif=exif), WHERE).size == (6, 8)


SIDES = st.integers(1, 400)


@given(SIDES, SIDES, st.integers(0, 2000), st.integers(2001, 50_000))
def test_resized_images_have_the_pixels_that_were_asked_for(
    width: int, height: int, least: int, most: int
) -> None:
    found = resize_image(PIL.Image.new("RGB", (width, height)), least, most)
    pixels = found.width * found.height
    assert pixels <= most
    if least <= width * height <= most:
        assert found.size == (width, height)
    elif max(width, height) <= 20 * min(width, height) and pixels > 400:
        # Between near bounds there may be no such product of whole sides: at most a row is missing.
        assert pixels + max(found.size) > min(least, width * height)
        assert found.width / found.height == pytest.approx(width / height, rel=0.25)


def test_pictures_are_pils_where_they_are_unpickled() -> None:
    source = ImageSource(_picture(64, 32), WHERE, pixels=(0, 512))
    image = source.image()
    assert (image.width, image.height) == (32, 16)
    (found,) = pickle.loads(pickle.dumps(Pictures([image.data])))
    assert found.size == (32, 16) and digest_of(found) == image.digest
    assert digest_of(read_image(png_of(source), WHERE)) == image.digest
