"""Send new weights to engines on CPUs: one array of safetensors bytes in shared memory.

    payload = pack_weights(policy.named_weights())        # policy rank 0, uint8 [bytes], a Ray object
    with private_file(payload) as path:                   # every rollout actor, in memory, mode 0600
        await hold_requests(engine, clear_cache=True)     # requests in flight wait, their KV cache is dropped
        await engine.start_weight_update()
        await engine.update_weights({"path": path})       # every engine process maps and loads its share
        await engine.finish_weight_update(version)
        await engine.resume_generation()                  # they continue, KV cache recomputed

GPUs use `workers.engine.weights.gpu_transfer`. Torch and vLLM are imported late, because every vLLM process
loads this module as a plugin. Without `end_with_actor` vLLM's processes would outlive a killed actor and keep
its memory.
"""

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from workers.engine.placement import BACKENDS
from workers.engine.root_cause import record_errors
from workers.user_code.process import end_with_parent

if TYPE_CHECKING:
    from torch import Tensor

ACTOR = "BALLAST_ROLLOUT_ACTOR"
# In vLLM's additional_config: updates bring nothing for the tower.
FROZEN_VISION = "frozen_vision"
# There too: seconds after which an engine leaves a broadcast.
TRANSFER_TIMEOUT = "transfer_timeout_s"


def mark_actor() -> None:
    """Mark this process. Processes that inherit its environment end with it."""
    os.environ[ACTOR] = str(os.getpid())


def end_with_actor() -> None:
    """Below a marked actor, let the kernel kill this process when its parent ends."""
    if os.environ.get(ACTOR) not in (None, str(os.getpid())):
        end_with_parent()


# The engine's side of each backend, by vLLM's name: module and class.
ENGINES = {
    "shared_memory": (
        "workers.engine.weights.complete_update",
        "SharedMemoryWeightTransferEngine",
    ),
    "complete_ipc": (
        "workers.engine.weights.complete_update",
        "CompleteIPCWeightTransferEngine",
    ),
    "complete_nccl": (
        "workers.engine.weights.complete_update",
        "CompleteNCCLWeightTransferEngine",
    ),
}
ENGINE_OF_BACKEND = dict(zip(BACKENDS.values(), ENGINES, strict=True))


@functools.cache  # vLLM may load a plugin twice in a process, and its factory refuses a known name
def register() -> None:
    """Register our engines with vLLM. Its processes call this entry point at start."""
    end_with_actor()
    record_errors()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, (module, engine) in ENGINES.items():
        WeightTransferEngineFactory.register_engine(name, module, engine)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # They register kernels, and take the place of vLLM's process.
        import workers.engine.cpu_kernels
        import workers.engine.cpu_registry  # noqa: F401


def pack_weights(named_tensors: "Iterable[tuple[str, Tensor]]") -> np.ndarray:
    """Return all tensors as safetensors bytes, uint8 [bytes]. Tied weights are stored under both names."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in named_tensors:
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses two names for one storage. vLLM must get both (its output layer is a separate
        # copy).
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return np.frombuffer(save(tensors), dtype=np.uint8)


@contextmanager
def private_file(payload: np.ndarray) -> Iterator[str]:
    """Yield the path to `payload` as a file in memory, for processes of this user, until the block ends."""
    # Unlike a file in /dev/shm, it vanishes with a killed process, and a container's small /dev/shm does not
    # limit it.
    with os.fdopen(os.memfd_create("ballast-weights"), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        payload.tofile(file)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
