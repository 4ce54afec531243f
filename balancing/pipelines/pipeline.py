"""Define in which order each pipeline stage computes the micro-batches of a mini-batch.

    model, in stages x virtual_stages chunks of layers. Chunk c of stage s is part c * stages + s of the model
    Pipeline --> actions(pipeline, stage, m) --> forward and backward passes of one stage, one after another
                 needs(pipeline, stage, a)   --> what another stage must have finished before

One forward, one backward (1F1B, Narayanan et al. 2021, arXiv:2104.04473, section 2.2): a stage begins with as
many forward passes as there are stages after it, then alternates, then ends with the remaining backward
passes. Interleaved 1F1B (virtual stages) takes micro-batches in rounds of `stages`, each round chunk by
chunk. A pass without gradients (`backward=0`) has only the forward passes, in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from balancing.basics.validation import positive_integer
from balancing.errors import CountError, OptionError

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, order=True)
class Action:
    """A pass of one micro-batch through one chunk of a stage. chunk 0 is nearest to the input."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True)
class Pipeline:
    """A model's division over stages, and the cost of its parts.

    stages: ranks in a row. virtual_stages: chunks of layers on each (interleaved 1F1B above 1, for at least 2
    stages).
    backward: backward cost / forward cost, 0 for passes without gradients.
    stage_shares: positive cost of each of the stages * virtual_stages parts, or None for equal parts.
    transfer: time of one transfer between stages. overhead: fixed cost of a micro-batch over all parts
    (`CostFit.overhead_seconds`). Both in the unit of the cost model.
    Raises OptionError for values out of range.
    """

    stages: int
    virtual_stages: int = 1
    backward: float = 2.0
    stage_shares: tuple[float, ...] | None = None
    transfer: float = 0.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stages", "virtual_stages"):
            object.__setattr__(self, name, positive_integer(getattr(self, name), name))
        if self.virtual_stages > 1 and self.stages == 1:
            raise OptionError(
                f"virtual_stages={self.virtual_stages} with stages=1 changes nothing. Raise stages."
            )
        for name in ("backward", "transfer", "overhead"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise OptionError(f"{name}={value!r} of a Pipeline must be finite and >= 0")
        if self.stage_shares is not None:
            object.__setattr__(self, "stage_shares", _scaled(self.stage_shares, self.parts))

    @property
    def parts(self) -> int:
        return self.stages * self.virtual_stages

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the share of each part in the cost of the model. They add up to 1."""
        return self.stage_shares or (1.0 / self.parts,) * self.parts

    @property
    def count_multiple(self) -> int:
        """The number of micro-batches must be a multiple: interleaving takes whole rounds of `stages`."""
        return self.stages if self.virtual_stages > 1 else 1


def _scaled(shares: Sequence[float], parts: int) -> tuple[float, ...]:
    if len(shares) != parts:
        raise OptionError(
            f"stage_shares holds {len(shares)} numbers. Pass one for each of stages * virtual_stages = "
            f"{parts} parts."
        )
    if not all(np.isfinite(share) and share > 0 for share in shares):
        raise OptionError(f"stage_shares={tuple(shares)!r} must be finite and positive")
    return tuple(float(share) / float(sum(shares)) for share in shares)


def actions(pipeline: Pipeline, stage: int, micro_batches: int) -> tuple[Action, ...]:
    """List the passes of one stage (0 reads the input): each micro-batch forward, then unless `backward` is 0
    backward.

    In this order, each as soon as its `needs` have arrived, all stages finish: no order of waiting is
    circular. Transfers must be asynchronous, or paired by the executor, because two stages may send to each
    other. Raises OptionError for an unknown stage, and CountError unless micro_batches is a multiple of
    `count_multiple`.
    """
    if not 0 <= stage < pipeline.stages:
        raise OptionError(
            f"stage={stage} is outside a pipeline of stages={pipeline.stages}"
        )
    check_count(pipeline, micro_batches)
    forward = [
        Action("forward", *place)
        for place in _rounds(pipeline, micro_batches, ascending=True)
    ]
    if pipeline.backward == 0:
        return tuple(forward)
    backward = [
        Action("backward", *place)
        for place in _rounds(pipeline, micro_batches, ascending=False)
    ]
    ahead = min(_ahead(pipeline, stage), len(forward))
    alternating = [
        action for pair in zip(forward[ahead:], backward, strict=False) for action in pair
    ]
    return (*forward[:ahead], *alternating, *backward[len(forward) - ahead :])


def check_count(pipeline: Pipeline, micro_batches: int) -> None:
    """Raise CountError unless `micro_batches` is a multiple of `count_multiple`."""
    if micro_batches < 1 or micro_batches % pipeline.count_multiple:
        raise CountError(
            f"a pipeline with stages={pipeline.stages} and virtual_stages={pipeline.virtual_stages} needs a "
            f"positive multiple of {pipeline.count_multiple} micro-batches, got {micro_batches}. Set "
            "multiple_of, or virtual_stages=1, which takes any number from 1."
        )


def needs(pipeline: Pipeline, stage: int, action: Action) -> tuple[int, Action] | None:
    """Return the stage and the action whose result this action takes, or None for the first part of the
    model.
    """
    part = action.chunk * pipeline.stages + stage
    if action.kind == "forward":
        return None if part == 0 else _at(pipeline, "forward", part - 1, action)
    if part == pipeline.parts - 1:
        return stage, Action("forward", action.micro_batch, action.chunk)
    return _at(pipeline, "backward", part + 1, action)


def _at(pipeline: Pipeline, kind: Kind, part: int, action: Action) -> tuple[int, Action]:
    return part % pipeline.stages, Action(kind, action.micro_batch, part // pipeline.stages)


def _rounds(
    pipeline: Pipeline, micro_batches: int, *, ascending: bool
) -> list[tuple[int, int]]:
    """Order (micro_batch, chunk) in rounds of `stages` micro-batches, each through all chunks one after
    another.
    """
    size = pipeline.stages if pipeline.virtual_stages > 1 else micro_batches
    chunks = (
        range(pipeline.virtual_stages)
        if ascending
        else range(pipeline.virtual_stages)[::-1]
    )
    return [
        (micro_batch, chunk)
        for first in range(0, micro_batches, size)
        for chunk in chunks
        for micro_batch in range(first, first + size)
    ]


def _ahead(pipeline: Pipeline, stage: int) -> int:
    later_stages = pipeline.stages - 1 - stage
    return (
        later_stages
        if pipeline.virtual_stages == 1
        else 2 * later_stages + (pipeline.virtual_stages - 1) * pipeline.stages
    )
