"""New weights for engines on GPUs, device to device. Needs a GPU; not run on CPU.

    sender = WeightSender("apart", engines, weights, rank=rank, ...)   # on every policy rank, once
    sender.send(version)                                               # on every policy rank, after every update

    policy ranks --gather, layer by layer--> rank 0 --nccl broadcast--> engines of their own GPUs      (`apart`)
    policy ranks --gather, chunk by chunk--> CUDA handles of all ranks --ipc--> engines on these GPUs  (`colocated`)

vLLM's trainer-side engines carry the bytes and decide the order; they talk to our actors through `EngineClient`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from workers.errors import ConfigError
from workers.rollout.weight_transfer import BACKENDS

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` protocol over `RolloutWorker` actors. Needs a GPU; not run on CPU."""

    def __init__(self, engines: Sequence[Any], tensor_parallel: int) -> None:
        self._engines = engines
        self._tensor_parallel = tensor_parallel
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every replica joins the transfer group; with nccl, each at ranks of its own after the trainer's."""
        self._all("init_transfer", [self._for_replica(init_info, replica) for replica in range(len(self._engines))])

    def start_weight_update(self) -> None:
        """Every replica holds its requests."""
        self._all("begin_update", [None] * len(self._engines))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Every replica receives; with nccl this runs beside the trainer's broadcast."""
        self._all("receive_update", [update_info] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Every replica goes on, under `self.version`: vLLM's trainer side does not pass the version through."""
        self._all("finish_update", [self.version] * len(self._engines))

    def _for_replica(self, init_info: dict[str, Any], replica: int) -> dict[str, Any]:
        # vLLM gives all replicas one offset, right for one engine with data-parallel ranks; ours are engines apart.
        if "rank_offset" not in init_info:
            return init_info
        return init_info | {"rank_offset": init_info["rank_offset"] + replica * self._tensor_parallel}

    def _all(self, method: str, arguments: Sequence[Any]) -> None:
        import ray

        calls = [getattr(engine, method) for engine in self._engines]
        pairs = zip(calls, arguments, strict=True)
        ray.get([call.remote() if argument is None else call.remote(argument) for call, argument in pairs])


class GatheredWeights(WeightSource):
    """vLLM's view of the policy's weights. Needs a GPU; not run on CPU.

    `weights()` starts a pass over (Hugging Face name, whole tensor), `lm_head.weight` among them even if tied; it is
    collective over the policy's ranks, and every pass brings the same names, shapes and dtypes in the same order.
    """

    def __init__(self, weights: NamedWeights) -> None:
        self._weights = weights
        self._metadata: list[ParamMeta] = []

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and shapes; the first call makes a pass over the weights, on all ranks."""
        if not self._metadata:
            self._metadata = [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self._weights()]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights()


class WeightSender:
    """A policy rank's end of the transfer. Needs a GPU; not run on CPU."""

    def __init__(
        self,
        placement: str,
        engines: Sequence[Any],
        weights: NamedWeights,
        *,
        rank: int,
        tensor_parallel: int,
        address: str = "",
        port: int = 0,
    ) -> None:
        """Meet the engines; collective over the policy's ranks.

        `engines`: handles of all `RolloutWorker` actors, started. `address`, `port`: of policy rank zero, free, for
        `apart`. The current CUDA device and the default process group must be the policy's.
        Raises ConfigError for a placement without GPUs.
        """
        self._client = EngineClient(engines, tensor_parallel)
        world_size = 1 + len(engines) * tensor_parallel
        source = GatheredWeights(weights)
        largest = max(meta.dtype.itemsize * math.prod(meta.shape) for meta in source.metadata())
        info = trainer_init_info(
            placement, rank=rank, address=address, port=port, world_size=world_size, largest_bytes=largest
        )
        self._trainer_side = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=source)

    def send(self, version: int) -> None:
        """Bring the weights to all engines as `version`; collective over the policy's ranks."""
        self._client.version = version
        self._trainer_side.send_weights()

    def close(self) -> None:
        """Leave the transfer group."""
        self._trainer_side.shutdown()


def trainer_init_info(
    placement: str, *, rank: int, address: str, port: int, world_size: int, largest_bytes: int
) -> TrainerInitInfo:
    """What vLLM's trainer side needs to know. Raises ConfigError for a placement without GPUs.

    `largest_bytes`: of the largest weight, which the transfer's buffer must hold whole.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if placement == "colocated":
        # Packed, because unpacked would hold a second copy of the model at once.
        buffer = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest_bytes)
        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer)
    if placement == "apart":
        return NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=world_size, rank=rank)
    raise ConfigError(f"rollout.placement={placement} sends weights by {BACKENDS[placement]}, not between GPUs.")
