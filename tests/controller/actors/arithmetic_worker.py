"""Workers whose results can be checked by hand.

Their module is all that a rank's process imports: with the tests' own, each took 4 CPU seconds, not 2.5.
"""

import os

import numpy as np
import psutil
import torch

from balancing import RankPlan
from workers.batch.dataproto import DataProto
from workers.batch.dispatch import Join, Split, dispatch
from workers.batch.metrics import Metric, Metrics
from workers.network import interface_of
from workers.roles.base import Worker


class ArithmeticWorker(Worker):
    """A real worker, with a process group, whose results can be checked by hand."""

    @dispatch(Split.ALL)
    def ranks_sum(self) -> int:
        total = torch.tensor(self.coordinates.index)
        torch.distributed.all_reduce(total)
        return int(total)

    @dispatch(Split.ALL)
    def interface(self) -> tuple[str | None, str | None]:
        return interface_of(self.address()[0], addresses()), os.environ.get(
            "GLOO_SOCKET_IFNAME"
        )

    @dispatch(Split.ALL)
    def double(self, value: int) -> int:
        return 2 * value

    @dispatch(Split.ALL, Join.RANK_ZERO)
    def answer(self) -> int:
        return 40 + self.coordinates.index

    @dispatch(Split.ALL, Join.RANK_ZERO_REFERENCE)
    def large(self) -> tuple[np.ndarray | None, Metrics]:
        return (np.arange(5) if self.coordinates.index == 0 else None), {
            "ranks": Metric.sum(1)
        }

    @dispatch(Split.PLAN, Join.TOKENS, returns=("doubled",))
    def doubled(self, batch: DataProto, plan: RankPlan) -> tuple[DataProto, Metrics]:
        block = DataProto(
            batch.lengths.numpy(), {"doubled": 2 * batch.tokens["input_ids"].numpy()}
        )
        return block, {
            "rows": Metric.sum(len(plan.rows)),
            "tokens": Metric.sum(batch.num_tokens),
        }

    @dispatch(Split.ALL)
    def fail_on(self, index: int) -> None:
        if self.coordinates.index == index:
            raise RuntimeError("out of cheese")
        torch.distributed.barrier()


class OnTwoNodes(ArithmeticWorker):
    """Rank 2 says that it is elsewhere."""

    def address(self) -> tuple[str, int]:
        host, port = super().address()
        return ("10.9.9.9" if self.coordinates.index == 2 else host), port

    @dispatch(Split.ALL)
    def threads(self) -> int:
        return torch.get_num_threads()


def addresses() -> dict[str, list[str]]:
    """The addresses of every interface of this machine."""
    return {
        name: [each.address for each in found]
        for name, found in psutil.net_if_addrs().items()
    }
