"""Say whether a run fits this machine: by count, and the memory of GPUs by a formula. `describe_cluster`
measures it.

Config --> GPUs or CPU cores asked, there
       --> GiB of a GPU --training_gib--> GPUs of balancing/time_model/machines.json
"""

import os
from dataclasses import replace
from math import ceil

from balancing.errors import BalancingError
from balancing.time_model import Layout, ModelShape
from balancing.time_model.machine import MACHINES
from balancing.time_model.memory import Needs, engine_holds, fullest_gib, training_gib
from controller.actors.layout import sum_reserved
from controller.config import Config, TrainingConfig
from controller.config.file import settings, value_of
from controller.config.training import count_noun
from controller.preflight.memory import USABLE_SHARE
from controller.preflight.time_inputs import needs_of, shape_of, training_layout

NODE = 8
"""GPUs of a node in the cluster that a page suggests."""


def fits_lines(config: TrainingConfig) -> list[str]:
    """Write a verdict, or what is known and how to get one. Nothing for a described cluster, which has its
    own page.
    """
    if config.is_described:
        return []
    if config.uses_gpus:
        return _lines_of_gpus(config)
    if config.joins_cluster:
        return ["fits: unknown until the run asks Ray's cluster. --cluster describes one"]
    engines = config.engine_range
    cores = len(os.sched_getaffinity(0))
    verdict = "yes" if engines.minimum <= cores else "no"
    return [f"fits: {verdict} (engines: {engines} on {count_noun(cores, 'CPU core')})"]


def _lines_of_gpus(config: TrainingConfig) -> list[str]:
    requested = int(sum_reserved(config, "GPU"))
    available = config.gpus
    nodes = max(1, ceil(requested / NODE))
    if config.joins_cluster:
        verdict = (
            f"unknown until the run asks Ray's cluster for {count_noun(requested, 'GPU')}"
        )
    elif not available:
        verdict = f"unknown, because this machine has no GPUs and the run uses {requested}"
    elif requested > available:
        return [f"fits: no (GPUs: {requested} of {available})"]
    else:
        verdict = f"GPUs yes ({requested} of {available}), memory not measured"
    if isinstance(config, Config):
        gpus = ceil(requested / nodes)
        verdict += f". To measure: --cluster nodes={nodes},gpus={gpus},gpu=H100, or your GPU's name"
    return [f"fits: {verdict}", *_memory_lines(config)]


def _memory_lines(config: TrainingConfig) -> list[str]:
    """Write the memory of a GPU by the formula, if it has all parts: neither images nor states in host
    memory.
    """
    offloads = [
        setting.key for setting in settings(config) if setting.key.endswith("cpu_offload")
    ]
    if any(value_of(config, key) not in (False, "none") for key in offloads):
        return []
    try:
        description = config.model_description()
        shape = shape_of(config)
    except BalancingError:  # a model that the formula does not know
        return []
    if "vision_config" in description:
        return []
    layout = training_layout(config)
    needs = needs_of(config)
    kept, passing = training_gib(shape, layout, needs)
    least = " at least" if config.model.gradient_checkpointing == "auto" else ""
    gpus = [name for name in MACHINES if name != "cpu"]
    fitting = [
        name for name in gpus if _fits_gpu(config, shape, layout, needs, MACHINES[name].gib)
    ]
    others = [name for name in gpus if name not in fitting]
    verdict = f"It fits {', '.join(fitting) or 'no GPU that Ballast knows'}"
    if fitting and others:
        verdict += f", not {', '.join(others)}"
    return [
        f"memory of a GPU by a formula, not measured: training takes{least} {passing:.1f} GiB, {kept:.1f} "
        f"of them between passes. {verdict}"
    ]


def _fits_gpu(
    config: TrainingConfig, shape: ModelShape, layout: Layout, needs: Needs, gib: float
) -> bool:
    if isinstance(config, Config) and config.engines:
        rollout = config.rollout
        placement = config.rollout_placement
        share = rollout.gpu_share(placement) * gib
        layout = replace(
            layout,
            engine_gib=share,
            engine_tp=rollout.tensor_parallel,
            placement=placement,  # type: ignore[arg-type]
        )
        if not engine_holds(shape, layout, needs):
            return False
    return fullest_gib(shape, layout, needs) <= USABLE_SHARE * gib
