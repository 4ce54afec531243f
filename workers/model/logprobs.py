"""Log-probabilities and entropies of given tokens without the matrix of all logits.

    hidden [N, H] --chunk of n--> logits [n, V] --> log_probs [n], entropy [n]      logits of one chunk exist at a time,
    hidden, weight gradients <--chunk of n-- logits again <-- their gradients       forward and backward

If ranks share the vocabulary, each has the logits of its part. They reduce the maximum, the sum of exponentials,
the target's log-probability and the entropy, [n] each, and the gradient of hidden.

N predicted tokens, H hidden size, V vocabulary (of this rank, if shared).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
    softcap: float | None = None,
    factor: float = 1.0,
    group: dist.ProcessGroup | None = None,
    first_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `targets` and entropy under softmax(cap(factor (hidden @ weight.T + bias)) / temperature).

        cap(x) = softcap * tanh(x / softcap)      (Gemma 2, Riviere et al. 2024, section 2), or x without a softcap

    hidden [N, H], weight [V, H], bias [V] or None, targets int64 [N]. Returns (log_probs [N], entropy [N] in nats), at
    least float32, with gradients to hidden, weight and bias. Extra memory: `chunk_tokens` rows of logits, twice in
    float32, more with a softcap or half precision.

    group: the ranks that share the vocabulary. Weight and bias are then the rows from `first_id` on. Hidden, targets,
    results and the gradient of hidden are the same on all ranks, if all use the results in the same way.
    """
    head = _Head(float(temperature), softcap or None, factor, group, first_id)
    return _LinearLogProbs.apply(hidden, weight, bias, targets, head, chunk_tokens)


@dataclass(frozen=True)
class _Head:
    temperature: float
    softcap: float | None
    factor: float
    group: dist.ProcessGroup | None
    first_id: int

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
        logits = logits if self.factor == 1.0 else logits.mul_(self.factor)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Return the derivative of `logits` by the raw logits, or None for 1."""
        slope = self.factor / self.temperature
        if self.softcap is None:
            return None if slope == 1.0 else slope
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1).mul_(slope)

    def logsumexp(self, logits: Tensor) -> Tensor:
        if self.group is None:
            return logits.logsumexp(-1)
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        return self.sum((logits - highest[:, None]).exp_().sum(-1)).log_().add_(highest)

    def sum(self, part: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(part, group=self.group)
        return part

    def own(self, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return (row of each target in this rank's part, or 0 if elsewhere, whether it is here), [n] each."""
        rows = targets - self.first_id
        mine = (rows >= 0) & (rows < size)
        return rows.where(mine, 0), mine


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
        head: _Head,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normalizer = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        results = torch.empty(2, len(hidden), dtype=dtype, device=hidden.device)
        for rows in _chunks(len(hidden), chunk_tokens):
            logits = head.logits(hidden[rows], weight, bias, dtype)
            normalizer[rows] = head.logsumexp(logits)
            all_log_probs = logits.sub_(normalizer[rows, None])
            ids, mine = head.own(targets[rows], len(weight))
            results[0, rows] = all_log_probs.gather(-1, ids[:, None]).squeeze(-1).where(mine, 0.0)
            results[1, rows] = all_log_probs.exp().mul_(all_log_probs).sum(-1).neg_()
            del logits, all_log_probs  # before the next chunk's exist
        log_probs, entropy = head.sum(results).unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.head, ctx.chunk_tokens = head, chunk_tokens
        ctx.set_materialize_grads(False)
        return log_probs.clone(), entropy.clone()  # otherwise autograd would keep one memory for both

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head, dtype = ctx.head, normalizer.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            logits = head.logits(hidden[rows], weight, bias, dtype)
            slope = head.slope(logits)
            ids, mine = head.own(targets[rows], len(weight))
            grad_logits = _grad_logits(
                logits.sub_(normalizer[rows, None]),
                ids,
                mine,
                entropy[rows],
                None if grad_log_probs is None else grad_log_probs[rows],
                None if grad_entropy is None else grad_entropy[rows],
            )
            if slope is not None:
                grad_logits.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            # Use the compute type below: these two products are most of the cost.
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[rows])
            del logits, slope, grad_logits  # before the next chunk's exist
        if grad_hidden is not None:
            head.sum(grad_hidden)
        return grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias), None, None, None


def _grad_logits(
    log_probs: Tensor,
    ids: Tensor,
    mine: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of the scaled logits [n, V], in the memory of log_probs [n, V] unless the entropy has a
    gradient.
    """
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(entropy)
    if grad_entropy is None:
        grad = log_probs.exp_().mul_(-grad_log_probs[:, None])
    else:
        grad = log_probs.exp()
        grad.mul_(log_probs.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_probs[:, None]))
    return grad.scatter_add_(-1, ids[:, None], grad_log_probs.where(mine, 0.0)[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _cast(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)
