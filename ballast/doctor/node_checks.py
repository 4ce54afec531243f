"""Check one machine: `look` runs as a Ray task on every node, and returns a line per check.

Facts that a test cannot create, such as a driver and GPUs, are arguments.
"""

import importlib.metadata
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil
from packaging.requirements import Requirement

from ballast.doctor.report import Finding, fail, ok, warn
from ballast.doctor.speed import speed
from controller.config.model_files import check_whole, read_model_files
from controller.config.training import has_amd_gpus
from workers import allocator
from workers.errors import ConfigError
from workers.model.rules.state_packages import missing_kernels, missing_packages

GIB = 2**30
# NCCL wants some tens of MiB for each GPU, and a container has 64 MiB by default.
SMALL_SHM_GIB = 1.0
LITTLE_DISK_GIB = 10.0
TRIED_BYTES = 2**26
OTHERS_SHARE = 0.1  # share of a GPU's memory used by other processes


@dataclass(frozen=True)
class Gpu:
    name: str
    total_gib: float
    free_gib: float


def look(
    address: str,
    requirements: Sequence[str],
    *,
    on_gpus: bool = False,
    nodes: int = 1,
    object_store_gib: float = 0.0,
    marker: str = "",
    paths: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Finding], int]:
    """Check this machine, whose Ray address is `address`. Return its findings and the number of its GPUs.

    requirements: as in pyproject.toml. on_gpus: models run on GPUs. nodes: of the cluster. object_store_gib:
    Ray's.
    marker: file that the driver wrote into run.dir, if any. paths: models by setting.
    """
    cards, problem = gpus()
    shm_gib = (
        shutil.disk_usage("/dev/shm").total / GIB if Path("/dev/shm").is_dir() else 0.0
    )
    findings = [
        versions(requirements),
        gpu_findings(cards, problem, on_gpus),
        *allocator_findings(cards),
        speed(cuda=bool(cards)),
        shared_memory(shm_gib, len(cards), object_store_gib),
        network(address, nodes),
        *run_folder(marker),
        *models(paths, on_gpus=bool(cards)),
    ]
    return findings, len(cards)


def versions(requirements: Sequence[str]) -> Finding:
    """Compare installed packages with the requirements."""
    wrong = list[str]()
    matches = list[str]()
    for requirement in map(Requirement, requirements):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        (matches if fits else wrong).append(
            f"{requirement.name} {version}"
            + ("" if fits else f" is not {requirement.specifier}")
        )
    if wrong:
        return fail(
            "versions", ", ".join(wrong), f"pip install {' '.join(map(repr, requirements))}"
        )
    return ok("versions", ", ".join(matches))


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """List torch's GPUs, or its reason for finding none: driver missing or too old, CPU build."""
    import torch

    if torch.version.hip:  # lists AMD GPUs as CUDA devices
        return (), "this build of torch is for ROCm, which is not supported"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (), str(error).strip().splitlines()[0]
    devices: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        devices.append(Gpu(torch.cuda.get_device_name(index), total / GIB, free / GIB))
    return tuple(devices), "" if devices else "no device is visible"


def gpu_findings(cards: Sequence[Gpu], problem: str, on_gpus: bool) -> Finding:
    """Report torch's GPUs, and other processes on them."""
    if not cards:
        devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
        if has_amd_gpus() and not devices:
            text = f"AMD GPUs, and ROCm is not supported: {problem}"
            return (fail if on_gpus else warn)(
                "GPUs", text, "use NVIDIA GPUs, or set resources.device=cpu"
            )
        if not on_gpus and not devices:
            return ok("GPUs", "none, models run on CPUs")
        advice = (
            "look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus. For a CUDA build of torch "
            "pip install -e .[vllm], or set resources.device=cpu"
        )
        return (fail if on_gpus else warn)(
            "GPUs", f"torch cannot use {', '.join(devices) or 'any'}: {problem}", advice
        )
    least = min(cards, key=lambda card: card.free_gib)
    text = f"{len(cards)} x {cards[0].name}, {least.free_gib:.1f} of {least.total_gib:.1f} GiB free"
    if least.free_gib < (1 - OTHERS_SHARE) * least.total_gib:
        return warn("GPUs", text, "end the processes that nvidia-smi shows on them")
    return ok("GPUs", text)


def allocator_findings(cards: Sequence[Gpu]) -> list[Finding]:
    """Allocate on every GPU in expandable segments, as ranks do, and in fixed ones, as memory for CUDA IPC
    is.
    """
    import torch

    failed = []
    for index in range(len(cards)):
        for kind, context in (
            ("expandable", nullcontext),
            ("fixed", allocator.fixed_segments),
        ):
            allocator.use_settings()
            try:
                with context():
                    torch.ones(TRIED_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
                torch.cuda.empty_cache()
            except RuntimeError as error:
                failed.append(
                    f"GPU {index}, {kind} segments: {str(error).strip().splitlines()[0]}"
                )
    if failed:
        advice = "set PYTORCH_ALLOC_CONF=expandable_segments:False where Ray starts"
        return [fail("allocator", "; ".join(failed), advice)]
    return [ok("allocator", f"{allocator.settings()}, and fixed segments")] * bool(cards)


def shared_memory(shm_gib: float, gpu_count: int, object_store_gib: float) -> Finding:
    """Check /dev/shm, used by Ray's object store and NCCL."""
    name = "/dev/shm"
    text = f"{shm_gib:.1f} GiB"
    advice = "start containers with --shm-size=16g, on Kubernetes mount an emptyDir of medium Memory there"
    if shm_gib < SMALL_SHM_GIB and gpu_count > 1:
        return fail(name, text, f"NCCL needs it between GPUs; {advice}")
    if shm_gib < max(SMALL_SHM_GIB, object_store_gib):
        text += f", less than Ray's object store of {object_store_gib:.1f} GiB, which goes to disk instead"
        return warn(name, text, advice)
    return ok(name, text)


def network(address: str, nodes: int) -> Finding:
    """Report the network interface of the node's address, which ranks use."""
    having = []
    for name, nic_addresses in psutil.net_if_addrs().items():
        if address in {
            nic_address.address.partition("%")[0] for nic_address in nic_addresses
        }:
            having.append(name)
    text = f"{having[0] if having else 'no interface'} carries {address}"
    if not having:
        return fail(
            "network", text, "start Ray with --node-ip-address of an interface of this node"
        )
    if nodes > 1 and address.startswith("127."):
        return fail(
            "network", text, "other nodes cannot reach it. Start Ray with --node-ip-address"
        )
    return ok("network", text)


def run_folder(marker: str) -> list[Finding]:
    """Check run.dir, in which the driver wrote `marker`, if any."""
    if not marker:
        return []
    folder = Path(marker).parent
    advice = "put run.dir, as an absolute path, on storage that every node has"
    if not Path(marker).exists():
        return [
            fail("run.dir", f"{folder} is not the driver's folder of that name", advice)
        ]
    if not os.access(folder, os.W_OK):
        return [fail("run.dir", f"{folder} cannot be written to", advice)]
    free = shutil.disk_usage(folder).free / GIB
    if free < LITTLE_DISK_GIB:
        text = f"{free:,.0f} GiB free"
        advice = "a checkpoint takes 12 bytes a parameter. Free some, or set run.dir"
        return [warn("run.dir", text, advice)]
    return [ok("run.dir", f"{free:,.0f} GiB free")]


def models(paths: Mapping[str, str], *, on_gpus: bool = False) -> list[Finding]:
    """Report models, by setting, that cannot be read here, or lack kernels. An empty path is not a model."""
    advice = (
        "put it where every node finds it, on shared storage or by `hf download` on each"
    )
    findings = []
    for key, path in paths.items():
        if not path:
            continue
        try:
            files = read_model_files(path, key)
            check_whole(files, path, key)
        except (ConfigError, OSError) as error:
            findings.append(fail(key, str(error).rstrip("."), advice))
            continue
        if on_gpus and (problem := missing_kernels(files.text)):
            packages = " ".join(missing_packages(files.text))
            findings.append(
                warn(key, problem, f"pip install --no-build-isolation {packages}")
            )
    return findings
