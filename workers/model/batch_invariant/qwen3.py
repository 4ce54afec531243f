"""Replace the forward passes of a dense Qwen3's modules by those of the engine, in place.

    layer 0     norm --> q k v in one product --> norms of heads --> rotation --> attention --> o
                sum, norm of the sum --> gate and up in one product --> silu, product --> down
    layer 1..   norm of the sum --> ..

Parameters keep their names and places: sharding, checkpoints and updates of engines do not change. Of the
norms only the first and those of heads have no residual in vLLM. The sum of a residual is transformers',
which rounds as vLLM's kernel does.

Shapes: T packed tokens, E hidden size, H query heads, K key-value heads, D head dimension.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.model.attention.attention import ballast_packed
from workers.model.batch_invariant.kernels import check_card
from workers.model.batch_invariant.log_probs import read_engine_log_probs
from workers.model.batch_invariant.operators import (
    invariant_gate,
    invariant_linear,
    invariant_norm,
    invariant_rotation,
    rotary_table,
)

Table = Callable[[torch.device, torch.dtype], Tensor]
"""Returns the `rotary_table` of a model on a device."""


def compute_as_engines(packed: Any, device: torch.device) -> None:
    """Let a `PackedCausalLM` compute by vLLM's kernels. Raises ConfigError for another card."""
    check_card(device)
    use_engine_kernels(packed.model)
    packed.read_log_probs = read_engine_log_probs


def use_engine_kernels(model: PreTrainedModel) -> None:
    """Let the decoder of a Qwen3 compute by vLLM's kernels. Before its layers are wrapped."""
    decoder = model.base_model
    table = _table_of(model.config)
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        _replace_norm(layer.input_layernorm, of_sum=index > 0)
        _replace_norm(layer.post_attention_layernorm, of_sum=True)
        _replace_norm(attention.q_norm, of_sum=False)
        _replace_norm(attention.k_norm, of_sum=False)
        attention.forward = partial(_attend, attention, table)
        layer.mlp.forward = partial(_feed_forward, layer.mlp)
    _replace_norm(decoder.norm, of_sum=True)


def _table_of(config: PreTrainedConfig) -> Table:
    base = config.rope_parameters["rope_theta"]
    return cache(
        partial(rotary_table, config.max_position_embeddings, config.head_dim, base)
    )


def _replace_norm(norm: nn.Module, *, of_sum: bool) -> None:
    norm.forward = partial(_normalize, norm, of_sum)


def _normalize(norm: Any, of_sum: bool, hidden: Tensor) -> Tensor:
    rows = hidden.flatten(0, -2)
    result = invariant_norm(rows, norm.weight, norm.variance_epsilon, of_sum)
    return result.view(hidden.shape)


def _feed_forward(mlp: Any, hidden: Tensor) -> Tensor:
    tokens = hidden.flatten(0, -2)
    halves = invariant_linear(tokens, [mlp.gate_proj.weight, mlp.up_proj.weight])
    output = invariant_linear(invariant_gate(halves), [mlp.down_proj.weight])
    return output.view(hidden.shape)


def _attend(
    attention: Any,
    table: Table,
    hidden_states: Tensor,
    position_ids: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Take and return what transformers' Qwen3Attention does: hidden states [1, T, E]."""
    tokens = hidden_states[0]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    weights = [projection.weight for projection in projections]
    joined = invariant_linear(tokens, weights)
    sizes = [len(weight) for weight in weights]
    query, key, value = (
        part.unflatten(1, (-1, attention.head_dim)) for part in joined.split(sizes, dim=1)
    )
    query, key = invariant_rotation(
        attention.q_norm(query),
        attention.k_norm(key),
        position_ids[0],
        table(tokens.device, tokens.dtype),
    )
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    output, _ = ballast_packed(
        attention,
        query,
        key,
        value,
        attention_mask,
        scaling=attention.scaling,
        packed_attention=arguments["packed_attention"],
    )
    projected = invariant_linear(output[0].flatten(1), [attention.o_proj.weight])
    return projected.view(hidden_states.shape), None
