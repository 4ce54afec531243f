"""A simulated GPU: its tensors have sizes but no data, so that the real engine runs to measure its memory.

    real tensors on the CPU  --.to("gpu")-->  fake tensors on "gpu"  --.item()-->  1

The device is a PrivateUse1 backend in Python, which autograd, FSDP2 and DTensor use like any other. Its
operations run on fake tensors. Tensors on the CPU are computed as usual. `stand_in` replaces calls that check
for CUDA by name, read files, or need data. The engine's code is unchanged.

Use a separate process: the backend stays registered. Needs the exact torch that pyproject.toml pins.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention.varlen import varlen_attn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AttentionInterface

from workers.model import layout, sharded_model
from workers.model.attention import attention
from workers.model.checkpoint import loading
from workers.model.copies import to_device
from workers.model.moe import experts
from workers.model.stages import stage_pipeline as pipelines

DEVICE = "gpu"
FLASH = "flash_simulated"
"""Attention of towers. With `flash` in its name, they do not cut images into windows."""


class Stream:
    """Stream or event of a device that does nothing."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def nothing(self, *_: Any, **__: Any) -> "Stream":
        return self

    record = record_event = wait = wait_event = wait_stream = synchronize = __enter__ = (
        nothing
    )

    def __exit__(self, *_: Any) -> None: ...


class Backend:
    """Provide the device's module for torch, FSDP2 and DeviceMesh, like `torch.cuda`."""

    def __init__(self) -> None:
        self.Stream = self.Event = Stream
        self._stream = Stream()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def current_stream(self, *_: Any) -> Stream:
        return self._stream

    def stream(self, *_: Any) -> Stream:
        return self._stream

    def nothing(self, *_: Any) -> None: ...

    set_device = manual_seed_all = synchronize = empty_cache = nothing

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False


class Ledger:
    """Count the bytes of live storages, and their peak since `restart`.

    torch's MemTracker misses what DTensor's operations allocate inside.
    """

    def __init__(self) -> None:
        self.current = self.peak = 0
        self._sizes: dict[int, int] = {}

    def restart(self) -> None:
        self.peak = self.current

    def enter(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size, until it is freed."""
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._set, key, None)
        self._set(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int | None) -> None:
        self.current += (size or 0) - self._sizes.get(key, 0)
        self.peak = max(self.peak, self.current)
        if size is None:
            del self._sizes[key]
        else:
            self._sizes[key] = size


class FakeGpu(TorchDispatchMode):
    """Run operations of the device on fake tensors. Others are unchanged. ledger: of the device's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls back with each rank's value
        if operator is torch.ops.aten._local_scalar_dense.default and isinstance(
            args[0], FakeTensor
        ):
            return 1
        if operator is torch.ops.aten.index.Tensor and isinstance(args[0], FakeTensor):
            args = _all_true(*args)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if _is_fake(leaf)]
        if not leaves:
            return operator(*args, **kwargs)
        # What a tower makes of the sizes of images is on the host, see `_sizes_stay`.
        devices = [
            leaf.device
            for leaf in leaves
            if isinstance(leaf, FakeTensor) and leaf.device.type == DEVICE
        ]
        device = devices[0] if devices and not operator._schema.is_mutable else None
        with self._fake:
            result = operator(
                *tree_map_only(
                    torch.Tensor, partial(_without_numbers, device=device), args
                ),
                **kwargs,
            )
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and tensor.device.type == DEVICE:
                self.ledger.enter(tensor.untyped_storage())
        return result


def _is_fake(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return isinstance(leaf, FakeTensor) or leaf.is_meta or leaf.device.type == DEVICE
    return isinstance(leaf, torch.device) and leaf.type == DEVICE


def _all_true(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return arguments of an index in which a mask chooses everything: how much it chooses is data."""
    mask = indices[0]
    if mask is None or mask.dtype != torch.bool:
        return tensor, indices
    return tensor.flatten(0, mask.ndim - 1), [torch.zeros(mask.numel(), dtype=torch.int64)]


def _without_numbers(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return tensor
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
    )


@contextmanager
def fake_gpus(ranks: int, rank: int = 0) -> Iterator[FakeGpu]:
    """Inside, this process is `rank` of `ranks` ranks, each with a fake GPU. Collectives do nothing."""
    backend = Backend()
    _setup_privateuseone_for_python_backend(DEVICE, backend)
    # FSDP2 asks there for layers gathered in vain.
    torch.accelerator.current_stream = backend.current_stream
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    stand_in()
    # CUDA has one kernel. For other backends torch composes many, with 2 T b f more at the peak.
    torch.library.impl(
        "aten::silu_backward", "PrivateUse1", torch.ops.aten.silu_backward.default
    )
    # torch.tensor(..., device=...) makes a tensor on the CPU and copies it.
    torch._C._set_only_lift_cpu_tensors(True)
    gpu = FakeGpu()
    with gpu, _resizes_counted(gpu.ledger):
        yield gpu


@contextmanager
def _resizes_counted(ledger: Ledger) -> Iterator[None]:
    """Count storage resizes, by which FSDP2 frees and remakes gathered parameters: no operation
    shows them.
    """
    resize = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        ledger.resized(storage)
        return result

    torch.UntypedStorage.resize_ = counted
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def stand_in() -> None:
    """Replace calls that need files, data or CUDA's name."""
    loading._on_rank_zero = lambda load: None
    loading.set_model_state_dict = lambda *_, **__: None
    sharded_model.load_tokenizer = lambda path: None
    sharded_model.check_tokenizer = lambda *_: None
    attention.kernel_problem = lambda *_, **__: ""
    layout.to_device = _sizes_stay
    AttentionInterface.register(FLASH, _flash_attention)
    # Every expert gets as many tokens: their number is data.
    experts.on_host = lambda sizes, rows: (
        [[len(part) for part in torch.arange(rows).chunk(sizes.shape[1])]] * 2
    )
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    # Every rank gives this one's answer, and every stage has as many layers.
    dist.broadcast_object_list = lambda *_, **__: None
    dist.all_gather_object = _all_say_the_same
    dist.batch_isend_irecv = lambda operations: []
    pipelines.Stage.from_stage = lambda self, stage, value: value  # type: ignore[method-assign]
    pipelines.split_layers = lambda costs, last, parts: _evenly(len(costs), parts)
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def outside(propagator: ShardingPropagator, op_schema: Any) -> Any:
        """Infer DTensor's result shapes outside the ledger: DTensor computes them on tensors of the whole
        size.
        """
        with _disable_current_modes():
            return propagate(propagator, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = outside


def _sizes_stay(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy to the device, except the sizes of images, int64 [n, 2 or 3], from which towers read numbers."""
    copied = to_device(device, *tensors)
    are_sizes = [
        tensor.ndim == 2 and tensor.shape[1] <= 3 and not tensor.is_floating_point()
        for tensor in tensors
    ]
    return [
        tensor if stays else copy
        for tensor, copy, stays in zip(tensors, copied, are_sizes, strict=True)
    ]


def _flash_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    scaling: float,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within a tower, [B, H, T, D] to [B, T, H, D]. All images at once: a call for each takes as much
    memory.
    """
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    bounds = torch.zeros(2, dtype=torch.int32, device=query.device)
    longest = len(q)
    output = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling)
    return output.view(len(query), -1, *output.shape[1:]), None


def _all_say_the_same(values: list[Any], value: Any, **_: Any) -> None:
    values[:] = [value] * len(values)


def _evenly(layers: int, parts: int) -> list[range]:
    size = layers // parts
    return [range(part * size, (part + 1) * size) for part in range(parts)]
