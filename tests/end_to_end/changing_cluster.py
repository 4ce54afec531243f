"""python -m tests.end_to_end.changing_cluster FOLDER: runs on a Ray cluster that gets and loses a node.

fixed: one engine, all the time          elastic: rollout.replicas=1..2
    step 1    step 2: a node joins    step 3: two engines serve    step 4: the node dies    step 5

Prints JSON: engines after each step, restarts, samples of each step and differences to the fixed run.
"""

import json
import math
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from controller.actors.layout import sum_reserved
from controller.config import load
from controller.run import Run
from examples.addition import data
from examples.addition.warm_start import create_model
from tests.end_to_end.faults import RunWithFaults, differences, run_with

ENGINE_CPUS = 1  # of the node that joins
OBJECT_STORE_BYTES = 80 * 2**20
STEPS = 5
SETTINGS = (
    f"run.steps={STEPS}",
    "batch.prompts_per_step=5",
    "rollout.samples_per_prompt=3",
    "rollout.sampling.max_new_tokens=48",
    "rollout.cpu_kv_cache_gib=0.25",
    "rollout.threads=1",
    "resources.cpus_per_worker=1",
    "policy.optimizer.learning_rate=1e-3",
    "policy.max_tokens_per_micro_batch=128",
    "reward.function=examples.addition.reward:reward",
    "data.max_prompt_tokens=26",
    "tracking.tensorboard=false",
)


def settings(folder: Path, name: str, replicas: str) -> list[str]:
    return [
        *SETTINGS,
        f"run.name={name}",
        f"run.dir={folder / 'runs'}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"rollout.replicas={replicas}",
    ]


@contextmanager
def connected_cluster(cpus: int) -> Iterator[Any]:
    """A connection to a new cluster of one node, which ends."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            cluster.add_node(
                num_cpus=cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
            )
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def wait_for_two_engines(run: Run) -> None:
    """Wait as a round does, until both engines have the weights. `lose` raises if one does not come up."""
    engines = run.roles.rollouts
    while len(engines.fleet.serving) < 2:
        engines.wait([])
        engines.check_deadlines(())


def run_elastic(cluster: Any, overrides: list[str]) -> RunWithFaults:
    """Add a node before step 2, and kill it while step 4 generates."""
    nodes: list[Any] = []

    def add_node(run: Run) -> None:
        nodes.append(
            cluster.add_node(num_cpus=ENGINE_CPUS, object_store_memory=OBJECT_STORE_BYTES)
        )

    def lose_node(run: Run) -> None:
        remove = partial(cluster.remove_node, nodes.pop(), allow_graceful=False)
        threading.Timer(0.3, remove).start()

    return run_with(overrides, {2: add_node, 3: wait_for_two_engines, 4: lose_node})


def main(folder: Path) -> dict[str, Any]:
    create_model(folder / "model", seed=0)
    data.write(folder / "train.jsonl", 64, seed=1, held_out=False)
    elastic = settings(folder, "elastic", "1..2")
    with connected_cluster(math.ceil(sum_reserved(load(None, elastic), "CPU"))) as cluster:
        fixed = run_with(settings(folder, "fixed", "1"), {})
        run = run_elastic(cluster, elastic)
    return {
        "engines": [step["rollout/engines"] for step in run.outcome.steps],
        "samples": [step["rollout/samples"] for step in run.outcome.steps],
        "restarts": [run.last["restarts/engines"], run.last["restarts/recoveries"]],
        "differences": differences(run, fixed),
        "log": run.said,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
