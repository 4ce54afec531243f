"""Worker: base of every rank of a role, with its coordinates, process group, threads and device."""

import ctypes
import gc
import os
import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from workers import allocator
from workers.batch.dispatch import Join, RankCoordinates, Split, dispatch
from workers.errors import ConfigError
from workers.model.sharding.parallel import process_group_backend
from workers.network import use_rays_interface

# glibc's option names and sizes in bytes: see mallopt(3).
M_TRIM_THRESHOLD = -1
KEPT_BYTES = 2**29
M_MMAP_THRESHOLD = -3
LARGEST_KEPT_BYTES = 2**25


class Worker:
    """Base of a `WorkerGroup`'s actors. The group calls `address` on rank zero, then `join_group` on all."""

    def __init__(
        self,
        role: str,
        coordinates: RankCoordinates,
        world_size: int,
        *,
        device: str = "cpu",
        threads: int = 0,
    ) -> None:
        """threads: of the CPU, or 0 for an equal share of the node's cores, from `join_group` on. Raises
        ConfigError without a GPU.
        """
        self.role = role
        self.coordinates = coordinates
        self.world_size = world_size
        keep_freed_memory()
        # What the process has imported stays: from here on the garbage collector does not walk it.
        gc.freeze()
        self._threads = threads
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"{role} needs a GPU, but torch sees none on this node. Check resources.device."
            )
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            allocator.use_settings()

    def __repr__(self) -> str:
        places = ((name, getattr(self.coordinates, name)) for name in ("cp", "tp", "pp"))
        return f"{self.role} dp={self.coordinates.dp}" + "".join(
            f" {name}={place}" for name, place in places if place
        )

    @dispatch(Split.ALL, Join.LIST)
    def node_id(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def address(self) -> tuple[str, int]:
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def join_group(self, address: str, port: int, timeout_s: float, on_node: int) -> None:
        """Start the role's process group. timeout_s: of a collective. on_node: the role's ranks
        on this node.
        """
        torch.set_num_threads(
            self._threads or max(1, len(os.sched_getaffinity(0)) // on_node)
        )
        os.environ.update(
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            RANK=str(self.coordinates.index),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK="0",  # Ray shows each actor only its own device
            TORCHELASTIC_USE_AGENT_STORE="True",  # no rank starts a store, see `_meeting_point`
        )
        if self.coordinates.index == 0:
            _meeting_point(address, port)
        use_rays_interface()
        backend = process_group_backend(self.device)
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]

    @dispatch(Split.ALL)
    def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}

    @dispatch(Split.ALL)
    def gpu_gib(self) -> float:
        """Return the memory of this rank's GPU, 0 on CPUs."""
        return (
            torch.cuda.get_device_properties(self.device).total_memory / 2**30
            if self.device.type == "cuda"
            else 0.0
        )


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors, 512 MiB of up to 32 MiB each: later pages need no fault."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


@cache
def _meeting_point(address: str, port: int) -> torch.distributed.TCPStore:
    # Bind this address, since torch listens on all interfaces by default. Keep it: groups use it after their
    # start.
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.bind((address, port))
    except OSError:  # behind a NAT no interface has the address
        listener.bind(("", port))
    return torch.distributed.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
