"""Send new weights to engines on GPUs, device to device. CPU tests replace communicator and memory handles.

    sender = WeightSender("apart", engines, weights, metadata, rank=rank, ...)   # on every policy rank, once
    sender.send(version)                                                    # and after every update

    policy ranks --gather, weight by weight--> rank 0 --nccl broadcast--> engines on other GPUs (`apart`)
    policy ranks --gather to all, chunk by chunk--> CUDA handles --ipc--> engines on these GPUs (`colocated`)

vLLM's trainer side carries the bytes and decides the order. It reaches our actors through `EngineClient`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from workers.allocator import fixed_segments
from workers.errors import BallastError, LostError, RolloutError

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` protocol over `VllmEngineActor` actors."""

    def __init__(self, engines: Sequence[Any], tensor_parallel: int) -> None:
        self._engines = engines
        self._tensor_parallel = tensor_parallel
        self.version = 0
        self.failure: BallastError | None = None  # of the last update
        self.on_failure: Callable[[], None] = lambda: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [init_info] * len(self._engines)
        if "rank_offset" in init_info:
            # vLLM gives all replicas one offset, right for one engine with data-parallel ranks. Ours are
            # separate.
            offsets = itertools.count(init_info["rank_offset"], self._tensor_parallel)
            infos = [info | {"rank_offset": offset} for info, offset in zip(infos, offsets, strict=False)]
        call_replicas(self._engines, "init_transfer", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        self.failure = None
        call_replicas(self._engines, "begin_update", [()] * len(self._engines))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """With nccl in a thread, while the trainer broadcasts. A failure ends the broadcast by
        `on_failure`.
        """
        try:
            call_replicas(self._engines, "receive_update", [(update_info,)] * len(self._engines))
        except BallastError as error:
            self.failure = error
            self.on_failure()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Resume under `self.version`: vLLM's trainer side does not pass the version through."""
        call_replicas(self._engines, "finish_update", [(self.version,)] * len(self._engines))


def call_replicas(engines: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call `method` of every replica with its arguments and wait for all.

    Raises at the first failure, because the others may wait for that replica: our errors unchanged, LostError
    for a lost actor, RolloutError otherwise.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    refs = [
        getattr(engine, method).remote(*call_arguments)
        for engine, call_arguments in zip(engines, arguments, strict=True)
    ]
    replicas = {ref: replica for replica, ref in enumerate(refs)}
    while refs:
        (done,), refs = ray.wait(refs, num_returns=1)
        try:
            ray.get(done)
        except RayTaskError as error:
            if isinstance(error.cause, BallastError):
                raise error.cause from error
            raise RolloutError(
                f"rollout replica {replicas[done]} failed in {method}: {error.cause!r}"
            ) from error
        except RayError as error:
            raise LostError(f"rollout replica {replicas[done]} was lost in {method}: {error}") from error


class GatheredWeights(WeightSource):
    """vLLM's view of the policy's weights.

    `weights()` iterates over (name, whole tensor), including a tied `lm_head.weight`. Collective over the
    policy's ranks. `metadata`: meta tensors of every pass, in its order.
    """

    def __init__(self, weights: NamedWeights, metadata: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.computation = torch.cuda.current_stream()
        self._metadata = [
            ParamMeta(name, empty.dtype, tuple(empty.shape)) for name, empty in metadata.items()
        ]

    def metadata(self) -> list[ParamMeta]:
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather on the computation's stream. vLLM reads on streams of its own in turn, which wait for it
        here.

        Without this, a conversion's tensors, such as a layer's experts, were gathered on one stream and read
        on the next one, and the first gathers did not wait for the optimizer.
        """
        weights = self._weights()
        while True:
            reader = torch.cuda.current_stream()
            with torch.cuda.stream(self.computation):
                item = next(weights, None)
            if item is None:
                return
            reader.wait_stream(self.computation)
            item[1].record_stream(reader)  # not to be given away before it is read
            yield item


class WeightSender:
    """A policy rank's end of the transfer."""

    def __init__(
        self,
        placement: str,
        engines: Sequence[Any],
        weights: NamedWeights,
        metadata: Mapping[str, Tensor],
        *,
        rank: int,
        tensor_parallel: int,
        address: str = "",
        port: int = 0,
        buffer_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES,
    ) -> None:
        """Connect to the engines. Collective over the policy's ranks, whose CUDA device must be current.

        engines: handles of all actors, started. weights, metadata: see `GatheredWeights`. Only rank zero
        needs whole tensors with `apart`, every rank with `colocated`. address, port: free, at policy rank
        zero, for `apart`.
        buffer_bytes: sent at a time.
        """
        self._client = EngineClient(engines, tensor_parallel)
        source = GatheredWeights(weights, metadata)
        info: TrainerInitInfo
        self._segments: Callable[[], AbstractContextManager[None]] = (
            fixed_segments if placement == "colocated" else nullcontext
        )
        if placement == "colocated":
            largest = max(meta.dtype.itemsize * math.prod(meta.shape) for meta in source.metadata())
            # Packed, because unpacked would hold a second copy of the model at once.
            info = IPCTrainerInitInfo(
                rank=rank, packed=True, packed_buffer_size_bytes=max(buffer_bytes, largest)
            )
        else:
            info = NCCLTrainerInitInfo(
                master_address=address,
                master_port=port,
                world_size=1 + len(engines) * tensor_parallel,
                rank=rank,
                packed_buffer_size_bytes=buffer_bytes,
            )
        self._trainer_side = WeightTransferTrainerFactory.trainer_init(
            info, client=self._client, source=source
        )
        # vLLM ends the communicator by aborting it, which also ends a broadcast that waits for a lost engine.
        self._client.on_failure = self._trainer_side.shutdown

    def send(self, version: int) -> None:
        """Send the weights to all engines as `version`. Collective over the policy's ranks.

        Raises on rank zero, and cannot be used afterwards: RolloutError if an engine refuses the update,
        LostError if an engine is lost.
        """
        self._client.version = version
        try:
            with self._segments():
                self._trainer_side.send_weights()
        except Exception as error:
            if self._client.failure is not None and error is not self._client.failure:
                raise self._client.failure from error  # the broadcast broke because of it
            raise

    def close(self) -> None:
        self._trainer_side.shutdown()
