"""Log-probabilities and entropies of given tokens without the matrix of all logits.

    hidden [N, H] --chunk of n--> logits [n, V] --> log_probs [n], entropy [n]
    hidden, weight gradients <--chunk of n-- logits again <-- their gradients

The logits of one chunk exist at a time, forward and backward.

If ranks share the vocabulary, each has the logits of its part. They reduce the maximum, the sum of
exponentials, the target's log-probability and the entropy, [n] each, and the gradient of hidden.

N predicted tokens, H hidden size, V vocabulary (of this rank, if shared).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_GRAPHS = 64
"""Compiled graphs of one function. Beyond dynamo's default of 8 it runs uncompiled. Two kinds of layers with
adapters exceed 8.
"""


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
    """Return log-probs of `targets` and entropy under softmax(cap(factor (hidden @ weight.T + bias)) /
    temperature).

        cap(x) = softcap * tanh(x / softcap)   (Gemma 2, Riviere et al. 2024), or x without a softcap

    hidden [N, H], weight [V, H], bias [V] or None, targets int64 [N]. Returns (log_probs [N], entropy [N] in
    nats), at least float32, with gradients to hidden, weight and bias. Extra memory: `chunk_tokens` rows of
    logits, twice in float32, more with a softcap or half precision.

    group: the ranks that share the vocabulary. Weight and bias are then the rows from `first_id` on. Hidden,
    targets, results and the gradient of hidden are the same on all ranks, if all use the results in the same
    way.
    """
    head = Head(float(temperature), softcap or None, factor, group, first_id)
    return log_probs_of(OutputLayer(hidden, weight, bias, head, chunk_tokens), targets)


def log_probs_of(layer: "OutputLayer", targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probs [N], entropy [N]), see `linear_log_probs`."""
    return _LinearLogProbs.apply(
        layer.hidden, layer.weight, layer.bias, targets, layer.head, layer.chunk_tokens
    )


@dataclass(frozen=True)
class Head:
    """What turns raw logits into log-probs, and the ranks that share the vocabulary, see
    `linear_log_probs`.
    """

    temperature: float
    softcap: float | None
    factor: float
    group: dist.ProcessGroup | None
    first_id: int

    def scaled(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        logits = raw.to(dtype)
        logits = logits if self.factor == 1.0 else logits.mul_(self.factor)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float | None:
        """Return the derivative of `logits` by the raw logits, or None for 1."""
        slope = self.factor / self.temperature
        if self.softcap is None:
            return None if slope == 1.0 else slope
        return (
            (logits * (self.temperature / self.softcap))
            .square_()
            .neg_()
            .add_(1)
            .mul_(slope)
        )

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
        """Return (row of each target in this rank's part, or 0 if elsewhere, whether it is here),
        [n] each.
        """
        rows = targets - self.first_id
        mine = (rows >= 0) & (rows < size)
        return rows.where(mine, 0), mine


@dataclass(frozen=True)
class OutputLayer:
    """The output layer and its input, see `linear_log_probs`. chunk_tokens: rows of logits that exist at a
    time.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    head: Head
    chunk_tokens: int


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
        head: Head,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normalizer = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        results = torch.empty(2, len(hidden), dtype=dtype, device=hidden.device)
        predict, _ = _chunk_functions(hidden.device.type, head.group is not None)
        for rows in chunks(len(hidden), chunk_tokens):
            raw = F.linear(hidden[rows], weight, bias)
            normalizer[rows], results[0, rows], results[1, rows] = predict(
                raw, *head.own(targets[rows], len(weight)), head, dtype
            )
            del raw  # before the next chunk's exist
        log_probs, entropy = head.sum(results).unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.head = head
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        # Otherwise autograd would keep one memory for both.
        return (log_probs.clone(), entropy.clone())

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        head = ctx.head
        _, differentiate = _chunk_functions(hidden.device.type, head.group is not None)

        def of_logits(rows: slice, raw: Tensor) -> tuple[Tensor, Tensor | None]:
            chunk_gradients: tuple[Tensor, Tensor | None] = differentiate(
                raw,
                *head.own(targets[rows], len(weight)),
                normalizer[rows],
                entropy[rows],
                None if grad_log_probs is None else grad_log_probs[rows],
                None if grad_entropy is None else grad_entropy[rows],
                head,
                ctx.needs_input_grad[2],
            )
            return chunk_gradients

        layer = hidden, weight, bias
        gradients = layer_gradients(
            layer,
            ctx.needs_input_grad[:3],
            normalizer.dtype,
            head,
            ctx.chunk_tokens,
            of_logits,
        )
        return *gradients, None, None, None


def layer_gradients(
    layer: tuple[Tensor, Tensor, Tensor | None],
    needed: Sequence[bool],
    dtype: torch.dtype,
    head: Head,
    chunk_tokens: int,
    of_logits: Callable[[slice, Tensor], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of an output layer (hidden, weight, bias), those that are `needed`, chunk by
    chunk.

    dtype: of the sums over chunks. of_logits: given a chunk's rows and raw logits [n, V], which it may
    overwrite, returns their gradient, and its sum over rows [V] if the bias needs it.
    """
    hidden, weight, bias = layer
    grad_hidden = torch.empty_like(hidden) if needed[0] else None
    grad_weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
    grad_bias = (
        torch.zeros_like(bias, dtype=dtype) if needed[2] and bias is not None else None
    )
    for rows in chunks(len(hidden), chunk_tokens):
        raw = F.linear(hidden[rows], weight, bias)
        grad_logits, bias_sum = of_logits(rows, raw)
        if grad_bias is not None:
            grad_bias += bias_sum
        if grad_hidden is not None:
            grad_hidden[rows] = grad_logits @ weight
        if grad_weight is not None:
            _add_product(grad_weight, grad_logits.T, hidden[rows])
        del raw, grad_logits  # before the next chunk's exist
    if grad_hidden is not None:
        head.sum(grad_hidden)
    return grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias)


def _predict(
    raw: Tensor, ids: Tensor, mine: Tensor, head: Head, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp, log-prob of `ids` where `mine`, and entropy, [n] each. May overwrite raw logits [n,
    V].
    """
    logits = head.scaled(raw, dtype)
    normalizer = head.logsumexp(logits)
    all_log_probs = logits.sub_(normalizer[:, None])
    log_probs = all_log_probs.gather(-1, ids[:, None]).squeeze(-1).where(mine, 0.0)
    return normalizer, log_probs, all_log_probs.exp().mul_(all_log_probs).sum(-1).neg_()


def _differentiate(
    raw: Tensor,
    ids: Tensor,
    mine: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    head: Head,
    needs_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of raw logits [n, V], in their dtype, and its sum over rows [V] if needed."""
    logits = head.scaled(raw, normalizer.dtype)
    slope = head.slope(logits)
    log_probs = logits.sub_(normalizer[:, None])
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(entropy)
    if grad_entropy is None:
        grad = log_probs.exp_().mul_(-grad_log_probs[:, None])
    else:
        grad = log_probs.exp()
        grad.mul_(
            log_probs.add_(entropy[:, None])
            .mul_(-grad_entropy[:, None])
            .sub_(grad_log_probs[:, None])
        )
    at_target = grad_log_probs.where(mine, 0.0)[:, None]
    # A scatter would end the kernel and write the matrix once more.
    if torch.compiler.is_compiling():
        grad += at_target.where(
            torch.arange(grad.shape[1], device=ids.device) == ids[:, None], 0.0
        )
    else:
        grad.scatter_add_(-1, ids[:, None], at_target)
    if slope is not None:
        grad.mul_(slope)
    # The products with weight and hidden are most of the cost, so they use the compute type.
    return grad.to(raw.dtype), grad.sum(0) if needs_bias else None


@cache
def _chunk_functions(
    device: str, shares_vocabulary: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile the passes over a chunk's logits on GPUs, where each pass takes as long as its memory traffic.

    On an H200, 1.5B parameters and a vocabulary of 151,936, they took 121 of 656 ms of a micro-batch.
    """
    # The reductions over ranks would split the kernels.
    if device != "cuda" or shares_vocabulary:
        return _predict, _differentiate
    compiled = partial(torch.compile, recompile_limit=MOST_GRAPHS)
    return compiled(_predict), compiled(_differentiate)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _cast(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)
