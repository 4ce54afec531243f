"""Checkpoints of a sharded model: torch's distributed checkpoint (DCP), written in the background, complete
or absent.

    save: state --copy to host memory--> training continues
                          \\--background--> every rank its shards, fsync --> manifest --rename--> step-30/
    load: manifest --> checksums --> names and shapes --> ranks read their slices, of any number of writers

Tensors are stored as safetensors and everything else as JSON, so that loading runs no code. DCP's own
metadata is a pickle. `HuggingFaceStorageReader` derives it from the files' headers.

A checkpoint holds the trained parameters, persistent buffers, the optimiser's state, the schedule (of every
LoRA policy, by name, or of one, without), and every rank's random states (torch's, on CPU and GPU). Settings
of the optimiser come from the run's configuration.
"""

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from workers.errors import CheckpointError, clause
from workers.model.checkpoint.checkpoint_folder import (
    Manifest,
    StoredFile,
    check_free,
    check_json,
    clear_unfinished,
    commit,
    read_manifest,
    unfinished_folder,
    verify_files,
)
from workers.model.optimizer.optimizer import optimizer_state
from workers.model.optimizer.training_states import TrainingStates
from workers.model.sharding.parallel import limit_waits, reshard
from workers.model.sharding.raise_on_all_ranks import raise_on_all_ranks
from workers.model.stages.stage_pipeline import Stage

log = logging.getLogger(__name__)

# A file is serialised in memory before it is written: extra memory of a save on each rank.
SHARD_BYTES = 2**30


@dataclass(frozen=True)
class RankCopy:
    """A rank's state in memory. numbers: of each policy. extra: JSON of the caller. forms: types and shapes
    of the tensors, by name. tensors: their bytes, uint8, each from a multiple of ALIGNMENT on.
    """

    numbers: dict[str, Any]
    extra: dict[str, Any]
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    tensors: np.ndarray

    def in_own_memory(self) -> "RankCopy":
        """Return the copy in this process's memory, which Ray's object store may then free."""
        return replace(self, tensors=self.tensors.copy())


ALIGNMENT = 16


def _views(
    forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], memory: Tensor
) -> dict[str, Tensor]:
    """Return tensors of these forms in `memory`, uint8."""
    views = {}
    start = 0
    for name, (dtype, shape) in forms.items():
        end = start + dtype.itemsize * math.prod(shape)
        views[name] = memory[start:end].view(dtype).reshape(shape)
        start = _aligned(end)
    return views


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Checkpointer:
    """Save and load the state of one engine, in a folder that all its ranks see. Every method is
    collective.
    """

    def __init__(
        self, module: nn.Module, states: TrainingStates, device: torch.device, stage: Stage
    ) -> None:
        self._module = module
        self._states = states
        self._device = device
        self._stage = stage
        # The background thread's messages must not mix with training's. One rank sends none, and a group has
        # threads.
        self._group = (
            dist.new_group(backend="gloo")
            if dist.get_world_size() > 1
            else dist.group.WORLD
        )
        limit_waits()
        self._saving: tuple[Path, Future] | None = None

    def save(
        self,
        path: str | Path,
        *,
        step: int,
        extra: dict[str, Any] | None = None,
        policy: str = "",
    ) -> None:
        """Start to save as `path`. Returns when the state is copied, while files are still being written.

        step, extra: see `Manifest`. policy: one of several, which any can load, or empty for all. Raises
        CheckpointError if the previous save failed or `path` holds a complete checkpoint, DataError if
        `extra` is not JSON.
        """
        self.wait()
        path = Path(path)
        extra = check_json(extra or {})
        unfinished = self._from_rank_zero(lambda: _prepare(path))
        names = {policy: ""} if policy else {name: name for name in self._states.all}
        numbers = {
            "policies": {
                stored: self._states.numbers(name) for name, stored in names.items()
            }
        }

        def finish(files: dict[str, StoredFile]) -> None:
            commit(
                unfinished,
                path,
                Manifest(step, dist.get_world_size(), numbers, extra, files),
            )

        state = self._trained_state(names, copies=False)
        sizes = {name: tensor.nbytes for name, tensor in state.items()}
        files = _files_of(
            {
                name: size
                for part in self._stage.of_all(sizes)
                for name, size in part.items()
            }
        )
        state |= _random_state(self._device)
        writer = _CommittingWriter(unfinished, files, finish)
        future = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        self._saving = path, cast(Future, future)

    def wait(self) -> None:
        """Wait for a running save. Raises CheckpointError, once, if the last save failed."""
        if self._saving is None:
            return
        (path, future), self._saving = self._saving, None
        try:
            future.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            clear_unfinished(path.parent)
            raise CheckpointError(f"{path} could not be saved: {_cause(error)}.") from error

    def load(self, path: str | Path, *, policy: str = "") -> Manifest:
        """Load the state at `path`, saved by any number of ranks. Returns its manifest.

        policy: the only one that changes, by a state of one, or empty for all. Others keep weights and
        gradients. Random states are restored if as many ranks load as saved. Otherwise they are kept, with a
        warning. Raises CheckpointError if the checkpoint is torn, foreign or of another model. The engine is
        then unchanged, unless a file changed during the read.
        """
        self.wait()
        path = Path(path)
        manifest: Manifest = self._from_rank_zero(lambda: read_manifest(path))
        rank = dist.get_rank()
        size = dist.get_world_size()
        self._on_all_ranks(
            lambda: verify_files(path, manifest, sorted(manifest.files)[rank::size])
        )
        reader = dcp.HuggingFaceStorageReader(str(path))
        # Earlier versions had one, without a name.
        numbers = manifest.engine.get("policies", {"": manifest.engine})
        if policy and "" not in numbers:
            raise CheckpointError(
                f"{path} holds the policies {', '.join(numbers)}. Load all, or save {policy} alone."
            )
        names = {policy: ""} if policy else {name: name for name in numbers}
        if policy:
            self._states.use(policy)
        else:
            self._states.hold(names)
        state = self._trained_state(names, copies=True)
        metadata = self._on_all_ranks(lambda: _read_metadata(path, reader))
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        every = {
            name: shape
            for part in self._stage.of_all(shapes)
            for name, shape in part.items()
        }
        _check_same_model(path, every, metadata)
        random_state = _random_state(self._device) if manifest.world_size == size else {}
        # A checkpoint saved on a CPU has no state of a GPU.
        random_state = {
            name: part
            for name, part in random_state.items()
            if name in metadata.state_dict_metadata
        }
        try:
            dcp.load(state | random_state, storage_reader=reader, process_group=self._group)
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} could not be loaded: {_cause(error)}."
            ) from error
        _set_random_state(random_state, self._device)
        if not random_state:
            message = "%s was saved by %d ranks and is loaded by %d: random states are not restored"
            log.warning(message, path, manifest.world_size, size)
        self._states.resume({name: numbers[stored] for name, stored in names.items()})
        return manifest

    def copy(self, extra: dict[str, Any]) -> RankCopy:
        """Return a copy of this rank's state in host memory. extra: see `Manifest`."""
        names = {name: name for name in self._states.all}
        numbers = {name: self._states.numbers(name) for name in names}
        state = self._trained_state(names, copies=True) | _random_state(self._device)
        tensors = {name: _local(tensor) for name, tensor in state.items()}
        forms = {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        }
        # Written once: a library's format would need the state's size several times more.
        size = sum(_aligned(tensor.nbytes) for tensor in tensors.values())
        memory = torch.empty(size, dtype=torch.uint8)
        for name, view in _views(forms, memory).items():
            view.copy_(tensors[name])
        return RankCopy(numbers, extra, forms, memory.numpy())

    def load_copy(self, copy: RankCopy) -> dict[str, Any]:
        """Load a copy of this rank in a run of the same configuration. Returns its `extra`.

        Raises CheckpointError on all ranks, before any changes, if one rank's copy is of another model.
        """
        self.wait()
        # Ray's memory is read-only, which torch's is not.
        tensors = _views(copy.forms, torch.from_numpy(copy.tensors.copy()))
        self._states.hold(copy.numbers)
        names = {name: name for name in copy.numbers}
        random_state = _random_state(self._device)
        state = self._trained_state(names, copies=True)
        local_state = {name: _local(tensor) for name, tensor in state.items()}
        self._on_all_ranks(lambda: _check_same_shards(local_state | random_state, tensors))
        for name, tensor in local_state.items():
            tensor.copy_(tensors[name])
        # torch reads a generator's state from the beginning of its storage.
        draws = {name: tensors[name].clone() for name in random_state}
        _set_random_state(draws, self._device)
        self._states.resume(copy.numbers)
        return copy.extra

    def _trained_state(
        self, policies: Mapping[str, str], *, copies: bool
    ) -> dict[str, Tensor]:
        """Return the engine's own tensors, a tied one once. policies: their names in a file. copies: include
        those that another stage holds, too.
        """
        reshard(self._module)
        names: dict[Tensor, str] = {}
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
                names.setdefault(tensor, self._stage.first_name(name))
        if not copies:
            for tensor in self._stage.copies(self._module.model):
                names.pop(tensor, None)
        state: dict[str, Tensor] = {}
        for policy, stored in policies.items():
            first = f"policies.{stored}." if stored else ""
            weights = self._states.weights_of(policy)
            state |= {
                f"{first}model.{name}": weights.get(tensor, tensor).detach()
                for tensor, name in names.items()
            }
            for parameter, parts in optimizer_state(
                self._states.all[policy].optimizer
            ).items():
                if parameter in names:
                    state |= {
                        f"{first}optimizer.{names[parameter]}.{part}": value
                        for part, value in parts.items()
                    }
        return state

    def _from_rank_zero(self, make: Callable[[], Any]) -> Any:
        objects = [self._on_all_ranks(lambda: make() if dist.get_rank() == 0 else None)]
        dist.broadcast_object_list(objects, src=0, group=self._group)
        return objects[0]

    def _on_all_ranks(self, check: Callable[[], Any]) -> Any:
        with raise_on_all_ranks(self._group):
            try:
                return check()
            except OSError as error:
                raise CheckpointError(str(error)) from error


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_same_shards(wanted: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    for name in sorted(wanted.keys() | stored.keys()):
        forms = [
            (tuple(tensors[name].shape), tensors[name].dtype) if name in tensors else "none"
            for tensors in (wanted, stored)
        ]
        if forms[0] != forms[1]:
            raise CheckpointError(
                f"a copy in memory is of another model: {name} has {forms[1]} there and {forms[0]} here."
            )


class _CommittingWriter(dcp.HuggingFaceStorageWriter):
    """Write this rank's shards. On the coordinator, `commit` ends the save. Errors reach every
    rank's future.
    """

    def __init__(
        self,
        folder: Path,
        file_numbers: dict[str, int],
        commit: Callable[[dict[str, StoredFile]], None],
    ) -> None:
        super().__init__(
            str(folder), fqn_to_index_mapping=file_numbers, save_distributed=True
        )
        self._folder = folder
        self._commit = commit

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write the data, and return each file's name, size and checksum as its tensors' storage data."""
        results = super().write_data(plan, planner).wait()
        names = [result.storage_data.relative_path for result in results]
        stored = {name: (name, StoredFile.of(self._folder / name)) for name in set(names)}
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(
            [
                replace(result, storage_data=stored[name])
                for result, name in zip(results, names, strict=True)
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. DCP's metadata is not written: readers derive it from the files."""
        self._commit(
            dict(result.storage_data for rank_results in results for result in rank_results)
        )


def _prepare(path: Path) -> Path:
    check_free(path)
    clear_unfinished(path.parent)
    unfinished = unfinished_folder(path)
    unfinished.mkdir(parents=True)
    return unfinished


def _files_of(sizes: dict[str, int]) -> dict[str, int]:
    numbers = {}
    written = 0
    for name, size in sizes.items():
        numbers[name] = 1 + written // (SHARD_BYTES * dist.get_world_size())
        written += size
    for rank in range(dist.get_world_size()):  # names that the coordinator lacks
        numbers |= dict.fromkeys(_random_names(rank), 1)
    return numbers


def _random_names(rank: int) -> tuple[str, str]:
    return f"random.{rank}.cpu", f"random.{rank}.cuda"


def _random_state(device: torch.device) -> dict[str, Tensor]:
    host, gpu = _random_names(dist.get_rank())
    state = {host: torch.get_rng_state()}
    return state | (
        {gpu: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    )


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    host, gpu = _random_names(dist.get_rank())
    if host in state:
        torch.set_rng_state(state[host])
    if gpu in state:
        torch.cuda.set_rng_state(state[gpu], device)


def _read_metadata(path: Path, reader: dcp.HuggingFaceStorageReader) -> Metadata:
    try:
        return reader.read_metadata()
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: {_cause(error)}.") from error


def _check_same_model(
    path: Path, wanted: dict[str, tuple[int, ...]], metadata: Metadata
) -> None:
    stored_shapes = {
        name: tuple(stored.size) for name, stored in metadata.state_dict_metadata.items()
    }
    stored_shapes = {
        name: shape
        for name, shape in stored_shapes.items()
        if not name.startswith("random.")
    }
    for name in sorted(stored_shapes.keys() | wanted.keys()):
        if stored_shapes.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{path} is of another model, optimiser or other trained parameters: {name} has shape "
                f"{stored_shapes.get(name, 'none')} there and {wanted.get(name, 'none')} here."
            )


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(sorted(error.failures.items())))
        return f"rank {rank}: {_cause(cause)}"
    return (
        f"{type(error).__name__}: {clause(error)}"
        if str(error).strip()
        else type(error).__name__
    )
