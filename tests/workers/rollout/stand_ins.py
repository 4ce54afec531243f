"""Replace what a transfer between GPUs needs: communicator, streams, memory handles, Ray's calls.

policy engine -> our sender -> vLLM's trainer engine -> [communicator | handles] -> our engine in vLLM on CPU
                     |--- EngineClient --- [call_replicas] --- VllmEngineActor.begin, receive, finish ---|
"""

import asyncio
import contextlib
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.workers.rollout.stream_races import StreamRaces
from workers import allocator
from workers.engine.weights import left_groups
from workers.engine.weights.weight_transfer import FROZEN_VISION, TRANSFER_TIMEOUT
from workers.errors import BallastError, LostError, RolloutError

TIMEOUT_S = 240.0  # a loaded machine takes minutes to import vLLM
DEVICE_UUID = "GPU-{rank}"


class Communicator:
    """A broadcast from rank 0 to the others, which fails as NCCL's does.

    A member waits for all others, also to join, and hangs until its time-out if one is missing. An abort
    releases the member that aborts, and no other. Sizes must agree, which NCCL demands and does not check.
    `sent`: bytes of every broadcast. `aborted`: ranks.
    """

    def __init__(self, receivers: int, timeout_s: float = TIMEOUT_S) -> None:
        self._members = receivers + 1
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._entered: Counter[int] = Counter()  # broadcasts, by rank
        self._copied: Counter[int] = Counter()
        self._tensor: torch.Tensor | None = None
        self.joined: list[int] = []
        self.sent: list[int] = []
        self.aborted: set[int] = set()

    def end(self, rank: int) -> Any:
        """What a rank holds of it: vLLM's `PyNcclCommunicator`, as far as transfers use it."""
        with self._changed:
            self.joined.append(rank)
        self._wait(rank, lambda: len(self.joined) == self._members)

        def broadcast(tensor: torch.Tensor, src: int, stream: object = None) -> None:
            if rank == src:
                self._tensor = tensor
                self.sent.append(tensor.nbytes)
            if not self._meet(rank, self._entered):
                return
            if rank != src:
                assert self._tensor is not None and self._tensor.shape == tensor.shape
                tensor.copy_(self._tensor)
            self._meet(rank, self._copied)

        def destroy() -> None:
            with self._changed:
                self.aborted.add(rank)
                self._changed.notify_all()

        return SimpleNamespace(broadcast=broadcast, destroy=destroy)

    def _meet(self, rank: int, counts: Counter[int]) -> bool:
        """Wait for all members to come as far as this one. Returns False if it was aborted."""
        with self._changed:
            counts[rank] += 1
            count = counts[rank]
        return self._wait(
            rank, lambda: min(counts[member] for member in range(self._members)) >= count
        )

    def _wait(self, rank: int, are_all_here: Callable[[], bool]) -> bool:
        with self._changed:
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: rank in self.aborted or are_all_here(), self._timeout_s
            ):
                raise TimeoutError(
                    f"member {rank} waited {self._timeout_s:g} s for a member that is missing"
                )
            # vLLM's returns at once when it was aborted on this side.
            return rank not in self.aborted


class _OnCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(
        self, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@contextlib.contextmanager
def without_gpus(communicator: Communicator, rank: int = 0) -> Iterator[None]:
    """Inside, vLLM's trainer and worker engines of `nccl` and `ipc` run on a CPU. Streams must not race."""
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor

    buffers: dict[int, torch.Tensor] = {}
    segments = [allocator.settings()]

    def export(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        assert segments[-1] == "expandable_segments:False", (
            "CUDA IPC does not share memory that grows"
        )
        buffers[id(tensor)] = tensor
        # The seventh is the device, which the other side sets.
        return None, (id(tensor), *[None] * 7)

    uuid = DEVICE_UUID.format(rank=rank)
    races = StreamRaces()
    with pytest.MonkeyPatch.context() as patch, _OnCpu(), races:
        patch.setattr(torch.cuda, "stream", races.stream)
        patch.setattr(torch.cuda, "current_stream", races.current_stream)
        patch.setattr(
            torch.Tensor,
            "record_stream",
            lambda *arguments: races.record_stream(*arguments),
        )
        patch.setattr(allocator, "_set", segments.append)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "ipc_collect", lambda: None)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid)
        )
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        patch.setattr(
            packed_tensor,
            "_get_streams",
            lambda device, count: tuple(races.new_stream() for _ in range(count)),
        )
        patch.setattr(packed_tensor, "reduce_tensor", export)
        patch.setattr(reductions, "rebuild_cuda_tensor", lambda key, *_: buffers[key])
        patch.setattr(
            nccl_engine, "open_trainer_endpoint", lambda info: communicator.end(0)
        )
        patch.setattr(
            nccl_engine,
            "worker_init_process_group",
            lambda info, parallel: communicator.end(info.rank_offset),
        )
        assert ipc_engine.packed_ipc_producer is packed_tensor.packed_ipc_producer
        yield
    assert segments[-1] == "expandable_segments:True"
    assert not races.races and not races.borrowed, [*races.races[:3], *races.borrowed[:3]]


def call_local(
    engines: Sequence[Any],
    method: str,
    arguments: Sequence[tuple[Any, ...]],
    *,
    together: bool = False,
) -> set[int]:
    """`workers.engine.weights.gpu_transfer.call_replicas` for replicas of this process, a thread each."""
    pool = ThreadPoolExecutor(len(engines))
    calls = [
        pool.submit(getattr(engine, method), *call_arguments)
        for engine, call_arguments in zip(engines, arguments, strict=True)
    ]
    pool.shutdown(wait=False)
    lost: set[int] = set()
    waiting = set(calls)
    while waiting and not (together and lost):
        done, waiting = wait(waiting, TIMEOUT_S, FIRST_COMPLETED)
        assert done, f"{method} hangs"
        for future in done:
            try:
                future.result()
            except LostError:
                lost.add(calls.index(future))
            except BallastError:
                raise
            except Exception as error:
                # As of an actor. The sender leaves its broadcast only for errors of ours.
                raise RolloutError(f"a replica failed in {method}: {error!r}") from error
    return lost


def tell_local(engines: Sequence[Any], method: str) -> None:
    """`workers.engine.weights.gpu_transfer.tell_replicas` for replicas of this process."""
    for engine in engines:
        getattr(engine, method)()


class Loop:
    """An event loop in a thread, for coroutines of a rollout worker that is no actor."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)


class LocalReplica:
    """A VllmEngineActor in this process, its coroutines called as functions."""

    def __init__(self, worker: Any) -> None:
        self.worker, self._loop = worker, Loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._loop.run(getattr(self.worker, name)(*arguments))

    def rows(self, requests: list[Any], sampling: Any) -> list[dict[str, Any]]:
        """The token columns of all samples."""

        async def collect() -> list[dict[str, Any]]:
            blocks = [
                part
                async for part in self.worker.generate(requests, sampling)
                if not isinstance(part, list)
            ]
            return [block.row(index) for block in blocks for index in range(len(block))]

        return self._loop.run(collect())


class BareReplica:
    """Instead of a rollout worker: vLLM's worker engine of a backend alone, around a model that keeps what it
    loads.

    dies_at: number of the `load_weights` at which its actor is lost. heard: what it
    was told, in order. ends: errors with which it left a transfer.
    """

    def __init__(self, backend: str, dies_at: int | None = None) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from workers.engine.weights.complete_update import TimedNCCLWeightTransferEngine

        self.loaded: dict[str, torch.Tensor] = {}
        self.heard: list[Any] = []
        self.ends: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._dies_at, self._loads, self._groups = dies_at, 0, 0
        # A replica of an earlier test in this process may have left a group of the same number.
        left_groups.prepare_file()
        engine_class = (
            TimedNCCLWeightTransferEngine
            if backend == "nccl"
            else WeightTransferEngineFactory._registry[backend]()
        )
        settings = {TRANSFER_TIMEOUT: TIMEOUT_S, FROZEN_VISION: False}
        parts = SimpleNamespace(
            parallel_config=None, model_config=None, additional_config=settings
        )
        self._engine = engine_class(None, parts, torch.device("cpu"), self)

    def load_weights(self, weights: Any) -> None:
        self._loads += 1
        if self._loads == self._dies_at:
            raise LostError("the actor died.")
        self.loaded |= {name: weight.clone() for name, weight in weights}

    def init_transfer(self, info: dict[str, Any]) -> None:
        self._groups += 1
        self._engine.init_transfer_engine(self._engine.parse_init_info(info))

    def leave_group(self) -> None:
        left_groups.leave(Path(os.environ[left_groups.FILE]), self._groups)

    def begin_update(self) -> None:
        self.heard.append("begin")

    def receive_update(self, info: dict[str, Any]) -> None:
        self.heard.append(sorted(info.get("ipc_handles", ())))
        try:
            self._engine.update_weights(info)
        except Exception as error:
            self.ends.put(error)
            raise

    def finish_update(self, version: int) -> None:
        self.heard.append(version)
