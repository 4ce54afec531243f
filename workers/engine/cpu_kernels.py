"""Ways to compute on CPUs what vLLM 0.32 computes slowly or wrongly there.

    x --contiguous, whole vectors, weight of its type?--> vLLM's kernel for norms, offered to GPUs alone
                                                     no --> vLLM's own way, eight calls of torch
    tokens of an adapter, together --> two products        vLLM's own way copies the adapter for each token
    queries [tokens, heads, size] --flat--> rotary kernel  which rotates other numbers of three dimensions
    experts by score + correction bias                     vLLM's own way leaves out the bias, or sigmoids

The eight calls take a tenth of a small model's time. The engine's `ir_op_priority` names the kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops, ir
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

PROVIDER = "ballast_cpu"
NORMS = ("rms_norm", "fused_add_rms_norm")
LANES = 32  # numbers in the longest vector, of which a kernel takes whole ones


def _fits(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    plain = variance_size is None and weight is not None and weight.dtype == x.dtype
    return plain and x.is_contiguous() and x.shape[-1] % LANES == 0


def _norm_fits(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _fits(x, weight, variance_size)


def _sum_fits(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        _fits(x, weight, variance_size)
        and x_residual.is_contiguous()
        and x_residual.dtype == x.dtype
    )


@ir.ops.rms_norm.register_impl(
    PROVIDER, supports_args=_norm_fits, supported=current_platform.is_cpu()
)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """RMSNorm of the last dimension of x, times weight."""
    out = torch.empty_like(x)
    _custom_ops.rms_norm(out, x, weight, epsilon)
    return out


@ir.ops.fused_add_rms_norm.register_impl(
    PROVIDER, supports_args=_sum_fits, supported=current_platform.is_cpu(), inplace=True
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x + x_residual, their sum), in place of x and x_residual."""
    _custom_ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


class GroupedAdapters(PunicaWrapperCPU):
    """x A^T B^T of each adapter, for its tokens at once. Tokens without an adapter stay as they are."""

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **options: Any,
    ) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self._of_tokens, self._of_logits = (
            groups_of_adapters(self.token_lora_indices),
            groups_of_adapters(self.sampler_indices),
        )

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """Add to y [tokens, outputs]. x: [tokens, inputs]. A: [adapters, 1, rank, inputs], B: [adapters, 1,
        outputs of a slice, rank].
        """
        flat = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            for slot, rows in self._of_tokens:
                flat[rows, start : start + size] += (
                    x[rows] @ a[slot, 0].T @ b[slot, 0].T * scale
                )
            start += size

    def add_lora_embedding(
        self,
        y: Tensor,
        x: Tensor,
        lora_b_stacked: Tensor,
        add_inputs: bool = True,
        **options: Any,
    ) -> None:
        for slot, rows in self._of_tokens:
            y[rows] += x[rows] @ lora_b_stacked[slot, 0].T

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **options: Any,
    ) -> None:
        flat = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        for slot, rows in self._of_logits:
            added = x[rows] @ lora_a_stacked[slot, 0].T @ lora_b_stacked[slot, 0].T * scale
            flat[rows, : added.shape[-1]] += added


def groups_of_adapters(slots: Tensor) -> list[tuple[int, Tensor | slice]]:
    """Return adapters and their rows. slots: int64 [rows], -1 for none."""
    adapters = [slot for slot in slots.unique().tolist() if slot >= 0]
    if len(adapters) == 1 and bool((slots == adapters[0]).all()):
        return [(adapters[0], slice(0, len(slots)))]  # without copies
    return [(slot, (slots == slot).nonzero().flatten()) for slot in adapters]


if current_platform.is_cpu():
    type(current_platform).get_punica_wrapper = classmethod(
        lambda cls: f"{__name__}.{GroupedAdapters.__name__}"
    )


def rotate(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys, with the heads of a token next to each other.

    vLLM's kernel takes the last dimension for all heads. LFM2 and latent attention give it one head there:
    log-probs differed by 0.07 to 0.4 nats a token.
    """
    tokens = positions.shape[-1]
    flat_key = None if key is None else key.reshape(tokens, -1)
    flat_query, flat_key = rotate_flat(self, positions, query.reshape(tokens, -1), flat_key)
    return flat_query.view(query.shape), None if key is None else flat_key.view(key.shape)


rotate_flat = RotaryEmbedding.forward_cpu
if current_platform.is_cpu():
    RotaryEmbedding.forward_cpu = rotate


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
}


def route(
    self: CPURouter,
    hidden_states: Tensor,
    router_logits: Tensor,
    indices_type: torch.dtype | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return (weights float32, experts int32), both [tokens, top_k]. router_logits: [tokens, experts].

    Experts are those of the largest score + bias, weighted by their scores without the bias, as on GPUs.
    Without groups of experts, vLLM 0.32 on CPUs leaves out the bias of ERNIE 4.5, and asserts that MiniMax M2
    has no sigmoids.
    """
    has_bias = self.e_score_correction_bias is not None
    is_plain = self.scoring_func == "softmax" and not has_bias
    is_known = self.scoring_func in SCORES and self.custom_routing_function is None
    if self.use_grouped_topk or is_plain or not is_known:
        return route_without_bias(
            self, hidden_states, router_logits, indices_type, **options
        )
    scores = SCORES[self.scoring_func](router_logits.float())
    choice = scores + self.e_score_correction_bias if has_bias else scores
    experts = choice.topk(self.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if self.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * self.routed_scaling_factor, experts.to(torch.int32)


route_without_bias = CPURouter._compute_routing
if current_platform.is_cpu():
    CPURouter._compute_routing = route
