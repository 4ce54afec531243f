"""The folder of a run as `RunWriter` leaves it, with texts that try to become part of a page."""

from pathlib import Path

import numpy as np

from balancing import CostModel, plan_batch
from balancing.analysis.lengths_file import plan_record
from controller.algorithm.validation_metrics import ScoredResponse
from controller.config import Config, to_yaml
from controller.observability.recorded_values import as_recorded
from controller.observability.run_folder import RunWriter
from controller.observability.timeline import TimelineRecorder
from tests.controller.observability.recorded_sessions import FORKED, node
from workers.model.timing import MicroStepTime

STEPS = 12
ATTACKS = (
    "<script>document.title = 'taken over'</script>",
    '"><img src=x onerror="document.title=\'taken over\'">',
    "</td></table></main><h1 id=injected>taken over</h1>",
    "<svg onload=\"document.title='taken over'\"></svg><!--",
    "{{ 7 * 7 }}{% raw %} $\\frac{1}{2 &lt;b&gt; \u0000\u202e",
)


def write_run(folder: Path, *, steps: int = STEPS, ranks: int = 4) -> Config:
    """Metrics that rise, lengths that grow, samples and held-out responses of which some are attacks."""
    config = Config()
    config.run.dir, config.run.name = str(folder.parent), folder.name
    config.model.path, config.data.train = "models/small", "train.jsonl"
    (
        config.policy.data_parallel,
        config.policy.max_tokens_per_micro_batch,
        config.batch.mini_batches,
    ) = (
        ranks,
        4096,
        2,
    )
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    with RunWriter(folder, to_yaml(config), []) as writer:
        writer.step(0, {"validation/reward": 0.2})
        for step in range(1, steps + 1):
            writer.step(step, metrics(step, steps))
            lengths = rng.lognormal(5.5 + step / steps, 0.6, 64).clip(8, 2048).astype(int)
            mini_batches = np.arange(64).reshape(2, 32)
            plan = plan_batch(
                lengths, ranks=ranks, max_tokens=4096, mini_batches=mini_batches
            )
            writer.lengths(step, plan_record(plan), lengths=lengths)
            writer.samples(step, samples(step, rng))
            writer.timeline(step, timeline())
        writer.validation(steps, held_out())
    return config


def metrics(step: int, steps: int) -> dict[str, float]:
    progress = step / steps
    return {
        "reward/mean": 0.2 + 0.6 * progress,
        "reward/std": 0.3,
        "reward/failures": 0.0,
        "reward/exact_match": 0.1 + 0.5 * progress,
        "balance/imbalance_before/micro_steps": 0.3 - 0.1 * progress,
        "balance/imbalance_karmarkar_karp/micro_steps": 0.04,
        "balance/imbalance/micro_steps": 0.02,
        "policy/entropy": 1.0 - 0.5 * progress,
        "policy/grad_norm": 0.5,
        "time/rollout_s": 2.0 + progress,
        "time/update_s": 1.5,
        "time/weights_s": 0.3,
        "time/step_s": 4.0 + progress,
        "throughput/tokens_per_s": 2_000.0,
    } | ({"validation/reward": 0.3 + 0.4 * progress} if step % 4 == 0 else {})


def samples(step: int, rng: np.random.Generator) -> list[dict]:
    tokens = rng.integers(10, 2_000, 3)
    texts = [ATTACKS[step % len(ATTACKS)], "the answer is 4", "digits " * 200]
    return [
        {
            "uid": f"{step}-{number}",
            "sample": number,
            "prompt": f"what is {step} + {number}? {text}",
            "response_tokens": int(count),
            "seconds": count / 300,
            "weight_version": step,
            "reward": 0.5,
            "response": text,
        }
        | (
            {"session": as_recorded([*FORKED, attack(step)], 20_000), "advantage": 0.75}
            if number == 1
            else {}
        )
        for number, (count, text) in enumerate(zip(tokens, texts, strict=True))
    ]


def attack(step: int) -> dict:
    return node(
        5, 0, ATTACKS[step % len(ATTACKS)], ("user", ATTACKS[0]), finish_reason="length"
    )


def timeline() -> dict:
    recorder = TimelineRecorder()
    recorder.micro_steps(
        {"policy dp=0": [MicroStepTime("update", 0.0, 1.0, 1, 1)]}, CostModel(1.0, 1e-3)
    )
    return recorder.take()


def held_out() -> list[ScoredResponse]:
    return [
        ScoredResponse(
            str(i),
            "held out",
            {"reward": i / 10},
            "",
            {"prompt": f"{i}: {attack}", "response": attack},
        )
        for i, attack in enumerate(ATTACKS)
    ]
