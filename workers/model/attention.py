"""Causal attention within the segments of a packed row, as one function registered with transformers.

    Engine --PackedAttention--> model.forward(packed_attention=...) --> every layer --> ballast_packed --> kernel

The segments travel as an argument, so packing is never inferred. transformers infers it from `position_ids`, and misses
it without a word when a KV cache is made or when an all-ones mask is passed.

Shapes: T packed tokens, H query heads, K key-value heads (K divides H), D head dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from workers.errors import ConfigError, UnsupportedModelError
from workers.model.packing import PackedRow

ATTENTION_NAME = "ballast_packed"

# (query [1, H, T, D], key and value [1, K, T, D], scale) -> [1, T, H, D]
PackedAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def choose_backend(setting: str, device: torch.device, compute_dtype: torch.dtype) -> str:
    """`varlen` or `sdpa` from `model.attention`; `auto` is varlen where it can run: on CUDA in half precision.

    Raises ConfigError if `varlen` is asked for where it cannot run.
    """
    can_run_varlen = device.type == "cuda" and compute_dtype in (torch.bfloat16, torch.float16)
    if setting == "auto":
        return "varlen" if can_run_varlen else "sdpa"
    if setting == "varlen" and not can_run_varlen:
        raise ConfigError(
            f"model.attention=varlen needs a CUDA device and half precision, not {device.type} and {compute_dtype}; "
            "set model.attention=sdpa or model.dtype=bfloat16"
        )
    return setting


def packed_attention(backend: str, row: PackedRow, device: torch.device) -> PackedAttention:
    """The attention of one packed row, shared by all layers of a pass."""
    if backend == "sdpa":
        return _sdpa(row.lengths)
    return _varlen(row.cu_seqlens.to(device), row.max_length)


def _sdpa(lengths: tuple[int, ...]) -> PackedAttention:
    """One causal call a segment. Batching segments of like length gains nothing on CPU: gathering costs as much."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        segments = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
        outputs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            for q, k, v in segments
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2)

    return attend


def _varlen(cu_seqlens: Tensor, max_length: int) -> PackedAttention:
    """Flash attention over all segments at once (`torch.nn.attention.varlen`, CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        output = varlen_attn(
            query,
            key,
            value,
            cu_seqlens,
            cu_seqlens,
            max_length,
            max_length,
            scale=scale,
            window_size=(-1, 0),  # causal
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.unsqueeze(0)

    return attend


def ballast_packed(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_attention: PackedAttention | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises UnsupportedModelError, naming the module, if the layer asks for something that would change the result and is
    not computed here: a mask, a cache, a sliding window, soft-capping, sinks, a position bias, dropout.
    """
    name = type(module).__name__
    if packed_attention is None:
        raise UnsupportedModelError(
            f"{name} was called without packed_attention: the model does not pass it to its layers"
        )
    asked = [feature for feature in REFUSED_FEATURES if features.get(feature) is not None]
    if attention_mask is not None:
        asked.append("attention_mask")
    if dropout:
        asked.append("dropout")
    if key.shape[2] != query.shape[2]:
        asked.append("past_key_values")
    if asked:
        raise UnsupportedModelError(f"{name} uses {', '.join(asked)}, which packed attention does not compute")
    return packed_attention(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


# Under these names transformers' layers hand over what an attention function must not ignore.
REFUSED_FEATURES = ("sliding_window", "softcap", "s_aux", "position_bias", "indices", "cache")

AttentionInterface.register(ATTENTION_NAME, ballast_packed)
