"""Divergence of a student's next-token distribution from a teacher's, without the matrix of all logits.

    student's hidden [N, H]  --chunk of n--> log-probs [n, V] --+
    teacher's hidden [N, H'] --chunk of n--> log-probs [n, V] --+--> divergence [N]     over the vocabulary
    teacher's k likeliest tokens [N, k], and the rest as one ---+                       over k + 1 events

The gradient goes to the student alone. With p the student, q the teacher, both softmax of logits over a
temperature, and z the student's scaled logits, over events e:

    reverse_kl    D = sum p log(p / q)                              w = p log(p / q)
    forward_kl    D = sum q log(q / p)                              w = -q
    jsd           D = (KL(p | m) + KL(q | m)) / 2, m = (p + q) / 2  w = p log(p / m) / 2
    d D / d z_i = p_i (w_e / p_e - sum w)                           e: the event of token i

(Agarwal et al. 2024, arXiv:2306.13649, section 3, whose jsd has beta = 1/2 here.) A divergence over k + 1
events is a lower bound of the one over the vocabulary: merging events never raises it. If ranks share the
vocabulary, they reduce sums, as in `logprobs`.

N predicted tokens, V vocabulary (of this rank, if shared).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.model.losses.logprobs import Head, OutputLayer, chunks, layer_gradients

# Of the rest of the vocabulary: its gradient divides by its probability.
LEAST_LOG_PROB = -60.0


@dataclass(frozen=True)
class TeacherLayer:
    """A teacher's output layer. weight: [V, H'], bias: [V] or None, of the tokens that both models have."""

    weight: Tensor
    bias: Tensor | None
    head: Head

    def log_probs(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        logits = self.head.scaled(F.linear(hidden, self.weight, self.bias), dtype)
        return logits.sub_(self.head.logsumexp(logits)[:, None])


def linear_divergence(
    layer: OutputLayer,
    divergence: str,
    *,
    teacher: TeacherLayer | None = None,
    teacher_hidden: Tensor | None = None,
    ids: Tensor | None = None,
    log_probs: Tensor | None = None,
) -> Tensor:
    """Return the divergence at each token, nats, [N], at least float32, with gradients to the layer.

    Over the vocabulary with the `teacher`'s layer and hidden states [N, H'], else over its likeliest tokens,
    `ids` int64 [N, k], by their `log_probs` [N, k + 1], the last of all other tokens.
    """
    leaves = (layer.hidden, layer.weight, layer.bias)
    rest = (layer.head, divergence, layer.chunk_tokens)
    if teacher is not None:
        return _OverVocabulary.apply(*leaves, teacher_hidden, teacher, *rest)
    return _OverTop.apply(*leaves, ids, log_probs, *rest)


def terms(divergence: str, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the events' parts of the divergence, and w, both as log_p, see the module's formulas."""
    if divergence == "forward_kl":
        q = log_q.exp()
        return q * (log_q - log_p), -q
    if divergence == "reverse_kl":
        part = log_p.exp() * (log_p - log_q)
        return part, part
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    part = log_p.exp() * (log_p - log_m) / 2
    return part + log_q.exp() * (log_q - log_m) / 2, part


def top_log_probs(layer: OutputLayer, *, count: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the ids int64 [N, k] of the `count` likeliest of the first `tokens` tokens, likeliest first, and
    log-probs [N, k + 1], the last of all other tokens."""
    hidden = layer.hidden
    weight = layer.weight
    head = layer.head
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    ids = torch.zeros(len(hidden), count, dtype=torch.int64, device=hidden.device)
    log_probs = torch.zeros(len(hidden), count + 1, dtype=dtype, device=hidden.device)
    for rows in chunks(len(hidden), layer.chunk_tokens):
        logits = head.scaled(F.linear(hidden[rows], weight, layer.bias), dtype)
        column_count = max(0, min(len(weight), tokens - head.first_id))
        top_logits, places = logits[:, :column_count].topk(min(count, column_count))
        missing = 0, count - top_logits.shape[1]
        top_logits = _of_all(head, F.pad(top_logits, missing, value=-math.inf))
        places = _of_all(head, F.pad(places + head.first_id, missing))
        best = top_logits.topk(count).indices
        ids[rows] = places.gather(-1, best)
        total = head.logsumexp(logits)
        log_probs[rows, :count] = top_logits.gather(-1, best) - total[:, None]
        log_probs[rows, count] = (
            _rest(logits, *head.own(ids[rows], len(weight)), head) - total
        )
    return ids, log_probs.clamp_(min=LEAST_LOG_PROB)


def _of_all(head: Head, values: Tensor) -> Tensor:
    if head.group is None:
        return values
    parts = [torch.empty_like(values) for _ in range(head.group.size())]
    dist.all_gather(parts, values.contiguous(), group=head.group)
    return torch.cat(parts, dim=-1)


def _rest(logits: Tensor, places: Tensor, mine: Tensor, head: Head) -> Tensor:
    """Return logsumexp of the logits [n, V] outside `places` [n, k], of which those that are `mine` are here:
    [n].
    """
    is_top = torch.zeros(
        len(logits), logits.shape[1] + 1, dtype=torch.bool, device=logits.device
    )
    is_top.scatter_(-1, places.where(mine, logits.shape[1]), True)
    return head.logsumexp(logits.masked_fill(is_top[:, :-1], torch.finfo(logits.dtype).min))


class _OverVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        layer: TeacherLayer,
        head: Head,
        divergence: str,
        chunk_tokens: int,
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.empty(2, len(hidden), dtype=dtype, device=hidden.device)
        ctx.of_chunk = _log_probs_of_both(layer, head, dtype, teacher_hidden)
        for rows in chunks(len(hidden), chunk_tokens):
            _, log_p, log_q = ctx.of_chunk(rows, F.linear(hidden[rows], weight, bias))
            for total, part in zip(sums, terms(divergence, log_p, log_q), strict=True):
                total[rows] = part.sum(-1)
        divergences, total_w = head.sum(sums).unbind()
        ctx.save_for_backward(hidden, weight, bias, total_w)
        ctx.head = head
        ctx.divergence = divergence
        ctx.chunk_tokens = chunk_tokens
        return divergences.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, total_w = ctx.saved_tensors

        def of_logits(rows: slice, raw: Tensor) -> tuple[Tensor, Tensor | None]:
            slope, log_p, log_q = ctx.of_chunk(rows, raw)
            _, w = terms(ctx.divergence, log_p, log_q)
            gradient = (w - log_p.exp() * total_w[rows, None]).mul_(grad[rows, None])
            gradient = F.pad(gradient, (0, len(weight) - gradient.shape[1]))
            return _of_raw(gradient, slope, raw, ctx.needs_input_grad[2])

        layer = hidden, weight, bias
        gradients = layer_gradients(
            layer,
            ctx.needs_input_grad[:3],
            total_w.dtype,
            ctx.head,
            ctx.chunk_tokens,
            of_logits,
        )
        return *gradients, None, None, None, None, None


def _log_probs_of_both(
    layer: TeacherLayer, head: Head, dtype: torch.dtype, teacher_hidden: Tensor
) -> Any:
    def of_chunk(rows: slice, raw: Tensor) -> tuple[Any, Tensor, Tensor]:
        logits = head.scaled(raw, dtype)
        slope = head.slope(logits)
        common = logits[:, : len(layer.weight)]
        log_q = layer.log_probs(teacher_hidden[rows], dtype)
        return slope, common - head.logsumexp(common)[:, None], log_q

    return of_chunk


class _OverTop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        log_q: Tensor,
        head: Head,
        divergence: str,
        chunk_tokens: int,
    ) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        normalizer = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        log_p = torch.empty(log_q.shape, dtype=dtype, device=hidden.device)
        for rows in chunks(len(hidden), chunk_tokens):
            logits = head.scaled(F.linear(hidden[rows], weight, bias), dtype)
            places, mine = head.own(ids[rows], len(weight))
            normalizer[rows] = head.logsumexp(logits)
            log_p[rows, :-1] = head.sum(logits.gather(-1, places).where(mine, 0.0))
            log_p[rows, -1] = _rest(logits, places, mine, head)
        log_p = log_p.sub_(normalizer[:, None]).clamp_(min=LEAST_LOG_PROB)
        parts, w = terms(divergence, log_p, log_q.to(dtype))
        ctx.save_for_backward(hidden, weight, bias, ids, normalizer, log_p, w)
        ctx.head = head
        ctx.chunk_tokens = chunk_tokens
        return parts.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, normalizer, log_p, w = ctx.saved_tensors
        head: Head = ctx.head
        of_rest = w[:, -1] / log_p[:, -1].exp()  # w / p of every token in the rest
        factor = of_rest - w.sum(-1)
        at_top = w[:, :-1] - log_p[:, :-1].exp() * of_rest[:, None]

        def of_logits(rows: slice, raw: Tensor) -> tuple[Tensor, Tensor | None]:
            logits = head.scaled(raw, normalizer.dtype)
            slope = head.slope(logits)
            gradient = (logits - normalizer[rows, None]).exp_().mul_(factor[rows, None])
            places, mine = head.own(ids[rows], len(weight))
            gradient.scatter_add_(-1, places, at_top[rows].where(mine, 0.0)).mul_(
                grad[rows, None]
            )
            return _of_raw(gradient, slope, raw, ctx.needs_input_grad[2])

        layer = hidden, weight, bias
        gradients = layer_gradients(
            layer, ctx.needs_input_grad[:3], log_p.dtype, head, ctx.chunk_tokens, of_logits
        )
        return *gradients, None, None, None, None, None


def _of_raw(
    grad: Tensor, slope: Any, raw: Tensor, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    if slope is not None:
        grad.mul_(slope)
    return grad.to(raw.dtype), grad.sum(0) if needs_bias else None
