"""Training speed on one GPU: model FLOP utilisation, peak memory, tokens/s of two Qwen2 architectures, random weights.

    python -m tests.gpu.benchmark [--sizes 0.5B 1.5B] [--max-tokens 32768] [--output docs/gpu-benchmark.md]
    python -m tests.gpu.benchmark --tiny --device cpu        the same program in a minute on a CPU, to see that it runs

It needs torch, transformers and NumPy, and of this project `workers.model` and `balancing`.

A step is one mini-batch of long-tail sequences: forward and backward of its micro-batches, then AdamW. The rows of the
table are the layout (packed, or padded with rows of like length together) times log-probs in chunks or in one piece.
Padded micro-batches keep the same cap, counted in cells. Model FLOPs of a step (Chowdhery et al. 2022, appendix B):

    6 N tokens + 6 layers hidden sum_i L_i^2       N weights in matrix products, L_i^2 halved by causality

Neither padding nor recomputation counts as model FLOPs.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from balancing import RankPlan, plan_batch
from workers.config import ModelConfig, OptimizerConfig
from workers.model.engine import Engine
from workers.model.losses import Denominators, sft
from workers.model.packing import Sequences

LONGEST = 32_768
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151_936},
}
HEADS = {"tiny": (4, 2), "0.5B": (14, 2), "1.5B": (12, 2)}  # query heads, key-value heads
# Dense bf16 peaks without sparsity, in TFLOP/s, from the makers' data sheets; matched in the name of the card.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10G": 70, "RTX 4090": 165}
ALL_AT_ONCE = 2**40  # more tokens than any micro-batch: all its logits exist at one time


@dataclass(frozen=True)
class Way:
    layout: str
    chunk_tokens: int

    @property
    def name(self) -> str:
        return f"{self.layout}, log-probs {'at once' if self.chunk_tokens == ALL_AT_ONCE else 'in chunks'}"


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
    lengths = (median_length * torch.exp(1.2 * torch.special.ndtri(quantiles))).long().clamp(2, longest)
    lengths[-1] = longest
    return lengths[torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist()


def random_batch(lengths: list[int], vocabulary: int) -> Sequences:
    """Every token but the first of a sequence is predicted."""
    generator = torch.Generator().manual_seed(0)
    return Sequences.from_list(
        [
            {
                "input_ids": torch.randint(0, vocabulary, (length,), generator=generator),
                "loss_mask": torch.arange(length) > 0,
            }
            for length in lengths
        ]
    )


def save_random_model(size: str, folder: Path) -> None:
    """A model and a tokenizer, as an engine loads them."""
    heads, pairs = HEADS[size]
    config = Qwen2Config(
        **SIZES[size],
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(16)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)


def model_flops(engine: Engine, lengths: list[int]) -> float:
    """Of forward and backward; the tied embedding counts once, as the output layer that it also is."""
    config = engine.module.model.config
    squares = sum(length**2 for length in lengths)
    return 6 * engine.num_parameters * sum(lengths) + 6 * config.num_hidden_layers * config.hidden_size * squares


def build_engine(folder: Path, way: Way, device: str, checkpointing: bool) -> Engine:
    model = ModelConfig(
        path=str(folder),
        dtype="bfloat16",
        layout=way.layout,
        gradient_checkpointing=checkpointing,
        logprob_chunk_tokens=way.chunk_tokens,
    )
    return Engine(model, optimizer=OptimizerConfig(), total_steps=100, device=device)


def measure(engine: Engine, batch: Sequences, plan: RankPlan, repeats: int) -> Measurement:
    """`repeats` steps after one to warm up."""
    lengths, on_gpu = batch.lengths.tolist(), engine.device.type == "cuda"
    batch = Sequences.from_list([batch.slice(row, row + 1).tokens for row in plan.rows.tolist()])
    denominators, taken = Denominators.of(batch), []
    for _ in range(1 + repeats):
        start = perf_counter()
        engine.forward_backward(batch, plan.mini_batches[0].micro_batches, sft, denominators)
        engine.optimizer_step()
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return Measurement(median(taken[1:]), peak, sum(lengths), model_flops(engine, lengths))


def measure_way(folder: Path, way: Way, lengths: list[int], arguments: argparse.Namespace) -> Measurement | None:
    """None where the GPU's memory does not suffice."""
    max_tokens = max(arguments.max_tokens, max(lengths))
    plan = plan_batch(lengths, ranks=1, max_tokens=max_tokens, layout=way.layout).for_rank(0)
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        engine = build_engine(folder, way, arguments.device, arguments.gradient_checkpointing)
        return measure(engine, random_batch(lengths, engine.vocabulary), plan, arguments.repeats)
    except torch.cuda.OutOfMemoryError:
        return None


def row_of(size: str, way: Way, found: Measurement | None, peak_tflops: float | None) -> str:
    if found is None:
        return f"| {size} | {way.name} | out of memory | | |"
    utilisation = found.flops / found.seconds / 1e12 / peak_tflops if peak_tflops else None
    cells = [
        f"{found.tokens / found.seconds:,.0f}",
        "unknown" if utilisation is None else f"{utilisation:.1%}",
        f"{found.peak_gib:.1f}" if found.peak_gib else "not measured",
    ]
    return f"| {size} | {way.name} | {' | '.join(cells)} |"


def known_peak(card: str) -> float | None:
    return next((float(peak) for name, peak in PEAK_TFLOPS.items() if name in card), None)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5B", "1.5B"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short sequences, to see that it runs")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=LONGEST, help="cap of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the card, where it is not known here")
    parser.add_argument("--output", type=Path, help="file for the table")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.sizes, arguments.max_tokens = ["tiny"], 512
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is at hand; `--tiny --device cpu` shows that the program runs")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    card = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    peak_tflops = arguments.peak_tflops or known_peak(card)
    shape = (50, 512) if arguments.tiny else (2_000, LONGEST)
    lengths = long_tail_lengths(arguments.sequences, *shape)
    lines = [
        f"# {card}, torch {torch.__version__}, transformers {transformers.__version__}\n",
        f"{arguments.sequences} sequences of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} in all; "
        f"micro-batches of at most {arguments.max_tokens:,}; bf16 over float32 parameters; gradient checkpointing "
        f"{'on' if arguments.gradient_checkpointing else 'off'}; dense bf16 peak {peak_tflops or 'unknown'} TFLOP/s.\n",
        "| size | way | tokens/s | model FLOP utilisation | peak GiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    ways = [Way(layout, chunk) for layout in ("packed", "padded") for chunk in (2048, ALL_AT_ONCE)]
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(size, Path(folder))
            for way in ways:
                lines.append(row_of(size, way, measure_way(Path(folder), way, lengths, arguments), peak_tflops))
                print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
