"""Training speed on one GPU: model FLOP utilisation, peak memory, tokens/s of Qwen architectures with random
weights.

    python -m tests.gpu.benchmark [--sizes 1.5B 4B] [--rows tail context prompt] [--contexts 16384 65536]
                                  [--run RUN_FOLDER] [--output PAGE]
    python -m tests.gpu.benchmark --tiny --device cpu        the same program in a minute on a CPU, to see that it runs

It needs torch, transformers and NumPy, and of this project `workers.model` and `balancing`; rows with LoRA
need peft.

A step is one mini-batch: forward and backward of its micro-batches, then AdamW. Three kinds of rows:

    long tail     packed or padded (rows of like length together), times log-probs in chunks or in one piece; padded
                  micro-batches keep the same cap, counted in cells
    one context   sequences of that many tokens, packed, with gradient checkpointing: the whole model or adapters, as it
                  is or compiled, activations on the device or offloaded
    one prompt    a group's samples in one micro-batch, with gradient checkpointing: the prompt computed for every
                  sample, or once

and with --run, from the metrics.jsonl of a run of `controller.fit`, what sending weights takes and how far
sampler and trainer are apart. Model FLOPs of a step (Chowdhery et al. 2022, appendix B; Q heads times head
dimension):

    6 N tokens + 6 layers Q sum_i L_i^2       N weights in matrix products, L_i^2 halved by causality

With adapters 4 N tokens: frozen matrices get no gradient. Neither padding nor recomputation counts as model
FLOPs, and a prompt that is computed once counts once; tokens/s are of the samples, prompts included.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from balancing import RankPlan, plan_batch
from workers.batch.dataproto import DataProto
from workers.config.roles import LoraConfig, ModelConfig, OptimizerConfig
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, sft

LONGEST, POSITIONS = 32_768, 131_072
SIZES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "vocab_size": 151_936,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "vocab_size": 151_936,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "vocab_size": 151_936,
        "head_dim": 128,
    },
}
# Query heads, key-value heads.
HEADS = {"tiny": (4, 2), "0.5B": (14, 2), "1.5B": (12, 2), "4B": (32, 8)}
FAMILIES = {"4B": Qwen3Config}  # Qwen2 otherwise
# Dense bf16 peaks without sparsity, in TFLOP/s, from the makers' data sheets; matched in the name of the
# card.
PEAK_TFLOPS = {
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "A10G": 70,
    "RTX 4090": 165,
}
CONTEXT_SEQUENCES = 4
ALL_AT_ONCE = 2**40  # more tokens than any micro-batch: all its logits exist at one time


@dataclass(frozen=True)
class Group:
    """Samples of one prompt; lengths in tokens."""

    prompt: int
    response: int
    samples: int

    @property
    def lengths(self) -> list[int]:
        return [self.prompt + self.response] * self.samples


GROUPS = (Group(512, 64, 16), Group(1024, 1024, 8), Group(8192, 1024, 8))


@dataclass(frozen=True)
class Way:
    """lora_rank: 0 trains the whole model. context: tokens of every sequence; 0 is the long tail, or a
    group's.

    shares: the group's prompt is computed once.
    """

    layout: str = "packed"
    chunk_tokens: int = 2048
    lora_rank: int = 0
    compiled: bool = False
    offloaded: bool = False
    context: int = 0
    group: Group | None = None
    shares: bool = False

    @property
    def name(self) -> str:
        if group := self.group:
            shape = (
                f"prompt {group.prompt:,}, {group.samples} responses of {group.response:,}"
            )
            return (
                f"{shape}, computed {'once' if self.shares else f'{group.samples} times'}"
            )
        if not self.context:
            return f"{self.layout}, log-probs {'at once' if self.chunk_tokens == ALL_AT_ONCE else 'in chunks'}"
        parts = [
            f"{self.context:,} tokens",
            f"LoRA {self.lora_rank}" if self.lora_rank else "whole model",
        ]
        return ", ".join(
            parts + ["compiled"] * self.compiled + ["offloaded"] * self.offloaded
        )


def long_tail_ways() -> list[Way]:
    return [
        Way(layout, chunk)
        for layout in ("packed", "padded")
        for chunk in (2048, ALL_AT_ONCE)
    ]


def context_ways(context: int, device: str) -> Iterator[Way]:
    """Compiled on GPUs alone; adapters where peft is installed."""
    for rank in (0, 32) if find_spec("peft") else (0,):
        yield Way(lora_rank=rank, context=context)
        yield Way(lora_rank=rank, context=context, offloaded=True)
        if device == "cuda":
            yield Way(lora_rank=rank, context=context, compiled=True)


@dataclass(frozen=True)
class Measurement:
    """seconds: of a step, median. peak_gib: allocated on the GPU; 0 on a CPU. flops: of the model, a step."""

    seconds: float
    peak_gib: float
    tokens: int
    flops: float


def long_tail_lengths(count: int, median_length: int, longest: int) -> list[int]:
    """Quantiles of a log-normal distribution with sigma 1.2, cut at `longest`, which one sequence reaches."""
    quantiles = (torch.arange(count) + 0.5) / count
    lengths = (
        (median_length * torch.exp(1.2 * torch.special.ndtri(quantiles)))
        .long()
        .clamp(2, longest)
    )
    lengths[-1] = longest
    return lengths[
        torch.randperm(count, generator=torch.Generator().manual_seed(0))
    ].tolist()


def random_batch(lengths: list[int], vocabulary: int, prompt: int = 0) -> DataProto:
    """Every token is predicted, but the first of a sequence and those of the prompt that all begin with."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths
    ]
    for row in rows:
        row[:prompt] = rows[0][:prompt]
    return DataProto.from_list(
        [
            {"input_ids": row, "loss_mask": torch.arange(len(row)) >= max(1, prompt)}
            for row in rows
        ]
    )


def save_random_model(size: str, folder: Path, device: str) -> None:
    """A model, drawn on `device`, and a tokenizer, as an engine loads them."""
    heads, pairs = HEADS[size]
    config = FAMILIES.get(size, Qwen2Config)(
        **SIZES[size],
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
            folder
        )
    words = Tokenizer(
        models.WordLevel({f"t{index}": index for index in range(16)}, unk_token="t0")
    )
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)


def model_flops(engine: TrainingEngine, way: Way, lengths: list[int]) -> float:
    """Of forward and backward; the tied embedding counts once, as the output layer that it also is."""
    config = engine.module.model.config
    width = config.num_attention_heads * (
        getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    )
    again = [way.group.prompt] * (way.group.samples - 1) if way.group and way.shares else []
    tokens = sum(lengths) - sum(again)
    squares = sum(length**2 for length in lengths) - sum(length**2 for length in again)
    passes = 4 if engine.has_adapters else 6
    return (
        passes * engine.num_parameters * tokens
        + 6 * config.num_hidden_layers * width * squares
    )


def build_engine(
    folder: Path, way: Way, device: str, checkpointing: bool
) -> TrainingEngine:
    model = ModelConfig(
        path=str(folder),
        dtype="bfloat16",
        layout=way.layout,
        gradient_checkpointing="full"
        if checkpointing or way.context > 0 or way.group is not None
        else "none",
        share_prefixes="auto" if way.shares else "never",
        activation_offload=way.offloaded,
        compile="auto" if way.compiled else "never",
        logprob_chunk_tokens=way.chunk_tokens,
        lora=LoraConfig(rank=way.lora_rank),
    )
    return TrainingEngine(
        model, optimizer=OptimizerConfig(), total_steps=100, device=device
    )


def measure(
    engine: TrainingEngine, way: Way, batch: DataProto, plan: RankPlan, repeats: int
) -> Measurement:
    """`repeats` steps after one to warm up."""
    lengths, on_gpu = batch.lengths.tolist(), engine.device.type == "cuda"
    batch = DataProto.from_list(
        [batch.slice(row, row + 1).tokens for row in plan.rows.tolist()]
    )
    denominators, taken = Denominators.of(batch), []
    for _ in range(1 + repeats):
        start = perf_counter()
        engine.forward_backward(
            batch, plan.mini_batches[0].micro_batches, sft, denominators
        )
        engine.optimizer_step()
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return Measurement(
        median(taken[1:]), peak, sum(lengths), model_flops(engine, way, lengths)
    )


def measure_way(
    folder: Path, way: Way, lengths: list[int], arguments: argparse.Namespace
) -> Measurement | None:
    """None where the GPU's memory does not suffice."""
    max_tokens = sum(lengths) if way.group else max(arguments.max_tokens, max(lengths))
    plan = plan_batch(lengths, ranks=1, max_tokens=max_tokens, layout=way.layout).for_rank(
        0
    )
    gc.collect()  # the engine before this one refers to itself
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        engine = build_engine(
            folder, way, arguments.device, arguments.gradient_checkpointing
        )
        batch = random_batch(
            lengths, engine.vocabulary, way.group.prompt if way.group else 0
        )
        return measure(engine, way, batch, plan, arguments.repeats)
    except torch.cuda.OutOfMemoryError:
        return None


def row_of(
    size: str, way: Way, found: Measurement | None, peak_tflops: float | None
) -> str:
    if found is None:
        return f"| {size} | {way.name} | out of memory | | |"
    utilisation = found.flops / found.seconds / 1e12 / peak_tflops if peak_tflops else None
    cells = [
        f"{found.tokens / found.seconds:,.0f}",
        "unknown" if utilisation is None else f"{utilisation:.1%}",
        f"{found.peak_gib:.1f}" if found.peak_gib else "not measured",
    ]
    return f"| {size} | {way.name} | {' | '.join(cells)} |"


def run_lines(folder: Path) -> Iterator[str]:
    """Of a run of `controller.fit`: medians over its steps, the first left out, in which
    everything starts.
    """
    steps = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    yield f"\nRun `{folder.name}`, medians of its steps after the first:\n"
    yield "| metric | value |"
    yield "| --- | --- |"
    for name in (
        "time/weights_s",
        "time/step_s",
        "policy/rollout_mismatch_mean",
        "policy/rollout_mismatch_max",
    ):
        values = [step[name] for step in steps if name in step][1:]
        yield f"| `{name}` | {f'{median(values):.4g}' if values else 'not measured'} |"


def known_peak(card: str) -> float | None:
    return next((float(peak) for name, peak in PEAK_TFLOPS.items() if name in card), None)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1.5B", "4B"])
    parser.add_argument(
        "--contexts",
        nargs="*",
        type=int,
        default=[16_384, 65_536],
        help="tokens of rows with one context",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=("tail", "context", "prompt"),
        default=["tail", "context", "prompt"],
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a tiny model and short sequences, to see that it runs",
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument(
        "--max-tokens", type=int, default=LONGEST, help="cap of a micro-batch"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="dense bf16 peak of the card, where it is not known here",
    )
    parser.add_argument(
        "--run", type=Path, help="folder of a run, for weight transfer and mismatch"
    )
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.sizes, arguments.max_tokens, arguments.contexts = ["tiny"], 512, [256]
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "no CUDA device is at hand; `--tiny --device cpu` shows that the program runs"
        )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    card = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    peak_tflops = arguments.peak_tflops or known_peak(card)
    shape = (50, 512) if arguments.tiny else (2_000, LONGEST)
    lengths = long_tail_lengths(arguments.sequences, *shape)
    lines = [
        f"# {card}, torch {torch.__version__}, transformers {transformers.__version__}\n",
        f"{arguments.sequences} sequences of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} "
        f"in all; micro-batches of at most {arguments.max_tokens:,}; bf16 over float32 parameters; gradient "
        f"checkpointing {'on' if arguments.gradient_checkpointing else 'off'}, in rows of one context or "
        f"prompt on; dense bf16 peak {peak_tflops or 'unknown'} TFLOP/s.\n",
        "| size | way | tokens/s | model FLOP utilisation | peak GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(size, Path(folder), arguments.device)
            for way, batch in batches(arguments, lengths):
                lines.append(
                    row_of(
                        size,
                        way,
                        measure_way(Path(folder), way, batch, arguments),
                        peak_tflops,
                    )
                )
                print(lines[-1], flush=True)
    if arguments.run:
        lines += run_lines(arguments.run)
        print("\n".join(lines[-6:]), flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


def batches(
    arguments: argparse.Namespace, long_tail: list[int]
) -> Iterator[tuple[Way, list[int]]]:
    """Each way, and the lengths of the sequences that it is measured with."""
    if "tail" in arguments.rows:
        for way in long_tail_ways():
            yield way, long_tail
    if "context" in arguments.rows:
        for context in arguments.contexts:
            for way in context_ways(context, arguments.device):
                yield way, [context] * CONTEXT_SEQUENCES
    if "prompt" in arguments.rows:
        for group in (Group(64, 32, 4),) if arguments.tiny else GROUPS:
            for shares in (False, True):
                yield Way(group=group, shares=shares), group.lengths


if __name__ == "__main__":
    main()
