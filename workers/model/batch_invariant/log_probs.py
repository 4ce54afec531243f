"""Log-probs of targets by the kernels of vLLM's sampler: product, temperature and log-softmax as there.

    hidden [N, E] --chunk--> logits [n, V] --float32, / temperature--> log_probs [n]

Normalizer and entropy, and the backward pass, are those of `losses.logprobs`, from the same logits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.batch_invariant.kernels import load_kernels
from workers.model.losses.logprobs import Head, OutputLayer, _LinearLogProbs, chunks
from workers.model.rows.packing import ModelInput


def read_engine_log_probs(rows: ModelInput, layer: OutputLayer) -> tuple[Tensor, ...]:
    """Return (log_probs [N], entropy [N]) of the targets, as `model.read_log_probs`."""
    return _EngineLogProbs.apply(
        layer.hidden, layer.weight, layer.bias, rows.targets, layer.head, layer.chunk_tokens
    )


@torch.library.custom_op("ballast::engine_log_probs", mutates_args=())
def engine_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-prob, log-sum-exp and entropy of a chunk, float32 [n] each, at a temperature."""
    kernels = load_kernels()
    raw = kernels.linear_batch_invariant(hidden, weight, None)
    logits = torch.empty_like(raw, dtype=torch.float32).copy_(raw)
    rows = torch.zeros(len(hidden), dtype=torch.int32, device=hidden.device)
    # A division of Triton's, which rounds otherwise than torch's.
    kernels.apply_temperature(logits, rows, logits.new_full((1,), temperature))
    log_probs = kernels.compute_token_logprobs(logits, targets[:, None]).squeeze(1)
    normalizer = logits.logsumexp(-1)
    all_log_probs = logits.sub_(normalizer[:, None])
    entropy = all_log_probs.exp().mul_(all_log_probs).sum(-1).neg_()
    return log_probs, normalizer, entropy


@engine_log_probs.register_fake
def _log_prob_shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    # As much as the logits take, so that a simulated card counts them.
    logits = hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    return logits.amax(-1), logits.amax(-1), logits.amax(-1)


class _EngineLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        results = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in chunks(len(hidden), chunk_tokens):
            chunk = engine_log_probs(hidden[rows], weight, targets[rows], head.temperature)
            results[:, rows] = torch.stack(chunk)
        log_probs, normalizer, entropy = results.unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.head = head
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        return log_probs.clone(), entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return _LinearLogProbs.backward(ctx, grad_log_probs, grad_entropy)
