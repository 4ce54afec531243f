"""Count the work of a micro-batch on the simulated GPU: its kernels, bytes and FLOPs.

The real engine runs on `workers.model.memory.fake_gpu` with 2 and 3 layers, and a straight line gives all
layers. Each operator on the device that is not a view counts as one kernel. What is compiled counts as
`tests.benchmarks.fusion` says.
"""

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MATMUL_TFLOPS, ATTENTION_TFLOPS, BANDWIDTH_TBPS = 680, 380, 2.6
TOKENS, LONGEST, RANKS = 16_384, 4_096, 8
CARD = "H100"
FEW, MANY = 2, 3
Description = dict[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """What is counted. description: a config.json. compiled: `nothing`, `log-probs` or `layers too`.

    experts: ranks that share the experts. tokens: in sequences of `longest`.
    """

    description: Description
    checkpointing: str
    compiled: str
    experts: int = 1
    tokens: int = TOKENS
    longest: int = LONGEST


# Views and allocations launch nothing.
FREE = frozenset(
    (
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "detach",
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "unsqueeze",
        "squeeze",
        "as_strided",
        "alias",
        "_reshape_alias",
        "chunk",
        "unfold",
        "view_as",
        "lift_fresh",
        "diagonal",
        "resize_",
        "set_",
        "record_stream",
        "narrow",
        "device",
        "layout",
        "is_pinned",
        "is_same_size",
        "_local_scalar_dense",
    )
)
# The host waits for their sizes.
WAITS = {
    "nonzero",
    "bincount",
    "_unique2",
    "unique_consecutive",
    "masked_select",
    "repeat_interleave",
    "unique_dim",
}
# They read as many bytes as they write.
LOOKUPS = {"index_select", "embedding", "index", "gather"}


@dataclass
class Work:
    """kernels, bytes, flops: by operator. waits: of the host for the device. copies: from host to device."""

    kernels: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    copies: int = 0
    collective_bytes: int = 0

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        def add(mine: Any, theirs: Any) -> Any:
            if isinstance(mine, Counter):
                return Counter(
                    {
                        name: mine[name] + times * theirs[name]
                        for name in mine.keys() | theirs.keys()
                    }
                )
            return mine + times * theirs

        return Work(
            **{name: add(value, getattr(other, name)) for name, value in vars(self).items()}
        )

    def seconds(self, operator: str) -> float:
        peak = ATTENTION_TFLOPS if is_attention(operator) else MATMUL_TFLOPS
        return (
            max(self.bytes[operator] / BANDWIDTH_TBPS, self.flops[operator] / peak) / 1e12
        )


def is_attention(operator: str) -> bool:
    return "attn" in operator or "attention" in operator


def flops_of(operator: str, arguments: Any, inputs: list[Any]) -> float:
    """Return the FLOPs of a matrix product, or of causal attention in sequences of one length."""
    if operator in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
        left, right = arguments[-2:] if "add" not in operator else arguments[1:3]
        return 2.0 * left.numel() * right.shape[-1]
    if operator == "_grouped_mm":
        left, right = arguments[:2]
        per_token = right.shape[-1] if right.dim() == 3 else left.shape[0]
        return 2.0 * (
            left.numel() * per_token if right.dim() == 3 else right.numel() * per_token
        )
    if is_attention(operator):
        tokens, heads, size = next(tensor for tensor in inputs if tensor.dim() == 3).shape
        # The first number of a flash kernel is the length of the longest sequence.
        longest = next(number for number in arguments if type(number) is int)
        pairs = tokens * longest / 2
        return 4.0 * pairs * heads * size * (2.5 if "backward" in operator else 1)
    return 0.0


@contextmanager
def counting() -> Iterator[Work]:
    """Count the work of the simulated GPU's operators."""
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_leaves

    from workers.model.memory.fake_gpu import DEVICE, FakeGpu, Stream

    plain, work = FakeGpu.__torch_dispatch__, Work()
    pin_memory = torch.Tensor.pin_memory
    pinned: set[int] = set()
    _counted.append(work)

    def pin(tensor: Tensor, *arguments: Any) -> Tensor:
        result = pin_memory(tensor, *arguments)
        pinned.add(result.untyped_storage()._cdata)
        return result

    def await_event(event: Stream, *_: Any) -> Stream:
        work.waits += 1
        return event

    def tensors(value: Any, device: str = DEVICE) -> list[Tensor]:
        return [
            leaf
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor) and leaf.device.type == device
        ]

    def dispatch(
        mode: FakeGpu, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = plain(mode, operator, types, args, kwargs)
        space, _, name = operator._schema.name.partition("::")
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        if _is_fused[0] or (not inputs and not outputs):
            return result
        if name in ("_to_copy", "copy_"):
            from_host, to_host = tensors((args, kwargs), "cpu"), tensors(result, "cpu")
            if (from_host and outputs) or (to_host and inputs):
                asked = (kwargs or {}).get("non_blocking") or args[2:3] == (True,)
                sources = {tensor.untyped_storage()._cdata for tensor in from_host}
                work.copies += bool(outputs)
                # The driver copies pageable memory itself, and the host waits for it.
                work.waits += not (asked and (not outputs or sources <= pinned))
                return result
        by_mask = name in ("index", "index_put", "index_put_") and any(
            leaf.dtype.itemsize == 1 for leaf in tree_leaves(args[1]) if leaf is not None
        )
        work.waits += name == "_local_scalar_dense" or name in WAITS or by_mask
        if "c10d" in space:
            work.collective_bytes += max(tensor.nbytes for tensor in inputs + outputs)
        elif (
            name not in FREE
            and not name.startswith("sym_")
            and not is_view(operator, inputs, outputs)
        ):
            moved = sum(tensor.nbytes for tensor in outputs)
            moved = (
                2 * moved
                if name in LOOKUPS
                else moved + sum(tensor.nbytes for tensor in inputs)
            )
            work.kernels[name] += 1
            work.bytes[name] += moved
            work.flops[name] += int(flops_of(name, args, inputs))
        return result

    synchronize = Stream.synchronize
    FakeGpu.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    torch.Tensor.pin_memory = pin  # type: ignore[method-assign]
    Stream.synchronize = await_event
    try:
        yield work
    finally:
        _counted.pop()
        FakeGpu.__torch_dispatch__ = plain  # type: ignore[method-assign]
        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
        Stream.synchronize = synchronize


_counted: list[Work] = []
_is_fused = [False]


def compile_on_the_simulated_gpu(layers: bool) -> None:
    """Compile log-probs, and layers, by a backend that counts groups of operators as kernels."""
    import torch

    from tests.benchmarks.fusion import backend
    from workers.model import compiled_layers, sharded_model
    from workers.model.losses import logprobs
    from workers.model.memory.fake_gpu import FakeGpu

    def count(moved: int) -> None:
        for work in _counted:
            work.kernels["fused"] += 1
            work.bytes["fused"] += moved

    def alone(is_alone: bool) -> None:
        _is_fused[0] = not is_alone

    compiled_layers.BACKEND = backend(count, alone)
    # Otherwise dynamo skips what runs under a mode.
    FakeGpu.ignore_compile_internals = classmethod(lambda _: True)
    passes = [
        torch.compile(chunk_pass, backend=compiled_layers.BACKEND)
        for chunk_pass in (logprobs._predict, logprobs._differentiate)
    ]
    logprobs._chunk_functions = lambda *_: passes
    sharded_model.compiles = lambda *_, **__: layers


def is_view(operator: Any, inputs: list[Any], outputs: list[Any]) -> bool:
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    shared = outputs and all(
        tensor.untyped_storage()._cdata in storages for tensor in outputs
    )
    return bool(shared) and not operator._schema.is_mutable


def micro_batch(layers: int, kind: MicroBatch) -> Work:
    """Return the work of one more micro-batch of an update. Runs inside `fake_gpus`."""
    from workers.config.roles import (
        LossConfig,
        ModelConfig,
        OptimizerConfig,
        ParallelConfig,
    )
    from workers.model.engine import TrainingEngine
    from workers.model.losses import Denominators, make_policy_loss
    from workers.model.memory import memory_trace
    from workers.model.memory.fake_gpu import DEVICE

    with memory_trace._folder(kind.description, layers) as path:
        model = ModelConfig(
            path=path, dtype="bfloat16", gradient_checkpointing=kind.checkpointing
        )
        engine = TrainingEngine(
            model,
            optimizer=OptimizerConfig(),
            total_steps=1,
            device=f"{DEVICE}:0",
            parallel=ParallelConfig(expert_parallel=kind.experts),
        )
    sequences, cuts = memory_trace.full_micro_batches(
        kind.tokens, kind.longest, engine.vocabulary, 2, padded=False
    )

    def update(count: int) -> None:
        denominators = Denominators.of(sequences)
        engine.forward_backward(
            sequences, cuts[:count], make_policy_loss(LossConfig()), denominators
        )

    update(1)
    works = []
    for count in (1, 2):
        with counting() as work:
            update(count)
        works.append(work)
    return works[1].plus(works[0], -1)


def measure(kind: MicroBatch, answer: Any) -> None:
    """Put the work of all layers into a queue. In a process of its own."""
    from workers.model.memory.fake_gpu import fake_gpus

    if kind.compiled != "nothing":
        compile_on_the_simulated_gpu(layers=kind.compiled == "layers too")
    with fake_gpus(RANKS):
        few, many = (micro_batch(layers, kind) for layers in (FEW, MANY))
    rest = (kind.description["num_hidden_layers"] - MANY) / (MANY - FEW)
    answer.put(many.plus(many.plus(few, -1), rest))
    answer.close()
    answer.join_thread()
    os._exit(0)  # the backend has no destructor


def work_of(kind: MicroBatch) -> Work:
    """Count a micro-batch in a process of its own."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=measure, args=(kind, answer))
    process.start()
    work: Work = answer.get()
    process.join()
    return work


def model_flops(description: Description, tokens: int, longest: int) -> float:
    """Of forward and backward, without recomputation (Chowdhery et al. 2022, appendix B),
    attention halved.
    """
    hidden, layers, heads = (
        description[f"{name}"]
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    size = description.get("head_dim", hidden // heads)
    attention = hidden * size * (2 * heads + 2 * description["num_key_value_heads"])
    experts, wide = (
        description.get("num_experts_per_tok", 1),
        description.get("moe_intermediate_size"),
    )
    mlp = 3 * hidden * (wide or description["intermediate_size"]) * experts
    router = hidden * description.get("num_experts", 0)
    weights = layers * (attention + mlp + router) + hidden * description["vocab_size"]
    return tokens * (6 * weights + 6 * layers * heads * size * longest)


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]
