"""Skip optimiser steps with a loss or gradient that is not finite, on all ranks, up to a limit."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.errors import NonFiniteError

SHOWN = 8  # sequences that an error names of each rank


class NonfiniteGuard:
    """Decide whether an engine takes an optimiser step. max_in_a_row: skipped steps after which training
    stops.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self.in_a_row = 0
        self._max_in_a_row = max_in_a_row
        self._watched: list[tuple[list[str], Tensor]] = []

    def watch(self, sequences: DataProto, start: int, stop: int, loss: Tensor) -> None:
        self._watched.append((_names(sequences, start, stop), loss.detach().isfinite()))

    def takes_step(self, gradient_norm: float, device: torch.device) -> bool:
        """Return whether all losses of the step and the global gradient norm are finite. Collective.

        Raises NonFiniteError on every rank, naming the sequences, after `max_in_a_row` skipped steps in a
        row.
        """
        watched = self._watched
        self._watched = []
        flags = [flag for _, flag in watched]
        finite = (
            torch.stack([*flags, torch.tensor(math.isfinite(gradient_norm), device=device)])
            .all()
            .to(torch.int32)
        )
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        if finite.item():
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        if self.in_a_row >= self._max_in_a_row:
            raise NonFiniteError(self._message(watched))
        return False

    def _message(self, watched: Sequence[tuple[list[str], Tensor]]) -> str:
        mine = [name for names, finite in watched if not finite for name in names]
        everything = [name for names, _ in watched for name in names]
        rank_names: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
        dist.all_gather_object(rank_names, (mine, everything))
        in_loss = any(losses for losses, _ in rank_names)
        subject = "the loss" if in_loss else "the gradient, with a finite loss,"
        names = [losses if in_loss else every for losses, every in rank_names]
        listed = "; ".join(
            f"rank {rank}: {_listed(part)}" for rank, part in enumerate(names) if part
        )
        return (
            f"{self.in_a_row} optimiser steps in a row were skipped (optimizer.max_skipped_steps="
            f"{self._max_in_a_row}). In the last, {subject} was NaN or infinite for {listed}. Look at "
            "these, or lower optimizer.learning_rate."
        )


def _names(sequences: DataProto, start: int, stop: int) -> list[str]:
    uids = sequences.objects.get("uid")
    if uids is None:
        return [f"row {row}" for row in range(start, stop)]
    names = [f"uid {uid}" for uid in uids[start:stop].tolist()]
    if "sample" not in sequences.columns:
        return names
    samples = sequences.columns["sample"][start:stop].tolist()
    return [f"{name} sample {sample}" for name, sample in zip(names, samples, strict=True)]


def _listed(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
