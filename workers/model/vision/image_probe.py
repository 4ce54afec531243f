"""Put images into the sequences of the check at load, and make what transformers' whole model reads of them.

    sequence 0    text
    sequence 1    prefix, image 1, text
    sequence 2    prefix, image 1, text, image 2, text

The images differ in size and shape. The first is repeated, in tokens that sequences may share. The reference
reads what the whole processor makes of all images of a sequence, the engine what it makes of the images of a
micro-batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Image, PlacedImage
from workers.errors import UnsupportedModelError, clause
from workers.images.images import digest_of, png_of

SIZES = ((84, 56), (56, 112))  # width and height in pixels
TYPES = ("mm_token_type_ids", "token_type_ids")  # of tokens: 1 in an image
AFTER = 3  # tokens after the last image

Inputs = dict[str, Tensor]
"""Arguments of a model's forward pass, beside its ids."""


def add_images(
    texts: Sequence[Tensor], prefix: int, processor: Any, name: str
) -> tuple[DataProto, tuple[Inputs, ...]]:
    """Return the sequences of `texts` (ids [n] of each) with images, and the reference's inputs for each.

    prefix: tokens that the last two share. name: of the model. Raises UnsupportedModelError if the processor
    refuses the images, or expands one otherwise beside another.
    """
    import PIL.Image

    noise = np.random.default_rng(0)
    pictures = [
        PIL.Image.fromarray(noise.integers(0, 256, (h, w, 3)).astype("uint8"))
        for w, h in SIZES
    ]
    try:
        alone = [_processed(processor, [picture]) for picture in pictures]
        both = _processed(processor, pictures)
    except Exception as error:  # processors raise many types
        raise UnsupportedModelError(
            f"{name}: its processor raises {type(error).__name__}: {clause(error)}"
        ) from error
    if not torch.equal(
        both["input_ids"], torch.cat([output["input_ids"] for output in alone], dim=1)
    ):
        raise UnsupportedModelError(
            f"{name}: its processor expands an image otherwise beside another"
        )
    images = [
        Image(digest_of(picture), *picture.size, png_of(picture)) for picture in pictures
    ]
    counts = [output["input_ids"].shape[1] for output in alone]
    columns = [name for name in ("input_ids", *TYPES) if name in alone[0]]
    start = prefix or 1
    rows = []
    placed = []
    inputs = []
    for text, places in zip(
        texts, ((), (start,), (start, len(texts[2]) - AFTER)), strict=True
    ):
        spliced = {column: _splice(column, text, places, alone) for column in columns}
        ids = spliced.pop("input_ids")
        rows.append({"input_ids": ids, "loss_mask": torch.arange(len(ids)) > 0})
        first = [place + sum(counts[:index]) for index, place in enumerate(places)]
        placed.append(tuple(map(PlacedImage, images, first, counts)))
        image_inputs = ({}, alone[0], both)[len(places)]
        pixels = {
            key: value
            for key, value in image_inputs.items()
            if key not in (*columns, "attention_mask")
        }
        inputs.append(pixels | {column: types[None] for column, types in spliced.items()})
    sequences = DataProto.from_list(rows)
    sequences.objects["images"] = object_column(placed)
    return sequences, tuple(inputs)


def _processed(processor: Any, pictures: list[Any]) -> Inputs:
    text = processor.image_token * len(pictures)
    return dict(
        processor(
            text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt"
        )
    )


def _splice(
    column: str, text: Tensor, places: Sequence[int], alone: Sequence[Inputs]
) -> Tensor:
    """Return ids of `text`, or zeros for them in columns of types, with what each image has put into its
    place.
    """
    parts = list(
        (text if column == "input_ids" else torch.zeros_like(text)).tensor_split(
            list(places)
        )
    )
    for index in range(len(places)):
        parts.insert(2 * index + 1, alone[index][column][0])
    return torch.cat(parts)
