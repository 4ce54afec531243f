"""Images as vLLM's engine takes them: processed once, and placed where the driver expanded them.

    ids, PlacedImage ... --ImageInputs.prompt--> MultiModalInput: the same ids, processed images, their places

This is the input that vLLM's renderer makes of a prompt. The renderer itself would expand the ids again.
"""

import asyncio
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.batch.placed_images import Image, PlacedImage
from workers.errors import DataError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

KEPT = 32  # processed images, of up to 24 MB for a million pixels


class ImageInputs:
    def __init__(self, engine: "AsyncLLM") -> None:
        self._engine = engine
        # By digest, the last used one at the end.
        self._processed: dict[int, asyncio.Task[tuple[Any, int, int]]] = {}
        self._one = asyncio.Lock()  # vLLM's processor takes one call at a time

    async def prompt(
        self, ids: np.ndarray, images: Sequence[PlacedImage], salt: str
    ) -> Any:
        """Return the engine's input. Raises DataError where the engine expands an image otherwise."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        if not images:
            return tokens_input(ids.tolist(), cache_salt=salt)
        items = []
        places = []
        for placed_image in images:
            item, token, tokens = await asyncio.shield(self._item(placed_image.image))
            items.append(item)
            places.append(_place(ids, placed_image, token, tokens))
        hashes = {"image": [f"{placed_image.image.digest:016x}" for placed_image in images]}
        processed = MultiModalKwargsItems({"image": items})
        return mm_input(ids.tolist(), processed, hashes, {"image": places}, cache_salt=salt)

    def _item(self, image: Image) -> "asyncio.Task[tuple[Any, int, int]]":
        task = self._processed.pop(image.digest, None)
        if task is None or (task.done() and task.exception()):
            task = asyncio.create_task(self._process(image))
        self._processed[image.digest] = task
        if len(self._processed) > KEPT:
            del self._processed[next(iter(self._processed))]
        return task

    async def _process(self, image: Image) -> tuple[Any, int, int]:
        """Return the engine's item, the token that it embeds, and how many of them the image takes."""
        data = await png_bytes(image)
        async with self._one:
            return await asyncio.to_thread(self._processed_by_vllm, data)

    def _processed_by_vllm(self, data: bytes) -> tuple[Any, int, int]:
        import PIL.Image

        processor = self._engine.renderer.get_mm_processor()
        items = processor.info.parse_mm_data({"image": [PIL.Image.open(io.BytesIO(data))]})
        inputs = processor(processor.dummy_inputs.get_dummy_text({"image": 1}), items)
        place = inputs["mm_placeholders"]["image"][0]
        expanded = np.array(
            inputs["prompt_token_ids"][place.offset : place.offset + place.length]
        )
        embedded = expanded if place.is_embed is None else expanded[place.is_embed.numpy()]
        return inputs["mm_kwargs"]["image"][0], int(embedded[0]), len(embedded)


async def png_bytes(image: Image) -> bytes:
    return image.data if isinstance(image.data, bytes) else await image.data  # type: ignore[no-any-return]


def _place(ids: np.ndarray, placed: PlacedImage, token: int, tokens: int) -> Any:
    """Return where the embeddings go, from the first of the image's placeholders to the last."""
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    is_embed = ids[placed.first : placed.first + placed.tokens] == token
    (cells,) = np.nonzero(is_embed)
    if len(cells) != tokens:
        size = f"{placed.image.width} x {placed.image.height}"
        raise DataError(
            f"an image of {size} has {len(cells)} placeholders in the prompt, and {tokens} in the engine."
        )
    between = is_embed[cells[0] : cells[-1] + 1]
    mask = None if between.all() else torch.from_numpy(between.copy())
    return PlaceholderRange(placed.first + int(cells[0]), len(between), mask)
