"""RolloutEngines: the rollout actors of a run, and replacement of lost engines.

    make(replica, attempt) --start--> up --current weights--> serves --died, hung--> killed
            ^                                                                          |
            '------------------------- while run.max_restarts allows ------------------'

`wait` watches starts, weight loads and health checks concurrently with a round's streams.
`controller.engines.fleet` decides which engine may serve.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from controller.engines.fleet import FRUITLESS_DEATHS, UP, Fleet, State
from controller.engines.transfer_group import Member
from workers.config.model import ONLY_POLICY
from workers.config.roles import RolloutConfig
from workers.errors import BallastError, ConfigError, LostError, RolloutError

MakeActor = Callable[[int, int], Any]
STOP_SECONDS = 30.0
POLL_SECONDS = 1.0  # interval between checks of deadlines while nothing arrives


@dataclass(frozen=True)
class _Call:
    """A call that `wait` watches. `then` runs on success."""

    replica: int
    doing: str
    timeout_s: float
    deadline: float
    then: Callable[[], None]


class RolloutEngines:
    """Actors of all replicas, their states, and their current weights."""

    def __init__(
        self,
        make: MakeActor,
        config: RolloutConfig,
        fleet: Fleet,
        *,
        by_transfer: bool = False,
        colocated: bool = False,
        start_timeout_s: float = 600.0,
        adapter_versions: int = 1,
        name: str = "rollout",
        log: Callable[[str], None] = print,
    ) -> None:
        """make: makes an actor from (replica, attempt). by_transfer: whether weights travel between GPUs, in
        a transfer that a replacement joins when it is up. colocated: whether engines sleep during training.
        adapter_versions: see `model.lora.versions`. name: of the role.
        """
        self.fleet = fleet
        self.actors = {
            replica: make(replica, 0) for replica in fleet.in_state(State.STARTING)
        }
        self._starting: dict[int, ray.ObjectRef] = {}
        self._make = make
        self._by_transfer = by_transfer
        self._transferring = False
        self._postponed: list[int] = []  # replacements that start after the transfer
        self._colocated = colocated
        self._log = log
        self._name = name
        self._hang_timeout_s = config.hang_timeout_s
        self._start_timeout_s = start_timeout_s
        self._attempts = dict.fromkeys(self.actors, 0)
        self._calls: dict[ray.ObjectRef, _Call] = {}
        self._last_sign: dict[int, float] = {}
        # A whole file, and what each later version changed.
        self._weights: list[tuple[int, ray.ObjectRef]] = []
        # Kept versions of LoRA policies, by name and version, if engines get adapters.
        self._adapters: dict[str, dict[int, ray.ObjectRef]] | None = None
        self._adapter_versions = adapter_versions
        self._deltas = config.weight_sync == "delta"
        self._restarted = False
        self._stopped = False

    @property
    def asleep(self) -> bool:
        """Whether all engines have freed their GPUs for training. A replacement sleeps while others serve."""
        return bool(self.fleet.in_state(State.ASLEEP)) and not self.fleet.in_state(*UP)

    @property
    def present(self) -> tuple[Member, ...]:
        """Engines that can take weights from a transfer."""
        return tuple(
            (replica, self._attempts[replica]) for replica in self.fleet.in_state(*UP)
        )

    def start(self) -> None:
        self._starting = {
            replica: actor.start.remote() for replica, actor in self.actors.items()
        }

    def wait_started(self, timeout_s: float | None = None) -> None:
        """Wait for all engines, at the first call.

        Raises RolloutError for a failed or late engine, and ConfigError for a model that vLLM cannot take.
        """
        for replica, ref in list(self._starting.items()):
            try:
                ray.get(ref, timeout=timeout_s)
            except RayError as error:
                if isinstance(error, RayTaskError) and isinstance(error.cause, ConfigError):
                    raise error.cause from error
                raise RolloutError(
                    f"{self._name} replica {replica} failed while starting its engine: {cause_of(error)}"
                ) from error
            del self._starting[replica]
            self.fleet.mark_started(replica)

    def wait(self, streams: Sequence[Any], timeout_s: float = POLL_SECONDS) -> Any | None:
        """Return the first of `streams` with a result, or None after another call or `timeout_s`. Raises as
        `lose`.
        """
        done, _ = ray.wait(
            [*self._calls, *streams], num_returns=1, timeout=timeout_s, fetch_local=False
        )
        for ref in done:
            if ref not in self._calls:
                return ref
            self._handle_answer(ref)
        return None

    def check_deadlines(self, busy: Collection[int]) -> None:
        """Lose replicas with overdue calls. Check the health of silent `busy` replicas."""
        now = time.monotonic()
        for ref, call in list(self._calls.items()):
            # A replica that was just lost has no calls left.
            if call.deadline >= now or ref not in self._calls:
                continue
            # It answered in time, between two rounds.
            if ray.wait([ref], timeout=0, fetch_local=False)[0]:
                self._handle_answer(ref)
            else:
                self.lose(
                    call.replica, f"{call.doing} was not done after {call.timeout_s:g} s"
                )
        for replica in self.fleet.serving:
            if replica in busy and now - self._last_sign[replica] > self._hang_timeout_s:
                self.fleet.drain(replica)
                health = self.actors[replica].health.remote()
                doing = "answering (rollout.hang_timeout_s)"
                self._watch(
                    replica,
                    health,
                    doing,
                    self._hang_timeout_s,
                    partial(self._healthy, replica),
                )

    def check_any_will_serve(self) -> None:
        """Raise RolloutError if no engine serves, starts or loads weights: waiting would never end."""
        if not (self.fleet.serving or self.expects_engines or self._waiting_for_transfer):
            raise RolloutError(
                f"no rollout engine has the weights of version {self.fleet.version}, and none is loading "
                "them: an update was refused before."
            )

    @property
    def _waiting_for_transfer(self) -> list[int]:
        return self.fleet.in_state(State.STALE, State.ASLEEP) if self._by_transfer else []

    @property
    def expects_engines(self) -> bool:
        """Whether engines start or load weights."""
        return bool(self._calls)

    @property
    def waits_for_weights(self) -> bool:
        """Whether nothing serves, and replacements of lost engines wait for the next transfer."""
        return (
            not self.fleet.serving and not self._calls and bool(self._waiting_for_transfer)
        )

    def on_lost(self, replica: int) -> None:
        """Called when an engine was lost, before another takes its place."""

    def note_progress(self, replica: int) -> None:
        """Record that the replica received or returned work."""
        self._last_sign[replica] = time.monotonic()

    def lose(self, replica: int, cause: Exception | str) -> None:
        """Replace an engine. Raises RolloutError if a new one would die too or no restart is left, and
        LostError if it was itself a replacement that did not come up, in a run whose weights travel between
        GPUs: a restart of the run frees them.
        """
        if self._stopped:
            raise RolloutError("the engines were stopped during a round.")
        text = cause if isinstance(cause, str) else cause_of(cause)
        was_starting = self.fleet.state(replica) is State.STARTING
        self.fleet.mark_lost(replica)
        self.on_lost(replica)
        self._calls = {
            ref: call for ref, call in self._calls.items() if call.replica != replica
        }
        ray.kill(self.actors[replica])
        lost = f"{self._name} replica {replica} was lost: {text}"
        self.replace(replica, lost, was_starting=was_starting)

    def replace(self, replica: int, lost: str, *, was_starting: bool) -> None:
        """Start an engine in place of a lost one. lost: says which and why. Raises as `lose`."""
        if self._by_transfer and self._attempts[replica] > 0 and was_starting:
            raise LostError(f"{lost}; it was to replace a lost engine")
        if self.fleet.is_hopeless(replica):
            raise RolloutError(
                f"{lost}; {FRUITLESS_DEATHS} engines in a row died before they finished a sample."
            )
        if not self.fleet.restart(replica):
            raise RolloutError(
                f"{lost}; all of run.max_restarts={self.fleet.budget.limit} are used up."
            )
        self._log(f"{lost}; starting a new one")
        self.make_actor(replica)
        if self._transferring:
            # Its start needs memory in which weights are gathered now.
            self._postponed.append(replica)
        else:
            self.start_later(replica)

    def make_actor(self, replica: int) -> None:
        """Make the replica's first or next actor."""
        self._attempts[replica] = self._attempts.get(replica, -1) + 1
        self._restarted = True
        self.actors[replica] = self._make(replica, self._attempts[replica])

    def start_later(self, replica: int) -> None:
        """Let an actor start its engine while the others serve. It serves once it has the weights."""
        started = self.actors[replica].start.remote()
        then = self._begin_joining if self._by_transfer else self._begin_loading
        self._watch(
            replica,
            started,
            "starting its engine",
            self._start_timeout_s,
            partial(then, replica),
        )

    def take_restarted(self) -> bool:
        """Return whether an engine was replaced since the last call."""
        restarted = self._restarted
        self._restarted = False
        return restarted

    def update_weights(
        self, payload: ray.ObjectRef, version: int, *, whole_weights: bool = True
    ) -> None:
        """Load packed weights as `version` into every engine, including engines that start later.

        whole_weights: or what changed since the last call. Raises RolloutError as `lose`, and if an engine
        refuses them, because it would keep old weights.
        """
        self._weights = [*([] if whole_weights else self._weights), (version, payload)]
        self._load_all(version)

    def update_adapters(self, adapters: Mapping[str, ray.ObjectRef], version: int) -> None:
        """Load adapters of LoRA policies, by name, as `version` into every engine, including engines that
        start later. `ONLY_POLICY` names the adapters of the only policy.

        Versions that leave them (`versions_to_replace`) may not be sampled meanwhile. Raises as
        `update_weights`.
        """
        by_policy = self._adapters = self._adapters or {}
        for name, files in adapters.items():
            gone = self.versions_to_replace(name)
            stay = {
                old: ref for old, ref in by_policy.get(name, {}).items() if old not in gone
            }
            by_policy[name] = stay | {version: files}
        self._load_all(version)

    def versions_to_replace(self, policy: str) -> list[int]:
        """Return versions of a LoRA policy that leave the engines when it is published again."""
        versions = list((self._adapters or {}).get(policy, {}))
        return versions[: max(0, len(versions) + 1 - self._adapter_versions)]

    def adapter(self, policy: str, version: int | None = None) -> int:
        """Return the version of a LoRA policy to sample, None for its newest. Raises ConfigError if engines
        lack it.
        """
        versions = (self._adapters or {}).get(policy, {})
        if not versions or version not in (None, *versions):
            had = (
                f"engines have the versions {sorted(versions)}"
                if versions
                else "engines have none"
            )
            raise ConfigError(
                f"adapter={policy!r}, version={version}: {had}. Ask for one of them, or publish it."
            )
        return max(versions) if version is None else version

    def _load_all(self, version: int) -> None:
        self.fleet.new_version(version)
        for replica in self.fleet.in_state(State.STALE):
            self._load(replica)
        while self.fleet.in_state(State.STALE):
            self.wait([])
            self.check_deadlines(())

    def receive_weights(self, send: Callable[[], list[int]], version: int) -> None:
        """Wake sleeping engines and let `send` bring the weights `version` to all, between GPUs.

            memory for weights --> send --> memory for the KV cache --> they serve

        send: returns replicas that have the weights, none if it must be tried again without engines that
        were lost in it. Raises errors of `send`, and as `lose`.
        """
        woken: list[int] = []
        receivers: list[int] = []
        while not receivers:
            self._start_postponed()
            woken += self._wake_for_weights()
            self._transferring = True
            try:
                receivers = send()
            finally:
                self._transferring = False
        # Not earlier: the sender needs room to gather.
        asleep = [replica for replica in receivers if replica in woken]
        awake = [replica for replica in receivers if replica not in woken]
        ready = awake + self._on_all("wake_kv_cache", asleep, self._start_timeout_s)
        self._start_postponed()
        self.fleet.new_version(version)
        for replica in ready:
            if self.fleet.state(replica) is State.STALE:
                self.fleet.mark_updated(replica, version)

    def _wake_for_weights(self) -> list[int]:
        """Wake engines that sleep, and replacements too. Waits for a replacement if it shares a GPU, or is
        alone.
        """
        woken: list[int] = []
        while True:
            self._settle()
            asleep = self.fleet.in_state(State.ASLEEP)
            if not asleep:
                return woken
            for replica in self._on_all("wake_for_weights", asleep, self._start_timeout_s):
                self.fleet.wake(replica)
                woken.append(replica)

    def _settle(self) -> None:
        """Wait for replacements that share a GPU with ranks, which may not compute meanwhile, or if no engine
        is up.
        """
        while self.expects_engines and (self._colocated or not self.fleet.in_state(*UP)):
            self.wait([])
            self.check_deadlines(())

    def _start_postponed(self) -> None:
        postponed = self._postponed
        self._postponed = []
        for replica in postponed:
            self.start_later(replica)

    def sleep(self) -> None:
        """Free weights and KV caches of colocated engines until `receive_weights`. Raises as `lose`."""
        while self._colocated and (self._calls or self.fleet.in_state(*UP)):
            self._settle()
            for replica in self._on_all(
                "sleep", self.fleet.in_state(*UP), self._start_timeout_s
            ):
                self.fleet.sleep(replica)

    def check_alive(self) -> None:
        """Lose engines whose actor or processes died, even while they receive weights. Raises as `lose`."""
        self._on_all("alive", self.fleet.in_state(*UP, State.ASLEEP), self._hang_timeout_s)

    def _on_all(self, method: str, replicas: Sequence[int], timeout_s: float) -> list[int]:
        """Call a method on each replica and wait. Returns the replicas that succeeded and loses
        the others.
        """
        calls = {
            replica: getattr(self.actors[replica], method).remote() for replica in replicas
        }
        done = []
        for replica, ref in calls.items():
            try:
                ray.get(ref, timeout=timeout_s)
                done.append(replica)
            except RayError as error:
                self.lose(replica, error)
        return done

    def stop(self) -> None:
        """End all engines and actors. A running round fails."""
        self._stopped = True
        actors = list(self.actors.values())
        stopping = [actor.stop.remote() for actor in actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS)
        for actor in actors:
            ray.kill(actor)
        for ref in self._calls:  # Ray prints errors of references that are never read
            with suppress(RayError):
                ray.get(ref, timeout=POLL_SECONDS)

    def _begin_joining(self, replica: int) -> None:
        """Let a replacement wait for the next transfer: asleep, if ranks may use its GPU before."""
        self.fleet.mark_waiting(replica)
        if self._colocated:
            slept = self.actors[replica].sleep.remote()
            then = partial(self.fleet.sleep, replica)
            self._watch(replica, slept, "going to sleep", self._start_timeout_s, then)

    def _begin_loading(self, replica: int) -> None:
        self.fleet.mark_started(replica)
        self._load(replica)

    def _load(self, replica: int) -> None:
        """Send the current weights to the engine, unless it has or is loading them."""
        doing = "loading weights"
        version = self.fleet.version
        loading = any(
            call.replica == replica and call.doing == doing for call in self._calls.values()
        )
        if self.fleet.state(replica) is State.STALE and not loading:
            actor = self.actors[replica]
            if self._adapters is not None and ONLY_POLICY in self._adapters:
                ref = actor.update_adapters.remote(
                    self._adapters[ONLY_POLICY][version], version
                )
            elif self._adapters is not None:
                adapters = {
                    number: files
                    for versions in self._adapters.values()
                    for number, files in versions.items()
                }
                ref = actor.load_adapters.remote(adapters, version)
            elif self._deltas:
                ref = actor.follow_weights.remote(self._weights)
            else:
                ref = actor.update_weights.remote(self._weights[-1][1], version)
            self._watch(
                replica,
                ref,
                doing,
                self._start_timeout_s,
                partial(self._finish_loading, replica, version),
            )

    def _finish_loading(self, replica: int, version: int) -> None:
        self.fleet.mark_updated(replica, version)
        self._load(replica)  # newer ones may exist by now

    def _healthy(self, replica: int) -> None:
        if self.fleet.state(replica) is State.DRAINING:  # new weights end draining too
            self.fleet.resume(replica)
        self.note_progress(replica)

    def _watch(
        self,
        replica: int,
        ref: ray.ObjectRef,
        doing: str,
        timeout_s: float,
        then: Callable[[], None],
    ) -> None:
        self._calls[ref] = _Call(
            replica, doing, timeout_s, time.monotonic() + timeout_s, then
        )

    def _handle_answer(self, ref: ray.ObjectRef) -> None:
        call = self._calls.pop(ref)
        try:
            ray.get(ref)
        except RayError as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, RolloutError):
                raise error.cause from error  # the engine is alive, and its replacement would refuse too
            self.lose(call.replica, error)
            return
        call.then()


def cause_of(error: Exception) -> str:
    """Return the actor's error, or the cause of its death, in one line without Ray's traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    typed = (
        str(cause)
        if isinstance(cause, BallastError)
        else f"{type(cause).__name__}: {cause}"
    )
    text = " ".join(typed.split())
    return re.sub(r" class_name: .*? ip: \S+", "", text).partition(" Some common causes")[0]
