"""A pool of gloo ranks for the tests that need several processes.

    results = ranks.run(function, 2, *arguments)         function(*arguments) on ranks 0 and 1; results in rank order

Every call gets a new default process group of exactly that many ranks, so that the function sees what it
would see under torchrun, and nothing of the calls before it. Function, arguments and results travel as
pickles: the function is one of a module's top level, DTensors do not travel.
"""

import faulthandler
import gc
import multiprocessing
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = ["pytest", "hypothesis", "workers.model.engine", "controller.actors.launch"]
# Of most tests' models.
PRELOADED += ["transformers.models.qwen2.modeling_qwen2", "transformers.processing_utils"]
# Imported by what ranks call, a tenth of their time where each imports it.
PRELOADED += ["peft", "tests.workers.model.exact", "torch.distributed.tensor.debug"]
PRELOADED += ["transformers.tokenization_mistral_common"]
GRACE_S = 5.0  # for the other ranks to fail too, after which they are taken to wait for the one that did
TIMEOUT_S = 240.0
# torch caches meshes with their groups, whose threads wake a hundred times a second for good
CALLS_OF_A_PROCESS = 8


class RankError(Exception):
    pass


class RankPool:
    """Processes that run functions as the ranks of a process group. They start with the first call that needs
    them.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
        """`function(*arguments)` on `count` ranks; its results in rank order. A pool that is smaller starts
        anew.

        Raises RankError if it raises on a rank or takes longer than `TIMEOUT_S`; the pool then starts anew. A
        call with a segmentation fault is made once more, with a warning: threads of gloo's have one now and
        then.
        """
        answers = self._call(function, count, *arguments)
        if any(process.exitcode == -signal.SIGSEGV for process in self._processes):
            warnings.warn(
                "a rank had a segmentation fault (its stack is in stderr, or in .pytest_cache/ranks.log): "
                "called once more",
                stacklevel=2,
            )
            self.stop()
            answers = self._call(function, count, *arguments)
        failures = [
            f"rank {rank} of {count}:\n{text}"
            for rank, (done, text) in answers.items()
            if not done
        ]
        if failures or len(answers) < count:
            silent = sorted(set(range(count)) - set(answers))
            self.stop()
            raise RankError(
                "\n".join(
                    [
                        *failures,
                        *(f"rank {rank} of {count} gave no answer" for rank in silent),
                    ]
                )
            )
        if self._calls % CALLS_OF_A_PROCESS == 0:
            self.stop()  # others are forked in a moment
        return [answers[rank][1] for rank in range(count)]

    def _call(
        self, function: Callable[..., Any], count: int, *arguments: Any
    ) -> dict[int, tuple[bool, Any]]:
        if count > self._size:
            self.stop()
            self._size = count
        self._start()
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        for rank, connection in enumerate(self._connections[:count]):
            connection.send_bytes(pickle.dumps((function, arguments, store, rank, count)))
        return self._collect(count)

    def _collect(self, count: int) -> dict[int, tuple[bool, Any]]:
        """(done, result or traceback) by rank; without the ranks that are stuck once one has failed."""
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < count:
            waiting = {
                self._connections[rank]: rank
                for rank in range(count)
                if rank not in answers
            }
            failed = any(not done for done, _ in answers.values())
            ready = wait(list(waiting), GRACE_S if failed else TIMEOUT_S)
            if not ready:
                break
            for connection in ready:
                try:
                    answers[waiting[connection]] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process = self._processes[waiting[connection]]
                    process.join(GRACE_S)
                    answers[waiting[connection]] = (
                        False,
                        f"the process ended with exit code {process.exitcode}",
                    )
        return answers

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # imported once for all ranks
        for _ in range(self._size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._processes, self._connections = [], []


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    gc.freeze()  # modules, which no collection need look through
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _run(*pickle.loads(request))))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
        del request, answer
        gc.collect()  # engines in cycles keep their groups, whose threads wake a hundred times a second


def _run(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    store: str,
    rank: int,
    count: int,
) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout
    )
    try:
        result = function(*arguments)
        # Else a rank that is still connecting a function's last group loses its peer.
        if dist.is_initialized():
            dist.barrier()
        return result
    finally:
        end_process_groups()


def end_process_groups() -> None:
    """Destroy all groups of this process: each has threads, which wake a hundred times a second."""
    import torch.distributed as dist

    if dist.is_initialized():  # an engine of vLLM ends it with its own
        dist.destroy_process_group()
    forget_meshes()


def gloo_loops() -> int:
    """Threads of this process that wait for messages, one a process group."""
    found = 0
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # others end
            found += file.read_text() == "gloo_tcp_loop\n"
    return found


def forget_meshes() -> None:
    """Clear what torch caches of DTensors: it holds the groups of a mesh that is gone, and would take them
    for those of the next call's, if that is equal.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def dp_rank(parallel: Any) -> int:
    """Whose sequences this rank of a `workers.model.sharding.parallel.Parallel` computes, 0 to dp - 1."""
    import torch.distributed as dist

    of_a_stage = dist.get_rank() % (dist.get_world_size() // parallel.pipeline.size())
    return of_a_stage // (parallel.context.size() * parallel.tensor.size())
