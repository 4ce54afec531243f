"""Causal attention within the segments of a packed row, as one function registered with transformers.

    RowLayout --PackedAttention--> model.forward(packed_attention=...) --> layers: ballast_packed --> kernel

The segments are passed as an argument. transformers would infer them from `position_ids`, and silently misses
packing when a KV cache is created or an all-ones mask is passed.

    backend   where                         sliding window   soft-capping   sinks
    flash4    Hopper, Blackwell, half       yes              no             yes     the flash-attn-4 package
    flash3    Hopper, half precision        yes              no             yes     varlen on FlashAttention 3
    varlen    CUDA, half precision          yes              no             yes     torch.nn.attention.varlen
    flash     CUDA, half precision          yes              yes            no      the flash-attn package
    sdpa      anywhere, a call a segment    yes              yes            yes

Shapes: T packed tokens, H query heads, K key-value heads (K divides H), D head dimension, L tokens of one
segment.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from transformers import AttentionInterface

from workers.errors import ConfigError, UnsupportedModelError
from workers.model.attention import flash4
from workers.model.attention.block_attention import block_attention, query_blocks
from workers.model.attention.flash4 import flash4_attention, use_flash4, uses_flash4
from workers.model.attention.flash_kernels import Segments, sink_attention, window_size
from workers.model.attention.selected_attention import selected_attention
from workers.model.attention.state_rows import StateRow
from workers.model.rows.packing import PackedRow
from workers.model.rules.families import KERNEL_FEATURES, expected_window
from workers.model.rules.model_rules import check_kernel_features, kernel_problem

log = logging.getLogger(__name__)

ATTENTION_NAME = "ballast_packed"

PackedAttention = Callable[..., Tensor]
"""Computes the attention of one packed row, shared by all layers of a pass.

(query [1, H, T, D], key and value [1, K, T, D], scale, *, window, softcap, sinks) -> [1, T, H, D]

    scores_ij = scale q_i . k_j, then softcap tanh(scores_ij / softcap)
    out_i = sum_j exp(scores_ij) v_j / (exp(sink) + sum_j exp(scores_ij))    over 0 <= i - j < window

window: tokens that each token sees, itself included. sinks: [H], one logit a head. Only layers that have
these three pass them, see `choose_backend`.
"""


@dataclass(frozen=True)
class Installed:
    """Describe the machine. generation: major compute capability, 9 for Hopper, 0 without a card."""

    generation: int
    packages: frozenset[str]

    @classmethod
    def here(cls, device: torch.device) -> "Installed":
        has_card = device.type == "cuda" and torch.cuda.is_available()
        generation = torch.cuda.get_device_capability(device)[0] if has_card else 0
        needed = {backend.package for backend in BACKENDS.values() if backend.package}
        return cls(
            generation, frozenset(package for package in needed if is_installed(package))
        )


def is_installed(package: str) -> bool:
    """Return whether a package has code. flash-attn-4 leaves a folder `flash_attn` without any."""
    try:
        specification = find_spec(package)
    except ModuleNotFoundError:  # of the package above it
        return False
    return specification is not None and specification.origin is not None


@dataclass(frozen=True)
class Backend:
    """Describe a backend. features: as in `families.required_features`. generations: of cards, empty for all.

    distribution: what installs `package`, if it has another name. head_problem: why a generation does not
    take heads of these sizes, or an empty string.
    """

    build: Callable[[PackedRow, torch.device], PackedAttention]
    features: frozenset[str]
    package: str = ""
    generations: tuple[int, ...] = ()
    distribution: str = ""
    head_problem: Callable[[int, frozenset[int]], str] = lambda generation, sizes: ""

    def obstacle(
        self, installed: Installed, head_sizes: frozenset[int] = frozenset()
    ) -> str:
        if self.generations and installed.generation not in self.generations:
            return (
                f"needs a card of compute capability {' or '.join(map(str, self.generations))}, and this one "
                f"has {installed.generation}. Set auto"
            )
        if self.package and self.package not in installed.packages:
            name = self.distribution or self.package.replace("_", "-")
            return f"needs the package {name}, which is not installed. Set auto"
        return self.head_problem(installed.generation, head_sizes)


def choose_backend(
    setting: str,
    device: torch.device,
    compute_dtype: torch.dtype,
    features: frozenset[str] = frozenset(),
    installed: Installed | None = None,
    model: str = "the model",
    head_sizes: frozenset[int] = frozenset(),
) -> str:
    """Return the backend of `model.attention` for packed rows. `auto` takes the first usable one of
    `BACKENDS`.

    features: what the model needs, from `families.required_features`. model: its name in messages.
    head_sizes: of its queries and values. Raises ConfigError if the backend cannot run here or does not take
    packed rows, UnsupportedModelError if it lacks a feature.
    """
    installed = installed or Installed.here(device)

    def obstacle(kernel: str) -> str:
        problem = kernel_problem(
            kernel, "packed", cuda=device.type == "cuda", half=compute_dtype.itemsize == 2
        )
        return problem or BACKENDS[kernel].obstacle(installed, head_sizes)

    if setting == "auto":
        able = [name for name, backend in BACKENDS.items() if features <= backend.features]
        chosen = next(name for name in able if not obstacle(name))
        log.info(
            "model.attention=auto takes %s on %s in %s, for %s",
            chosen,
            device,
            compute_dtype,
            sorted(features),
        )
        return chosen
    if problem := obstacle(setting):
        raise ConfigError(f"model.attention={setting} {problem}.")
    check_kernel_features(setting, "packed", features, model)
    return setting


@dataclass(frozen=True)
class RowAttention:
    kernel: PackedAttention
    states: StateRow

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, **features: Any
    ) -> Tensor:
        return self.kernel(query, key, value, scale, **features)


def packed_attention(backend: str, row: PackedRow, device: torch.device) -> RowAttention:
    return RowAttention(BACKENDS[backend].build(row, device), StateRow.of(row, device))


def _sdpa(row: PackedRow, device: torch.device) -> PackedAttention:
    """Call the kernel once a segment. On a CPU, batching segments of similar length gains nothing."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, scale: float, **features: Any
    ) -> Tensor:
        lengths = row.padded_lengths
        segments = zip(
            query.split(lengths, 2),
            key.split(lengths, 2),
            value.split(lengths, 2),
            strict=True,
        )
        outputs = [_attend_segment(*segment, scale, **features) for segment in segments]
        return torch.cat(outputs, dim=2).transpose(1, 2)

    return attend


def _attend_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [1, H, L, D] -> [1, H, L, D]. With a window, block by block of queries: cost grows linearly with
    L.
    """
    length = query.shape[2]
    if softcap is not None or sinks is not None:
        return block_attention(query, key, value, scale, window, softcap, sinks)
    if window is None or window >= length:
        return _kernel(query, key, value, is_causal=True, scale=scale)
    blocks = []
    for block in query_blocks(length, window):
        rows = slice(block.start, block.stop)
        seen = slice(block.first, block.stop)
        visible = block.visible(window, query.device)
        blocks.append(
            _kernel(
                query[:, :, rows],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=visible,
                scale=scale,
            )
        )
    return torch.cat(blocks, dim=2)


def _kernel(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    if query.device.type == "cuda":
        # Few kernels take grouped heads with a mask or in single precision. The fallback holds all scores in
        # memory.
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **arguments)


FlashImplementation = Literal["FA4", "FA3"] | None
"""Of flash operators: FlashAttention 4 or 3, or torch's own."""
IMPLEMENTATIONS: dict[str, FlashImplementation] = {"flash4": "FA4", "flash3": "FA3"}


def flash_implementation(
    setting: str,
    device: torch.device,
    compute_dtype: torch.dtype,
    installed: Installed | None = None,
    head_sizes: frozenset[int] = frozenset(),
) -> FlashImplementation:
    """Choose for all rows of an engine: plain ones, those with shared prefixes, and parts of a ring."""
    if device.type != "cuda" or compute_dtype.itemsize != 2:
        return None
    installed = installed or Installed.here(device)
    allowed = IMPLEMENTATIONS if setting == "auto" else IMPLEMENTATIONS.keys() & {setting}
    usable = [
        kernel for kernel in allowed if not BACKENDS[kernel].obstacle(installed, head_sizes)
    ]
    return IMPLEMENTATIONS[usable[0]] if usable else None


def use_flash_implementation(implementation: FlashImplementation) -> None:
    """Let flash operators call it. "FA3" imports `flash_attn_interface`, "FA4" `flash_attn.cute`.

    Through torch, torch.compile traces "FA3", the FLOP counter counts it, and the operators that sinks and
    rings call use it. "FA4" has operators here.
    """
    current = "FA4" if uses_flash4() else current_flash_attention_impl()
    if current == implementation:
        return
    log.info("flash attention: %s", implementation or "torch's own")
    use_flash4(implementation == "FA4")
    if implementation == "FA3":
        activate_flash_attention_impl(implementation)
    elif current == "FA3":
        restore_flash_attention_impl()


def _torch_varlen(row: PackedRow, device: torch.device) -> PackedAttention:
    """Use torch's flash attention over all segments at once."""
    from torch.nn.attention.varlen import varlen_attn

    segments = Segments.of(row.padded_lengths, device)
    bounds = segments.bounds
    longest = segments.longest

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        enable_gqa = query.shape[1] != key.shape[1]
        query, key, value = _tokens_first(query, key, value)
        if sinks is not None:
            return sink_attention(
                query, key, value, sinks, segments, scale, window
            ).unsqueeze(0)
        output = varlen_attn(
            query,
            key,
            value,
            bounds,
            bounds,
            longest,
            longest,
            scale=scale,
            window_size=window_size(True, window),
            enable_gqa=enable_gqa,
        )
        return output.unsqueeze(0)

    return attend


def _flash4(row: PackedRow, device: torch.device) -> PackedAttention:
    segments = Segments.of(row.padded_lengths, device)
    bounds = segments.bounds
    longest = segments.longest

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        query, key, value = _tokens_first(query, key, value)
        if sinks is not None:
            return sink_attention(
                query, key, value, sinks, segments, scale, window
            ).unsqueeze(0)
        output, _lse = flash4_attention(
            query, key, value, bounds, bounds, longest, longest, True, window, scale
        )
        return output.unsqueeze(0)

    return attend


def _flash(row: PackedRow, device: torch.device) -> PackedAttention:
    from flash_attn import flash_attn_varlen_func

    segments = Segments.of(row.padded_lengths, device)
    bounds = segments.bounds
    longest = segments.longest

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        output = flash_attn_varlen_func(
            *_tokens_first(query, key, value),
            bounds,
            bounds,
            longest,
            longest,
            softmax_scale=scale,
            causal=True,
            window_size=window_size(True, window),
            softcap=softcap or 0.0,
        )
        return output.unsqueeze(0)

    return attend


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor[0].transpose(0, 1) for tensor in tensors)


BACKENDS = {
    "flash4": Backend(
        _flash4,
        KERNEL_FEATURES["packed"]["flash4"],
        package=flash4.PACKAGE,
        generations=flash4.GENERATIONS,
        distribution=flash4.DISTRIBUTION,
        head_problem=flash4.head_size_problem,
    ),
    "flash3": Backend(
        _torch_varlen,
        KERNEL_FEATURES["packed"]["flash3"],
        package="flash_attn_interface",
        generations=(9,),
    ),
    "varlen": Backend(_torch_varlen, KERNEL_FEATURES["packed"]["varlen"]),
    "flash": Backend(_flash, KERNEL_FEATURES["packed"]["flash"], package="flash_attn"),
    "sdpa": Backend(_sdpa, KERNEL_FEATURES["packed"]["sdpa"]),
}
"""In the order in which `auto` prefers them."""

# Arguments of transformers' layers that an attention function must not ignore: those computed here, with
# their names in PackedAttention, and those refused.
COMPUTED_FEATURES = {"sliding_window": "window", "softcap": "softcap", "s_aux": "sinks"}
REFUSED_FEATURES = ("position_bias", "cache")


def ballast_packed(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_attention: Any = None,
    indices: Tensor | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    packed_attention: a `PackedAttention`. indices: tokens that an indexer selected, see `selected_attention`.

    Raises UnsupportedModelError, naming the module, for a feature that is not supported (a mask, a cache, a
    position bias, dropout), or another window than the configuration states.
    """
    name = type(module).__name__
    if packed_attention is None:
        raise UnsupportedModelError(
            f"{name} was called without packed_attention: the model does not pass it to its layers"
        )
    refused_features = [
        feature for feature in REFUSED_FEATURES if features.get(feature) is not None
    ]
    if attention_mask is not None and indices is None:  # with them it is `NO_MASK`
        refused_features.append("attention_mask")
    if dropout:
        refused_features.append("dropout")
    if key.shape[2] != query.shape[2]:
        refused_features.append("past_key_values")
    if refused_features:
        raise UnsupportedModelError(
            f"{name} uses {', '.join(refused_features)}, which packed attention does not compute"
        )
    _check_window(module, features.get("sliding_window"))
    computed = {
        ours: features[theirs]
        for theirs, ours in COMPUTED_FEATURES.items()
        if features.get(theirs) is not None
    }
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"{name} is not causal: it looks at later tokens, which packed attention does not"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, values = _of_one_size(query, key, value)
    if indices is not None and indices.shape[-1]:
        output = selected_attention(
            query, key, values, scale, packed_attention.states.lengths, indices, **computed
        )
    else:
        output = packed_attention(query, key, values, scale, **computed)
    # Some families take a view of the output.
    return output[..., : value.shape[-1]].contiguous(), None


def _of_one_size(*tensors: Tensor) -> list[Tensor]:
    """Pad heads [..., D] to the largest D: latent attention has smaller values than keys, and kernels need
    one size.
    """
    sizes = [tensor.shape[-1] for tensor in tensors]
    missing = [max(sizes) - size for size in sizes]
    return [
        F.pad(tensor, (0, count)) if count else tensor
        for tensor, count in zip(tensors, missing, strict=True)
    ]


def _check_window(module: torch.nn.Module, window: int | None) -> None:
    config = getattr(module, "config", None)
    index = getattr(module, "layer_idx", None)
    if config is None or index is None:
        return
    expected = expected_window(config, index)
    if window != expected:
        raise UnsupportedModelError(
            f"layer {index}, {type(module).__name__}, asks for sliding_window={window} where its "
            f"configuration says {expected}"
        )


AttentionInterface.register(ATTENTION_NAME, ballast_packed)
