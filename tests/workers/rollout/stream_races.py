"""CUDA's streams on a CPU: operators that would not wait for another stream's work on the same memory are
races.

    each operator: a tick of its stream      wait_stream, wait_event: the waiting stream has seen the other's ticks
    reading needs to have seen the last write, writing also all reads since

Only operators of the thread that enters are watched.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRAPPERS = (DTensor, AsyncCollectiveTensor)


class Stream:
    """Stand-in for torch.cuda.Stream. seen: ticks of other streams, by stream, that its next operator comes
    after.
    """

    def __init__(self, name: str) -> None:
        self.name, self.ticks, self.seen = name, 0, {}

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> dict["Stream", int]:
        return {**self.seen, self: self.ticks}

    def wait_event(self, event: dict["Stream", int]) -> None:
        for stream, ticks in event.items():
            self.seen[stream] = max(ticks, self.seen.get(stream, 0))

    def has_seen(self, stream: "Stream", tick: int) -> bool:
        return stream is self or self.seen.get(stream, 0) >= tick

    def synchronize(self) -> None:
        """Let the host wait: found by `StreamRaces`, since all later operators come after it."""


class StreamRaces(TorchDispatchMode):
    """races: one line per operator that does not wait. borrowed: names of side streams that used another's
    memory without `record_stream`, after which the memory may be given away too early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.borrowed: list[str] = []
        self._default = Stream("of the computation")
        self._streams, self._local = [self._default], threading.local()
        self._wrote: dict[int, tuple[Stream, int]] = {}
        self._read: dict[int, list[tuple[Stream, int]]] = {}
        self._owner: dict[int, Stream] = {}
        self._recorded: set[tuple[int, Stream]] = set()
        # Threads that receive record streams too, while an operator goes through the set.
        self._lock = threading.Lock()

    def new_stream(self) -> Stream:
        races, stream = self, Stream(f"side {len(self._streams)}")
        self._streams.append(stream)

        def synchronize() -> None:
            for other in races._streams:
                other.wait_stream(stream)

        stream.synchronize = synchronize  # type: ignore[method-assign]
        return stream

    def current_stream(self, *_: object) -> Stream:
        return getattr(self._local, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        with self._lock:
            self._recorded.add((_memory(tensor), stream))

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Made of tensors that come here.
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        if operator.is_view:
            return result
        inputs = _memories((args, kwargs))
        made = _memories(result) - inputs
        values = zip(operator._schema.arguments, args, strict=False)
        changed = _memories(
            [
                value
                for argument, value in values
                if argument.alias_info and argument.alias_info.is_write
            ]
        )
        with self._lock:
            self._tick(str(operator), inputs, made, changed)
        return result

    def _tick(self, name: str, inputs: set[int], made: set[int], changed: set[int]) -> None:
        stream = self.current_stream()
        stream.ticks += 1
        for memory in made:  # new, perhaps at the address of what was freed
            self._wrote.pop(memory, None), self._read.pop(memory, None)
            self._recorded = {pair for pair in self._recorded if pair[0] != memory}
            self._owner[memory] = stream
        for memory in inputs:
            before = [self._wrote[memory]] if memory in self._wrote else []
            before += self._read.get(memory, []) if memory in changed else []
            self.races += [
                f"{name} on stream {stream.name} does not wait for stream {other.name}"
                for other, tick in before
                if not stream.has_seen(other, tick)
            ]
            owned = stream is self._default or self._owner.get(memory, stream) is stream
            if not owned and (memory, stream) not in self._recorded:
                self.borrowed.append(stream.name)
        for memory in made | changed:
            self._wrote[memory], self._read[memory] = (stream, stream.ticks), []
        for memory in inputs - changed:
            self._read.setdefault(memory, []).append((stream, stream.ticks))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memories(values: Any) -> set[int]:
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return {
        _memory(tensor)
        for tensor in tensors
        if not (tensor.is_meta or isinstance(tensor, WRAPPERS)) and tensor.numel()
    }
