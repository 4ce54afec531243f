"""Experts with adapters on a CPU add what each token's adapter adds to each of its experts."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

from workers.engine.cpu_experts import AdaptedExperts

normal = partial(torch.randn, dtype=torch.float64)
TOKENS, EXPERTS, ADAPTERS, HIDDEN, INNER, RANK = 9, 4, 2, 8, 6, 3


def make_experts(slots: Tensor) -> AdaptedExperts:
    torch.manual_seed(0)
    experts = AdaptedExperts.__new__(AdaptedExperts)  # its settings are of kernels
    experts.quant_config = FusedMoEQuantConfig.make()
    experts.set_lora_context(
        SimpleNamespace(
            w13_lora_a_stacked=tuple(
                normal(ADAPTERS, EXPERTS, RANK, HIDDEN) for _ in range(2)
            ),
            w13_lora_b_stacked=tuple(
                normal(ADAPTERS, EXPERTS, INNER, RANK) for _ in range(2)
            ),
            w2_lora_a_stacked=(normal(ADAPTERS, EXPERTS, RANK, INNER),),
            w2_lora_b_stacked=(normal(ADAPTERS, EXPERTS, HIDDEN, RANK),),
            punica_wrapper=SimpleNamespace(token_lora_indices=slots),
        )
    )
    return experts


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(
    "slots", [[0] * TOKENS, [-1] * TOKENS, [0, 1, -1, 1, 0, 0, -1, 1, 1]]
)
def test_a_tokens_experts_compute_with_its_adapter(
    slots: list[int], on_input: bool
) -> None:
    """on_input: whether the weight of an expert is in the token already."""
    experts = make_experts(torch.tensor(slots))
    lora = experts._lora_context
    w1, w2 = normal(EXPERTS, 2 * INNER, HIDDEN), normal(EXPERTS, HIDDEN, INNER)
    x = normal(TOKENS, HIDDEN)
    chosen = torch.rand(TOKENS, EXPERTS).topk(2).indices.to(torch.int32)
    weights = torch.rand(TOKENS, 2)

    def expected(token: int) -> Tensor:
        slot = slots[token]
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = (w1[expert] @ x[token]).chunk(2)
            if slot >= 0:
                (a, up_a), (b, up_b) = lora.w13_lora_a_stacked, lora.w13_lora_b_stacked
                gate = gate + b[slot, expert] @ a[slot, expert] @ x[token]
                up = up + up_b[slot, expert] @ up_a[slot, expert] @ x[token]
            inner = silu(gate) * up
            out = w2[expert] @ inner
            if slot >= 0:
                out = out + lora.w2_lora_b_stacked[0][slot, expert] @ (
                    lora.w2_lora_a_stacked[0][slot, expert] @ inner
                )
            total += out * (1 if on_input else weight)
        return total

    output = normal(TOKENS, HIDDEN)
    experts.apply(
        output,
        x,
        w1,
        w2,
        weights,
        chosen,
        MoEActivation.SILU,
        EXPERTS,
        None,
        apply_router_weight_on_input=on_input,
    )
    torch.testing.assert_close(
        output, torch.stack([expected(token) for token in range(TOKENS)])
    )
