"""Placeholders: where a prompt's images stand, and the tokens that a model reads there.

    template writes <image>, one id --expand--> <row_1> <image> ... <image>, the ids of an image of that size

How many tokens, and which separators, follows from the image's size. Transformers' processor is asked once a
size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from workers.batch.placed_images import Image, Placed, PlacedImage
from workers.errors import ConfigError, DataError, ImageError, describe_error
from workers.images.images import ImageSource, read_image

COMPARED = 4


class Placeholders:
    """Expands the placeholders of one model.

    processor: of transformers. path: for errors. compared: first calls whose images the whole processor
    expands too.
    """

    def __init__(self, processor: Any, path: str, compared: int = COMPARED) -> None:
        self._processor = processor
        self._path = path
        self._compared = compared
        self.token: str = processor.image_token
        self.id = int(processor.tokenizer.convert_tokens_to_ids(self.token))
        self._of_size: dict[tuple[int, int], np.ndarray] = {}

    def expand(
        self, ids: np.ndarray, images: Sequence[Image], place: str
    ) -> tuple[np.ndarray, Placed]:
        """Replace each placeholder by its image's tokens: int32 [n], and the images' places.

        Raises DataError, naming `place`, unless there is one placeholder for each image.
        """
        places = np.flatnonzero(ids == self.id)
        if len(places) != len(images):
            raise DataError(
                f"{place} has {len(images)} images, and {len(places)} places for them ({self.token}). "
                'Write a part {"type": "image"} in a message, or that token in a text, for each image.'
            )
        if images and self._compared:
            self._compared -= 1
            self._compare(images, place)
        return self._expand(ids, places, images, place)

    def _expand(
        self,
        ids: np.ndarray,
        places: np.ndarray,
        images: Sequence[Image],
        record_place: str,
    ) -> tuple[np.ndarray, Placed]:
        parts = []
        placed = []
        start = 0
        first = 0
        for place, image in zip(places.tolist(), images, strict=True):
            tokens = self._tokens(image.width, image.height, record_place)
            parts += [ids[start:place], tokens]
            first += place - start
            placed.append(PlacedImage(image, first, len(tokens)))
            start = place + 1
            first = first + len(tokens)
        return np.concatenate([*parts, ids[start:]]).astype(np.int32), tuple(placed)

    def _tokens(self, width: int, height: int, place: str) -> np.ndarray:
        import PIL.Image

        if (size := (width, height)) not in self._of_size:
            self._of_size[size] = self._whole(
                self.token, [PIL.Image.new("RGB", size)], place
            )
        return self._of_size[size]

    def _whole(self, text: str, images: Sequence[Any], place: str) -> np.ndarray:
        try:
            outputs = self._processor(
                text=[text],
                images=[list(images)],
                add_special_tokens=False,
                return_tensors="np",
            )
        except Exception as error:  # processors raise many types
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise ImageError(
                f"{place}: the image processor of model.path={self._path} refuses an image of {sizes} "
                f"pixels: {describe_error(error)}."
            ) from None
        return np.asarray(outputs["input_ids"][0], np.int32)

    def _compare(self, images: Sequence[Image], place: str) -> None:
        """Raise ConfigError unless the whole processor expands a text with these images to the same ids."""
        text = "Look:\n" + " and\n".join(
            [f"{self.token}\n ({n}) {self.token}." for n in range(len(images))]
        )
        pictures = [_picture(image.data, place) for image in images for _ in range(2)]
        ids = np.asarray(
            self._processor.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32
        )
        twice = [image for image in images for _ in range(2)]
        if not np.array_equal(
            self._expand(ids, np.flatnonzero(ids == self.id), twice, place)[0],
            self._whole(text, pictures, place),
        ):
            raise ConfigError(
                f"model.path={self._path}: {type(self._processor).__name__} expands images by more than "
                "their sizes, which is not supported. Name a model of another family."
            )


class RefusedImages(Placeholders):
    """Stands for a model that is trained on text alone. problem: of its images."""

    def __init__(self, path: str, problem: str) -> None:
        self.id = -1
        self._path = path
        self._problem = problem

    def expand(
        self, ids: np.ndarray, images: Sequence[Image], place: str
    ) -> tuple[np.ndarray, Placed]:
        """Return the ids. Raises ConfigError if there are images."""
        if images:
            raise ConfigError(
                f"model.path={self._path}: {place} has images, which this model cannot be trained on: "
                f"{self._problem}. Take another model, or text alone."
            )
        return ids, ()


def _picture(data: Any, place: str) -> Any:
    return data.open() if isinstance(data, ImageSource) else read_image(data, place)


def spread(values: np.ndarray, placed: Sequence[PlacedImage]) -> np.ndarray:
    """Give each token of an image 0, in values [n] of the ids before `expand`."""
    for image in placed:
        values = np.concatenate(
            [
                values[: image.first],
                np.zeros(image.tokens, values.dtype),
                values[image.first + 1 :],
            ]
        )
    return values
