"""Micro-batches through the model of this rank, or its pipeline stage: forward, and backward with losses.

    DataProto --RowLayout--> forward of one micro-batch --> finish: results, loss --> backward      one stage
    stage:  receive --> forward --> send ... receive gradient --> backward --> send                 one of several

The order comes from `balancing.pipeline`; a single stage alternates forward and backward. Tensors for the next
micro-batch are received during the computation of the current one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from balancing.pipeline import Action, actions
from workers.dataproto import DataProto
from workers.model.layout import LaidOut, RowLayout
from workers.model.losses import Predictions, ValuePredictions
from workers.model.model import PackedModel
from workers.model.sharding.stage_layers import Part, Passing
from workers.model.stages.stage_pipeline import Arrival, Exchange, Stage
from workers.model.timing import MicroStep, MicroStepClock
from workers.model.value_head import PackedValueModel

Compute = Callable[[LaidOut, Passing], Any]
"""The model's outputs for a micro-batch; for a part that others follow, the hidden states for these."""
Finish = Callable[[int, LaidOut, Any], Tensor | None]
"""Takes the outputs of micro-batch number i, on the last stage alone; returns its loss, or None."""


class RouterHook(Protocol):
    """Act on a model's routers during the passes of a micro-batch."""

    def cells(self, micro_batch: DataProto, laid_out: LaidOut) -> Any:
        """Return the data that the hook needs of a micro-batch, by the cells of this rank."""

    def following(self, cells: Any, *, counting: bool = False) -> AbstractContextManager[None]:
        """Inside, act on forward passes. counting: of a pass that is trained and not repeated by checkpointing."""


@dataclass(frozen=True)
class Work:
    """Hold the micro-batches of one pass, and how to lay them out (`RowLayout.lay_out`). trains: backward follows."""

    name: str
    micro_batches: Sequence[DataProto]
    finish: Finish
    trains: bool = False
    forward: bool = False
    last: bool = False


def outputs(module: PackedModel, laid_out: LaidOut, passing: Passing, temperature: float) -> Any:
    """Return the outputs of `module` for this rank's part of a micro-batch; see `Compute`."""
    arguments = laid_out.arguments | {"temperature": temperature}
    if isinstance(module, PackedValueModel):
        del arguments["temperature"], arguments["targets"]
    return module(**arguments, passing=passing)


def predictions_of(head: str, micro_batch: DataProto, laid_out: LaidOut, outputs: Any) -> Any:
    """Return (Value)Predictions; on every rank of a context-parallel group, of the whole micro-batch."""
    if head == "value":
        return ValuePredictions.gather(laid_out.whole(outputs), micro_batch, laid_out.rows)
    log_probs, entropy = laid_out.whole(torch.stack(outputs, dim=-1)).unbind(-1)
    return Predictions.gather(log_probs, entropy, micro_batch, laid_out.rows)


@dataclass
class _Begun:
    """Hold a micro-batch between forward and backward.

    end: its loss, or what was sent. routed: data of each RouterHook.
    """

    received: Tensor | None
    end: Tensor | None
    step: MicroStep
    routed: Sequence[Any]


class Passes:
    """Run micro-batches through the model. Collective: every rank runs the same number."""

    def __init__(
        self,
        stage: Stage,
        layout: RowLayout,
        clock: MicroStepClock,
        device: torch.device,
        dtype: torch.dtype,
        before_backward: Callable[[Part, bool], None],
        router_hooks: Sequence[RouterHook],
    ) -> None:
        """dtype: of what stages send. before_backward: called before each backward pass with the part of the model, and
        whether this is the part's last pass.
        """
        self._stage, self._layout, self._clock, self._device, self._dtype = stage, layout, clock, device, dtype
        self._before_backward, self._router_hooks = before_backward, router_hooks
        self._exchange = Exchange(stage.parallel) if stage.stages > 1 else None

    def run(self, work: Work, compute: Compute) -> None:
        """Run all micro-batches forward and, if `work.trains`, backward."""
        run = _Run(work, compute, self._stage, self._layout, self._clock, self._exchange, self._router_hooks)
        schedule = replace(self._stage.schedule, backward=2.0 if work.trains else 0.0)
        order = actions(schedule, self._stage.index, len(work.micro_batches)) if work.micro_batches else ()
        last = {action.chunk: action for action in order if action.kind == "backward"}
        for action, following in zip(order, [*order[1:], None], strict=True):
            run.expect(action, self._dtype, self._device)
            if following is not None:
                run.expect(following, self._dtype, self._device)
            if action.kind == "backward":
                self._before_backward(self._stage.parts[action.chunk], last[action.chunk] == action)
            run.carry_out(action)
        if self._exchange is not None:
            self._exchange.finish()


class _Run:
    """Run one call of `Passes.run`."""

    def __init__(
        self,
        work: Work,
        compute: Compute,
        stage: Stage,
        layout: RowLayout,
        clock: MicroStepClock,
        exchange: Exchange | None,
        router_hooks: Sequence[RouterHook],
    ) -> None:
        self._work, self._compute, self._stage, self._layout, self._clock = work, compute, stage, layout, clock
        self._exchange, self._router_hooks = exchange, router_hooks
        self._laid_out: dict[int, LaidOut] = {}
        self._arriving: dict[Action, Arrival] = {}
        self._begun: dict[tuple[int, int], _Begun] = {}

    def expect(self, action: Action, dtype: torch.dtype, device: torch.device) -> None:
        """Start to receive the input of `action` from another stage, unless started."""
        part = self._stage.parts[action.chunk]
        if self._exchange is None or action in self._arriving:
            return
        if not (part.first if action.kind == "forward" else part.last):
            shape = self._shape(action.micro_batch)
            self._arriving[action] = self._exchange.receive(action.kind, shape, dtype, device)

    def carry_out(self, action: Action) -> None:
        part = self._stage.parts[action.chunk]
        arriving = self._arriving.pop(action, None)
        received = None if arriving is None else arriving.wait()
        if action.kind == "forward":
            self._forward(action, part, received)
        else:
            self._backward(action, part, received)

    def _forward(self, action: Action, part: Part, received: Tensor | None) -> None:
        index, work = action.micro_batch, self._work
        if received is not None:
            received.requires_grad_(work.trains)
        passing = Passing(part, received)
        with self._clock.micro_step(work.name, work.micro_batches[index].lengths) as step:
            laid_out = self._lay_out(index)
            self._clock.leave_out(laid_out.rows.shared)
            routed = [hook.cells(work.micro_batches[index], laid_out) for hook in self._router_hooks]
            with self._following(routed, counting=work.trains):
                outputs = self._compute(laid_out, passing)
            end = work.finish(index, laid_out, outputs) if part.last else outputs
        if action.chunk == len(self._stage.parts) - 1:
            del self._laid_out[index]
        if self._exchange is not None and not part.last:
            self._exchange.send("forward", outputs.detach())
        if work.trains:
            self._begun[index, action.chunk] = _Begun(received, end, step, routed)

    def _backward(self, action: Action, part: Part, gradient: Tensor | None) -> None:
        begun = self._begun.pop((action.micro_batch, action.chunk))
        assert begun.end is not None
        with self._clock.more_of(begun.step), self._following(begun.routed):
            begun.end.backward(gradient)
        if self._exchange is not None and begun.received is not None:
            assert begun.received.grad is not None
            self._exchange.send("backward", begun.received.grad)

    def _following(self, routed: Sequence[Any], counting: bool = False) -> ExitStack:
        inside = ExitStack()
        for hook, cells in zip(self._router_hooks, routed, strict=True):
            inside.enter_context(hook.following(cells, counting=counting))
        return inside

    def _lay_out(self, index: int) -> LaidOut:
        if index not in self._laid_out:
            work = self._work
            laid_out = self._layout.lay_out(work.micro_batches[index], forward=work.forward, last=work.last)
            self._laid_out[index] = laid_out
        return self._laid_out[index]

    def _shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a micro-batch's hidden states on this rank, split by tensor parallelism."""
        rows, cells = self._lay_out(index).arguments["input_ids"].shape
        return rows, cells // self._stage.parallel.tensor.size(), self._stage.hidden_size
