"""Load weights without a copy of the model on each rank: rank 0 reads the files, others hold only their
shards.

    rank 0   files --load_model--> whole model, host memory --\\
                                                               broadcast, a few tensors at a time
    every rank   skeleton, meta device --shard--> empty shards <--/ keeps its part of each

Rank 0 reads for all because transformers converts some families (fused experts) while loading, from whole
tensors.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from workers.model.checkpoint.checkpoint_weights import loading_rules
from workers.model.model import PackedModel
from workers.model.sharding.raise_on_all_ranks import raise_on_all_ranks

Packed = TypeVar("Packed", bound=PackedModel)
Result = TypeVar("Result", covariant=True)
Answer = TypeVar("Answer")


class Load(Protocol[Result]):
    def __call__(self, *, skeleton: bool = False) -> Result: ...


class Source(Generic[Packed]):
    """Distribute a model: the caller changes and shards `module`, then calls `fill`. Collective."""

    def __init__(self, load: Load[Packed]) -> None:
        self._whole = _on_rank_zero(load)
        alone = dist.get_world_size() == 1
        self.module: Packed = self._whole if alone and self._whole else load(skeleton=True)
        # Every rank exports weights by reversing the conversions that rank 0 applied to the files.
        self.rules = self.ask(lambda full_model: loading_rules(full_model.model)) or []

    def change(self, function: Callable[[Packed], None]) -> None:
        function(self.module)
        if self._whole is not None and self._whole is not self.module:
            function(self._whole)

    def ask(self, function: Callable[[Packed], Answer]) -> Answer:
        """Return `function`'s value on the whole model, on every rank."""
        answers = [_on_rank_zero(lambda: function(cast(Packed, self._whole)))]
        dist.broadcast_object_list(answers, src=0)
        return cast(Answer, answers[0])

    def fill(self, device: torch.device, *, cpu_offload: bool) -> None:
        """Allocate the sharded `module`, copy rank 0's values of its tensors, and drop the whole model.

        device: of the computation. With `cpu_offload` parameters stay in host memory.
        """
        full_model = self._whole
        self._whole = None
        if full_model is self.module:
            return
        self.module.to_empty(device=torch.device("cpu") if cpu_offload else device)
        _tie_again(self.module.model)
        state = full_model.state_dict() if full_model else {}
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, strict=False
        )
        set_model_state_dict(self.module, state, options=options)
        _fill_buffers(
            self.module, dict(full_model.named_buffers()) if full_model else {}, device
        )


def _tie_again(model: Any) -> None:
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for target, source in model.all_tied_weights_keys.items():
        if {target, source} <= present:  # a stage of a pipeline may have one of them
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(source))


def _fill_buffers(
    skeleton: nn.Module, values: dict[str, torch.Tensor], device: torch.device
) -> None:
    """Copy buffers outside state dicts (rotary frequencies), which `to_empty` leaves uninitialised."""
    described = [{name: value.to("meta") for name, value in values.items()}]
    dist.broadcast_object_list(described, src=0)
    wanted = {name for name, _ in skeleton.named_buffers()}
    for name, like in described[0].items():
        value = values[name].to(device) if values else torch.empty_like(like, device=device)
        dist.broadcast(value, src=0)
        if name in wanted:
            owner, _, attribute = name.rpartition(".")
            setattr(skeleton.get_submodule(owner), attribute, value)


def _on_rank_zero(load: Callable[[], Answer]) -> Answer | None:
    with raise_on_all_ranks():
        return load() if dist.get_rank() == 0 else None
