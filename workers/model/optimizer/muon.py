"""Muon for the matrices of the layers (Jordan et al. 2024, kellerjordan.github.io/posts/muon), AdamW for the
rest.

    m = mu m + (1 - mu) g,  u = mu m + (1 - mu) g          w, g, m: [A, B]
    w = w - lr (decay w + 0.2 sqrt(max(A, B)) NS(u))

NS: torch's Newton-Schulz iteration in bfloat16. The factor is Moonlight's (arXiv 2502.16982): an update has
the size of AdamW's, so both parts take one learning rate. Ranks share the work: as many matrices as there are
ranks are stacked,

    [n, A, B] cut as the parameters --all-to-all--> n / ranks whole matrices --NS--> --all-to-all--> as before

and experts [E, A, B] are n matrices already. Which rank computes a matrix does not change a bit of it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _zeropower_via_newtonschulz,
)


class Muon(torch.optim.AdamW):
    """Muon for the groups that have `momentum`, AdamW for the others."""

    param_groups: list[dict[str, Any]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if "momentum" in group:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if "momentum" not in group]
        super().step()
        self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        rate = group["lr"]
        shrink = 1 - group["lr"] * group["weight_decay"]
        for matrices in _stackable(group["params"]):
            updates = [self._update(matrix, group["momentum"]) for matrix in matrices]
            for matrix, update in zip(matrices, orthogonalized(updates), strict=True):
                matrix.mul_(shrink).add_(
                    update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape[-2:]))
                )

    def _update(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        gradient = matrix.grad
        state = self.state[matrix]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).bfloat16()


def _stackable(parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Yield parameters of one shape and layout together, up to one matrix a rank. Experts come alone."""
    by_layout: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            layout = (
                (parameter.device_mesh, parameter.placements)
                if isinstance(parameter, DTensor)
                else ()
            )
            by_layout[parameter.shape, layout].append(parameter)
    for (shape, layout), group in by_layout.items():
        count = layout[0].size() if layout and len(shape) == 2 else 1
        yield from (group[start : start + count] for start in range(0, len(group), count))


def orthogonalized(updates: list[Tensor]) -> list[Tensor]:
    """Return the nearest semi-orthogonal matrix of each, [A, B] or [E, A, B], cut as they are. Overwrites
    them.
    """
    stacked = updates[0] if updates[0].ndim == 3 else torch.stack(updates)
    spread = stacked
    if isinstance(stacked, DTensor):
        # Weights are whole where they are replicated, or divided by expert.
        are_whole = all(getattr(place, "dim", 0) == 0 for place in stacked.placements)
        spread = (
            stacked
            if are_whole
            else stacked.redistribute(placements=[Shard(0)] * stacked.device_mesh.ndim)
        )
    for matrix in spread.to_local() if isinstance(spread, DTensor) else spread:
        matrix.copy_(
            _zeropower_via_newtonschulz(
                matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS
            )
        )
    if isinstance(spread, DTensor) and isinstance(stacked, DTensor):
        stacked = spread.redistribute(placements=stacked.placements)
    return [stacked] if updates[0].ndim == 3 else list(stacked.unbind(0))
