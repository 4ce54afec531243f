"""Facts of one machine, gathered on it: `look` runs as a Ray task on every node. Nothing is judged here."""

import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from controller.config.model_files import check_whole, read_model_files
from controller.diagnosis.device_sharing import sharing_problem
from workers.errors import ConfigError

GIB = 2**30
UNLIMITED = -1
DRIVER_SECONDS = 20.0


@dataclass(frozen=True)
class Asked:
    """Subjects to look at. packages: distributions. folder: run.dir, in which the driver has written `marker`; both
    empty without a configuration. models: paths by setting."""

    packages: tuple[str, ...]
    folder: str = ""
    marker: str = ""
    models: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Gpu:
    name: str
    total_gib: float
    free_gib: float


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one machine.

    versions: installed, by distribution. driver: NVIDIA's version, empty where none answers. cuda: of torch's build,
    empty for a CPU build. gpus: those that torch sees. without_peer_access: pairs of them. sharing: why a process
    cannot open the GPU memory of another, empty if it can. shm_gib: size of /dev/shm. open_files, locked_memory: soft
    limits, files and bytes, -1 is none. address: of the node. interface: the network interface that carries it.
    folder, models: why runs cannot go there and models cannot be read, by setting; free_disk_gib: of that folder.
    """

    node: str
    versions: Mapping[str, str]
    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]
    without_peer_access: tuple[tuple[int, int], ...]
    sharing: str
    shm_gib: float
    open_files: int
    locked_memory: int
    infiniband: bool
    memory_gib: float
    free_memory_gib: float
    cpus: int
    address: str
    interface: str
    folder: str
    free_disk_gib: float
    models: Mapping[str, str]


def look(asked: Asked, address: str) -> NodeFacts:
    """The facts of this machine; `address` is its own, as Ray knows it."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = psutil.virtual_memory()
    folder, free_disk = folder_problem(asked)
    return NodeFacts(
        node=socket.gethostname(),
        versions=versions(asked.packages),
        driver=driver_version(),
        cuda=torch.version.cuda or "",
        gpus=tuple(gpu(index) for index in range(count)),
        without_peer_access=without_peer_access(count),
        sharing=sharing_problem("cuda") if count else "",
        shm_gib=shutil.disk_usage("/dev/shm").total / GIB if Path("/dev/shm").is_dir() else 0.0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        memory_gib=memory.total / GIB,
        free_memory_gib=memory.available / GIB,
        cpus=len(os.sched_getaffinity(0)),
        address=address,
        interface=interface_of(address),
        folder=folder,
        free_disk_gib=free_disk,
        models=model_problems(asked.models or {}),
    )


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions; what is not installed is left out."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver_version() -> str:
    """NVIDIA's, by nvidia-smi; empty where there is none or it does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def gpu(index: int) -> Gpu:
    """Name and memory of a CUDA device."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return Gpu(torch.cuda.get_device_name(index), total / GIB, free / GIB)


def without_peer_access(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs of the first `count` CUDA devices of which one cannot read the other's memory itself."""
    import torch

    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    return tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))


def interface_of(address: str) -> str:
    """The network interface that has an address; empty where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return name
    return ""


def folder_problem(asked: Asked) -> tuple[str, float]:
    """(reason why runs cannot be written here, or ""; free GiB there)."""
    if not asked.folder:
        return "", 0.0
    folder = Path(asked.folder)
    if not (folder / asked.marker).exists():
        return f"{folder} is not the driver's folder of that name", 0.0
    if not os.access(folder, os.W_OK):
        return f"{folder} cannot be written to", 0.0
    return "", shutil.disk_usage(folder).free / GIB


def model_problems(models: Mapping[str, str]) -> dict[str, str]:
    """Reasons why models cannot be read here, by the setting that names the model."""
    problems = {}
    for key, path in models.items():
        try:
            check_whole(read_model_files(path, key), path, key)
        except (ConfigError, OSError) as error:
            problems[key] = str(error).rstrip(".")
    return problems
