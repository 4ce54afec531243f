"""Predict training speed without a GPU: what one micro-batch launches, moves and computes, against a card's
limits.

    python -m tests.benchmarks.roofline [--sizes 1.5B 7B 32B 30B-A3B] [--output docs/gpu-roofline.md]

The real engine runs on the simulated GPU (`workers.model.memory.fake_gpu`) with 2 and 3 layers, and a
straight line gives all layers. Each operator on the device that is not a view counts as one kernel:

    seconds = max(bytes read and written / bandwidth, FLOPs / peak of its kind)

What is compiled counts as `tests.benchmarks.fusion` says.
"""

import argparse
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.benchmark import PEAK_TFLOPS

HEADER = """# Roofline of a training micro-batch

Written by `python -m tests.benchmarks.roofline`, without a GPU: one micro-batch of {tokens:,} tokens in sequences of
{longest:,}, bf16, the PPO loss, {ranks} ranks with FSDP2, forward and backward. The engine runs on the simulated GPU,
and each operator takes the longer of its bytes at {bandwidth} TB/s and its FLOPs at {matmul} TFLOP/s (attention
{attention}). Collectives count as hidden behind the computation. Of a compiled graph, each group of connected operators
between products and attention is one kernel, which reads and writes what enters and leaves the group.

The constants are what an H100 reaches: about 69 % of its data sheet's 989 TFLOP/s in large matrix products, 78 % of
3.35 TB/s. [Measured on a card](gpu-benchmark.md), 1.5B with full checkpointing on an H200, in ms:

| compiled | products and attention | elementwise | kernels |
| --- | --- | --- | --- |
| nothing | 326 | 310 | 5,931 |
| log-probs | 325 | 223 | 5,716 |
| layers too | 340 | 128 | 3,252 |

Log-probs are compiled on GPUs, always, and layers by default. The predictions:
"""
MATMUL_TFLOPS, ATTENTION_TFLOPS, BANDWIDTH_TBPS = 680, 380, 2.6
CARD = "H100"
DONE = [
    "model",
    "checkpointing",
    "compiled",
    "kernels",
    "TB",
    "TFLOPs",
    "waits",
    "copies to the card",
    "GB in collectives",
]
TOOK = [
    "model",
    "checkpointing",
    "compiled",
    "products and attention, ms",
    "elementwise, ms",
    "tokens/s",
    "utilisation",
]
TOOK += ["slowest elementwise, ms"]
TOKENS, LONGEST, RANKS = 16_384, 4_096, 8
WAYS = (
    ("full", "nothing"),
    ("full", "log-probs"),
    ("full", "layers too"),
    ("selective", "layers too"),
    ("none", "nothing"),
    ("none", "layers too"),
)
FEW, MANY = 2, 3
Description = dict[str, Any]
QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 131_072,
}


def qwen2(
    hidden: int,
    wide: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool,
) -> Description:
    return QWEN2 | {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


SIZES = {
    "1.5B": qwen2(1536, 8960, 28, 12, 2, 151_936, True),
    "7B": qwen2(3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": qwen2(5120, 27_648, 64, 40, 8, 152_064, False),
    "30B-A3B": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "max_position_embeddings": 131_072,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
}
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
    """Of a matrix product, or of causal attention in sequences of LONGEST tokens."""
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
        heads, size = next(tensor for tensor in inputs if tensor.dim() == 3).shape[1:]
        pairs = TOKENS * LONGEST / 2
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
    FakeGpu.ignore_compile_internals = classmethod(
        lambda _: True
    )  # otherwise dynamo skips what runs under a mode
    passes = [
        torch.compile(each, backend=compiled_layers.BACKEND)
        for each in (logprobs._predict, logprobs._differentiate)
    ]
    logprobs._chunk_functions = lambda *_: passes
    sharded_model.compiles = lambda *_, **__: layers


def is_view(operator: Any, inputs: list[Any], outputs: list[Any]) -> bool:
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    shared = outputs and all(
        tensor.untyped_storage()._cdata in storages for tensor in outputs
    )
    return bool(shared) and not operator._schema.is_mutable


def micro_batch(
    layers: int, description: Description, checkpointing: str, experts: int = 1
) -> Work:
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

    with memory_trace._folder(description, layers) as path:
        model = ModelConfig(
            path=path, dtype="bfloat16", gradient_checkpointing=checkpointing
        )
        engine = TrainingEngine(
            model,
            optimizer=OptimizerConfig(),
            total_steps=1,
            device=f"{DEVICE}:0",
            parallel=ParallelConfig(expert_parallel=experts),
        )
    sequences, cuts = memory_trace.full_micro_batches(
        TOKENS, LONGEST, engine.vocabulary, 2, padded=False
    )

    def update(count: int) -> None:
        denominators = Denominators.of(sequences)
        engine.forward_backward(
            sequences, cuts[:count], make_policy_loss(LossConfig()), denominators
        )

    update(1)
    found = []
    for count in (1, 2):
        with counting() as work:
            update(count)
        found.append(work)
    return found[1].plus(found[0], -1)


def measure(
    description: Description, checkpointing: str, compiled: str, experts: int, answer: Any
) -> None:
    """In a separate process: the work of all layers."""
    from workers.model.memory.fake_gpu import fake_gpus

    if compiled != "nothing":
        compile_on_the_simulated_gpu(layers=compiled == "layers too")
    with fake_gpus(RANKS):
        few, many = (
            micro_batch(layers, description, checkpointing, experts)
            for layers in (FEW, MANY)
        )
    answer.put(
        many.plus(
            many.plus(few, -1), (description["num_hidden_layers"] - MANY) / (MANY - FEW)
        )
    )
    answer.close()
    answer.join_thread()
    os._exit(0)  # the backend has no destructor


def model_flops(description: Description) -> float:
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
    return TOKENS * (6 * weights + 6 * layers * heads * size * LONGEST)


def row(
    name: str, checkpointing: str, compiled: str, experts: int
) -> tuple[list[str], list[str]]:
    """Return cells of DONE and of TOOK."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(
        target=measure, args=(SIZES[name], checkpointing, compiled, experts, answer)
    )
    process.start()
    work = answer.get()
    process.join()
    times = {operator: work.seconds(operator) for operator in work.kernels}
    computing = sum(seconds for operator, seconds in times.items() if work.flops[operator])
    total = sum(times.values())
    slowest = sorted(
        (operator for operator in times if not work.flops[operator]),
        key=lambda each: -times[each],
    )[:3]
    share = model_flops(SIZES[name]) / total / PEAK_TFLOPS[CARD] / 1e12
    names = [f"{name}, ep {experts}" if experts > 1 else name, checkpointing, compiled]
    done = [
        f"{work.kernels.total():,.0f}",
        f"{work.bytes.total() / 1e12:.2f}",
        f"{work.flops.total() / 1e12:,.0f}",
        f"{work.waits:.0f}",
        f"{work.copies:.0f}",
        f"{work.collective_bytes / 1e9:.0f}",
    ]
    took = [
        f"{computing * 1e3:,.0f}",
        f"{(total - computing) * 1e3:,.0f}",
        f"{TOKENS / total:,.0f}",
        f"{share:.0%}",
        ", ".join(f"`{operator}` {times[operator] * 1e3:.0f}" for operator in slowest),
    ]
    return names + done, names + took


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def page(sizes: list[str]) -> str:
    ways = [
        (name, *way, experts)
        for name in sizes
        for experts in (1, RANKS)[: 1 + ("A3B" in name)]
        for way in WAYS
    ]
    rows = [row(*way) for way in ways if way[-1] == 1 or way[1:3] == WAYS[2]]
    lines = [
        HEADER.format(
            tokens=TOKENS,
            longest=LONGEST,
            ranks=RANKS,
            bandwidth=BANDWIDTH_TBPS,
            matmul=MATMUL_TFLOPS,
            attention=ATTENTION_TFLOPS,
        ),
        *table(DONE, [done for done, _ in rows]),
        "",
        *table(TOOK, [took for _, took in rows]),
        "",
        f"Utilisation is of the {CARD}'s {PEAK_TFLOPS[CARD]} TFLOP/s, recomputation not counted.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = page(arguments.sizes)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
