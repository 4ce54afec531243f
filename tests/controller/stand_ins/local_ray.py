"""Ray in this process: an actor's method runs when it is called, and its reference holds what came of it.

ray.remote(Class).options(...).remote(...) --> LocalActor --.method.remote(...)--> LocalRef --get, wait--> value, error
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

DRIVERS_NODE = "d" * 56


class NeverReturnsError(Exception):
    """Raised in an actor's method that would wait for ever: its reference never gets a value."""


class LocalRef:
    """A value, an error, or neither where the call never returns."""

    def __init__(
        self, value: Any = None, error: Exception | None = None, *, done: bool = True
    ) -> None:
        self.value, self.error, self.done = value, error, done

    def __await__(self) -> Iterator[Any]:
        return self.value
        yield


class LocalStream:
    """What a streaming call yielded; an error comes as its last object, as Ray hands it over."""

    done = True

    def __init__(self, refs: list[LocalRef]) -> None:
        self._refs = iter(refs)

    def __next__(self) -> LocalRef:
        return next(self._refs)


class LocalActor:
    """An object of an actor class on some GPUs. lives: False from `die` on; calls then say that the actor
    died. node: see `LocalRay.node_of`.
    """

    def __init__(
        self,
        local: "LocalRay",
        name: str,
        gpus: list[int],
        node: str,
        make: Callable[[], Any],
    ) -> None:
        self.local, self.name, self.gpus, self.node = local, name, gpus, node
        self.lives = True
        self.instance = local.run(self, make)

    def die(self) -> None:
        self.lives = False
        self.local.on_death(self)

    def __getattr__(self, name: str) -> "LocalMethod":
        return LocalMethod(self, name)


class LocalMethod:
    def __init__(self, actor: LocalActor, name: str, returns: Any = 1) -> None:
        self._actor, self._name, self._returns = actor, name, returns

    def options(self, *, num_returns: Any = 1, **_: Any) -> "LocalMethod":
        return LocalMethod(self._actor, self._name, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        actor, local = self._actor, self._actor.local
        given = [arg.value if isinstance(arg, LocalRef) else arg for arg in args]
        if self._returns == "streaming":
            return LocalStream(list(local.stream(actor, self._name, given)))
        ref = local.call(actor, self._name, given, kwargs)
        if self._returns == 1:
            return ref
        return [
            LocalRef(ref.value[i] if ref.value else None, ref.error, done=ref.done)
            for i in range(self._returns)
        ]


class LocalClass:
    def __init__(
        self, local: "LocalRay", actor_class: type, options: dict[str, Any] | None = None
    ) -> None:
        self._local, self._class, self._options = local, actor_class, options or {}

    def options(self, **options: Any) -> "LocalClass":
        return LocalClass(self._local, self._class, self._options | options)

    def remote(self, *args: Any, **kwargs: Any) -> LocalActor:
        gpus = gpus_of(self._options)
        node = getattr(self._options.get("scheduling_strategy"), "node_id", "")
        node = node or self._local.node_of(gpus)
        name = self._options.get("name", f"{self._class.__name__} on {node}")
        actor = LocalActor(
            self._local, name, gpus, node, lambda: self._class(*args, **kwargs)
        )
        self._local.actors[name] = actor
        return actor


def gpus_of(options: dict[str, Any]) -> list[int]:
    """The GPUs that Ray would show an actor: those of its bundle, or those that its environment names."""
    visible = options.get("runtime_env", {}).get("env_vars", {}).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [int(gpu) for gpu in visible.split(",")]
    if not options.get("num_gpus"):
        return []
    return list(options["scheduling_strategy"])


class LocalRay:
    """`stand_ins`: actor classes that others take the place of. running: the actor whose method runs.

    node_of: the node of actors with these GPUs. Actors without are on the driver's.
    """

    def __init__(self, stand_ins: dict[type, type]) -> None:
        self.actors: dict[str, LocalActor] = {}
        self.running: list[LocalActor] = []
        self.on_death: Callable[[LocalActor], None] = lambda actor: None
        self.node_of: Callable[[Sequence[int]], str] = lambda gpus: DRIVERS_NODE
        self._stand_ins = stand_ins
        self._loop, self._one = asyncio.new_event_loop(), threading.RLock()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put this in the place of Ray's functions, until the test ends."""
        for name in ("remote", "get", "wait", "put", "kill", "get_runtime_context"):
            monkeypatch.setattr(ray, name, getattr(self, name))

    def remote(self, actor_class: type) -> LocalClass:
        return LocalClass(self, self._stand_ins.get(actor_class, actor_class))

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        del timeout
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        assert refs.done, "this would wait for ever"
        if refs.error is not None:
            raise refs.error
        return refs.value

    def wait(
        self, refs: Sequence[Any], *, num_returns: int = 1, **_: Any
    ) -> tuple[list[Any], list[Any]]:
        done = [ref for ref in refs if ref.done][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def put(self, value: Any) -> LocalRef:
        return LocalRef(value)

    def kill(self, actor: LocalActor) -> None:
        actor.die()

    def get_runtime_context(self) -> Any:
        node = self.running[-1].node if self.running else DRIVERS_NODE
        return SimpleNamespace(get_node_id=lambda: node, runtime_env=None)

    def lose_node(self, node: str) -> list[str]:
        """Let all actors on a node die. Returns their names."""
        victims = [
            actor for actor in self.actors.values() if actor.node == node and actor.lives
        ]
        for victim in victims:
            victim.die()
        return [victim.name for victim in victims]

    def run(self, actor: LocalActor, function: Callable[[], Any]) -> Any:
        """Call `function` as the actor's process would: with its GPUs in the environment. One at a time."""
        with self._one:
            before = os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in actor.gpus)
            self.running.append(actor)
            try:
                return function()
            finally:
                self.running.pop()
                del os.environ["CUDA_VISIBLE_DEVICES"]
                if before is not None:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before

    def call(
        self, actor: LocalActor, method: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> LocalRef:
        if not actor.lives:
            return LocalRef(error=ActorDiedError())
        try:
            value = self.run(
                actor,
                lambda: self._awaited(getattr(actor.instance, method)(*args, **kwargs)),
            )
            return LocalRef(value) if actor.lives else LocalRef(error=ActorDiedError())
        except NeverReturnsError:
            return LocalRef(done=False)
        except Exception as error:
            return LocalRef(
                error=raised_in(actor, method, error) if actor.lives else ActorDiedError()
            )

    def stream(
        self, actor: LocalActor, method: str, args: Sequence[Any]
    ) -> Iterator[LocalRef]:
        if not actor.lives:
            yield LocalRef(error=ActorDiedError())
            return
        steps = getattr(actor.instance, method)(*args)
        while True:
            try:
                yield LocalRef(self.run(actor, lambda: self._awaited(anext(steps))))
            except StopAsyncIteration:
                return
            except Exception as error:
                yield LocalRef(
                    error=raised_in(actor, method, error)
                    if actor.lives
                    else ActorDiedError()
                )
                return

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        return self._loop.run_until_complete(value)


def raised_in(actor: LocalActor, method: str, error: Exception) -> Exception:
    """The error as `ray.get` raises it on the other side."""
    return RayTaskError(
        f"{actor.name}.{method}", f"{type(error).__name__}: {error}", error
    ).as_instanceof_cause()
