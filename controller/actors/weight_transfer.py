"""Send weights between GPUs, from the policy's ranks to all engines that are up.

engines up --next_group--> connect, if others than before --> send --> lost some? they are replaced meanwhile
                  ^                                                         |
                  '------------------- apart: again without them <----------'

A lost rank, or a transfer without an end, costs a restart of the run from its last checkpoint.
"""

import time
from collections.abc import Callable
from typing import Any

from controller.actors.worker_group import WorkerGroup
from controller.engines.engine_pool import EnginePool
from controller.engines.transfer_group import TransferGroup
from workers.errors import LostError


class WeightTransfer:
    """The transfer of a run. Each group of sender and engines has an epoch."""

    def __init__(
        self,
        policy: WorkerGroup,
        engines: EnginePool,
        placement: str,
        tensor_parallel: int,
        timeout_s: float,
        log: Callable[[str], None] = print,
    ) -> None:
        """timeout_s: for a group to meet or to transfer."""
        self._policy = policy
        self._engines = engines
        self._placement = placement
        self._tensor_parallel = tensor_parallel
        self._timeout_s = timeout_s
        self._log = log
        self.group = TransferGroup(placement)

    def send(self, version: int) -> None:
        """Send the policy's weights to all engines as `version`, and wake them. A lost engine is replaced.

        Raises LostError if a rank is lost, if nothing moves, or as `RolloutEngines.lose`.
        """
        self._engines.receive_weights(lambda: self._send(version), version)

    def connect(self) -> None:
        """Let ranks and engines that are up meet, unless they have met. Raises as `send`."""
        group = self.group.next_group(self._engines.present)
        if group is self.group:
            return
        if self.group.epoch:
            self._log(f"ranks and engines meet again: {group}")
        actors = [self._engines.actors[replica] for replica, _ in group.members]
        arguments = (actors, self._placement, self._tensor_parallel, group.epoch)
        self._call("connect_engines", *arguments, meeting=group)
        self.group = group

    def _send(self, version: int) -> list[int]:
        """Try once. Returns replicas that have the weights, none if it must be tried again."""
        self._engines.check_alive()
        if not self._engines.present:
            return []
        present = self._engines.present
        try:
            self.connect()
        except LostError:
            self._engines.check_alive()
            # With `apart` rank 0 still waits for the lost member, and takes no other call.
            if self._placement == "apart" or self._engines.present == present:
                raise
            return []
        positions = self._call("send_weights", version, self.group.epoch)[0]
        lost = {self.group.members[position] for position in positions}
        for replica, attempt in lost & set(self._engines.present):
            self._engines.lose(
                replica, f"it did not answer in {self.group} (attempt {attempt})"
            )
        receivers = self.group.receivers(lost)
        self.group = self.group.after(lost)
        return [replica for replica, _ in receivers]

    def _call(self, method: str, *args: Any, meeting: TransferGroup | None = None) -> Any:
        """Call a method of the policy in which ranks and engines wait for each other.

        Nothing tells a rank of a dead engine but Ray, so engines are polled meanwhile. meeting: a group that
        meets in this call.
        """
        deadline = time.monotonic() + self._timeout_s

        def poll() -> None:
            self._engines.check_alive()
            if meeting is not None and self._waits_forever(meeting):
                raise LostError(f"an engine was lost while {meeting} met.")
            if time.monotonic() > deadline:
                raise LostError(
                    f"policy.{method} did not finish within "
                    f"resources.collective_timeout_s={self._timeout_s:g} s, and no engine says why."
                )

        return getattr(self._policy, method).remote(*args).result(meanwhile=poll)

    def _waits_forever(self, meeting: TransferGroup) -> bool:
        """Whether rank 0 waits for a lost member: with `apart`, until its store's time-out."""
        lost = set(meeting.members) - set(self._engines.present)
        return self._placement == "apart" and bool(lost)
