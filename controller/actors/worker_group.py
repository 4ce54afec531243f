"""WorkerGroup: the actors of one role, called as one.

group = WorkerGroup("policy", PolicyWorker, bundles, arguments)     named actors "policy dp=1"
group.log_probs(batch, plan)            blocks, returns the joined result
group.log_probs.remote(batch, plan)     returns a GroupFuture, whose .result() joins
"""

import inspect
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from controller.actors.resources import Reservation
from controller.engines.engine_calls import cause_of
from workers.batch.dispatch import (
    DISPATCH_ATTRIBUTE,
    DispatchMode,
    Join,
    RankCoordinates,
    join_rows,
    join_tokens,
    leaders,
    split_arguments,
)
from workers.batch.metrics import merge
from workers.errors import BallastError, LostError, WorkerError
from workers.roles.base import Worker

LOST_SECONDS = 3.0  # time in which Ray reports a lost actor, after its peers noticed
MEANWHILE_SECONDS = 0.5


@dataclass(frozen=True)
class Share:
    cpus: float
    gpus: float = 0.0


class GroupFuture:
    def __init__(
        self,
        label: str,
        names: Sequence[str],
        refs: Sequence[ray.ObjectRef],
        join: Callable[[], Any],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """refs: one small result per rank, which arrives when its call ends."""
        self._label = label
        self._names = dict(zip(refs, names, strict=True))
        self._join = join
        self._meanwhile = meanwhile

    def result(
        self, timeout_s: float | None = None, meanwhile: Callable[[], None] | None = None
    ) -> Any:
        """Wait for every rank, then join. meanwhile: called every MEANWHILE_SECONDS. Its errors end the wait.

        Raises at the first failed rank, because others may be stuck in a collective: LostError for a lost
        actor, our errors unchanged, WorkerError with the remote traceback otherwise, and if no rank finishes
        for `timeout_s`.
        """
        waiting = list(self._names)
        while waiting:
            done, other_refs = self._wait_for_one(
                waiting, timeout_s, meanwhile or self._meanwhile
            )
            if not done:
                late = ", ".join(self._names[ref] for ref in waiting)
                raise WorkerError(
                    f"{self._label} did not finish within {timeout_s:g} s on {late}."
                )
            self._raise_if_failed(done[0], other_refs)
            waiting = other_refs
        return self._join()

    @staticmethod
    def _wait_for_one(
        refs: list[ray.ObjectRef],
        timeout_s: float | None,
        meanwhile: Callable[[], None] | None,
    ) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
        if meanwhile is None:
            return ray.wait(refs, num_returns=1, timeout=timeout_s)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining_seconds = max(0.0, deadline - time.monotonic())
            done, other_refs = ray.wait(
                refs, num_returns=1, timeout=min(MEANWHILE_SECONDS, remaining_seconds)
            )
            if done or not remaining_seconds:
                return done, other_refs
            meanwhile()

    def _raise_if_failed(self, ref: ray.ObjectRef, other_refs: list[ray.ObjectRef]) -> None:
        try:
            ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, BallastError):
                raise type(error.cause)(f"{self._names[ref]}: {error.cause}") from error
            if isinstance(error.cause, ObjectLostError):
                raise LostError(
                    f"{self._label} needed tokens of a node that was lost: {cause_of(error)}"
                ) from error
            self._raise_lost(other_refs)
            raise WorkerError(
                f"{self._names[ref]} failed in {self._label}: {error.cause!r}\n{error}"
            ) from error
        except RayError as error:
            raise LostError(
                f"{self._names[ref]} was lost in {self._label}: {cause_of(error)}"
            ) from error

    def _raise_lost(self, refs: list[ray.ObjectRef]) -> None:
        """Raise LostError if another rank was lost, which broke this rank's collective."""
        deadline = time.monotonic() + LOST_SECONDS
        while refs and (remaining_seconds := deadline - time.monotonic()) > 0:
            done, refs = ray.wait(refs, num_returns=1, timeout=remaining_seconds)
            for ref in done:
                try:
                    ray.get(ref)
                except RayTaskError:
                    continue
                except RayError as error:
                    raise LostError(
                        f"{self._names[ref]} was lost in {self._label}: {cause_of(error)}"
                    ) from error


class GroupMethod:
    def __init__(self, group: "WorkerGroup", name: str, mode: DispatchMode) -> None:
        self._group = group
        self._name = name
        self._mode = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote(*args, **kwargs).result()

    def remote(self, *args: Any, **kwargs: Any) -> GroupFuture:
        group = self._group
        mode = self._mode
        arguments = split_arguments(mode, group.ranks, args, kwargs, ray.put)
        label = f"{group.role}.{self._name}"
        calls = [
            getattr(actor, self._name)
            .options(name=label, num_returns=2 if mode.join.keeps_first else 1)
            .remote(*positional, **named)
            for actor, (positional, named) in zip(group.actors, arguments, strict=True)
        ]
        # A kept first return value stays in the object store. The second, small one shows that it is
        # complete.
        done = [call[1] for call in calls] if mode.join.keeps_first else calls
        return GroupFuture(
            label, group.names, done, lambda: self._join(args, calls, done), group.meanwhile
        )

    def _join(
        self, args: tuple[Any, ...], calls: list[Any], done: list[ray.ObjectRef]
    ) -> Any:
        join = self._mode.join
        counted = leaders(self._group.ranks, args)
        if join is Join.LIST:
            return ray.get(done)
        if join is Join.RANK_ZERO:
            return ray.get(done[0])
        outputs = ray.get([done[i] for i in counted])
        if join is Join.METRICS:
            return merge(outputs)
        if join is Join.ROWS:
            return join_rows(args[1], len(args[0]), outputs)
        if join is Join.RANK_ZERO_REFERENCE:
            return calls[0][0], merge(outputs)
        return join_tokens(
            self._mode, args[1], len(args[0]), [calls[i][0] for i in counted], outputs
        )


class WorkerGroup:
    def __init__(
        self,
        role: str,
        worker_class: type[Worker],
        bundles: Reservation,
        share: Share,
        *,
        dp: int,
        cp: int = 1,
        tp: int = 1,
        pp: int = 1,
        arguments: dict[str, Any] | None = None,
        timeout_s: float = 300.0,
        collective_timeout_s: float = 300.0,
    ) -> None:
        """Start pp * dp * cp * tp actors and their process group, in the order of `ParallelRanks`.

        collective_timeout_s: of waits within a collective. Raises WorkerError if a worker cannot be built or
        the process group is not up within `timeout_s`.
        """
        self.role = role
        self.meanwhile: Callable[[], None] | None = None
        """Called while the driver waits for a method (see `GroupFuture.result`)."""
        places = itertools.product(range(pp), range(dp), range(cp), range(tp))
        self.ranks = [
            RankCoordinates(index=i, dp=d, cp=c, tp=t, pp=p)
            for i, (p, d, c, t) in enumerate(places)
        ]
        self.names = [
            _actor_name(role, rank, {"cp": cp, "tp": tp, "pp": pp}) for rank in self.ranks
        ]
        actor_class = ray.remote(worker_class)
        self.actors = [
            actor_class.options(
                name=name,
                num_cpus=share.cpus,
                num_gpus=share.gpus,
                scheduling_strategy=bundles.strategy(rank.index),
            ).remote(role, rank, len(self.ranks), **(arguments or {}))
            for name, rank in zip(self.names, self.ranks, strict=True)
        ]
        self._methods = {
            name: GroupMethod(self, name, getattr(method, DISPATCH_ATTRIBUTE))
            for name, method in inspect.getmembers(worker_class, callable)
            if hasattr(method, DISPATCH_ATTRIBUTE)
        }
        try:
            self._start(timeout_s, collective_timeout_s)
        except BaseException:
            self.stop()
            raise

    def _start(self, timeout_s: float, collective_timeout_s: float) -> None:
        built = [actor.address.remote() for actor in self.actors]
        addresses = GroupFuture(
            f"{self.role} start-up", self.names, built, lambda: ray.get(built)
        ).result(timeout_s)
        hosts = [host for host, _ in addresses]
        joined = [
            actor.join_group.remote(*addresses[0], collective_timeout_s, hosts.count(host))
            for actor, host in zip(self.actors, hosts, strict=True)
        ]
        GroupFuture(f"{self.role} process group", self.names, joined, lambda: None).result(
            timeout_s
        )

    def __getattr__(self, name: str) -> GroupMethod:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            raise AttributeError(
                f"{self.__dict__.get('role')} workers have no dispatched method {name!r}"
            )
        return methods[name]

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def _actor_name(role: str, rank: RankCoordinates, sizes: dict[str, int]) -> str:
    shared = [f" {name}={getattr(rank, name)}" for name, size in sizes.items() if size > 1]
    return f"{role} dp={rank.dp}{''.join(shared)}"
