"""A twin of flash-attn-4 for CPUs: its signatures and its demands, computed by all scores at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.model.attention import flash4

Window = tuple[int | None, int | None]


@contextmanager
def twin_in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Let the engine's rows call the twin. Yields the arguments of its forward calls, without tensors."""
    calls: list[dict[str, Any]] = []

    def forward(**arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(
            {
                name: value
                for name, value in arguments.items()
                if not isinstance(value, torch.Tensor)
            }
        )
        return varlen_forward(**arguments)

    package = SimpleNamespace(
        flash_attn_varlen_func=forward, _flash_attn_bwd=varlen_backward
    )
    monkeypatch.setattr(flash4, "load_package", lambda: package)
    flash4.use_flash4(True)
    try:
        yield calls
    finally:
        flash4.use_flash4(False)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: Window,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    assert return_lse
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    outputs = []
    sums = []
    for query, key, value in _segments(q, k, v, cu_seqlens_q, cu_seqlens_k):
        scores = _scores(query, key, softmax_scale, causal, window_size)
        sums.append(scores.logsumexp(-1))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    lse = torch.cat(sums, dim=1)
    return torch.cat(outputs).to(q.dtype), lse.to(
        torch.promote_types(q.dtype, torch.float32)
    )


def varlen_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the output and the log-sum-exp that are handed in, as the kernel does:

    P = exp(S - lse),    dS = P (dP - sum(dout out))
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert out.shape == dout.shape == (len(q), q.shape[1], v.shape[2])
    assert out.dtype == dout.dtype == q.dtype
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    window = (window_size_left, window_size_right)
    grads: list[tuple[Tensor, ...]] = []
    of_queries = zip(_split(out, cu_seqlens_q), _split(dout, cu_seqlens_q), strict=True)
    sums = _split(lse.t(), cu_seqlens_q)
    repeats = q.shape[1] // k.shape[1]
    for (query, key, value), (output, grad), total in zip(
        _segments(q, k, v, cu_seqlens_q, cu_seqlens_k), of_queries, sums, strict=True
    ):
        shares = (
            _scores(query, key, softmax_scale, causal, window) - total.t()[..., None]
        ).exp()
        of_shares = torch.einsum("qhd,khd->hqk", grad, value)
        of_scores = (
            shares * (of_shares - (grad * output).sum(-1).t()[..., None]) * softmax_scale
        )
        parts = (
            torch.einsum("hqk,khd->qhd", of_scores, key),
            torch.einsum("hqk,qhd->khd", of_scores, query),
            torch.einsum("hqk,qhd->khd", shares, grad),
        )
        grads.append(parts)
    joined = [torch.cat(parts) for parts in zip(*grads, strict=True)]
    of_query, of_key, of_value = joined
    return (
        of_query.to(q.dtype),
        of_key.unflatten(1, (-1, repeats)).sum(2).to(k.dtype),
        of_value.unflatten(1, (-1, repeats)).sum(2).to(v.dtype),
    )


def _scores(
    query: Tensor, key: Tensor, scale: float, causal: bool, window: Window
) -> Tensor:
    """[H, Q, T], the last query at the last key, as the package's `_resolve_causal_local_window` reads it."""
    left, right = window
    if causal:
        right = 0
    queries = len(query)
    keys = len(key)
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    hidden |= distance < -right if right is not None else hidden
    hidden |= distance > left if left is not None else hidden
    return (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(
        hidden, -torch.inf
    )


def _segments(
    q: Tensor, k: Tensor, v: Tensor, query_bounds: Tensor, key_bounds: Tensor
) -> list[tuple[Tensor, ...]]:
    repeats = q.shape[1] // k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    key, value = (tensor.to(dtype).repeat_interleave(repeats, dim=1) for tensor in (k, v))
    parts = (
        _split(q.to(dtype), query_bounds),
        _split(key, key_bounds),
        _split(value, key_bounds),
    )
    return list(zip(*parts, strict=True))


def _split(tensor: Tensor, bounds: Tensor) -> list[Tensor]:
    return list(tensor.split(bounds.diff().tolist()))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    queries: int,
    keys: int,
) -> None:
    for tensor, bounds, longest in ((q, query_bounds, queries), (k, key_bounds, keys)):
        assert tensor.dim() == 3 and bounds.dtype == torch.int32
        assert (
            bounds[0] == 0 and bounds[-1] == len(tensor) and bounds.diff().max() == longest
        )
    assert len(query_bounds) == len(key_bounds) and len(k) == len(v)
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2]
