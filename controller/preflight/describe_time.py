"""Write the section "time" of `--dry-run --cluster`: seconds of a step, the run's hours and cost, and what
would help.

Config, Cluster, TimeOptions --time_inputs--> balancing.time_model.step_time --> lines of the page
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from balancing.time_model import Efficiency, Layout, StepTime
from balancing.time_model.machine import ATTENTION_OF_FLASH4
from balancing.time_model.search import Problem
from controller.config import Config
from controller.preflight.cluster import Cluster
from controller.preflight.page import Page
from controller.preflight.time_fit import fit_to_run
from controller.preflight.time_inputs import (
    DEFAULT,
    drawn_lengths,
    layout_of,
    machine_of,
    recorded_lengths,
    shape_of,
    workload_of,
)

LEAST_GAIN = 1.02
SHOWN_CHANGES = 2

Change = tuple[bool, str, dict[str, Any]]
"""Whether a change applies, its words, and the fields of the layout that it replaces."""


@dataclass(frozen=True)
class TimeOptions:
    """Options of the command line. price: of a GPU for an hour. lengths: a run's folder. response_tokens: see
    DRAWS.

    measured: a run on the same machine, to which the model is fitted.
    """

    price: float = 0.0
    lengths: Path | None = None
    response_tokens: str = ""
    measured: Path | None = None


def print_time(
    config: Config,
    cluster: Cluster,
    options: TimeOptions,
    prompts: Sequence[int],
    page: Page,
) -> None:
    """Write the section. prompts: lengths of the data's prompts, empty if it is elsewhere. Raises
    ConfigError.
    """
    page.begin("time", "time, predicted")
    if cluster.gpus and not cluster.gpu:
        page.write("not predicted: name the card in --cluster, as in gpu=H100")
        return
    problem, source_lines = read_problem(config, cluster, options, prompts)
    workload = problem.workload
    layout = layout_of(config, cluster)
    step_time = problem.seconds(layout)
    tokens = workload.tokens
    gpus = max(layout.gpus, cluster.nodes * cluster.gpus)
    variant_times = {
        words: problem.seconds(variant) for words, variant in changes(layout).items()
    }
    gains = sorted(
        (
            (step_time.seconds / variant_time.seconds, words)
            for words, variant_time in variant_times.items()
        ),
        reverse=True,
    )
    below = "\n" + 11 * " "
    best_gains = [
        (gain, words) for gain, words in gains[:SHOWN_CHANGES] if gain >= LEAST_GAIN
    ]
    helping = [
        f"    {gain:.2f}x  {words.replace(', ', below)}" for gain, words in best_gains
    ]
    lines = [
        *source_lines,
        f"tokens: responses {workload.responses.mean():,.0f} on average, at most "
        f"{workload.responses.max():,.0f}; prompts {workload.prompts.mean():,.0f}",
        *_table(step_time),
        f"{tokens / step_time.seconds:,.0f} tokens/s, {tokens / step_time.seconds / gpus:,.0f} a GPU",
        _run_line(config, step_time, gpus, options.price),
        f"idle: trainers {step_time.trainer_idle:.0%}, engines {step_time.engine_idle:.0%} of a step",
        f"a step waits mostly for {step_time.limit}",
        *(["would help, if memory allows:", *helping] if helping else []),
    ]
    page.write(
        *[line for text in lines for line in text.split("\n")],
        phases={name: phase._asdict() for name, phase in step_time.phases.items()},
        step=step_time.step._asdict(),
        tokens_per_second=tokens / step_time.seconds,
        trainer_idle=step_time.trainer_idle,
        engine_idle=step_time.engine_idle,
        limit=step_time.limit,
        speedups={words: gain for gain, words in best_gains},
    )


def read_problem(
    config: Config, cluster: Cluster, options: TimeOptions, prompts: Sequence[int] = ()
) -> tuple[Problem, list[str]]:
    """Return the model, work and machine of a run, and lines that name their sources. Raises ConfigError."""
    machine = machine_of(cluster)
    efficiency = Efficiency()
    if config.model.attention == "flash4":
        efficiency = replace(efficiency, attention=ATTENTION_OF_FLASH4)
    devices = cluster.gpus or int(cluster.cpus)
    machine_line = (
        f"one {machine.name} of {cluster.nodes} x {devices}: figures of its data sheet"
    )
    if options.measured:
        machine, efficiency, machine_line = fit_to_run(options.measured, machine)
    responses = drawn_lengths(options.response_tokens, config.longest_response)
    source = (
        options.response_tokens
        or f"log-normal, median {DEFAULT[0]:g} of the limit. Set --response-tokens"
    )
    if options.lengths:
        responses, recorded = recorded_lengths(options.lengths)
        prompts = prompts or recorded
        source = f"those of {options.lengths}"
    prompts = prompts or [config.data.max_prompt_tokens // 2]
    workload = workload_of(config, responses, prompts)
    return Problem(shape_of(config), workload, machine, efficiency), [
        machine_line,
        f"responses: {source}",
    ]


def _table(step_time: StepTime) -> list[str]:
    rows = [
        (name, phase) for name, phase in step_time.phases.items() if phase.seconds >= 0.005
    ]
    lines = [f"{'seconds of':12}{'predicted':>10}{'from':>10}{'to':>10}"]
    for name, phase in [*rows, ("step", step_time.step)]:
        lines.append(f"{name:12}" + "".join(f"{seconds:10,.2f}" for seconds in phase))
    return lines


def _run_line(config: Config, step_time: StepTime, gpus: int, price: float) -> str:
    hours = [config.run.steps * seconds / 3600 for seconds in step_time.step]
    cost = f", {price * gpus * hours[0]:,.0f} at {price:g} a GPU-hour" if price else ""
    return (
        f"the run: {config.run.steps} steps in {hours[0]:,.1f} hours ({hours[1]:,.1f} to {hours[2]:,.1f}), "
        f"{gpus * hours[0]:,.0f} GPU-hours{cost}"
    )


def changes(layout: Layout) -> dict[str, Layout]:
    """Return layouts of the same GPUs that differ by a setting or two, by their words. Some may not fit into
    memory.
    """
    possible = [
        *_setting_changes(layout),
        *_sharing_changes(layout),
        *_placement_changes(layout),
    ]
    layouts = {
        words: replace(layout, **edits) for applies, words, edits in possible if applies
    }
    valid = layout.gpus, True
    return {
        name: variant
        for name, variant in layouts.items()
        if variant != layout and (variant.gpus, variant.engines > 0) == valid
    }


def _setting_changes(layout: Layout) -> list[Change]:
    return [
        (
            True,
            "policy.max_tokens_per_micro_batch doubled",
            {"max_tokens": 2 * layout.max_tokens},
        ),
        (
            True,
            "rollout.max_concurrent doubled",
            {"max_concurrent": 2 * layout.max_concurrent},
        ),
        (
            True,
            "rollout.gpu_memory_utilization, 1.5 times",
            {"engine_gib": 1.5 * layout.engine_gib},
        ),
        (True, "model.gradient_checkpointing=none", {"recomputed": 0.0}),
        (True, "policy.reshard_after_forward=false", {"reshard_after_forward": False}),
        (True, "model.share_prefixes=always", {"shared_prompts": True}),
    ]


def _sharing_changes(layout: Layout) -> list[Change]:
    engines = layout.engines
    tp = layout.engine_tp
    nodes = layout.ranks // layout.gpus_per_node
    return [
        (
            nodes > 1 and layout.dp % nodes == 0,
            f"policy.parallel.replicate={nodes}",
            {"replicate": nodes},
        ),
        (
            engines % 2 == 0,
            f"rollout.tensor_parallel={2 * tp}",
            {"engines": engines // 2, "engine_tp": 2 * tp},
        ),
        (
            tp % 2 == 0,
            f"rollout.tensor_parallel={tp // 2}",
            {"engines": engines * 2, "engine_tp": tp // 2},
        ),
    ]


def _placement_changes(layout: Layout) -> list[Change]:
    engines = layout.engines
    tp = layout.engine_tp
    dp = layout.dp
    shared = layout.placement == "colocated"
    half = layout.ranks // 2 // tp
    even = dp % 2 == 0 and half > 0
    fewer = f"policy.data_parallel={dp // 2}"
    apart = {
        "placement": "apart",
        "staleness": 1,
        "dp": dp // 2,
        "engines": half,
        "replicate": 1,
    }
    more_ranks = {
        "dp": dp + engines // 2 * tp * dp // layout.ranks,
        "engines": engines // 2,
        "replicate": 1,
    }
    less = {"dp": dp // 2, "engines": engines + half, "replicate": 1}
    return [
        (shared, "rollout.replicas=0", {"engines": layout.ranks // tp}),
        (
            shared and even,
            f"rollout.placement=apart, rollout.max_staleness=1, {fewer}",
            apart,
        ),
        (
            not shared,
            f"rollout.max_staleness={layout.staleness + 1}",
            {"staleness": layout.staleness + 1},
        ),
        (not shared and even, f"{fewer}, rollout.replicas={engines + half}", less),
        (
            not shared,
            f"policy.data_parallel={more_ranks['dp']}, rollout.replicas={engines // 2}",
            more_ranks,
        ),
    ]
