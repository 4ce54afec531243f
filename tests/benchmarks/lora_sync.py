"""LoRA by what it trains and how engines get it: log-probs after an update, bytes sent, seconds.

    python -m tests.benchmarks.lora_sync [--output docs/lora-benchmark.md]                      or make bench

    trainer   two updates --weights, or A and B--> engine   vLLM on a CPU: samples --rows--> trainer, again

Each case is a random model of its kind in float32. Its policy makes two updates on random sequences. The
engine then has to sample with what the trainer has. Trainers are one or two ranks, engines real ones of vLLM,
in processes that all cases share.
"""

import os
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.command import read_options, write_page
from tests.workers.model.ranks import RankError, RankPool
from tests.workers.rollout.test_transfers import SIZES, save_model, start_replica
from tests.workers.vision_families import PLACEHOLDERS, pictures, save_tiny_vision_model
from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Image
from workers.config.roles import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SamplingConfig,
)
from workers.engine.requests import SampleRequest
from workers.engine.weights.weight_transfer import pack_weights
from workers.images.images import digest_of, png_of
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators
from workers.model.losses.supervised import sft

UPDATES = 2
COPIES = 20  # of the requests whose time is taken
ROUNDS = 5
PROMPT_TOKENS = (3, 17, 40)
SAMPLING = SamplingConfig(max_new_tokens=24)
VISION = "qwen2_5_vl"
LORA = LoraConfig(rank=4, alpha=8.0)
BESIDE_ABSORBED = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "vocab_size": 4096,
}
EXPERTS = replace(LORA, target_parameters="experts.gate_up_proj,experts.down_proj")
SEVERAL = "not offered: with `model.lora.policies` above 1 engines take adapters"
HEADER = """# LoRA: what engines get, and what it costs

Written by `python -m tests.benchmarks.lora_sync` on {cores} CPU cores. Each row is a random model of its kind in
float32, with adapters of rank 4 on all linear modules, in the last rows of rank 16. After two updates on random
sequences the engine gets all weights with the adapters merged, or A and B alone
([how](lora.md#adapters-in-the-engines)). It samples, and the trainer computes the same tokens. `mismatch` is the
difference of both log-probs, in nats a token. `changed` is the mean difference between the trainer and the base
model, which an engine without the update would show. Times are CPU seconds of one thread each: rank 0 packs an
update, an engine loads it. `tokens/s` are tokens that the engine samples in a CPU second, in the fastest of five
rounds: other work on the machine only slows it.

| model | `sync` | mismatch, mean | max | changed | MB sent | packing, s | loading, s | tokens/s |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""
FOOTER = """
With fused experts, and with expert parallelism, experts have adapters of their own
([`target_parameters`](lora.md#experts)). With latent attention the adapters are on all linear modules but
`kv_b_proj`, whose adapter vLLM loads and never computes: Ballast refuses it with `adapters`.
"""


@dataclass(frozen=True)
class Case:
    """A kind of run: its model, its adapters, and how ranks share the policy."""

    name: str
    family: str
    lora: LoraConfig = field(default_factory=lambda: LORA)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ranks: int = 1
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def policies(self) -> list[str]:
        return ["first", "second"] if self.lora.policies > 1 else [""]


@dataclass(frozen=True)
class Measured:
    """A case with one value of `model.lora.sync`. mismatch: of the engine's and the trainer's log-probs, mean
    and max. changed: mean difference of the trainer's to the base model's. seconds: of a CPU.
    """

    mismatch: tuple[float, float]
    changed: float
    sent_bytes: int
    packing_seconds: float
    loading_seconds: float
    tokens_a_second: float


CASES = (
    Case("dense", "qwen2"),
    Case("dense, rsLoRA", "qwen2", replace(LORA, rslora=True)),
    Case("mixture of experts", "qwen3_moe"),
    Case("fused experts", "qwen3_moe", EXPERTS),
    Case("tensor parallel 2", "qwen2", parallel=ParallelConfig(tensor_parallel=2), ranks=2),
    Case(
        "expert parallel 2",
        "qwen3_moe",
        EXPERTS,
        ParallelConfig(expert_parallel=2),
        ranks=2,
    ),
    Case(
        "latent attention",
        "deepseek_v3",
        replace(LORA, target_modules=",".join(BESIDE_ABSORBED)),
    ),
    Case("images", VISION),
    Case("two policies", "qwen2", replace(LORA, policies=2)),
    Case("dense, 27M parameters", "qwen2", replace(LORA, rank=16), sizes=LARGER),
)


def save_case(case: Case, folder: Path) -> str:
    if case.family == VISION:
        return str(save_tiny_vision_model(VISION, folder))
    return save_model(folder, case.family, **case.sizes)


def updated_policy(path: str, case: Case, name: str = "") -> TrainingEngine:
    """Return the case's policy after `UPDATES` steps, the same in every call."""
    policy = TrainingEngine(
        ModelConfig(path=path, dtype="float32", lora=case.lora),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        total_steps=UPDATES,
        device="cpu",
        parallel=case.parallel,
    )
    if name:
        policy.use_adapters(name)
    generator = torch.Generator().manual_seed(len(name) + 1)
    rows = [
        torch.randint(4, 256, (length,), generator=generator) for length in (40, 24, 9, 32)
    ]
    batch = DataProto.from_list(
        [{"input_ids": row, "loss_mask": torch.arange(len(row)) > 0} for row in rows]
    )
    if case.family == VISION:
        batch.objects["images"] = object_column([()] * len(rows))
    for _ in range(UPDATES):
        policy.forward_backward(batch, [(0, len(batch))], sft, Denominators.of(batch))
        policy.optimizer_step()
    return policy


def payload_of(path: str, case: Case, name: str) -> tuple[Any, float]:
    """Return what an update sends, and the trainer's CPU seconds for it."""
    policy = updated_policy(path, case, name)
    began = time.process_time()
    if case.lora.sends_adapters:
        payload: Any = policy.adapter_files()
    else:
        payload = pack_weights(policy.named_weights(torch.float32, keeper=0))
    return payload, time.process_time() - began


def requests_of(path: str, case: Case, adapter: int) -> list[SampleRequest]:
    if case.family == VISION:
        return image_requests(path)
    random = np.random.default_rng(3)
    prompts = [
        random.integers(4, SIZES["vocab_size"], size).astype(np.int32)
        for size in PROMPT_TOKENS
    ]
    return [
        SampleRequest(f"{adapter}/{place}", 0, ids, seed=place, adapter=adapter)
        for place, ids in enumerate(prompts)
    ]


def image_requests(path: str) -> list[SampleRequest]:
    from transformers import AutoTokenizer

    from workers.model.vision.processor import load_placeholders

    placeholders = load_placeholders(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    requests = []
    for number, picture in enumerate(pictures()):
        image = Image(digest_of(picture), *picture.size, png_of(picture))
        text = f"how many dots has {PLACEHOLDERS[VISION]}?"
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        expanded, places = placeholders.expand(ids, [image], "a prompt")
        requests.append(SampleRequest(str(number), 0, expanded, seed=number, images=places))
    return requests


@dataclass(frozen=True)
class Sampled:
    """What an engine did with an update: samples by policy, and seconds of a CPU."""

    batches: list[DataProto]
    loading_seconds: float
    tokens_a_second: float


def sample_with(path: str, case: Case, payloads: list[Any]) -> Sampled:
    """Send the payloads to an engine, and sample from each policy."""
    replica = start_replica(path, "shared_memory", lora=case.lora)
    began = time.process_time()
    several = case.lora.policies > 1
    if several:
        replica.load_adapters(
            {place: Ready(files) for place, files in enumerate(payloads, 1)}, 1
        )
    elif case.lora.sends_adapters:
        replica.update_adapters(payloads[0], 1)
    else:
        replica.update_weights(payloads[0], 1)
    loading_seconds = time.process_time() - began
    batches = []
    for place in range(1, len(payloads) + 1):
        requests = requests_of(path, case, place if several else 0)
        batches.append(as_batch(replica.rows(requests, SAMPLING), requests))
    many = [
        replace(request, uid=f"{copy}/{request.uid}", seed=copy)
        for copy in range(COPIES)
        for request in requests
    ]
    rates = []
    for _ in range(ROUNDS):
        began = time.process_time()
        rows = replica.rows(many, SAMPLING)
        rates.append(
            sum(int(row["loss_mask"].sum()) for row in rows) / (time.process_time() - began)
        )
    replica.stop()
    return Sampled(batches, loading_seconds, max(rates))


class Ready:
    """Files that are there, as a reference of Ray's that an engine awaits."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def __await__(self) -> Any:
        yield from ()
        return self._files


def as_batch(rows: list[dict[str, Any]], requests: list[SampleRequest]) -> DataProto:
    """Return samples, which come in the order of their ends, with the images of their prompts."""
    columns = [{name: torch.tensor(values) for name, values in row.items()} for row in rows]
    batch = DataProto.from_list(columns)
    if any(request.images for request in requests):
        images = {request.prompt_ids.tobytes(): request.images for request in requests}
        prompts = [
            row["input_ids"][~row["loss_mask"]].astype(np.int32).tobytes() for row in rows
        ]
        batch.objects["images"] = object_column([images[prompt] for prompt in prompts])
    return batch


def differences_of(
    path: str, case: Case, name: str, batch: DataProto
) -> tuple[np.ndarray, float]:
    """Return |engine - trainer| of every sampled token, and the mean |base model - trainer|."""
    policy = updated_policy(path, case, name)
    cut = [(0, len(batch))]
    mask = batch.tokens["loss_mask"]
    log_probs, _ = policy.log_probs(batch, cut)
    with policy.without_adapters():
        base, _ = policy.log_probs(batch, cut)
    mismatch = (log_probs - batch.tokens["rollout_log_probs"]).abs()[mask]
    return mismatch.numpy(), float((log_probs - base).abs()[mask].mean())


def measure(case: Case, trainers: RankPool, engines: RankPool) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        path = save_case(case, Path(folder))
        sent = [
            trainers.run(payload_of, case.ranks, path, case, name)[0]
            for name in case.policies
        ]
        payloads = [payload for payload, _ in sent]
        (sampled,) = engines.run(sample_with, 1, path, case, payloads)
        results = [
            trainers.run(differences_of, case.ranks, path, case, name, batch)[0]
            for name, batch in zip(case.policies, sampled.batches, strict=True)
        ]
    mismatch = np.concatenate([differences for differences, _ in results])
    return Measured(
        mismatch=(float(mismatch.mean()), float(mismatch.max())),
        changed=min(changed for _, changed in results),
        sent_bytes=sum(map(bytes_of, payloads)),
        packing_seconds=sum(seconds for _, seconds in sent),
        loading_seconds=sampled.loading_seconds,
        tokens_a_second=sampled.tokens_a_second,
    )


def bytes_of(payload: Any) -> int:
    return (
        sum(file.nbytes for file in payload.values())
        if isinstance(payload, dict)
        else payload.nbytes
    )


def line_of(case: Case, sync: str, trainers: RankPool, engines: RankPool) -> str:
    """Return a row of the page: numbers, or why there are none."""
    begin = f"| {case.name} | `{sync}` | "
    if case.lora.policies > 1 and sync == "merged":
        return f"{begin}{SEVERAL} |||||||"
    try:
        result = measure(
            replace(case, lora=replace(case.lora, sync=sync)), trainers, engines
        )
    except RankError as error:
        reason = str(error).strip().splitlines()[-1].replace("|", "/")
        return f"{begin}{reason} |||||||"
    mean, largest = result.mismatch
    return (
        f"{begin}{mean:.1e} | {largest:.1e} | {result.changed:.2f} | {result.sent_bytes / 1e6:.2f} | "
        f"{result.packing_seconds:.3f} | {result.loading_seconds:.3f} | {result.tokens_a_second:,.0f} |"
    )


def main() -> None:
    """Measure the cases whose names begin with `--only`, and print the page."""
    arguments = read_options(__doc__, only="", output=None)
    trainers = RankPool(2)
    engines = RankPool(1)
    text = HEADER.format(cores=len(os.sched_getaffinity(0)))
    for case in CASES:
        for sync in ("merged", "adapters"):
            if case.name.startswith(arguments.only):
                line = line_of(case, sync, trainers, engines)
                print(line, flush=True)
                text += f"{line}\n"
    trainers.stop()
    engines.stop()
    write_page(arguments.output, text + FOOTER)


if __name__ == "__main__":
    main()
