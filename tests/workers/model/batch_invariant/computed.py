"""Compute what `test_kernels` compares, by vLLM's kernels in Triton's interpreter, and write it to a file.

    python -m tests.workers.model.batch_invariant.computed FILE

In a process of its own: the interpreter and vLLM's switches are chosen at import.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import tests.workers.model.batch_invariant.interpreter  # noqa: F401
from workers.batch.dataproto import DataProto
from workers.config.model import ModelConfig
from workers.model.attention.attention import (
    ATTENTION_NAME,
    RowAttention,
    packed_attention,
)
from workers.model.attention.state_rows import StateRow
from workers.model.batch_invariant.kernels import load_kernels
from workers.model.batch_invariant.log_probs import read_engine_log_probs
from workers.model.batch_invariant.operators import (
    invariant_gate,
    invariant_linear,
    invariant_norm,
    invariant_rotation,
    rotary_table,
)
from workers.model.batch_invariant.paged_row import (
    BLOCK_TOKENS,
    _in_blocks,
    invariant_attention,
    lay_blocks,
    paged_attention,
)
from workers.model.batch_invariant.qwen3 import use_engine_kernels
from workers.model.model import PackedCausalLM
from workers.model.rows.packing import PackedRow, pack

CPU = torch.device("cpu")
LENGTHS = (5, 2, 37, 18)
"""One longer than a tile of the attention's keys, and one shorter than a block."""
VOCABULARY = 150
"""More than a block of columns of the product."""
TEMPERATURE = 0.7


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def with_gradients(function: Any, *inputs: Tensor) -> dict[str, Any]:
    """Return the inputs, outputs, and gradients of the outputs' weighted sum."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [drawn(*output.shape, 1)[..., 0] for output in outputs]
    total = sum(
        (output * weight).sum() for output, weight in zip(outputs, weights, strict=True)
    )
    return {
        "inputs": inputs,
        "outputs": [output.detach() for output in outputs],
        "weights": weights,
        "gradients": torch.autograd.grad(total, leaves),
    }


def of_operators() -> dict[str, Any]:
    positions = torch.tensor([0, 1, 2, 40, 41])
    table = rotary_table(64, 16, 10_000.0, CPU, torch.float32)
    lengths = [5, 2, 37]
    laid = (
        *lay_blocks(lengths),
        torch.tensor([0, 5, 7, 44], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
    )
    return {
        "linear": with_gradients(
            lambda tokens, *weights: invariant_linear(tokens, list(weights)),
            drawn(5, 40),
            drawn(130, 40),
            drawn(24, 40),
        ),
        "norm": with_gradients(
            lambda rows, weight: invariant_norm(rows, weight, 1e-6, False),
            drawn(5, 3, 48),
            drawn(48),
        ),
        "norm of a sum": with_gradients(
            lambda rows, weight: invariant_norm(rows, weight, 1e-6, True),
            drawn(5, 48),
            drawn(48),
        ),
        "gate": with_gradients(invariant_gate, drawn(5, 64)),
        "rotation": with_gradients(
            lambda query, key: invariant_rotation(query, key, positions, table),
            drawn(5, 4, 16),
            drawn(5, 2, 16),
        ),
        "attention": with_gradients(
            lambda query, key, value: invariant_attention(
                query, key, value, *laid, lengths, 0.3
            ),
            drawn(44, 4, 32),
            drawn(44, 2, 32),
            drawn(44, 2, 33)[..., :32],
        ),
    }


def tiny_qwen3() -> PackedCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).float()
    model.set_attn_implementation(ATTENTION_NAME)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return PackedCausalLM(model, ModelConfig(path="", logprob_chunk_tokens=16))


def sequences(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    drawn_ids = [
        torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths
    ]
    return [ids.tolist() for ids in drawn_ids]


def row_of(ids: Sequence[list[int]], *, paged: bool) -> PackedRow:
    records = [
        {"input_ids": row, "loss_mask": [False] + [True] * (len(row) - 1)} for row in ids
    ]
    row = pack(DataProto.from_list(records))
    if not paged:
        return replace(row, attention=packed_attention("sdpa", row, CPU))
    attention = RowAttention(paged_attention(row, CPU), StateRow.of(row, CPU))
    return replace(row, attention=attention)


def log_probs_of_a_model() -> dict[str, Any]:
    """Return log-probs of a packed row, of its sequences alone, and by transformers' own modules."""
    ids = sequences(LENGTHS)
    ordinary = tiny_qwen3()
    model = tiny_qwen3()
    use_engine_kernels(model.model)
    model.read_log_probs = read_engine_log_probs
    names = [name for name, _ in model.named_parameters()]
    results: dict[str, Any] = {"names": names}
    for key, module, paged in (("ordinary", ordinary, False), ("packed", model, True)):
        log_probs, entropy = module(row_of(ids, paged=paged), TEMPERATURE)
        loss = log_probs.mean() + 0.1 * entropy.mean()
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        results[key] = (log_probs.detach(), entropy.detach(), gradients)
    with torch.no_grad():
        results["reversed"] = model(row_of(ids[::-1], paged=True), TEMPERATURE)[0]
        results["alone"] = [
            model(row_of([sequence], paged=True), TEMPERATURE)[0] for sequence in ids
        ]
    return results


def decoded_attention() -> dict[str, Tensor]:
    """Return the attention of a segment's last token from the row, and alone, as an engine decodes it."""
    length = 37
    query, key, value = drawn(length, 4, 32), drawn(length, 2, 32), drawn(length, 2, 31)
    value = torch.cat([value, drawn(length, 2, 1)], dim=-1)
    slots, table = lay_blocks([length])
    bounds = torch.tensor([0, length], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    whole = invariant_attention(
        query, key, value, slots, table, bounds, lengths, [length], 0.3
    )
    blocks = -(-length // BLOCK_TOKENS)
    decoded = torch.empty(1, 4, 32)
    load_kernels().unified_attention(
        q=query[-1:],
        k=_in_blocks(key, slots, blocks),
        v=_in_blocks(value, slots, blocks),
        out=decoded,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=length,
        softmax_scale=0.3,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return {"whole": whole[-1:], "decoded": decoded}


def of_engine_layers() -> dict[str, tuple[Tensor, Tensor]]:
    """Return what vLLM's layers compute on cards, and what the operators do, from the same numbers."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope

    hidden, residual, weight = drawn(5, 48), drawn(5, 49)[:, :48], drawn(48)
    query, key = drawn(5, 4, 16), drawn(5, 2, 16)
    positions = torch.tensor([0, 1, 2, 40, 41])
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(48, eps=1e-6)
        rope = get_rope(
            16,
            max_position=64,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            dtype=torch.float32,
        )
    norm.weight.data = weight
    table = rotary_table(64, 16, 10_000.0, CPU, torch.float32)
    alone = norm.forward_cuda(hidden.clone())
    added, total = norm.forward_cuda(hidden.clone(), residual.clone())
    engine_query, engine_key = rope.forward_cuda(
        positions, query.flatten(1).clone(), key.flatten(1).clone()
    )
    our_query, our_key = invariant_rotation(query, key, positions, table)
    return {
        "norm": (alone, invariant_norm(hidden, weight, 1e-6, False)),
        "sum": (total, residual + hidden),
        "norm of a sum": (added, invariant_norm(residual + hidden, weight, 1e-6, True)),
        "table": (rope.cos_sin_cache, table),
        "query": (engine_query, our_query.flatten(1)),
        "key": (engine_key, our_key.flatten(1)),
    }


def main() -> None:
    results = {
        "engine layers": of_engine_layers(),
        "operators": of_operators(),
        "model": log_probs_of_a_model(),
        "decoding": decoded_attention(),
    }
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
