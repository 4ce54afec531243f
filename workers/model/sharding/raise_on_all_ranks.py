"""Raise one rank's error on all ranks, so that none waits in a collective for a failed rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from workers.errors import BallastError


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Enter on every rank of `group`; all raise the BallastError of the first rank with one.

    The block must make no collective calls that a failing rank would skip.
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
