"""Checks that this machine has the resources of a run that names no cluster, and so starts a local Ray on it.

Config --check_machine--> nothing, or ConfigError
"""

import os
from pathlib import Path

import psutil

from controller.actors.layout import reserved
from controller.config import Config, TrainingConfig
from workers.errors import ConfigError

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
ELSEWHERE = "or set resources.ray_address (or RAY_ADDRESS) for a cluster"


def check_machine(config: TrainingConfig, *, dry_run: bool) -> None:
    """Raise ConfigError if a local Ray on this machine has too little for the run. Does nothing with an address, where
    Ray itself checks.

    dry_run: do not ask for GPUs on a machine without any, so that configurations for GPUs can be tried anywhere.
    """
    if config.joins_cluster:
        return
    if config.uses_gpus:
        _check_gpus(config, config.gpus, dry_run=dry_run)
    elif isinstance(config, Config):
        _check_cpus(config)


def _check_gpus(config: TrainingConfig, gpus: int, *, dry_run: bool) -> None:
    asked = reserved(config, "GPU")
    if asked > gpus and not (dry_run and gpus == 0):
        settings = "policy.ranks, rollout.replicas or rollout.tensor_parallel" if config.samples else "policy.ranks"
        raise ConfigError(
            f"the run asks for {asked:g} GPUs and this machine has {gpus}; lower {settings}, {ELSEWHERE}."
        )


def _check_cpus(config: Config) -> None:
    cores, engines = len(os.sched_getaffinity(0)), config.engines
    if engines > cores:
        raise ConfigError(
            f"rollout.replicas={engines} engines are more than the {cores} CPU cores of this machine, and each needs "
            f"one; lower it, {ELSEWHERE}."
        )
    caches, memory = engines * config.rollout.cpu_kv_cache_gib, memory_gib()
    if caches > memory:
        raise ConfigError(
            f"rollout.replicas * rollout.cpu_kv_cache_gib = {caches:g} GiB of KV cache are more than the {memory:.1f} "
            f"GiB of this machine; lower them, {ELSEWHERE}."
        )


def memory_gib() -> float:
    """Memory of this machine, or the limit of its container."""
    total = psutil.virtual_memory().total
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    return (min(total, int(limit)) if limit.isdigit() else total) / 2**30
