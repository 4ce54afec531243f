"""`--dry-run --measure`: the peak of every pass of every role, by running them without a GPU.

Config --request--> python -m workers.model.memory_trace --> bytes by role and pass --+
Config --phases--> estimate by role and pass -----------------------------------------+--> lines, side by side
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from controller.config import Config
from controller.config.model_files import read_model_files
from controller.preflight.memory import GIB, Phase, is_offloaded, of_stage
from controller.preflight.model_shape import model_shape
from workers.errors import ConfigError

LAYERS = (3, 4)
"""Layers of a model that is measured. From three on each adds the same; with two, none is gathered ahead."""
TIMEOUT_S = 600


@dataclass(frozen=True)
class Measured:
    """GiB of a GPU in one pass of a role, or why it is not known, beside the estimate."""

    phase: str
    estimated: float
    gib: float = 0.0
    problem: str = ""


def measure(config: Config, phases: list[Phase], layers: tuple[int, ...] = LAYERS) -> list[Measured]:
    """Every phase of the estimate, measured. Raises ConfigError if the measuring process does not answer.

    In a pipeline the fuller one of the first and the last stage counts, each with the layers of the fullest.
    """
    stages = config.policy.parallel.pipeline_parallel
    found = [_beside(phases, run_trace(request(config, phases, layers, stage))) for stage in sorted({0, stages - 1})]
    return [max(of_stages, key=lambda each: (bool(each.problem), each.gib)) for of_stages in zip(*found, strict=True)]


def request(config: Config, phases: list[Phase], layers: tuple[int, ...] = LAYERS, stage: int = 0) -> dict[str, Any]:
    """The request for `workers.model.memory_trace.trace`. stage: of the pipeline, the one to measure."""
    parallel = config.policy.parallel
    virtual = parallel.virtual_stages
    fewest = -(-layers[0] // virtual) * virtual  # as many in each part of a stage
    return {
        "ranks": config.training_workers,
        "rank": stage * (config.training_workers // parallel.pipeline_parallel),
        "layers": [fewest + virtual * (count - layers[0]) for count in layers],
        "longest": config.longest_sequence,
        "parallel": asdict(config.policy.parallel),
        "reshard_after_forward": config.policy.reshard_after_forward,
        "entropy_coefficient": config.algorithm.loss.entropy_coefficient,
        "roles": {role: _role(config, role, phases) for role in config.training_roles},
    }


def _role(config: Config, role: str, phases: list[Phase]) -> dict[str, Any]:
    models = {
        "policy": ("model.path", config.model),
        "reference": ("reference.path", config.reference_model),
        "critic": ("critic.path", config.critic_model),
        "reward_model": ("reward.model.path", config.reward_model),
    }
    key, model = models[role]
    dtype = "bfloat16" if model.dtype == "auto" else model.dtype
    chunk = model.chunk_tokens("cuda")
    sharing = config.policy.parallel.context_parallel
    description = dict(read_model_files(model.path, key).description)
    return {
        "description": description,
        "layers": of_stage(config, model_shape(description, key)).layers,
        "model": asdict(model) | {"dtype": dtype, "logprob_chunk_tokens": chunk},
        "head": "lm" if role in ("policy", "reference") else "value",
        "trains": role in ("policy", "critic"),
        "tokens": {each.call: each.tokens * sharing for each in phases if each.role == role},
        "cpu_offload": is_offloaded(config, role),
    }


def run_trace(asked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The answer of a process of its own. Raises ConfigError, with its last words, if it gives none."""
    process = subprocess.run(
        [sys.executable, "-m", "workers.model.memory_trace"],
        input=json.dumps(asked),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"},
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    if process.returncode or not process.stdout.strip():
        words = (process.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(f"--measure: the measuring process ended with {process.returncode}: {words}")
    answer: dict[str, dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return answer


def _beside(phases: list[Phase], found: Mapping[str, Mapping[str, Any]]) -> Iterator[Measured]:
    """Of each phase its own peak, and what the other roles keep."""
    for phase in phases:
        estimated = sum(phase.parts.values())
        problems = [f"{role}: {each['problem']}" for role, each in found.items() if "problem" in each]
        if problems:
            yield Measured(phase.name, estimated, problem=problems[0])
            continue
        kept = sum(each["states"] for role, each in found.items() if role != phase.role)
        yield Measured(phase.name, estimated, (found[phase.role][phase.call] + kept) / GIB)


def measured_lines(measured: list[Measured]) -> list[str]:
    """A line for each phase."""
    return [_line(each) for each in measured]


def _line(each: Measured) -> str:
    if each.problem:
        return f"{each.phase}: estimated {each.estimated:.1f}, not measured: {each.problem}"
    above = each.estimated / each.gib - 1
    return f"{each.phase}: measured {each.gib:.1f}, estimated {each.estimated:.1f} ({above:+.0%})"
