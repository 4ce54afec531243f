"""What the system costs: a step of the quickstart against the same step written by hand in one process.

    python -m tests.benchmarks.step [--steps 16] [--rounds 2] [--output docs/step-benchmark.md]         or make bench

Both train the warm-started adder (run `make fit` once before) on the same prompts: 32 prompts x 8 samples, at
most 64 new tokens, GRPO, one AdamW step. By hand: vLLM's `LLM` and a transformers model in one process with
all cores, sequences sorted by length and padded in micro-batches, weights loaded in place; no Ray, no log, no
second rank. The two take turns, so that both see the machine in the same minutes; the ratio of the medians is
what counts.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.json_lines import read_lines

CONFIG = "examples/addition/config.yaml"
MODEL, TRAIN = "examples/addition/cache/model", "examples/addition/cache/train.jsonl"
PROMPTS, SAMPLES, MAX_NEW_TOKENS, LEARNING_RATE, CLIP = 32, 8, 64, 2e-4, 1.0
MICRO_BATCH = 32  # sequences; 16 to 64 take the same time
WARM_UP = 3  # steps that are not counted
BY_HAND, TRL = "by hand, one process", "TRL's GRPOTrainer, transformers generation"
WAYS: dict[str, tuple[str, ...] | None] = {
    BY_HAND: None,
    **({TRL: None} if find_spec("trl") else {}),
    "this system": (),
    "this system, model.share_prefixes=never": ("model.share_prefixes=never",),
    "this system, rollout.max_staleness=1": (
        "rollout.max_staleness=1",
        "rollout.replicas=1",
    ),
}
HEADER = """# A step against a loop by hand

Written by `python -m tests.benchmarks.step` on {cores} CPU cores: seconds per step of the quickstart, medians of
{steps} steps, {rounds} times in turns. By hand: vLLM and a transformers model in one process with all cores, padded
micro-batches sorted by length, no Ray. `update` is forward, backward and the optimizer's step. An update is faster if
responses to a prompt share a beginning, which depends on the warm start.

| loop | seconds a step, in turns | median | of the loop by hand | update, s | tokens a step |
| --- | --- | --- | --- | --- | --- |
"""


class HandWritten:
    """GRPO on one engine and one model, as short as it gets."""

    def __init__(self) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from vllm import LLM, SamplingParams

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.engine = LLM(
            MODEL,
            dtype="float32",
            enforce_eager=True,
            max_model_len=96,
            kv_cache_memory_bytes=2**29,
        )
        self.sampling = SamplingParams(
            n=SAMPLES,
            temperature=1.0,
            max_tokens=MAX_NEW_TOKENS,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
        )
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.records = read_lines(Path(TRAIN))

    def step(self, number: int) -> int:
        """Sample, score, learn, load; returns the tokens of the step."""
        begin = number * PROMPTS % (len(self.records) - PROMPTS)
        sequences, responses, advantages = self.sample(
            self.records[begin : begin + PROMPTS]
        )
        start = time.perf_counter()
        self.learn(sequences, responses, advantages)
        self.update_seconds = time.perf_counter() - start
        weights = iter(self.model.state_dict().items())
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.engine.reset_prefix_cache()
        return sum(map(len, sequences))

    def sample(
        self, records: list[dict[str, str]]
    ) -> tuple[list[list[int]], list[int], list[float]]:
        from examples.addition.reward import reward

        prompts: list[Any] = [
            {"prompt_token_ids": self.tokenizer(record["prompt"])["input_ids"]}
            for record in records
        ]
        sequences, responses, advantages = [], [], []
        for record, output in zip(
            records,
            self.engine.generate(prompts, self.sampling, use_tqdm=False),
            strict=True,
        ):
            texts = [
                self.tokenizer.decode(one.token_ids, skip_special_tokens=True)
                for one in output.outputs
            ]
            rewards = [reward(text, record["solution"])["reward"] for text in texts]
            mean, deviation = statistics.mean(rewards), statistics.pstdev(rewards)
            advantages += [(value - mean) / (deviation + 1e-6) for value in rewards]
            responses += [len(one.token_ids) for one in output.outputs]
            sequences += [
                [*output.prompt_token_ids, *one.token_ids] for one in output.outputs
            ]
        return sequences, responses, advantages

    def learn(
        self, sequences: list[list[int]], responses: list[int], advantages: list[float]
    ) -> None:
        import torch

        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        for begin in range(0, len(order), MICRO_BATCH):
            rows = order[begin : begin + MICRO_BATCH]
            width = max(len(sequences[i]) for i in rows)
            ids, mask = (
                torch.zeros(len(rows), width, dtype=torch.long),
                torch.zeros(len(rows), width),
            )
            attention = torch.zeros(len(rows), width, dtype=torch.long)
            for row, i in enumerate(rows):
                length = len(sequences[i])
                ids[row, :length] = torch.tensor(sequences[i])
                attention[row, :length] = 1
                mask[row, length - responses[i] : length] = 1
            logits = self.model(input_ids=ids, attention_mask=attention).logits[:, :-1]
            log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (
                log_probs - log_probs.detach()
            ).exp()  # one step on policy: the clip is never met
            weight = torch.tensor([advantages[i] for i in rows])[:, None] * mask[:, 1:]
            (-(ratio * weight).sum() / sum(responses)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()


def by_hand(steps: int) -> None:
    """Print the seconds and tokens of the counted steps as JSON."""
    loop, seconds, updates, tokens = HandWritten(), [], [], []
    for number in range(WARM_UP + steps):
        start = time.perf_counter()
        tokens.append(loop.step(number))
        seconds.append(time.perf_counter() - start)
        updates.append(loop.update_seconds)
    print(
        json.dumps(
            {
                "seconds": seconds[WARM_UP:],
                "updates": updates[WARM_UP:],
                "tokens": tokens[WARM_UP:],
            }
        )
    )


def by_trl(steps: int) -> None:
    """Print the seconds of TRL's counted steps as JSON: the same prompts, samples, lengths, loss and
    optimizer.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from examples.addition.reward import reward

    seconds: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    def score(completions: list[str], solution: list[str], **_: Any) -> list[float]:
        return [
            reward(text, right)["reward"]
            for text, right in zip(completions, solution, strict=True)
        ]

    records = read_lines(Path(TRAIN))
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder, per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO_BATCH,
            num_generations=SAMPLES, max_completion_length=MAX_NEW_TOKENS, max_steps=WARM_UP + steps, beta=0.0,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=CLIP, adam_beta2=0.95,
            shuffle_dataset=False, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        GRPOTrainer(
            MODEL, score, arguments, Dataset.from_list(records), callbacks=[Clock()]
        ).train()
    nothing = [math.nan]
    print(json.dumps({"seconds": seconds[WARM_UP:], "updates": nothing, "tokens": nothing}))


def measured_alone(loop: str, steps: int) -> dict[str, list[float]]:
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.step",
        f"--{loop}",
        "--steps",
        str(steps),
    ]
    lines = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    found: dict[str, list[float]] = json.loads(lines[-1])
    return found


def measured_run(steps: int, overrides: tuple[str, ...]) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}",
            "run.name=step",
            f"run.steps={WARM_UP + steps}",
            "validation.prompts=8",
        ]
        # Prompts in the order of the loop by hand.
        settings += ["tracking.tensorboard=false", "data.shuffle=false"]
        command = [
            sys.executable,
            "-m",
            "controller.fit",
            "--config",
            CONFIG,
            *settings,
            *overrides,
        ]
        subprocess.run(command, check=True, capture_output=True)
        lines = read_lines(Path(folder) / "step/metrics.jsonl")
        found = [line for line in lines if "time/step_s" in line][WARM_UP:]
    seconds = [line["time/step_s"] for line in found]
    tokens = [line["time/step_s"] * line["throughput/tokens_per_s"] for line in found]
    return {
        "seconds": seconds,
        "updates": [line["time/update_s"] for line in found],
        "tokens": tokens,
    }


def pause_of_updates() -> str:
    """The section of `tests.benchmarks.update_pause`."""
    command = [sys.executable, "-m", "tests.benchmarks.update_pause"]
    page = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return page[page.index("## ") :].rstrip() + "\n"


def main() -> None:
    """Measure all ways in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--by-hand", action="store_true", help="only that loop, as JSON")
    parser.add_argument("--trl", action="store_true", help="only TRL, as JSON")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.by_hand or arguments.trl:
        (by_hand if arguments.by_hand else by_trl)(arguments.steps)
        return
    found: dict[str, list[dict[str, list[float]]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, overrides in WAYS.items():
            steps = arguments.steps
            alone = "trl" if way == TRL else "by-hand"
            found[way].append(
                measured_alone(alone, steps)
                if overrides is None
                else measured_run(steps, overrides)
            )
            print(
                f"{way}: {statistics.median(found[way][-1]['seconds']):.2f} s", flush=True
            )
    medians = {
        way: statistics.median(s for turn in turns for s in turn["seconds"])
        for way, turns in found.items()
    }
    page = HEADER.format(
        cores=len(os.sched_getaffinity(0)), steps=arguments.steps, rounds=arguments.rounds
    )
    for way, turns in found.items():
        each = ", ".join(f"{statistics.median(turn['seconds']):.2f}" for turn in turns)
        tokens, update = (
            statistics.median(one for turn in turns for one in turn[name])
            for name in ("tokens", "updates")
        )
        ratio = medians[way] / next(iter(medians.values()))
        row = f"| {way} | {each} | {medians[way]:.2f} | {ratio:.2f} | {update:.2f} | {tokens:,.0f} |\n"
        page += row.replace("nan", "not measured")
    print(page)
    page += "\n" + pause_of_updates()
    print(page)
    if arguments.output:
        arguments.output.write_text(page)


if __name__ == "__main__":
    main()
