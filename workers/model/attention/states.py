"""States of the segments of a packed row: what a mixer computes along the sequence, for all segments at once.

    mixer(hidden [1, T, H])          projections, norms and gates run over the row as it is
      causal_conv1d_fn               a kernel with seq_idx, or one call with K - 1 zeros before each segment
      chunked rules and scans        a kernel with cu_seqlens, or a call for each batch of like segments

transformers' mixers call these functions by their names in the module of the family, where `follow_rows` puts
ones that know the row. Outside `over_row` they are transformers' own.

A segment that continues another, whose tokens several sequences share, starts from the state at its end and
from its last K - 1 columns, `state_rows`. Gradients pass through both.

Ranks that share a row exchange tokens for heads, or for channels of a convolution, before and after a
function: each computes whole sequences for its share.

Shapes: T tokens of the row, n segments of a batch with at most L tokens, a convolution with C channels of
width K.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model.attention.exchange import HeadExchange
from workers.model.attention.state_rows import StateRow

CONVOLUTION = "causal_conv1d_fn"


@dataclass(frozen=True)
class StateNames:
    """Name a function's arguments for states at the start of segments, and for returning those at the end."""

    initial: str
    returned: str


@dataclass(frozen=True)
class Kernel:
    """Name the function that transformers calls in place of a reference."""

    module: str
    function: str
    states: StateNames | None = None

    def is_installed(self) -> bool:
        return _has_function(self.module, self.function)


CAUSAL_CONV = Kernel("causal_conv1d", "causal_conv1d_fn")
DELTA_STATES = StateNames("initial_state", "output_final_state")
SPACE_STATES = StateNames("initial_states", "return_final_states")
GATED_DELTA = Kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", DELTA_STATES)
KIMI_DELTA = Kernel("fla.ops.kda", "chunk_kda", DELTA_STATES)
STATE_SPACE = Kernel(
    "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", SPACE_STATES
)
KERNELS = {
    CONVOLUTION: CAUSAL_CONV,
    "torch_chunk_gated_delta_rule": GATED_DELTA,
    "chunk_kimi_delta_attention": KIMI_DELTA,
    "mamba2_chunk_scan": STATE_SPACE,
}
"""By the name of the reference in transformers' modules."""

HEADS = ("num_v_heads", "num_heads")
"""Names of the count of a mixer's heads, the first that it has."""

OF_CACHES = frozenset(
    {
        "causal_conv1d_update",
        "torch_recurrent_gated_delta_rule",
        "recurrent_kimi_delta_attention",
        "mamba2_selective_state_update",
        "mamba2_split_conv1d_scan_combined",
    }
)
"""Called with a cache, or by modules in training mode, in which a model never is here."""


def in_batches(
    row: StateRow,
    function: Callable[..., Any],
    *arguments: Any,
    states: StateNames | None = None,
    **named: Any,
) -> Any:
    """Call a function of arguments with T tokens, [1, T, ...], once a batch, with [n, L, ...] -> [1, T, ...].

    states: the function's arguments for states of segments, [n, ...]. Needed if segments continue others.
    Further results are those of the last call.
    """
    everything: dict[Any, Any] = {**dict(enumerate(arguments)), **named}
    padded = {
        name: torch.cat([value[0], value.new_zeros(1, *value.shape[2:])])
        for name, value in everything.items()
        if is_of_row(row, value)
    }
    outputs = []
    state_at_end: dict[int, Tensor] = {}
    for batch in row.batches:
        of_batch = everything | {
            name: value[batch.tokens] for name, value in padded.items()
        }
        if states and batch.parents:
            of_batch[states.initial] = torch.stack(
                [state_at_end[segment] for segment in batch.parents]
            )
        if states and batch.hands_on:
            of_batch[states.returned] = True
        positional = [of_batch.pop(place) for place in range(len(arguments))]
        result = function(*positional, **of_batch)
        output, *further = result if isinstance(result, tuple) else (result,)
        if batch.hands_on:
            state_at_end |= zip(batch.segments, further.pop().unbind(), strict=True)
        outputs.append(output.flatten(0, 1))
    joined = torch.cat(outputs)[row.cells][None]
    return (joined, *further) if further else joined


def is_of_row(row: StateRow, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == (1, row.tokens)


_row: ContextVar[StateRow | None] = ContextVar("row", default=None)


@contextmanager
def over_row(row: StateRow) -> Iterator[None]:
    token = _row.set(row)
    try:
        yield
    finally:
        _row.reset(token)


class RowHook:
    """Before a layer runs, set `row` of what looks along its sequences. A padded layer has none."""

    def __init__(self, followers: Sequence[Any]) -> None:
        self._followers = followers

    def __call__(self, layer: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        attention = named.get("packed_attention")
        for follower in self._followers:
            follower.row = None if attention is None else attention.states


def follows_rows(mixer: nn.Module) -> bool:
    """Return whether a mixer looks along the sequence by functions of `KERNELS` alone."""
    called = _functions_of(mixer)
    return CONVOLUTION in called and called <= KERNELS.keys() | OF_CACHES


def sharing_problem(mixers: Sequence[nn.Module], ranks: int) -> str:
    """Return why so many ranks cannot share the sequences of mixers, or an empty string."""
    for mixer in mixers:
        name = type(mixer).__name__
        if not follows_rows(mixer):
            return f"{name}, whose state is not by heads or channels"
        channels = [
            child.in_channels for child in mixer.children() if isinstance(child, nn.Conv1d)
        ]
        heads = [getattr(mixer, name) for name in HEADS if hasattr(mixer, name)]
        if undivided := [count for count in (*heads[:1], *channels) if count % ranks]:
            return f"{name} with {undivided[0]} heads or channels, which they do not divide"
    return ""


def follow_rows(mixer: nn.Module) -> None:
    """Let the functions that a mixer of `follows_rows` calls see the row of `over_row`."""
    module = sys.modules[type(mixer).__module__]
    for name in _functions_of(mixer) & KERNELS.keys():
        function = getattr(module, name)
        if not isinstance(function, _OfRow):
            setattr(module, name, _OfRow(function, KERNELS[name]))


def _functions_of(mixer: nn.Module) -> set[str]:
    forward = inspect.unwrap(type(mixer).forward)
    module = sys.modules[type(mixer).__module__]
    names = forward.__code__.co_names
    # Those that a package may replace: transformers wraps them.
    return {name for name in names if hasattr(getattr(module, name, None), "__wrapped__")}


class _OfRow:
    """Call one function for the segments of the current row."""

    def __init__(self, function: Callable[..., Any], kernel: Kernel) -> None:
        self.__wrapped__ = function
        self._reference = inspect.unwrap(function)
        self._kernel = kernel

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        row = _row.get()
        if row is None:
            return self.__wrapped__(*arguments, **named)
        if row.exchange is None:
            return self._over_segments(row, *arguments, **named)
        compute = partial(self._over_segments, row)
        if self._kernel is CAUSAL_CONV:
            return _share_channels(row.exchange, compute, *arguments, **named)
        return _share_heads(row.exchange, compute, *arguments, **named)

    def _over_segments(self, row: StateRow, *arguments: Any, **named: Any) -> Any:
        has_kernel = arguments[0].is_cuda and self._kernel.is_installed()
        if has_kernel and not row.shares:
            return self._with_kernel(row, *arguments, **named)
        function = self.__wrapped__ if has_kernel else self._reference
        if len(row.lengths) == 1:
            return function(*arguments, **named)
        if self._kernel is CAUSAL_CONV:
            return _convolve(row, function, *arguments, **named)
        if row.shares and self._kernel is STATE_SPACE:
            arguments, named = _compute_time_steps(*arguments, **named)
        return in_batches(row, function, *arguments, states=self._kernel.states, **named)

    def _with_kernel(self, row: StateRow, *arguments: Any, **named: Any) -> Any:
        if self._kernel is CAUSAL_CONV:
            hidden, *others = arguments
            # seq_idx asks for it.
            hidden = hidden.transpose(1, 2).contiguous().transpose(1, 2)
            return self.__wrapped__(
                hidden, *others, **named | {"seq_idx": row.segment_of_token}
            )
        places = {"cu_seqlens": row.bounds}
        if self._kernel is STATE_SPACE:
            places = {"seq_idx": row.segment_of_token}
        return self.__wrapped__(*arguments, **named | places)


def _convolve(
    row: StateRow,
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    *others: Any,
    **named: Any,
) -> Tensor:
    """hidden [1, C, T], weight [C, K] -> [1, C, T]."""
    zeros = weight.shape[-1] - 1
    cells = row.cells_between_zeros(zeros)
    width = row.tokens + zeros * (len(row.lengths) - 1)
    spread = hidden.new_zeros(*hidden.shape[:2], width).index_copy(2, cells, hidden)
    if row.shares:
        tokens, cells_before = row.tokens_before(zeros)
        spread = spread.index_copy(2, cells_before, hidden.index_select(2, tokens))
    return function(spread, weight, *others, **named).index_select(2, cells)


def _compute_time_steps(
    hidden: Tensor,
    time_steps: Tensor,
    *others: Any,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **named: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a state space with final time steps: padding has 0, which keeps the state."""
    time_steps = time_steps.to(torch.promote_types(time_steps.dtype, torch.float32))
    if dt_bias is not None:
        time_steps = time_steps + dt_bias
    if dt_softplus:
        time_steps = F.softplus(time_steps)
    return (hidden, time_steps.clamp(*dt_limit), *others), named


def _share_channels(
    exchange: HeadExchange,
    compute: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **named: Any,
) -> Tensor:
    """hidden [1, C, T/cp], weight [C, K] -> [1, C, T/cp]."""
    (whole,) = exchange.to_whole_sequences([hidden[0].transpose(0, 1)])
    bias = None if bias is None else exchange.own_share(bias)
    output = compute(whole.transpose(0, 1)[None], exchange.own_share(weight), bias, **named)
    return exchange.to_all_heads(output[0].transpose(0, 1)).transpose(0, 1)[None]


def _share_heads(
    exchange: HeadExchange, compute: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Arguments [1, T/cp, h, ...] and by head [h] -> [1, T/cp, h, ...], or the first of several results.

    Groups of heads that share B and C of a state space are repeated until the ranks divide them.
    """
    everything: dict[Any, Any] = {**dict(enumerate(arguments)), **named}
    tokens, heads = arguments[0].shape[1:3]
    of_tokens: dict[Any, Tensor] = {}
    for name, value in everything.items():
        if not isinstance(value, Tensor):
            continue
        if value.shape[:2] == (1, tokens):
            repeats = math.lcm(value.shape[2], exchange.size) // value.shape[2]
            of_tokens[name] = value[0].repeat_interleave(repeats, dim=1)
        elif value.shape == (heads,):
            everything[name] = exchange.own_share(value)
    whole = exchange.to_whole_sequences(list(of_tokens.values()))
    everything |= {name: value[None] for name, value in zip(of_tokens, whole, strict=True)}
    positional = [everything.pop(place) for place in range(len(arguments))]
    result = compute(*positional, **everything)
    output, *further = result if isinstance(result, tuple) else (result,)
    shared = exchange.to_all_heads(output[0])[None]
    return (shared, *further) if further else shared


@cache
def _has_function(module: str, function: str) -> bool:
    try:
        return hasattr(import_module(module), function)
    except Exception:  # a package that does not load raises what it likes, and transformers goes without it
        return False
