"""The images of a vision-language model: from pictures in a batch to embeddings in its rows.

    images of a micro-batch, each once --HF processor--> pixels --tower, projector--> features [F, H]
    row    5 7 I I I I 9        cells of I <-- rows of the features; also after the first layers (deepstack)
    M-RoPE positions: time, height, width of each token, [3, R, W]

Placeholders are the `image_token`s inside a `PlacedImage`. Elsewhere the id is a token that somebody wrote or
sampled.

The tower is all that makes features: vision model and projector. Frozen, it is whole on every rank, in the
compute dtype. Trained, it is sharded like the layers. Then every rank runs it in every micro-batch, without
images on a blank one whose features no cell reads: ranks take part in the same collectives, with gradients of
0.

Shapes: R rows of W cells, F features of all images, H hidden size, C placeholder cells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import AutoProcessor, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from workers.batch.dataproto import DataProto
from workers.batch.placed_images import Image, PlacedImage
from workers.errors import BallastError, ConfigError, DataError, clause
from workers.images.images import read_image
from workers.model.rows.packing import ModelInput, Rows

Inputs = Mapping[str, Tensor]
"""Arguments of a family's `get_image_features`."""
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
KEPT_IMAGES = 32  # processed images in host memory: neighbouring micro-batches and passes read the same
BLANK = 64  # pixels


@dataclass(frozen=True)
class Features:
    """Hold features of all images, in order. embeds: [F, H]. deepstack: [F, H] for each of the
    first layers.
    """

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()


class Vision:
    """Know the images of a loaded image-text-to-text model, or of its skeleton.

    trains: whether the tower is trained, and so sharded. names: its parameters.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        self.model = model
        self.trains = False
        self.refusal: BallastError | None = None
        self.image_token: int = model.config.image_token_id
        paths = {id(module): name for name, module in model.named_modules()}
        head = paths[id(model.get_output_embeddings())]
        inner = paths[id(decoder)].split(".")
        around = [".".join(inner[:count]) for count in range(len(inner) + 1)]
        children = [
            f"{level}.{name}"
            for level in around[:-1]
            for name, _ in model.get_submodule(level).named_children()
        ]
        self.parts = [
            name
            for child in children
            if (name := child.removeprefix(".")) not in (*around, head)
        ]
        prefixes = (f"{around[-1]}.", f"{head}.")
        self.names = frozenset(
            name for name, _ in model.named_parameters() if not name.startswith(prefixes)
        )
        self._processed = lru_cache(KEPT_IMAGES)(self._process)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Return the tower's parameters that this rank has."""
        return {
            parameter
            for name, parameter in self.model.named_parameters()
            if name in self.names
        }

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the layers of the tower."""
        parts = [self.model.get_submodule(name) for name in self.parts]
        return [
            module
            for part in parts
            for module in part.modules()
            if isinstance(module, GradientCheckpointingLayer)
        ]

    # --- rows, on the CPU

    def lay_out(self, rows: Rows, sequences: DataProto) -> Rows:
        """Return `rows` with their images, the cells of the images' features, and the family's kind of
        positions.
        """
        positions = (
            rows.position_ids.repeat(3, 1, 1) if self._has_grids else rows.position_ids
        )
        firsts: dict[Image, int] = {}
        cells = [torch.empty(0, dtype=torch.int64)]
        source = [torch.empty(0, dtype=torch.int64)]
        count = 0
        for index, images in enumerate(sequences.objects.get("images", ())):
            start, stop = sequences.offsets[index : index + 2]
            ids = sequences.tokens["input_ids"][start:stop].cpu()
            row_cells = rows.cells[start:stop]
            if images and self._has_grids:
                positions.flatten(1)[:, row_cells] = self.positions(ids, images)
            for placed_image in images:
                places = self._placeholders(ids, placed_image)
                first = firsts.setdefault(placed_image.image, count)
                count += len(places) if first == count else 0
                cells.append(row_cells[places])
                source.append(first + torch.arange(len(places)))
        if not firsts and not self.trains:
            return replace(rows, position_ids=positions)
        # Sequences share cells.
        image_cells, places = torch.cat(cells).unique(return_inverse=True)
        return replace(
            rows,
            position_ids=positions,
            images=self.inputs(list(firsts)) if firsts else self._blank,
            image_cells=image_cells,
            image_source=torch.empty_like(image_cells).scatter_(
                0, places, torch.cat(source)
            ),
            image_features=count,
        )

    def positions(self, ids: Tensor, images: Sequence[PlacedImage]) -> Tensor:
        """Return M-RoPE's positions of a sequence's tokens, int64 [3, n]."""
        types = torch.zeros(1, len(ids), dtype=torch.int64)
        for placed_image in images:
            types[0, self._placeholders(ids, placed_image)] = 1
        grids = torch.cat(
            [
                self._processed(placed_image.image)["image_grid_thw"]
                for placed_image in images
            ]
        )
        positions = self._family.get_rope_index(ids[None], types, image_grid_thw=grids)[0]
        return torch.as_tensor(positions[:, 0])

    def inputs(self, images: Sequence[Image]) -> Inputs:
        """Return the processor's tensors for these images, on the CPU. Raises what the check at
        load found.
        """
        if self.refusal is not None:
            raise self.refusal
        processed_images = [self._processed(image) for image in images]
        inputs = {}
        for name in processed_images[0]:
            inputs[name] = _joined(name, [tensors[name] for tensors in processed_images])
        return inputs

    def _placeholders(self, ids: Tensor, placed: PlacedImage) -> Tensor:
        span = ids[placed.first : placed.first + placed.tokens]
        return placed.first + (span == self.image_token).nonzero().squeeze(1)

    @property
    def _family(self) -> Any:
        return self.model.base_model

    @property
    def _has_grids(self) -> bool:
        return hasattr(self._family, "get_rope_index")

    @cached_property
    def processor(self) -> Any:
        path = self.model.name_or_path
        try:
            return AutoProcessor.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises many types
            raise ConfigError(
                f"model.path={path} has no processor of images: {clause(error)}."
            ) from error

    def _process(self, image: Image) -> Inputs:
        return self._tensors(read_image(image.data, "an image"))

    def _tensors(self, picture: Any) -> Inputs:
        features = self.processor(
            text=[self.processor.image_token], images=[[picture]], return_tensors="pt"
        )
        tensors = {name: value for name, value in features.items() if name not in OF_TEXT}
        # Images of LLaVA-NeXT have unequally many parts.
        if "image_sizes" in tensors and tensors["pixel_values"].ndim == 5:
            tensors["pixel_values"] = tensors["pixel_values"].flatten(0, 1)
        return tensors

    @cached_property
    def _blank(self) -> Inputs:
        from PIL import Image

        return self._tensors(Image.new("RGB", (BLANK, BLANK)))

    # --- features, on the device

    def features(self, inputs: Inputs, dtype: torch.dtype) -> Features:
        """Return the features of a micro-batch's images. dtype: of the computation."""
        arguments = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        with torch.set_grad_enabled(self.trains and torch.is_grad_enabled()):
            output: Any = self.model.get_image_features(**arguments, return_dict=True)
        return Features(
            _flat(output.pooler_output),
            tuple(map(_flat, getattr(output, "deepstack_features", None) or ())),
        )

    def embedded(self, rows: ModelInput) -> dict[str, Any]:
        """Return the decoder's arguments for rows with images: their embeddings, and features for its first
        layers.
        """
        assert (
            rows.images is not None
            and rows.image_cells is not None
            and rows.image_source is not None
        )
        embedding: Any = self.model.get_input_embeddings()
        # Under tensor parallelism this rank's part of the cells.
        embeds = embedding(rows.input_ids)
        features = self.features(rows.images, embeds.dtype)
        cells = rows.image_cells
        source = rows.image_source
        layers = [features.embeds, *features.deepstack]
        if rows.image_features not in (0, len(features.embeds)):
            raise DataError(
                f"images with {len(features.embeds)} features have {rows.image_features} placeholders in ids"
            )
        if isinstance(embedding.weight, DTensor):
            mesh = embedding.weight.device_mesh
            width = embeds.shape[1]
            # Each rank returns the gradient of its own cells: their sum is the tower's.
            layers = [
                DTensor.from_local(layer, mesh, [Replicate()], run_check=False)
                for layer in layers
            ]
            layers = [layer.to_local(grad_placements=[Partial()]) for layer in layers]
            first = mesh.get_local_rank() * width
            mine = (cells >= first) & (cells < first + width)
            cells = cells[mine] - first
            source = source[mine]
        values = [layer[source].to(embeds.dtype) for layer in layers]
        flat = embeds.flatten(0, 1).index_copy(0, cells, values[0])
        arguments: dict[str, Any] = {"inputs_embeds": flat.view_as(embeds)}
        if features.deepstack:
            seen = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
            seen.view(-1)[cells] = True
            arguments |= {"visual_pos_masks": seen, "deepstack_visual_embeds": values[1:]}
        return arguments


def _flat(parts: Any) -> Tensor:
    tensor = torch.cat(list(parts)) if isinstance(parts, list | tuple) else parts
    return tensor.flatten(0, -2)


def _joined(name: str, values: Sequence[Tensor]) -> Tensor:
    """Join tensors of images. Pixels [..., height, width] are padded to the largest, as processors do."""
    if values[0].ndim < 4:
        return torch.cat(list(values))
    height = max(tensor.shape[-2] for tensor in values)
    width = max(tensor.shape[-1] for tensor in values)
    padded = [
        F.pad(tensor, (0, width - tensor.shape[-1], 0, height - tensor.shape[-2]))
        for tensor in values
    ]
    images = 1 if "mask" in name or padded[0].ndim == 5 else 0
    return torch.cat(padded, images)
