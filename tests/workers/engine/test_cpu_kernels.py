"""vLLM's kernels for norms, as they are offered to engines on a CPU, and adapters of a batch's tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper import get_punica_wrapper
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from workers.engine.cpu_kernels import NORMS, PROVIDER, GroupedAdapters


def arguments(name: str, x: torch.Tensor, weight: torch.Tensor | None) -> tuple[Any, ...]:
    """Of the operator: a norm of x, or of the sum of x and something else."""
    return (
        (x, weight, 1e-6)
        if name == "rms_norm"
        else (x, (x * 0.5).contiguous(), weight, 1e-6)
    )


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
# Of tokens, or of the heads of tokens.
@pytest.mark.parametrize("shape", [(7, 32), (1, 704), (7, 3, 96)])
def test_a_kernel_computes_what_vllm_computes_without_it(
    name: str, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]
):
    torch.manual_seed(0)
    given = arguments(
        name, torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    )
    operator = getattr(ir.ops, name)
    expected = operator.impls["native"].impl_fn(*given)
    with operator.set_priority([PROVIDER, "native"]):
        assert operator.dispatch(*given).provider == PROVIDER
        found = operator(*given)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NORMS)
def test_what_a_kernel_would_compute_wrongly_or_refuse_is_left_to_vllm(name: str):
    operator, ones = getattr(ir.ops, name), torch.ones
    with operator.set_priority([PROVIDER, "native"]):
        for x, weight in (
            (ones(7, 128)[:, :64], ones(64)),  # rows that are not next to each other
            (ones(7, 40), ones(40)),  # a part of a vector
            (ones(7, 64), None),
            (ones(7, 64, dtype=torch.bfloat16), ones(64)),
        ):
            assert operator.dispatch(*arguments(name, x, weight)).provider == "native"
        # Of 32 numbers.
        assert (
            operator.dispatch(*arguments(name, ones(7, 64), ones(64)), 32).provider
            == "native"
        )


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_experts_are_chosen_with_the_bias_and_weighted_without_it(
    scoring_func: str, has_bias: bool, renormalize: bool
) -> None:
    """As transformers' ERNIE 4.5 (softmax) and MiniMax M2 (sigmoid) route."""
    torch.manual_seed(0)
    logits = torch.randn(5, 4)
    bias = torch.tensor([0.0, 2.0, -1.0, 0.5]) if has_bias else None
    router = CPURouter(
        2,
        4,
        renormalize=renormalize,
        scoring_func=scoring_func,
        routed_scaling_factor=1.5,
        e_score_correction_bias=bias,
    )
    weights, experts = router._compute_routing(logits, logits, torch.int32)
    scores = (
        torch.softmax(logits, -1) if scoring_func == "softmax" else torch.sigmoid(logits)
    )
    for token in range(5):
        values = scores[token] + (bias if has_bias else 0)
        expected = sorted(range(4), key=lambda expert: -float(values[expert]))[:2]
        assert experts[token].tolist() == expected
        chosen = scores[token, expected]
        total = float(chosen.sum()) if renormalize else 1.0
        # vLLM scales plain softmax elsewhere.
        scale = 1.5 if has_bias or scoring_func == "sigmoid" else 1.0
        torch.testing.assert_close(weights[token], chosen / total * scale)


@pytest.mark.parametrize("is_neox", [True, False])
# Of each head, what another slice has in front of the rotated one.
@pytest.mark.parametrize("width", [0, 16])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_heads_are_rotated_alike_in_two_and_in_three_dimensions(
    dimensions: int, width: int, is_neox: bool
) -> None:
    """LFM2 and latent attention give the kernel queries of [tokens, heads, size], of parts of heads."""
    torch.manual_seed(0)
    tokens, heads, size = 7, 4, 32
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(size, size, 64, 10000.0, is_neox, torch.float32)
    query, key = (
        torch.randn(tokens, count, width + size)[..., width:] for count in (heads, 1)
    )
    if dimensions == 2:
        query, key = query.reshape(tokens, -1), key.reshape(tokens, -1)
    positions = torch.arange(tokens) + 5
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    result = rotary.forward_cpu(positions, query.clone(), key.clone())
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("tokens", [[5] * 6, [0] * 4, [7, 7, 0, 5, 0, 7, 5], [3, 0], [5]])
@pytest.mark.parametrize("is_prefill", [True, False])
def test_each_token_gets_what_its_own_adapter_adds(
    tokens: list[int], is_prefill: bool
) -> None:
    """tokens: adapter of each, 0 for none. Four places, of which one is free."""
    places: list[int | None] = [3, None, 5, 7]
    torch.manual_seed(0)
    adapters = get_punica_wrapper(16, 16, torch.device("cpu"))
    assert isinstance(adapters, GroupedAdapters)
    prompts = tuple(reversed(tokens))  # rows of logits are other ones
    adapters.update_metadata(
        LoRAMapping(tuple(tokens), prompts, is_prefill=is_prefill), places, len(places), 32
    )
    x, sizes = torch.randn(len(tokens), 6), (8, 4)
    a = tuple(torch.randn(len(places), 1, 3, 6) for _ in sizes)
    b = tuple(torch.randn(len(places), 1, size, 3) for size in sizes)

    def added(row: Tensor, adapter: int, which: int) -> Tensor:
        place = places.index(adapter) if adapter else 0
        return b[which][place, 0] @ (a[which][place, 0] @ row) * (2.0 if adapter else 0.0)

    y = torch.randn(len(tokens), 12)
    expected = y + torch.stack(
        [
            torch.cat([added(row, adapter, 0), added(row, adapter, 1)])
            for row, adapter in zip(x, tokens, strict=True)
        ]
    )
    adapters.add_lora_linear(y, x, a, b, 2.0, sizes)
    torch.testing.assert_close(y, expected)
    logits = torch.randn(len(tokens), 10)  # padded
    rows = [added(row, adapter, 0) for row, adapter in zip(x, prompts, strict=True)]
    expected = logits + torch.nn.functional.pad(torch.stack(rows), (0, 2))
    adapters.add_lora_logits(logits, x, a[0], b[0], 2.0)
    torch.testing.assert_close(logits, expected)
    embedded, looked_up = torch.randn(len(tokens), 4), torch.randn(len(tokens), 3)
    kept, looked = embedded.clone(), zip(looked_up, tokens, strict=True)
    adapters.add_lora_embedding(embedded, looked_up, b[1])
    added_rows = [
        b[1][places.index(adapter), 0] @ row if adapter else torch.zeros(4)
        for row, adapter in looked
    ]
    torch.testing.assert_close(embedded, kept + torch.stack(added_rows))
