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
from vllm.distributed.weight_transfer import (
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from workers.allocator import fixed_segments
from workers.errors import BallastError, LostError, RolloutError

LOSS_SECONDS = 5.0
"""Wait for the news of a lost engine, after another in the same broadcast has failed."""

NamedWeights = Callable[[], Iterator[tuple[str, Tensor]]]


class EngineClient:
    """vLLM's `VLLMWeightSyncClient` protocol over `VllmEngineActor` actors.

    A lost engine raises nothing here: ranks other than zero would wait in a gather for ever. It is left out,
    and the others go on, unless they share a broadcast (`together`): that is aborted here and by each of
    them.
    """

    def __init__(
        self, engines: Sequence[Any], tensor_parallel: int, *, together: bool
    ) -> None:
        self._engines = engines
        self._tensor_parallel = tensor_parallel
        self._together = together
        self.version = 0
        # Positions of engines that were lost in the last update.
        self.lost: set[int] = set()
        self.failure: BallastError | None = None  # of the last update
        self.abort: Callable[[], None] = lambda: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Raises LostError for a lost engine."""
        infos = [init_info] * len(self._engines)
        if "rank_offset" in init_info:
            # vLLM gives all replicas one offset, right for one engine with data-parallel ranks. Ours are
            # separate.
            offsets = itertools.count(init_info["rank_offset"], self._tensor_parallel)
            infos = [
                info | {"rank_offset": offset}
                for info, offset in zip(infos, offsets, strict=False)
            ]
        lost = call_replicas(self._engines, "init_transfer", [(info,) for info in infos])
        if lost:
            raise LostError(
                f"engines {sorted(lost)} of the transfer group were lost while it met."
            )

    def start_weight_update(self) -> None:
        self.failure = None
        self.lost = set()
        self._call("begin_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """With nccl in a thread, while the trainer broadcasts. A failure or a loss aborts the broadcast."""
        try:
            self._call("receive_update", update_info)
        except BallastError as error:
            self.failure = error
            self._abort_broadcast()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Resume under `self.version`: vLLM's trainer side does not pass the version through."""
        self._call("finish_update", self.version)

    def _call(self, method: str, *arguments: Any) -> None:
        if self._together and self.lost:
            return
        positions = [
            position for position in range(len(self._engines)) if position not in self.lost
        ]
        engines = [self._engines[position] for position in positions]
        lost = call_replicas(
            engines, method, [arguments] * len(engines), together=self._together
        )
        self.lost |= {positions[index] for index in lost}
        if self._together and self.lost:
            self._abort_broadcast()

    def _abort_broadcast(self) -> None:
        self.abort()
        if self._together:
            others = set(range(len(self._engines))) - self.lost
            tell_replicas([self._engines[position] for position in others], "leave_group")


def tell_replicas(engines: Sequence[Any], method: str) -> None:
    """Call `method` of every replica, and wait for none."""
    for engine in engines:
        getattr(engine, method).remote()


def call_replicas(
    engines: Sequence[Any],
    method: str,
    arguments: Sequence[tuple[Any, ...]],
    *,
    together: bool = False,
) -> set[int]:
    """Call `method` of every replica with its arguments and wait for all. Returns positions of lost actors.

    together: returns at the first lost one, for which the others may wait. Raises at the first failure: our
    errors unchanged, RolloutError otherwise. With `together`, a failure beside a lost actor comes from its
    loss, and is not raised.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    refs = [
        getattr(engine, method).remote(*call_arguments)
        for engine, call_arguments in zip(engines, arguments, strict=True)
    ]
    replicas = {ref: replica for replica, ref in enumerate(refs)}
    lost: set[int] = set()
    failure: BallastError | None = None
    while refs and not (together and lost):
        timeout_s = LOSS_SECONDS if failure else None
        done, refs = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if not done:
            break
        replica = replicas[done[0]]
        try:
            ray.get(done[0])
        except RayTaskError as error:
            if isinstance(error.cause, LostError):
                lost.add(replica)
                continue
            failure = failure or _failure(error, replica, method)
            if not together:
                raise failure from error
        except RayError:
            lost.add(replica)
    if failure is not None and not lost:
        raise failure
    return lost


def _failure(error: Any, replica: int, method: str) -> BallastError:
    if isinstance(error.cause, BallastError):
        return error.cause
    return RolloutError(f"rollout replica {replica} failed in {method}: {error.cause!r}")


class GatheredWeights(WeightSource):
    """vLLM's view of the policy's weights.

    `weights()` iterates over (name, whole tensor), including a tied `lm_head.weight`. Collective over the
    policy's ranks. `metadata`: meta tensors of every pass, in its order.
    """

    def __init__(self, weights: NamedWeights, metadata: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.computation = torch.cuda.current_stream()
        self._metadata = [
            ParamMeta(name, empty.dtype, tuple(empty.shape))
            for name, empty in metadata.items()
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
        self._client = EngineClient(engines, tensor_parallel, together=placement == "apart")
        source = GatheredWeights(weights, metadata)
        info: TrainerInitInfo
        self._segments: Callable[[], AbstractContextManager[None]] = (
            fixed_segments if placement == "colocated" else nullcontext
        )
        if placement == "colocated":
            largest = max(
                meta.dtype.itemsize * math.prod(meta.shape) for meta in source.metadata()
            )
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
        self._client.abort = self._abort

    def send(self, version: int) -> list[int]:
        """Send the weights to all engines as `version`. Collective over the policy's ranks.

        Returns positions of lost engines, on rank zero. With `colocated` the others have the weights. With
        `apart` none has, and the group cannot be used afterwards. Raises RolloutError on rank zero if an
        engine refuses the update.
        """
        self._client.version = version
        self._client.lost = set()
        try:
            with self._segments():
                self._trainer_side.send_weights()
        except Exception as error:
            if self._client.failure is not None and error is not self._client.failure:
                raise self._client.failure from error  # the broadcast broke because of it
            if not self._client.lost:
                raise
            # The aborted broadcast said so, after all weights were gathered or with every rank's collective.
        return sorted(self._client.lost)

    def _abort(self) -> None:
        """Leave the broadcast, which would wait for a lost engine. vLLM then gathers, as other ranks do."""
        group = getattr(self._trainer_side, "model_update_group", None)
        if group is not None:
            group.destroy()

    def close(self) -> None:
        self._trainer_side.shutdown()
