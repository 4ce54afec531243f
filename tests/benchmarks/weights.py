"""Weights that an update changes, by learning rate, and what whole weights and deltas take to send.

    python -m tests.benchmarks.weights [--steps 6] [--output docs/weights-benchmark.md]                    or make bench

Real steps in one process: the quickstart's model (run `make fit` once before) in bfloat16, sampled by vLLM,
GRPO, AdamW. After each step the engine gets the changes. Sizes and times of larger weights are of random
matrices, with as many values changed as at a learning rate of 1e-6.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from examples.addition.reward import reward
from tests.benchmarks.command import read_options, write_page
from workers.batch.dataproto import DataProto
from workers.config.roles import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
)
from workers.engine.requests import SampleRequest, sample_seed
from workers.engine.weights.weight_delta import DeltaPacker, WeightFile
from workers.engine.weights.weight_transfer import pack_weights
from workers.rollout.engine_actor import VllmEngineActor

MODEL = ModelConfig(path="examples/addition/cache/model", dtype="bfloat16")
TRAIN = Path("examples/addition/cache/train.jsonl")
RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3)
PROMPTS, SAMPLES, MICRO_BATCH, MAX_NEW_TOKENS = 8, 8, 16, 64
LARGE_MIB, MATRIX = 1024, 4096
HEADER = """# Weights that an update changes

Written by `python -m tests.benchmarks.weights` on {cores} CPU cores. `rollout.weight_sync: delta` sends the changed
weights ([how](placement.md#weights-over-a-slow-network)). The quickstart's model, 3M parameters after its warm start,
computes in bfloat16 and keeps its parameters in float32. It makes {steps} steps of {prompts} prompts with {samples}
samples: vLLM, GRPO, AdamW. Values are medians over steps. `changed`: share of the bfloat16 values that differ from
those that the engine got last. `bytes`: of the delta, over those of whole weights. Above 20 % whole weights are sent.

| learning rate | changed | bytes | vLLM loads them, s |
| ---: | ---: | ---: | ---: |
"""
LARGE = """
A value changes when AdamW's steps, each about the learning rate, have moved it to the next bfloat16. Large values have
larger distances between neighbours, so larger models with the same deviation of weights change by a similar share.

{mib:,} MiB of random weights, {share:.1%} of them changed:

| | whole | delta |
| --- | ---: | ---: |
| MiB sent | {mib:,} | {delta_mib:.0f} |
| rank 0 packs them, CPU s | {pack:.2f} | {delta_pack:.2f} |
| an engine's host writes them, CPU s | {write:.2f} | {delta_write:.2f} |
| on a network of 1 Gbit/s, s (computed) | {slow:.1f} | {delta_slow:.1f} |
| on a network of 100 Gbit/s, s (computed) | {fast:.2f} | {delta_fast:.2f} |

vLLM then loads the whole file either way. A delta takes {extra:.1f} CPU seconds more here. On one thread it gains on a
network below {even:.0f} Gbit/s, and nothing within a node.
"""


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the CPU seconds of all threads, which other work on the machine changes little."""
    start = time.process_time()
    return call(), time.process_time() - start


async def sample(engine: VllmEngineActor, step: int) -> DataProto:
    """Samples of the step's prompts, with their advantages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL.path)
    records = [
        json.loads(line)
        for line in TRAIN.read_text().splitlines()[step * PROMPTS : (step + 1) * PROMPTS]
    ]
    prompts = [
        np.array(tokenizer(record["prompt"])["input_ids"], np.int32) for record in records
    ]
    requests = [
        SampleRequest(str(i), k, ids, sample_seed(step, 0, str(i), k))
        for i, ids in enumerate(prompts)
        for k in range(SAMPLES)
    ]
    rows: dict[int, list[dict[str, Any]]] = {i: [] for i in range(PROMPTS)}
    block = DataProto.from_rows([])
    async for part in engine.generate(
        requests, SamplingConfig(max_new_tokens=MAX_NEW_TOKENS)
    ):
        if isinstance(part, DataProto):
            block = part
            continue
        for result in part:
            row = block.row(result.row)
            text = tokenizer.decode(
                row["input_ids"][row["loss_mask"]], skip_special_tokens=True
            )
            solution = records[int(result.uid)]["solution"]
            row = {name: row[name] for name in ("input_ids", "loss_mask")}
            rows[int(result.uid)].append(row | {"reward": reward(text, solution)["reward"]})
    for group in rows.values():
        rewards = np.array([row.pop("reward") for row in group])
        for row, advantage in zip(
            group, (rewards - rewards.mean()) / (rewards.std() + 1e-6), strict=True
        ):
            row["advantages"] = np.full(len(row["input_ids"]), advantage, np.float32)
    return DataProto.from_rows(
        [row for group in rows.values() for row in group]
    ).as_tensors()


async def measured(
    engine: VllmEngineActor, rate: float, steps: int, version: int
) -> list[tuple[float, float, float]]:
    """Of each step: share of changed values, bytes over those of whole weights, and seconds of
    vLLM's load.
    """
    from workers.model.engine import TrainingEngine
    from workers.model.losses import Denominators, make_policy_loss

    optimizer = OptimizerConfig(learning_rate=rate)
    policy = TrainingEngine(MODEL, optimizer=optimizer, total_steps=steps, device="cpu")
    packer, found, whole = DeltaPacker(), [], 0
    for step in range(steps + 1):
        if step:
            batch = await sample(engine, step)
            cuts = [
                (begin, begin + MICRO_BATCH) for begin in range(0, len(batch), MICRO_BATCH)
            ]
            policy.forward_backward(
                batch, cuts, make_policy_loss(LossConfig()), Denominators.of(batch)
            )
            policy.optimizer_step()
        payload, metrics = packer.pack(policy.named_weights(policy.dtype, 0))
        whole = whole or payload.nbytes
        sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        sent.set_result(payload)
        await engine.follow_weights([(version + step, sent)])
        (load,) = await engine.take_weight_loads()
        found.append(
            (metrics["weights_changed"].value, payload.nbytes / whole, load.seconds)
        )
    return found[1:]


def of_large_weights(share: float) -> str:
    """The second table."""
    import torch

    count = LARGE_MIB * 2**20 // (2 * MATRIX * MATRIX)
    weights = {
        f"{i}": (torch.randn(MATRIX, MATRIX) * 0.02).bfloat16() for i in range(count)
    }
    packer, file = DeltaPacker(), WeightFile()
    whole, pack = timed(lambda: pack_weights(weights.items()))
    packer.pack(weights.items())
    _, write = timed(lambda: file.take(whole, 0))
    for weight in weights.values():
        at = torch.rand(weight.shape) < share
        weight[at] *= 1.01
    (delta, _), delta_pack = timed(lambda: packer.pack(weights.items()))
    _, delta_write = timed(lambda: file.take(delta, 1))
    bits = {"": whole.nbytes * 8, "delta_": delta.nbytes * 8}
    networks = {f"{key}slow": size / 1e9 for key, size in bits.items()}
    networks |= {f"{key}fast": size / 1e11 for key, size in bits.items()}
    times = {
        "pack": pack,
        "write": write,
        "delta_pack": delta_pack,
        "delta_write": delta_write,
    }
    extra = max(delta_pack + delta_write - pack - write, 0.01)
    times |= {"extra": extra, "even": 8 * (whole.nbytes - delta.nbytes) / 1e9 / extra}
    return LARGE.format(
        mib=LARGE_MIB, share=share, delta_mib=delta.nbytes / 2**20, **times, **networks
    )


async def page(steps: int) -> str:
    config = RolloutConfig(cpu_kv_cache_gib=0.25, weight_sync="delta")
    engine = VllmEngineActor(
        MODEL, config, index=0, placement="shared_memory", max_model_tokens=96, seed=0
    )
    # before Numba is imported, which its thread stumbles over; it joins a process group of one
    await engine.start()
    lines = HEADER.format(
        cores=len(os.sched_getaffinity(0)), steps=steps, prompts=PROMPTS, samples=SAMPLES
    )
    shares = []
    for number, rate in enumerate(RATES):
        found = await measured(engine, rate, steps, number * (steps + 1))
        share, ratio, seconds = (
            statistics.median(column) for column in zip(*found, strict=True)
        )
        lines += f"| {rate:.0e} | {share:.2%} | {ratio:.1%} | {seconds:.3f} |\n"
        print(lines.splitlines()[-1], flush=True)
        shares.append(share)
    await engine.stop()
    return lines + of_large_weights(shares[0])


def main() -> None:
    """Measure, and print the page."""
    arguments = read_options(__doc__, steps=6, output=None)
    text = asyncio.run(page(arguments.steps))
    print(text)
    write_page(arguments.output, text)


if __name__ == "__main__":
    main()
