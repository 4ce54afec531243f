"""Build the probe of the check at load: three sequences of random ids, and which gradients to compare."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.batch.dataproto import DataProto
from workers.errors import BallastError, UnsupportedModelError
from workers.model.model import PackedModel
from workers.model.rows.packing import max_positions
from workers.model.value_head import PackedValueModel
from workers.model.vision.image_probe import Inputs, add_images
from workers.model.vision.tower import Vision

LENGTHS = (7, 19, 12)
LONGEST_PREFIX = 512  # longer ones are not shared by the probe
# Frames of buffers and kernels.
BUILT_IN = (
    "window_size",
    "block_size",
    "rel_extent",
    "chunk_size",
    "mamba_chunk_size",
)
LONGEST_SPAN = 1024  # the longest built-in length that the probe exceeds
BEYOND_SPAN = 8


@dataclass(frozen=True)
class Probe:
    """Hold the input of the check.

    sequences: all but their first tokens predicted. temperature, dtype: the engine's. parameters: names of
    those whose gradients are compared. inputs: of transformers' own pass for each sequence, with images.
    """

    sequences: DataProto
    temperature: float
    dtype: torch.dtype
    parameters: tuple[str, ...]
    inputs: tuple[Inputs, ...] = ({}, {}, {})


def make_probe(
    packed: PackedModel, dtype: torch.dtype, temperature: float = 1.0, prefix: int = 0
) -> Probe:
    """Build sequences of random ids, the same for every model of a vocabulary. `packed` may be a skeleton.

    Special ids (padding, images) are left out. The longest sequence, in the middle, exceeds each length of
    `BUILT_IN`.
    prefix: tokens that the last two share, for engines that share prefixes. Raises UnsupportedModelError if a
    length of the model is too long for the probe.
    """
    prefix = prefix if prefix <= LONGEST_PREFIX else 0
    longest = max(
        [
            LENGTHS[1],
            prefix + LENGTHS[0],
            *(span + BEYOND_SPAN for span in _built_in(packed)),
        ]
    )
    limit = max_positions(packed.model.config) or longest
    generator = torch.Generator().manual_seed(0)
    ids = _ordinary_ids(packed.model)
    rows = []
    for length in (LENGTHS[0], longest, max(LENGTHS[2], prefix + LENGTHS[0])):
        chosen = torch.randint(len(ids), (min(length, limit),), generator=generator)
        rows.append({"input_ids": ids[chosen], "loss_mask": torch.arange(len(chosen)) > 0})
    rows[2]["input_ids"][:prefix] = rows[1]["input_ids"][:prefix]
    probe = Probe(DataProto.from_list(rows), temperature, dtype, _probed_parameters(packed))
    return (
        probe
        if packed.vision is None
        else _with_images(probe, packed.vision, packed.name, prefix)
    )


def _with_images(probe: Probe, vision: Vision, name: str, prefix: int) -> Probe:
    """Put images into the sequences. If the processor cannot make them, text is proved alone and images are
    refused.
    """
    texts = probe.sequences.tokens["input_ids"].split(probe.sequences.lengths.tolist())
    try:
        sequences, inputs = add_images(texts, prefix, vision.processor, name)
    except BallastError as error:
        vision.refusal = error
        return probe
    return replace(probe, sequences=sequences, inputs=inputs)


def _built_in(packed: PackedModel) -> list[int]:
    config = packed.model.config.get_text_config()
    limit = max_positions(packed.model.config)
    spans = {
        name: span
        for name in BUILT_IN
        if (span := getattr(config, name, None)) and (limit or span + 1) > span
    }
    for name, span in spans.items():
        if span > LONGEST_SPAN:
            raise UnsupportedModelError(
                f"{packed.name} with {name}={span}, a length that the check at load cannot exceed. Take "
                "another model."
            )
    return list(spans.values())


def _ordinary_ids(model: PreTrainedModel) -> Tensor:
    settings = model.config.to_dict() | model.config.get_text_config().to_dict()
    named = [
        value
        for name, value in settings.items()
        if name.endswith(("token_id", "token_index"))
    ]
    special = {
        one
        for value in named
        for one in (value if isinstance(value, list) else [value])
        if one is not None
    }
    ids = torch.arange(model.get_input_embeddings().num_embeddings)
    ordinary = ids[~torch.isin(ids, torch.tensor(list(special), dtype=torch.int64))]
    return ordinary if len(ordinary) else ids


def _probed_parameters(packed: PackedModel) -> tuple[str, ...]:
    """Return the name of the smallest trained parameter of the first layer, whose gradient passes all later
    layers.

    And of the tower's first, if it is trained. Biases are excluded, because softmax may cancel them, and so
    is the half of an adapter with an initial gradient of 0. Empty for a frozen model and for a value head,
    which starts at 0 and passes no gradient on.
    """
    if isinstance(packed, PackedValueModel):
        return ()
    first = [set(packed.layers[0].parameters())]
    if packed.vision is not None and packed.vision.trains:
        first.append(set(packed.vision.blocks[0].parameters()))
    names = [_smallest(packed, parameters) for parameters in first]
    return tuple(name for name in names if name)


def _smallest(packed: PackedModel, parameters: set[nn.Parameter]) -> str:
    sizes = {
        name: parameter.numel()
        for name, parameter in packed.named_parameters()
        if parameter in parameters
        and parameter.requires_grad
        and not name.endswith("bias")
        and ".lora_A." not in name
    }
    return min(sizes, key=sizes.__getitem__) if sizes else ""
