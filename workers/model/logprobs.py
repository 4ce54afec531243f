"""Log-probabilities and entropies of given tokens without the matrix of all logits.

    hidden [N, H] --chunk of n--> logits [n, V] --> log_probs [n], entropy [n]      logits of one chunk exist at a time,
    hidden, weight gradients <--chunk of n-- logits again <-- their gradients       forward and backward

N predicted tokens, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy under softmax((hidden @ weight.T + bias) / temperature).

    hidden [N, H], weight [V, H], bias [V] or None, targets int64 [N]. Returns (log_probs [N], entropy [N] in nats), in
    float32 (float64 for float64 input); both carry gradients to hidden, weight and bias. Memory beyond the inputs and
    their gradients is that of `chunk_tokens` rows of logits.
    """
    return _LinearLogProbs.apply(hidden, weight, bias, targets, float(temperature), chunk_tokens)


class _LinearLogProbs(torch.autograd.Function):
    """With z the scaled logits, p = softmax(z), Z = logsumexp(z), H = Z - sum_i p_i z_i:

    d log p_t / d z_i = [i = t] - p_i        d H / d z_i = -p_i (log p_i + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        normalizer, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for rows in _chunks(len(hidden), chunk_tokens):
            logits = _scaled_logits(hidden[rows], weight, bias, temperature, dtype)
            normalizer[rows] = logits.logsumexp(-1)
            all_log_probs = logits.sub_(normalizer[rows, None])
            log_probs[rows] = all_log_probs.gather(-1, targets[rows, None]).squeeze(-1)
            entropy[rows] = all_log_probs.exp().mul_(all_log_probs).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = normalizer.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            logits = _scaled_logits(hidden[rows], weight, bias, ctx.temperature, dtype)
            grad_logits = _grad_logits(
                logits.sub_(normalizer[rows, None]),
                targets[rows],
                entropy[rows],
                None if grad_log_probs is None else grad_log_probs[rows],
                None if grad_entropy is None else grad_entropy[rows],
            ).div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            # In the compute type from here on: the two products below are most of the cost.
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        return grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias), None, None, None


def _grad_logits(
    log_probs: Tensor, targets: Tensor, entropy: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient of the scaled logits [n, V] from log_probs [n, V] of the whole vocabulary and gradients [n]."""
    probs = log_probs.exp()
    if grad_entropy is None:
        grad = torch.zeros_like(probs)
    else:
        grad = log_probs.add_(entropy[:, None]).mul_(probs).mul_(-grad_entropy[:, None])
    if grad_log_probs is not None:
        grad -= probs.mul_(grad_log_probs[:, None])
        grad.scatter_add_(-1, targets[:, None], grad_log_probs[:, None])
    return grad


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype
) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _cast(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)
