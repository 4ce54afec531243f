"""Models: sessions, models and samplers of the server, by the facts in its log.

fact --_note--> log --_take--> policies of models, weights of samplers, deleted checkpoints
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ballast.loop.open_run import STATES, OpenRun
from ballast.serve import wire
from ballast.serve.checkpoints import Checkpoints
from ballast.serve.log import CallLog
from ballast.serve.policies import Policies, Policy
from ballast.serve.samplers import Samplers
from ballast.serve.wire import RefusedError

SILENT_SECONDS = 60.0
"""Without a heartbeat (one in 10 s), after which another session may take the policy."""


class Models:
    """The part of a service that knows its sessions, models and samplers."""

    def __init__(
        self, run: OpenRun, log: CallLog, stop: Callable[[BaseException], None]
    ) -> None:
        """stop: ends the server, which after an error of `STOPS` may start again."""
        self._run = run
        self._log = log
        self._stop = stop
        self.config = run.config
        path = Path(self.config.model.path)
        self.lora = {
            "is_lora": bool(rank := self.config.model.lora.rank),
            "lora_rank": rank or None,
        }
        self.base_model = str(path.resolve()) if path.is_dir() else self.config.model.path
        self._sessions = dict[str, float]()
        self._policies = Policies(run)
        self._next = dict[str, int]()  # by model: number of its next call
        self._pending = dict[str, asyncio.Future[Any]]()
        self.samplers = Samplers(run, self._policies, self._pending, stop)
        self.checkpoints = Checkpoints(run.folder / STATES)

    def _note(self, **fact: Any) -> None:
        fact["at"] = time.time()
        self._log.note(**fact)
        self._take(**fact)

    def _take(self, kind: str, name: str, at: float = 0.0, **values: Any) -> None:
        if kind == "session":
            self._sessions[name] = time.monotonic()
        elif kind == "model":
            policy = self._policies.by_adapter[values.get("adapter", "")]
            self._policies.of_model[name] = policy
            policy.model = name
            policy.owner = values["session"]
            self._log.last_calls.setdefault(name, at)
            self._next.setdefault(name, 1)
        elif kind == "sampler":
            self.samplers.weights[name] = values.get("model", ""), values["weights"]
            if values["path"] and values["path"] not in self.checkpoints.deleted:
                self.checkpoints.samplers[values["path"]] = *self.samplers.weights[name], at
        elif kind == "refused":
            self._next |= {name: values["seq_id"] + 1} if name in self._next else {}
        elif kind == "deleted":
            self.checkpoints.deleted.add(name)
            self.checkpoints.samplers.pop(name, None)
        else:
            self._policies.by_adapter[name].published = values["weights"]

    def _claim(self, request: dict[str, Any], again: bool) -> tuple[str, Policy]:
        """Return the name of a new model, and its policy. Raises RefusedError while clients train all of
        them.
        """
        session = wire.text(request, "session_id")
        rank = self.config.model.lora.rank
        self.check_base(wire.optional_text(request, "base_model") or self.base_model)
        lora = (
            {}
            if request.get("lora_config") is None
            else wire.mapping(request, "lora_config")
        )
        requested_rank = (
            None if lora.get("rank") is None else wire.whole(lora, "rank", 0, 1, 2**20)
        )
        if rank and requested_rank not in (None, rank):
            raise RefusedError(
                f"rank={requested_rank!r:.20}: the server trains model.lora.rank={rank}. Ask for it."
            )
        self.heard(session)
        name = model_name(request)
        if again and name in self._policies.of_model:
            return name, self._policies.of_model[name]
        free = [
            policy
            for policy in self._policies.by_adapter.values()
            if again or self._may_take(session, policy)
        ]
        if not free:
            names = ", ".join(policy.model for policy in self._policies.by_adapter.values())
            raise RefusedError(
                f"create_model: {names} in training. Wait until a client has ended."
            )
        return name, min(free, key=lambda policy: policy.model != "")

    def _may_take(self, session: str, policy: Policy) -> bool:
        silent = time.monotonic() - self._sessions.get(policy.owner, -SILENT_SECONDS)
        return silent >= SILENT_SECONDS or (
            policy is self._policies.base and session == policy.owner
        )

    def _send(self, policy: Policy) -> Future[Any]:
        """Send the trainer's weights to the engines, unless they have them."""
        if policy.published == policy.weights:
            return completed()
        sent = self._policies.send_weights(policy)
        self._note(kind="published", name=policy.adapter, weights=policy.weights)
        return sent

    # --- samples

    def create_sampler(self, request: dict[str, Any]) -> str:
        """Return the name of a sampler of the base model or of a model's newest weights. Raises
        RefusedError.
        """
        path = wire.optional_text(request, "model_path")
        name = f"{wire.text(request, 'session_id')}:sampler:{uuid.uuid4().hex}"
        if not path:
            self.check_base(wire.text(request, "base_model"))
        elif path not in self.checkpoints.samplers:
            raise RefusedError(
                f"model_path={path!r:.200}: no sampler weights. Save weights for a sampler."
            )
        model, weights = self.checkpoints.samplers[path][:2] if path else ("", 0)
        self._note(kind="sampler", name=name, model=model, weights=weights, path="")
        return name

    def check_base(self, name: str) -> None:
        if name not in (self.base_model, self.config.model.path):
            raise RefusedError(
                f"base_model={name!r:.200}: the server has {self.config.model.path}. Ask for it."
            )

    # --- sessions

    def create_session(self) -> str:
        name = uuid.uuid4().hex
        self._note(kind="session", name=name)
        return name

    def training_runs(self) -> list[dict[str, Any]]:
        about = self.lora | {"base_model": self.config.model.path}
        return [about | run for run in self._log.models()]

    def heard(self, session: str) -> None:
        """Note a heartbeat. Raises RefusedError for an unknown session."""
        if session not in self._sessions:
            raise RefusedError(
                f"session_id={session!r:.80}: unknown. Create a session.", 404
            )
        self._sessions[session] = time.monotonic()

    def end_session(self, session: str) -> None:
        """Let another session take the models at once."""
        self._sessions.pop(session, None)


def model_name(request: dict[str, Any]) -> str:
    """Name of a new model, as the SDK derives it."""
    session = wire.text(request, "session_id")
    number = wire.whole(request, "model_seq_id", -1, 0, wire.LARGEST)
    return f"{session}:train:{number}"


def completed() -> Future[Any]:
    done = Future[Any]()
    done.set_result(None)
    return done
