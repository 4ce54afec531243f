"""All that is done at the routers of a mixture of experts while it computes; nothing for a dense model.

router_replay.py   experts that the sampler chose      router_losses.py   balance and z      expert_load.py   metric
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from workers.config import ModelConfig
from workers.dataproto import DataProto
from workers.model.expert_load import ExpertLoad
from workers.model.losses import Statistics
from workers.model.model import PackedModel
from workers.model.parallel import Parallel
from workers.model.passes import RouterHook
from workers.model.router_losses import RouterLosses
from workers.model.router_replay import RouterReplay


class Routing:
    """The hooks of one engine.

    packed: before its layers are divided between stages, and its experts between ranks. trained: whether gradients are
    computed. Raises UnsupportedModelError for settings that need experts, of a model without.
    """

    def __init__(
        self, packed: PackedModel, config: ModelConfig, parallel: Parallel, device: torch.device, *, trained: bool
    ) -> None:
        self._replay = RouterReplay(packed, config.router_replay, parallel, device)
        self._losses = RouterLosses(packed, config, parallel, device, trained=trained)
        self._load = ExpertLoad(packed, parallel, device)

    @property
    def hooks(self) -> Sequence[RouterHook]:
        """Called by `passes` for each micro-batch."""
        return self._replay, self._losses, self._load

    def begin(self, micro_batches: Sequence[DataProto], groups: Sequence[dist.ProcessGroup]) -> None:
        """Before the passes of a mini-batch, of which these are this rank's; collective. groups: see
        `TrainingEngine.data_parallel_groups`."""
        self._losses.begin(micro_batches, groups)

    def take(self) -> list[Statistics]:
        """Metrics of the passes since the last call; collective."""
        return [self._load.take(), self._replay.take(), self._losses.take()]

    def without_losses(self) -> AbstractContextManager[None]:
        """Inside, the gradient of a mini-batch is that of its loss alone."""
        return self._losses.left_out()

    def with_own_choices(self, sequences: DataProto) -> DataProto:
        """`sequences` without recorded choices of experts; see `RouterReplay.with_own_choices`."""
        return self._replay.with_own_choices(sequences)
