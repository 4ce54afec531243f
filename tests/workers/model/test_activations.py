"""Offloaded activations come back as they were, also when every copy happens as late as a second stream
allows.
"""

import weakref
from collections.abc import Callable
from unittest.mock import MagicMock, call

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from workers.model.activations import MOST_LEAVING, HostActivations, activations_on_host
from workers.model.copies import CopyStream

LAYERS = 6


class LateCopies:
    """A stream whose copies happen only when somebody waits for them; until then their targets hold NaN.

    log: ("copy", number) and ("wait", number) in order. most_waiting: copies begun and not done at one time.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.most_waiting = 0
        self._copies: list[tuple[Callable[[], Tensor | None], Tensor]] = []
        self._done = 0

    def copy(self, source: Tensor, target: Tensor) -> int:
        if target.is_floating_point():
            target.fill_(torch.nan)
        self._copies.append((weakref.ref(source), target))
        self.log.append(("copy", len(self._copies) - 1))
        self.most_waiting = max(self.most_waiting, len(self._copies) - self._done)
        return len(self._copies) - 1

    def wait(self, copied: int) -> None:
        self.log.append(("wait", copied))
        for source, target in self._copies[self._done : copied + 1]:
            kept = source()
            assert kept is not None, "a tensor was dropped before it was copied"
            target.copy_(kept)
        self._done = max(self._done, copied + 1)


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)
    ).double()


def gradients(stack: nn.ModuleList, hooks: saved_tensors_hooks | None) -> list[Tensor]:
    hidden = torch.randn(
        5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).requires_grad_()
    first = hidden
    with hooks or saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for layer in stack:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
    return list(torch.autograd.grad(hidden.square().sum(), [first, *stack.parameters()]))


def test_gradients_are_the_same_however_late_the_copies_are():
    late = LateCopies()
    activations = HostActivations(late)
    expected = gradients(layers(), None)
    for hooks in (
        saved_tensors_hooks(activations.save, activations.load),
        activations_on_host(torch.device("cpu")),
    ):
        assert all(map(torch.equal, gradients(layers(), hooks), expected))
    assert late.most_waiting == MOST_LEAVING


def test_a_tensor_is_fetched_while_the_layer_after_it_is_computed():
    """Before the computation waits for tensor i, the copy of tensor i - 1 has begun; none is
    fetched twice.
    """
    late = LateCopies()
    activations = HostActivations(late)
    saved = [activations.save(torch.full((2,), float(index))) for index in range(4)]
    begun = len(late.log)
    loaded = [activations.load(entry) for entry in reversed(saved)]
    assert [float(tensor[0]) for tensor in loaded] == [3, 2, 1, 0]
    # Copies 0 to 3 went out, 4 to 7 come back.
    backward = [event for event in late.log[begun:] if event[1] >= 4]
    expected = "copy 4, copy 5, wait 4, copy 6, wait 5, copy 7, wait 6, wait 7"
    assert ", ".join(f"{what} {number}" for what, number in backward) == expected


def test_a_copy_waits_for_the_computation_and_the_computation_for_the_copy(monkeypatch):
    calls = MagicMock()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: calls.copies)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: calls.computation)
    stream, target = CopyStream(torch.device("cuda")), torch.empty(2)
    stream.wait(stream.copy(torch.ones(2), target))
    assert target.tolist() == [1, 1]
    assert calls.mock_calls == [
        call.copies.wait_stream(calls.computation),
        call.copies.__enter__(),
        call.copies.record_event(),
        call.copies.__exit__(None, None, None),
        call.computation.wait_event(calls.copies.record_event.return_value),
    ]
