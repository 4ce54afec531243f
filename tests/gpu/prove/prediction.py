"""The dry run's prediction for a run that has ended, with the lengths that it sampled."""

from pathlib import Path
from typing import Any

import torch

from balancing.time_model import MACHINES
from controller.config import Config
from controller.config.recorded import load_recorded
from controller.observability.run_folder import RunFolder
from controller.preflight.cluster import Cluster, parse_cluster
from controller.preflight.describe_time import TimeOptions, read_problem
from controller.preflight.memory import host_memory, measure, memory_lines
from controller.preflight.time_inputs import layout_of, machine_of, shape_of

CPU_CORES = 2
RATE = "throughput/update_tokens_per_s"


def describe_prediction(run_folder: Path, device: str) -> dict[str, Any]:
    """Return predicted seconds by phase, the update's share of the card's peak, and predicted memory."""
    config = load_recorded(run_folder / "config.yaml")
    assert isinstance(config, Config)
    cluster = this_cluster(device)
    if cluster is None:
        return {
            "predicted": {},
            "not_predicted": f"no figures of {torch.cuda.get_device_name()}",
        }
    problem, _ = read_problem(config, cluster, TimeOptions(lengths=run_folder))
    step_time = problem.seconds(layout_of(config, cluster))
    phases = {name: round(phase.seconds, 3) for name, phase in step_time.phases.items()}
    predicted: dict[str, Any] = {
        "predicted": phases | {"step": round(step_time.seconds, 3)}
    }
    if device == "cuda":
        memory = measure(config)
        host = host_memory(config, memory, ranks=1)
        predicted["predicted_memory"] = memory_lines(config, memory, host, cluster)
    return predicted | utilization(config, run_folder, cluster)


def this_cluster(device: str) -> Cluster | None:
    """Return this machine as the dry run knows it, None for a card without figures."""
    if device == "cpu":
        return Cluster(nodes=1, cpus=CPU_CORES)
    card = torch.cuda.get_device_name()
    names = [name for name in MACHINES if name in card]
    return parse_cluster(f"nodes=1,gpus=1,gpu={names[0]}") if names else None


def utilization(config: Config, run_folder: Path, cluster: Cluster) -> dict[str, float]:
    """Return tokens/s and model FLOPs of the fastest update, as a share of the peak.

    6 FLOPs a weight and token, and attention forward and backward. Recomputation does not count.
    """
    shape = shape_of(config)
    run = RunFolder(run_folder)
    rates = [row.get(RATE, 0.0) for row in run.metrics]
    # Random weights hardly ever end earlier.
    length = config.data.max_prompt_tokens + config.longest_response
    flops_of_token = 6 * shape.active + 3 * shape.attention * length
    peak = machine_of(cluster).flops(config.compute_dtype)
    return {
        "update_tokens_per_s": round(max(rates)),
        "update_mfu": max(rates) * flops_of_token / peak,
    }
