"""What training changes in an engine, once for each LoRA policy of its base model. They take turns, by name.

    use("b"):  shards, gradients --> kept for a   kept for b --> shards, gradients, optimiser, schedule, guard

FSDP2 keeps the storage of parameters, so weights are copied, on each rank its shards. The rest is exchanged.
Policies trained in turns equal policies trained alone, to the bit.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from workers.errors import ConfigError
from workers.model.optimizer.nonfinite_guard import NonfiniteGuard
from workers.model.optimizer.optimizer import optimizer_state, resume_schedule


@dataclass
class TrainingState:
    """weights, gradients: of the trained parameters in order, while another policy is in use. Else empty."""

    optimizer: Optimizer
    schedule: LambdaLR
    nonfinite_guard: NonfiniteGuard
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)


class TrainingStates:
    """States by name, of which `current` is in use. The state of an engine whose policy has no
    name is `""`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        begin: Callable[[], TrainingState],
        limit: int,
    ) -> None:
        """parameters: the trained ones, sharded. begin: makes a state for them. limit: of states,
        model.lora.policies.

        Each policy begins with the values that `parameters` have now.
        """
        self._parameters = parameters
        self._begin = begin
        self._limit = limit
        self._initial = (
            [parameter.detach().clone() for parameter in parameters] if limit > 1 else []
        )
        self.name, self.all = "", {"": self._begun()}

    @property
    def current(self) -> TrainingState:
        return self.all[self.name]

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Exchange the policy for another, which is made if it is new. Parameters must be sharded.

        Raises ConfigError for one policy more than model.lora.policies.
        """
        if name not in self.all and "" in self.all:  # which nobody has used
            self.all[name] = self.all.pop("")
        elif name not in self.all and len(self.all) == self._limit:
            raise ConfigError(
                f"adapter={name!r}: model.lora.policies={self._limit} are trained, {', '.join(self.all)}. "
                "Raise it, or name one of these."
            )
        elif name != self.name:
            self._keep()
            if name not in self.all:
                self._copy(self._initial)
                self.all[name] = self._begun()
            self._take(self.all[name])
        self.name = name

    def weights_of(self, name: str) -> Mapping[Tensor, Tensor]:
        """Return what a policy has for each trained parameter. Empty for the one in use: the parameters
        themselves.
        """
        return dict(zip(self._parameters, self.all[name].weights, strict=False))

    def numbers(self, name: str) -> dict[str, int]:
        """Return what a checkpoint holds of a policy besides tensors."""
        state = self.all[name]
        return {
            "schedule_steps": state.schedule.last_epoch,
            "skipped_in_a_row": state.nonfinite_guard.in_a_row,
        }

    def hold(self, names: Collection[str]) -> None:
        """Have exactly these policies, for values that are loaded next. Raises as `use`."""
        if set(names) != set(self.all):
            current = self.current
            self.name = ""
            self.all = {"": current}
            for name in names:
                self.use(name)

    def resume(self, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Set `numbers`, by name, and clear these policies' gradients. The one in use must be among them."""
        for name, values in numbers.items():
            state = self.all[name]
            resume_schedule(state.schedule, values["schedule_steps"])
            state.nonfinite_guard.in_a_row = values["skipped_in_a_row"]
            state.gradients = [None] * len(state.weights)
        self.current.optimizer.zero_grad(set_to_none=True)

    def _begun(self) -> TrainingState:
        state = self._begin()
        # Now: without a state it would take a step on what another policy has by then.
        if self._limit > 1:
            optimizer_state(state.optimizer)
        return state

    def _keep(self) -> None:
        self.current.weights = [
            parameter.detach().clone() for parameter in self._parameters
        ]
        self.current.gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def _take(self, state: TrainingState) -> None:
        self._copy(state.weights)
        for parameter, gradient in zip(self._parameters, state.gradients, strict=False):
            parameter.grad = gradient
        state.weights = []
        state.gradients = []

    def _copy(self, weights: Sequence[Tensor]) -> None:
        # None of a new policy.
        for parameter, weight in zip(self._parameters, weights, strict=False):
            parameter.copy_(weight)
