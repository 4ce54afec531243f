from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from workers.errors import BallastError


@contextmanager
def raise_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise the first BallastError of a rank of `group` on all its ranks, so that none waits for a failed
    one.

    Enter on every rank. The block must make no collective calls that a failing rank would skip.
    """
    problem = None
    try:
        yield
    except BallastError as error:
        problem = error
    problems: list[BallastError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    for rank_problem in problems:
        if rank_problem is not None:
            raise rank_problem
