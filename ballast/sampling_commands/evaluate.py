"""`python -m ballast evaluate --config FILE [--model PATH] [key.sub=value ...]`: validation metrics, no
training.

    data.validation --validation.samples of each--> samples.jsonl
                    --pass@k, maj@n, rewards, intervals--> metrics.json

Metrics and samples are as in a training's validation. Start a stopped job again to continue it. Exit codes:
see `controller.fit`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from controller.algorithm.validation_metrics import CONFIDENCE, by_prompt, interval
from controller.config.sampler import EvaluateConfig
from controller.lifecycle.session import exit_code
from controller.observability.recorded_values import finite
from controller.observability.run_folder import writing
from controller.sampling.jobs import Job
from controller.sampling.output import Line, scored_response
from controller.sampling.sampling_run import prepare
from workers.errors import RolloutError

if TYPE_CHECKING:
    from controller.observability.console import Console

METRICS = "metrics.json"
ROW = "{:32}{:>10}  {:>18}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(prepare, EvaluateConfig, finish, arguments))


def finish(job: Job, lines: list[Line], given_up: int, console: "Console") -> None:
    """Write and show metrics.json. Raises RolloutError if every reward failed and was dropped."""
    report = evaluation(job, lines, given_up)
    path = job.config.run_folder / METRICS
    with writing(path):
        path.write_text(
            json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    console.log(ROW.format("metric", "value", f"{CONFIDENCE:.0%} interval", "by").rstrip())
    for name, metric in report["metrics"].items():
        ends = (
            "-" if metric["low"] is None else f"{metric['low']:.3f} to {metric['high']:.3f}"
        )
        value = "-" if metric["value"] is None else f"{metric['value']:.4f}"
        console.log(ROW.format(name, value, ends, metric["method"] or "").rstrip())
    console.log(f"{path}: {report['samples']:,} samples of {report['prompts']:,} prompts")


def evaluation(job: Job, lines: list[Line], given_up: int) -> dict[str, Any]:
    """Content of metrics.json.

    metrics: by name {value, low, high, method}, null without an interval. given_up: samples that no engine
    could make. failed_rewards: samples whose reward failed.
    """
    config = job.config
    kept_lines = [
        line
        for line in lines
        if config.reward.on_failure != "drop" or "failure" not in line
    ]
    if not kept_lines:
        raise RolloutError(f"every reward failed, the first: {lines[0]['failure']}")
    validation = config.validation
    values = by_prompt(
        list(map(scored_response, kept_lines)),
        validation.success,
        validation.success_threshold,
    )
    metrics = {}
    for name, of_prompts in values.items():
        ends = interval(of_prompts)
        no_ends = {"low": None, "high": None, "method": None}
        metrics[name] = {"value": finite(of_prompts.value)} | (
            asdict(ends) if ends else no_ends
        )
    return {
        "model": config.model.path,
        "data": config.data.train,
        "confidence": CONFIDENCE,
        "prompts": len({line["uid"] for line in kept_lines}),
        "samples": len(kept_lines),
        "given_up": given_up,
        "failed_rewards": sum("failure" in line for line in lines),
        "metrics": metrics,
    }


if __name__ == "__main__":
    sys.exit(main())
