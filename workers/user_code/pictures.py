"""Pictures: images as users' code receives them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workers.images.images import png_of, read_image

if TYPE_CHECKING:
    import PIL.Image


class Pictures:
    """Images for users' code: unpickled there, they are a list of PIL's. data: of `Image`, without
    references.
    """

    def __init__(self, data: Sequence[Any]) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_images, ([png_of(picture) for picture in self.data],)


def _open_images(data: Sequence[bytes]) -> "list[PIL.Image.Image]":
    return [read_image(png, "an image") for png in data]
