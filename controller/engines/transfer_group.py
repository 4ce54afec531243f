"""Decide who takes part in a transfer of weights between GPUs, without I/O, Ray or a clock.

    engines that are up --next_group--> group of an epoch --transfer, with losses--> receivers
             ^                                                                          |
             '------ apart: nobody, so the others meet again in the next epoch <--------'

Invariants: no group has a member that is known to be lost. An epoch never names two groups. With `apart` one
broadcast serves all members, so it serves all or none. With `colocated` each reads memory by itself.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

Member = tuple[int, int]
"""Replica and attempt: a replacement is another member."""


@dataclass(frozen=True)
class TransferGroup:
    """The sender and these engines. broken: whether its communicator was aborted."""

    placement: str
    epoch: int = 0
    members: tuple[Member, ...] = ()
    broken: bool = False

    def __str__(self) -> str:
        names = [
            f"{replica}" + (f" restart {attempt}" if attempt else "")
            for replica, attempt in self.members
        ]
        return f"transfer group {self.epoch} (rollout {', '.join(names)})"

    def next_group(self, present: Iterable[Member]) -> "TransferGroup":
        """Return this group, or that of the next epoch if others are present or it is broken."""
        members = tuple(sorted(present))
        if members == self.members and not self.broken:
            return self
        return TransferGroup(self.placement, self.epoch + 1, members)

    def receivers(self, lost: Collection[Member]) -> tuple[Member, ...]:
        """Return members that have the weights after a transfer in which some were lost."""
        if lost and self.placement == "apart":
            return ()
        return tuple(member for member in self.members if member not in lost)

    def after(self, lost: Collection[Member]) -> "TransferGroup":
        """Return the group as a transfer leaves it in which some were lost."""
        return replace(self, broken=bool(lost))
