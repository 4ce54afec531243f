"""Micro-batches through the model of this rank, or its pipeline stage: forward, and backward with losses.

    DataProto --RowLayout--> forward of one micro-batch --> finish: results, loss --> backward  one stage
    stage:  receive --> forward --> send ... receive gradient --> backward --> send             one of several

The order comes from `balancing.pipelines.pipeline`. A single stage alternates forward and backward. A stage
asks for a tensor right before the pass that reads it. Asked for one pass earlier, NCCL's kernel would wait
for it on the multiprocessors that compute this pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from balancing.pipelines.pipeline import Action, actions
from workers.batch.dataproto import DataProto
from workers.model.layout import RowLayout
from workers.model.rows.packing import ModelInput
from workers.model.sharding.stage_layers import Part, Passing
from workers.model.stages.stage_pipeline import Exchange, Stage
from workers.model.timing import MicroStep, MicroStepClock


class RouterHook:
    """Act on a model's routers during the passes of a micro-batch.

    current: the micro-batch's data of `cells`. counting: whether metrics count the forward pass.
    """

    current: Any = None
    counting = False

    def cells(self, micro_batch: DataProto, rows: ModelInput) -> Any:
        """Return the data that the hook needs of a micro-batch, by the cells of this rank."""
        raise NotImplementedError

    @contextmanager
    def following(self, cells: Any, *, counting: bool = False) -> Iterator[None]:
        self.current = cells
        self.counting = counting
        try:
            yield
        finally:
            self.current, self.counting = None, False


@dataclass
class _Begun:
    """Hold a micro-batch between forward and backward. end: its loss, or the sent tensor. routed: data of
    each hook.
    """

    received: Tensor | None
    end: Tensor | None
    step: MicroStep
    routed: Sequence[Any]


@dataclass
class EnginePass:
    """Hold one pass over micro-batches. trains: backward follows. forward, cells: see `RowLayout.lay_out`.

    compute: the model's outputs, or the hidden states for the next part. finish: takes the outputs of
    micro-batch number i, on the last stage alone. Returns its loss, or None.
    """

    name: str
    micro_batches: Sequence[DataProto]
    compute: Callable[[ModelInput, Passing], Any]
    finish: Callable[[int, ModelInput, Any], Tensor | None]
    trains: bool = False
    forward: bool = False
    cells: str = "before"
    rows: dict[int, ModelInput] = field(default_factory=dict, init=False)
    begun: dict[tuple[int, int], _Begun] = field(default_factory=dict, init=False)


@dataclass
class TokenOutputs:
    """Collect numbers at the tokens with `loss_mask` of micro-batches, on the device."""

    positions: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, first: int, rows: ModelInput, columns: Sequence[Tensor]) -> None:
        """columns: [N] each. first: token of the batch at which the micro-batch begins."""
        self.positions.append(first + rows.loss_positions)
        self.values.append(torch.stack([column.detach().float() for column in columns]))

    def columns(self, count: int, tokens: int) -> Tensor:
        """Return `count` columns, float32 [count, tokens] on the CPU, 0 elsewhere."""
        columns = torch.zeros(count, tokens, dtype=torch.float32)
        if self.values:  # one copy to the host: a copy of each micro-batch would wait for its computation
            columns[:, torch.cat(self.positions)] = torch.cat(self.values, 1).cpu()
        return columns


class MicroBatchRunner:
    """Run micro-batches through the model. Collective: every rank runs the same number.

    dtype: of what stages send. before_backward: called before each backward pass with the part of the model,
    and whether this is the part's last pass.
    """

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
        self._stage = stage
        self._layout = layout
        self._clock = clock
        self._device = device
        self._dtype = dtype
        self._before_backward = before_backward
        self._router_hooks = router_hooks
        self._exchange = Exchange(stage.parallel) if stage.stages > 1 else None

    def run(self, work: EnginePass) -> None:
        schedule = replace(self._stage.schedule, backward=2.0 if work.trains else 0.0)
        order = (
            actions(schedule, self._stage.index, len(work.micro_batches))
            if work.micro_batches
            else ()
        )
        last = {action.chunk: action for action in order if action.kind == "backward"}
        for action in order:
            part = self._stage.parts[action.chunk]
            if action.kind == "backward":
                self._before_backward(part, last[action.chunk] == action)
            run = self._forward if action.kind == "forward" else self._backward
            run(work, action, part, self._received(work, action, part))
        if self._exchange is not None:
            self._exchange.finish()

    def _received(self, work: EnginePass, action: Action, part: Part) -> Tensor | None:
        """Return the input of a pass that another part sends."""
        if self._exchange is None or (
            part.first if action.kind == "forward" else part.last
        ):
            return None
        if action.kind == "forward":
            rows, cells = self._lay_out(work, action.micro_batch).input_ids.shape
            shape: tuple[int, ...] = (
                rows,
                cells // self._stage.parallel.tensor.size(),
                self._stage.hidden_size,
            )
        else:
            end = work.begun[action.micro_batch, action.chunk].end
            assert end is not None
            shape = end.shape
        return self._exchange.receive(action.kind, shape, self._dtype, self._device)

    def _forward(
        self, work: EnginePass, action: Action, part: Part, received: Tensor | None
    ) -> None:
        index = action.micro_batch
        micro_batch = work.micro_batches[index]
        if received is not None:
            received.requires_grad_(work.trains)
        placed = (
            image for images in micro_batch.objects.get("images", ()) for image in images
        )
        images = {placed_image.image.digest: placed_image.tokens for placed_image in placed}
        with self._clock.micro_step(
            work.name, micro_batch.lengths, [*images.values()]
        ) as step:
            rows = self._lay_out(work, index)
            step.leave_out(rows.shared)
            step.share(rows.degree)
            routed = [hook.cells(micro_batch, rows) for hook in self._router_hooks]
            with self._following(routed, counting=work.trains):
                outputs = work.compute(rows, Passing(part, received))
            end = work.finish(index, rows, outputs) if part.last else outputs
        if action.chunk == len(self._stage.parts) - 1:
            del work.rows[index]
        if self._exchange is not None and not part.last:
            self._exchange.send("forward", outputs.detach())
        if work.trains:
            work.begun[index, action.chunk] = _Begun(received, end, step, routed)

    def _backward(
        self, work: EnginePass, action: Action, part: Part, gradient: Tensor | None
    ) -> None:
        forward_pass = work.begun.pop((action.micro_batch, action.chunk))
        assert forward_pass.end is not None
        with self._clock.more_of(forward_pass.step), self._following(forward_pass.routed):
            forward_pass.end.backward(gradient)
        if self._exchange is not None and forward_pass.received is not None:
            assert forward_pass.received.grad is not None
            self._exchange.send("backward", forward_pass.received.grad)

    def _following(self, routed: Sequence[Any], counting: bool = False) -> ExitStack:
        inside = ExitStack()
        for hook, cells in zip(self._router_hooks, routed, strict=True):
            inside.enter_context(hook.following(cells, counting=counting))
        return inside

    def _lay_out(self, work: EnginePass, index: int) -> ModelInput:
        if index not in work.rows:
            batch = work.micro_batches[index]
            work.rows[index] = self._layout.lay_out(
                batch, forward=work.forward, cells=work.cells
            )
        return work.rows[index]
