"""Pipeline parallelism: stages hold consecutive layers, and micro-batches pass from stage to stage.

    whole model --layer_costs, split_layers--> parts of about equal cost --keep_parts--> this stage's part
    tokens --> stage 0: embedding, layers --hidden [R, W, H]--> stage 1: layers ... last: layers, head, loss
                                          <--their gradient---              (1F1B, `forward_backward.py`)

Every stage gets the same sequences and so knows the shapes that it receives. Weights keep the names of the
whole model. A tied weight is on the first and the last stage, which add their gradients and so stay equal.

Transfers have one process group for each direction: NCCL runs all transfers of two ranks in a group in call
order, so two stages that send to each other would deadlock. With virtual stages, transfers from the last
stage to the first have a group too.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from balancing.pipelines.pipeline import Kind, Pipeline
from workers.errors import UnsupportedModelError
from workers.model.model import PackedModel
from workers.model.pretrained import decoder_of
from workers.model.rows.packing import MicroBatch
from workers.model.sharding.parallel import Parallel, clip_gradients
from workers.model.sharding.stage_layers import Part, StageLayers
from workers.model.sharding.stage_split import relative_costs, split_layers
from workers.model.value_head import HEAD


def layer_costs(packed: PackedModel, *, recomputed: float) -> tuple[list[float], float]:
    """Return (cost of each layer, of the output layer), see `relative_costs`. For fused experts, those of one
    token count.
    """
    text = packed.model.config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None) or 1

    def used(parameter: nn.Parameter) -> float:
        return parameter.numel() * (
            min(1.0, chosen / len(parameter)) if parameter.ndim > 2 else 1.0
        )

    def matrix_cost(layer: nn.Module) -> float:
        return sum(used(weight) for weight in layer.parameters() if weight.ndim > 1)

    layers = [matrix_cost(layer) for layer in packed.layers]
    head = packed.model.get_output_embeddings() or getattr(packed.model, HEAD)
    return relative_costs(layers, head.weight.numel(), recomputed=recomputed)


@dataclass(frozen=True)
class Form:
    """Name a model's tower of images, embedding, list of layers, modules after them (a norm) and output
    layer, which have all parameters.
    """

    tower: tuple[str, ...]
    embedding: str
    layers: str
    after: tuple[str, ...]
    head: str

    @classmethod
    def of(cls, packed: PackedModel) -> "Form":
        model = packed.model
        decoder = decoder_of(packed.model)
        prefix = next(name for name, module in model.named_modules() if module is decoder)
        paths = {id(module): name for name, module in model.named_modules()}
        head = model.get_output_embeddings() or getattr(model, HEAD)
        children = {f"{prefix}.{name}": child for name, child in decoder.named_children()}
        layers = next(
            name for name, child in children.items() if isinstance(child, nn.ModuleList)
        )
        names = list(children)
        tail_modules = [
            name
            for name in names[names.index(layers) + 1 :]
            if list(children[name].parameters())
        ]
        tower = tuple(packed.vision.parts) if packed.vision else ()
        form = cls(
            tower,
            paths[id(model.get_input_embeddings())],
            layers,
            tuple(tail_modules),
            paths[id(head)],
        )
        prefixes = tuple(
            f"{name}."
            for name in (*tower, form.embedding, form.layers, *form.after, form.head)
        )
        for name, _ in model.named_parameters():
            if not name.startswith(prefixes):
                raise UnsupportedModelError(
                    f"{packed.name} has {name} outside embedding, layers, norm and output layer: it cannot "
                    "be split into stages. Set policy.parallel.pipeline_parallel=1."
                )
        return form

    def layer_of(self, name: str) -> int | None:
        below = name.removeprefix(f"{self.layers}.")
        return int(below.partition(".")[0]) if below != name else None


class Stage:
    """Hold this rank's stage of the pipeline. The only stage of an undivided model holds the whole.

    parts: of this stage, from the input on. hidden_size: of what stages send. tied: names of a weight that
    embedding and output layer share, or None. Raises UnsupportedModelError if the model cannot be split,
    ConfigError if it has fewer layers than parts.
    """

    def __init__(
        self, packed: PackedModel, parallel: Parallel, *, recomputed: float
    ) -> None:
        pipeline = parallel.pipeline
        self.parallel = parallel
        self.index = pipeline.get_local_rank()
        self.stages = pipeline.size()
        self.is_first = self.index == 0
        self.is_last = self.index == self.stages - 1
        self.schedule = Pipeline(self.stages, parallel.config.virtual_stages)
        self.hidden_size: int = packed.model.config.get_text_config().hidden_size
        self.tied: tuple[str, str] | None = None
        self._form: Form | None = None
        ranges = [range(len(packed.layers))]
        if self.stages > 1:
            self._form = Form.of(packed)
            self.tied = _tied_names(packed)
            ranges = split_layers(
                *layer_costs(packed, recomputed=recomputed), self.schedule.parts
            )
        last = len(ranges) - 1
        every = [
            Part(layers, number == 0, number == last)
            for number, layers in enumerate(ranges)
        ]
        self.parts = every[self.index :: self.stages]
        self._stage_of_layer = {
            index: number % self.stages
            for number, part in enumerate(every)
            for index in part.layers
        }

    def holder_of(self, name: str) -> int:
        """Return the stage that holds the model's tensor `name`. Buffers outside the layers are
        everywhere.
        """
        if self._form is None:
            return 0
        layer = self._form.layer_of(name)
        if layer is not None:
            return self._stage_of_layer[layer]
        at_end = tuple(f"{path}." for path in (*self._form.after, self._form.head))
        return self.stages - 1 if name.startswith(at_end) else 0

    def whole_rounds(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return [
            *micro_batches,
            *[(0, 0)] * (-len(micro_batches) % self.schedule.count_multiple),
        ]

    def keep(self, packed: PackedModel) -> None:
        """Drop other stages' modules from `packed`, a skeleton with adapters and tensor parallelism."""
        form = self._form
        if form is None:
            return
        layers: Any = packed.model.get_submodule(form.layers)
        indices = {index for part in self.parts for index in part.layers}
        packed.model.set_submodule(form.layers, StageLayers(layers, indices))
        dropped = [*form.tower, form.embedding] * (not self.is_first) + [
            *form.after,
            form.head,
        ] * (not self.is_last)
        for name in dropped:
            packed.model.set_submodule(name, nn.Identity())

    def first_name(self, name: str) -> str:
        """Return the name of a tensor in all checkpoints: the embedding's for a tied weight."""
        prefix = "model."
        return (
            prefix + self.tied[0] if self.tied and name == prefix + self.tied[1] else name
        )

    def copies(self, model: nn.Module) -> list[nn.Parameter]:
        return [model.get_parameter(self.tied[1])] if self.tied and self.is_last else []

    def rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.parallel.pipeline.get_group(), stage)

    def to_all(
        self, tensor: Tensor | None, holder: int, like: Tensor, device: torch.device
    ) -> Tensor:
        """Send `tensor`, held by the ranks of stage `holder`, to every rank. like: of its shape and dtype."""
        if self.stages == 1 and tensor is not None:
            return tensor
        tensor = (
            torch.empty_like(like, device=device) if tensor is None else tensor.contiguous()
        )
        dist.broadcast(tensor, group=self.parallel.pipeline.get_group(), group_src=holder)
        return tensor

    def of_all(self, value: Any) -> list[Any]:
        """Return the values of all stages in order, on each of them, sent as pickles."""
        if self.stages == 1:
            return [value]
        values: list[Any] = [None] * self.stages
        dist.all_gather_object(values, value, group=self.parallel.pipeline.get_group())
        return values

    def from_stage(self, stage: int, value: Any) -> Any:
        """Return `value` of a stage, on all stages, sent as a pickle."""
        if self.stages == 1:
            return value
        values = [value if self.index == stage else None]
        dist.broadcast_object_list(
            values, group=self.parallel.pipeline.get_group(), group_src=stage
        )
        return values[0]

    def from_last(self, value: Any) -> Any:
        return self.from_stage(self.stages - 1, value)


def _tied_names(packed: PackedModel) -> tuple[str, str] | None:
    embedding = packed.model.get_input_embeddings()
    head = packed.model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = {id(module): name for name, module in packed.model.named_modules()}
    return f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"


def clip_over_stages(stage: Stage, packed: PackedModel, max_norm: float) -> float:
    """Run `clip_gradients` by the norm over all stages, in which a tied weight counts once."""
    parameters = list(packed.parameters())
    if stage.stages == 1:
        return clip_gradients(parameters, max_norm)
    add_tied_gradients(stage, packed.model)
    group = stage.parallel.pipeline.get_group()
    return clip_gradients(
        parameters, max_norm, group, counted_elsewhere=stage.copies(packed.model)
    )


def add_tied_gradients(stage: Stage, model: nn.Module) -> None:
    """Set the gradients of both copies of a tied weight to their sum, in place."""
    if stage.tied is None or not (stage.is_first or stage.is_last):
        return
    mine = model.get_parameter(stage.tied[0 if stage.is_first else 1]).grad
    if mine is None:
        return
    part = mine.to_local() if isinstance(mine, DTensor) else mine
    if not part.numel():
        return
    peer_part = torch.empty_like(part)
    peer = stage.rank_of(stage.stages - 1 if stage.is_first else 0)
    group = stage.parallel.pipeline.get_group()
    sent = dist.P2POp(dist.isend, part.contiguous(), peer, group)
    received = dist.P2POp(dist.irecv, peer_part, peer, group)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    part.add_(peer_part)  # a + b is b + a to the last bit: both copies take the same step


class Exchange:
    """Transfer tensors between one rank and its place's ranks in the neighbouring stages. Create it
    collectively.
    """

    def __init__(self, parallel: Parallel) -> None:
        pipeline = parallel.pipeline
        self._index = pipeline.get_local_rank()
        self._stages = pipeline.size()
        self._groups: dict[tuple[Kind, bool], dist.ProcessGroup] = {
            ("forward", False): pipeline.get_group()
        }
        self._groups["backward", False] = _same_groups_again(parallel)
        if parallel.config.virtual_stages > 1:
            self._groups["forward", True] = _same_groups_again(parallel)
            self._groups["backward", True] = _same_groups_again(parallel)
        self._meet(parallel.mesh.device_type)
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, kind: Kind, tensor: Tensor) -> None:
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        tensor = tensor.contiguous()
        group, place = self._way(kind, 1)
        work = dist.isend(tensor, group=group, group_dst=place)
        self._leaving.append((work, tensor))

    def receive(
        self, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the input of a pass of `kind`."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        group, place = self._way(kind, -1)
        work = dist.irecv(tensor, group=group, group_src=place)
        assert work is not None
        work.wait()
        return tensor

    def finish(self) -> None:
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def _meet(self, device: str) -> None:
        """Connect all pairs in order along each direction: NCCL connects a pair in its first transfer, for
        which both wait.
        """
        greeting = torch.zeros(1, device=device)
        # Tied weights use a batched transfer between the ends. As a group's first call torch leaves it
        # undefined unless all ranks take part.
        dist.all_reduce(greeting, group=self._groups["forward", False])
        for kind, wraps in self._groups:
            for steps, transfer in ((-1, dist.irecv), (1, dist.isend)):
                target = self._index + (steps if kind == "forward" else -steps)
                if wraps != (0 <= target < self._stages):
                    group, place = self._way(kind, steps)
                    names = {"group_dst": place} if steps > 0 else {"group_src": place}
                    work = transfer(greeting, group=group, **names)
                    assert work is not None
                    work.wait()

    def _way(self, kind: Kind, steps: int) -> tuple[dist.ProcessGroup, int]:
        target = self._index + (steps if kind == "forward" else -steps)
        return self._groups[kind, not 0 <= target < self._stages], target % self._stages


def _same_groups_again(parallel: Parallel) -> dist.ProcessGroup:
    columns = parallel.mesh.mesh.flatten(
        1
    ).T.tolist()  # of every place, its rank in each stage
    own_group = None
    for ranks in columns:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own_group = group
    assert own_group is not None
    return own_group
