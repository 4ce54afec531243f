"""Experts with adapters on CPUs, where vLLM 0.32 has none: its choice for engines with LoRA is a kernel of
Triton.

engine with LoRA --experts adapted?--> AdaptedExperts   expert by expert, base and adapters in one pass
                         no -------> vLLM's kernel for CPUs, as without LoRA
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.platforms import current_platform

from workers.engine.adapters import EXPERTS
from workers.engine.cpu_kernels import groups_of_adapters


def gate_of_gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)


GATES: dict[MoEActivation, Callable[[Tensor, Tensor], Tensor]] = {
    MoEActivation.SILU: lambda gate, up: F.silu(gate) * up,
    MoEActivation.GELU: lambda gate, up: F.gelu(gate) * up,
    MoEActivation.GELU_TANH: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    MoEActivation.SWIGLUOAI: gate_of_gpt_oss,
}
"""What vLLM's kernel for CPUs takes, whose own functions take whole vectors only."""


class AdaptedExperts(LoRAExpertsMixin, CPUUnquantizedExperts):  # type: ignore[misc]  # vLLM has no types here
    """Compute experts and their adapters in torch."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they are. vLLM packs them for its kernel."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        *,
        apply_router_weight_on_input: bool,
        **options: Any,
    ) -> None:
        """Write sums over experts to output [tokens, hidden]. w1: [experts, 2 inner, hidden], w2: [experts,
        hidden, inner].
        """
        sums = output
        sums.zero_()
        for expert in topk_ids.unique().tolist():
            place = expert if expert_map is None else int(expert_map[expert])
            if place < 0:  # of another process
                continue
            tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
            rows = self._outputs(
                hidden_states[tokens], tokens, place, w1[place], w2[place], activation
            )
            if not apply_router_weight_on_input:
                rows = rows * topk_weights[tokens, choices, None].to(rows.dtype)
            sums.index_add_(0, tokens, rows)

    def _outputs(
        self,
        x: Tensor,
        tokens: Tensor,
        expert: int,
        w1: Tensor,
        w2: Tensor,
        activation: MoEActivation,
    ) -> Tensor:
        context = self._lora_context
        assert context is not None  # an engine without LoRA takes vLLM's kernel
        groups = groups_of_adapters(context.punica_wrapper.token_lora_indices[tokens])
        both = x @ w1.T
        if self.w1_bias is not None:
            both += self.w1_bias[expert]
        in_turn = activation == MoEActivation.SWIGLUOAI  # gpt-oss: of gate and up
        gate, up = (both[:, 0::2], both[:, 1::2]) if in_turn else both.chunk(2, dim=-1)
        gate_a, up_a = context.w13_lora_a_stacked
        gate_b, up_b = context.w13_lora_b_stacked
        _add(gate, x, gate_a, gate_b, expert, groups)
        _add(up, x, up_a, up_b, expert, groups)
        inner = GATES[activation](gate, up)
        rows = inner @ w2.T
        if self.w2_bias is not None:
            rows += self.w2_bias[expert]
        _add(
            rows,
            inner,
            context.w2_lora_a_stacked[0],
            context.w2_lora_b_stacked[0],
            expert,
            groups,
        )
        return rows


def _add(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    expert: int,
    groups: list[tuple[int, Tensor | slice]],
) -> None:
    """Add an expert's adapters to y [rows, outputs]. A: [adapters, experts, rank, inputs], B: [adapters,
    experts, outputs, rank].
    """
    for slot, rows in groups:
        y[rows] += x[rows] @ a[slot, expert].T @ b[slot, expert].T


def choose_experts(moe_config: FusedMoEConfig) -> tuple[Any, Any]:
    """Return vLLM's choice of a backend and of a class, as without adapters unless the experts have some."""
    backend, experts = choose_of_vllm(replace(moe_config, is_lora_enabled=False))
    lora = get_current_vllm_config().lora_config
    adapts = lora is not None and EXPERTS in (lora.target_modules or ())
    return backend, AdaptedExperts if adapts else experts


choose_of_vllm = unquantized_fused_moe_method.select_unquantized_moe_backend
if current_platform.is_cpu():
    unquantized_fused_moe_method.select_unquantized_moe_backend = choose_experts
