"""What the packed layout and the chunked log-probs buy, as ratios within one run on CPU.

    python -m tests.benchmarks.engine [--repeats 3] [--output docs/engine-benchmark.md]                 or make bench

    layouts     one long-tail batch through a 20M model, forward and backward: packed, padded, transformers' own packing
    log_probs   log-probs and entropies of 8,192 tokens over 32,000 words: chunked against the whole matrix of logits
    tokens      cost of a packed row as it grows at a fixed length of its sequences

Times are medians of CPU seconds of one thread, so that other work on the machine does not count; the ways
that are compared take turns.
"""

import multiprocessing
import resource
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from time import process_time

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from balancing import plan_batch
from tests.benchmarks.command import read_options, write_page
from workers.batch.dataproto import DataProto
from workers.config.roles import ModelConfig
from workers.model.attention.attention import packed_attention
from workers.model.losses.logprobs import linear_log_probs
from workers.model.model import PackedCausalLM, packed_causal_lm
from workers.model.rows.packing import pack, pad

HEADER = """# Engine benchmark

Written by `python -m tests.benchmarks.engine`: forward and backward in float32 on one core of an x86-64 processor with
AVX2. Times are medians of CPU seconds, measured in turns. Read the ratios, because absolute times drift
with the machine.
"""
CPU = torch.device("cpu")
VOCABULARY = 10_000


def long_tail_lengths(count: int, median_length: int) -> list[int]:
    """Quantiles of a log-normal distribution with sigma 1, in random order."""
    quantiles = (torch.arange(count) + 0.5) / count
    lengths = (
        (median_length * torch.special.ndtri(quantiles).exp()).round().long().clamp_min(2)
    )
    return lengths[
        torch.randperm(count, generator=torch.Generator().manual_seed(0))
    ].tolist()


def random_batch(lengths: list[int]) -> DataProto:
    """Every token but the first of a sequence is predicted."""
    generator = torch.Generator().manual_seed(0)
    return DataProto.from_list(
        [
            {
                "input_ids": torch.randint(0, VOCABULARY, (length,), generator=generator),
                "loss_mask": torch.arange(length) > 0,
            }
            for length in lengths
        ]
    )


def model_of_20m(layout: str) -> PackedCausalLM:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return packed_causal_lm(
        AutoModelForCausalLM.from_config(config), ModelConfig(layout=layout)
    )


def packed(module: PackedCausalLM, batch: DataProto) -> Tensor:
    """Loss of the batch as one packed row."""
    row = pack(batch)
    return module(replace(row, attention=packed_attention("sdpa", row, CPU)), 1.0)[0].mean()


def padded(module: PackedCausalLM, batch: DataProto) -> Tensor:
    """Loss of the batch as rows of its longest sequence."""
    return module(pad(batch), 1.0)[0].mean()


def native(module: PackedCausalLM, batch: DataProto) -> Tensor:
    """Loss through transformers' own packing, which reads it from the positions; output layer and loss as in
    ours.
    """
    row = pack(batch)
    hidden = module.model.get_decoder()(
        input_ids=row.input_ids, position_ids=row.position_ids, use_cache=False
    ).last_hidden_state[0, row.predicting]
    return linear_log_probs(
        hidden, module.model.get_output_embeddings().weight, None, row.targets
    )[0].mean()


def seconds(run: Callable[[], Tensor], module: torch.nn.Module) -> float:
    """Of one forward and backward pass."""
    start = process_time()
    run().backward()
    took = process_time() - start
    module.zero_grad()
    return took


def dynamic_batches(batch: DataProto, max_tokens: int) -> list[DataProto]:
    """The batch cut for the padded layout: rows of like length together, rows * longest within
    `max_tokens`.
    """
    plan = plan_batch(
        batch.lengths.numpy(), ranks=1, max_tokens=max_tokens, layout="padded"
    )
    parts = [
        step.ranks[0] for mini_batch in plan.mini_batches for step in mini_batch.micro_steps
    ]
    return [
        DataProto.from_list([batch.slice(i, i + 1).tokens for i in part.tolist()])
        for part in parts
    ]


def part_layouts(repeats: int) -> str:
    lengths = long_tail_lengths(64, 40)
    batch, tokens = random_batch(lengths), sum(lengths)
    ours, rows, theirs = (
        model_of_20m("packed"),
        model_of_20m("padded"),
        model_of_20m("padded"),
    )
    theirs.model.set_attn_implementation("sdpa")
    parts = dynamic_batches(batch, 4 * max(lengths))
    ways = {
        "packed": (ours, [batch], packed),
        "transformers' packing (position_ids, sdpa, no cache)": (theirs, [batch], native),
        f"padded, cut into {len(parts)} micro-batches of similar length": (
            rows,
            parts,
            padded,
        ),
        "padded": (rows, [batch], padded),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (module, pieces, forward) in ways.items():
            times[name].append(
                sum(
                    seconds(lambda f=forward, m=module, b=b: f(m, b), module)
                    for b in pieces
                )
            )
    base = median(times["packed"])
    lines = [
        f"A Qwen2 architecture of {sum(p.numel() for p in ours.parameters()) / 1e6:.0f}M parameters, 64 "
        f"sequences of {min(lengths)} to {max(lengths)} tokens, {tokens:,} in all, {64 * max(lengths):,} "
        "cells when padded to the longest. Timed: forward, log-probs and entropies, backward.\n",
        "| way | CPU s | tokens / CPU s | packed is faster by |",
        "| --- | --- | --- | --- |",
    ]
    for name, taken in times.items():
        lines.append(
            f"| {name} | {median(taken):.2f} | {tokens / median(taken):,.0f} | {median(taken) / base:.1f}x |"
        )
    lines.append("\nTargets: at least 4x over padded, 2x over transformers' packing.")
    return "\n".join(lines)


def naive_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """The whole matrix of logits at once."""
    all_log_probs = torch.nn.functional.linear(hidden, weight).log_softmax(-1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return all_log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy


def measure_log_probs(chunk_tokens: int | None, repeats: int, answer: object) -> None:
    """In a process of its own: (median seconds, peak GiB above the inputs) of forward and backward; None is
    naive.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8192, 256, generator=generator, requires_grad=True)
    weight = (torch.randn(32_000, 256, generator=generator) / 16).requires_grad_()
    targets = torch.randint(0, 32_000, (8192,), generator=generator)
    before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(repeats):
        start = process_time()
        if chunk_tokens is None:
            log_probs, entropy = naive_log_probs(hidden, weight, targets)
        else:
            log_probs, entropy = linear_log_probs(
                hidden, weight, None, targets, chunk_tokens=chunk_tokens
            )
        (log_probs.mean() + 0.01 * entropy.mean()).backward()
        times.append(process_time() - start)
        hidden.grad = weight.grad = None
        del log_probs, entropy
    answer.put(
        (
            median(times),
            (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20,
        )
    )


def part_log_probs(repeats: int) -> str:
    context = multiprocessing.get_context("spawn")
    lines = [
        "8,192 tokens, 32,000 words, hidden size 256: log-probs and entropies, forward and backward. Peak "
        "resident memory above the inputs, gradients included, each way in a separate process.\n",
        "| way | CPU s | peak GiB |",
        "| --- | --- | --- |",
    ]
    for chunk_tokens in (
        None,
        ModelConfig().chunk_tokens("cuda"),
        ModelConfig().chunk_tokens("cpu"),
    ):
        answer = context.Queue()
        process = context.Process(
            target=measure_log_probs, args=(chunk_tokens, repeats, answer)
        )
        process.start()
        took, peak = answer.get()
        process.join()
        name = (
            "all logits at once"
            if chunk_tokens is None
            else f"chunks of {chunk_tokens} tokens"
        )
        lines.append(f"| {name} | {took:.2f} | {peak:.2f} |")
    lines.append(
        "\nTarget: at most 0.5 GiB, and no slower than all at once. `model.logprob_chunk_tokens` sets the "
        "chunk."
    )
    return "\n".join(lines)


def part_tokens(repeats: int) -> str:
    module, length = model_of_20m("packed"), 64
    batches = {count * length: random_batch([length] * count) for count in (8, 16, 32, 64)}
    times: dict[int, list[float]] = {tokens: [] for tokens in batches}
    for _ in range(repeats):
        for tokens, batch in batches.items():
            times[tokens].append(seconds(lambda b=batch: packed(module, b), module))
    lines = [
        f"The same model, one packed row of more and more sequences of {length} tokens each.\n",
        "| tokens | CPU s | microseconds a token |",
        "| --- | --- | --- |",
    ]
    for tokens, taken in times.items():
        lines.append(
            f"| {tokens:,} | {median(taken):.2f} | {1e6 * median(taken) / tokens:.0f} |"
        )
    lines.append(
        "\nTarget: cost linear in the tokens. A mask of tokens x tokens would make the last column grow "
        "with the first."
    )
    return "\n".join(lines)


def main() -> None:
    arguments = read_options(__doc__, repeats=3, output=None)
    torch.set_num_threads(1)
    page, parts = (
        HEADER,
        {"Layouts": part_layouts, "Log-probs without the logits": part_log_probs},
    )
    for title, measure in (parts | {"Cost of a packed row": part_tokens}).items():
        section = f"\n## {title}\n\n{measure(arguments.repeats)}\n"
        print(section, flush=True)
        page += section
    write_page(arguments.output, page)


if __name__ == "__main__":
    main()
