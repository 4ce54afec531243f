"""A timed all-reduce over ranks on every node, through the actors and the process group that training roles have.

reserve a bundle a rank --WorkerGroup--> process group --all-reduce, several times--> median seconds, and the sum
"""

import time
from contextlib import ExitStack
from statistics import median

import torch
import torch.distributed as dist

from controller.actors.layout import Pool
from controller.actors.resources import reserve
from controller.actors.worker_group import Share, WorkerGroup
from controller.config import Config
from controller.diagnosis.findings import Finding, fail
from controller.diagnosis.judgement import bandwidth
from workers.base import Worker
from workers.dispatch import Split, dispatch

BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
REPEATS = 5


class LinkWorker(Worker):
    """A rank without a model: only a member of the process group."""

    @dispatch(Split.ALL)
    def time_all_reduce(self, byte_count: int, repeats: int) -> tuple[float, float]:
        """(median seconds of one all-reduce, largest sum of a number that is 1 on every rank)."""
        taken, largest = [], 0.0
        for _ in range(1 + repeats):
            numbers = torch.ones(byte_count // 4, device=self.device)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(numbers)
            largest = max(largest, float(numbers.max()))  # on a GPU this waits for the result
            taken.append(time.perf_counter() - start)
        return median(taken[1:]), largest


def time_all_reduce(config: Config, ranks: int) -> Finding:
    """Over `ranks` ranks, spread over the nodes; on GPUs each has one. Raises what WorkerGroup raises."""
    cpus, gpus = config.resources.cpus_per_worker, float(config.uses_gpus)
    bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    with ExitStack() as stack:
        bundles = reserve(Pool("doctor", (bundle,) * ranks, "SPREAD"), config.resources.placement_timeout_s)
        stack.callback(bundles.release)
        start_s, collective_s = config.resources.start_timeout_s, config.resources.collective_timeout_s
        group = WorkerGroup(
            "link",
            LinkWorker,
            bundles,
            Share(cpus, gpus),
            dp=ranks,
            arguments={"device": config.device, "threads": 1},
            timeout_s=start_s,
            collective_timeout_s=collective_s,
        )
        stack.callback(group.stop)
        measured = group.time_all_reduce.remote(BYTES[config.device], REPEATS).result(collective_s)
    return judged(ranks, measured, config.device)


def judged(ranks: int, measured: list[tuple[float, float]], device: str) -> Finding:
    """A finding about the slowest rank's time, or about a wrong sum."""
    wrong = [index for index, (_, total) in enumerate(measured) if total != ranks]
    if wrong:
        text = f"rank {wrong[0]} got {measured[wrong[0]][1]:g} where {ranks} ones add up to {ranks}"
        return fail("all-reduce", text, "the network or a GPU corrupts data; test the node of that rank")
    return bandwidth(ranks, BYTES[device], max(seconds for seconds, _ in measured), device)
