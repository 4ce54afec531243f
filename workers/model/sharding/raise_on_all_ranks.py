"""Errors that all ranks raise if one does, so that no rank waits in a collective for one that has failed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from workers.errors import BallastError


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """A block that every rank of `group` enters; the BallastError of the first rank with one is raised by all.

    The block itself must make no collective calls that a rank could leave out by raising.
    """
    problem = None
    try:
        yield
    except BallastError as error:
        problem = error
    problems: list[BallastError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    for found in problems:
        if found is not None:
            raise found
