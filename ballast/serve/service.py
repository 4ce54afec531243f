"""Service: policies behind Tinker's calls. Accepts each call once, makes them in order, and keeps their
answers.

    POST call --its turn by (model_id, seq_id)--> log --> OpenRun --> answer on disk <--retrieve_future
    kill --> run.resume=auto: the last checkpoint, of step k --> the log's calls after step k are made again

`policies` knows which model has which policy of the run, and `samplers` samples.
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
from ballast.serve.checkpoints import Checkpoints, oldest_step, path_of, state_of
from ballast.serve.log import Call, CallLog
from ballast.serve.policies import NEWEST, Policies, Policy
from ballast.serve.samplers import STOPS, Samplers
from ballast.serve.wire import Answer, RefusedError, json_answer
from workers.errors import ConfigError
from workers.model.checkpoint.checkpoint_folder import remove

POLL_SECONDS = 20.0  # that a request for an answer waits: clients give up after 45
TURN_SECONDS = 30.0  # that a call waits for the call before it
SILENT_SECONDS = 60.0  # without a heartbeat (one in 10 s), after which another session may take the policy
INITIAL = "initial"
BEGINNING = ("create_model", "load_weights")  # calls that may begin a model

Begin = Callable[[int], Future[Answer]]


class Service:
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
        self._numbers = dict[tuple[str, int], int]()
        self._next = dict[str, int]()
        self._pending = dict[str, asyncio.Future[Any]]()
        self.samplers = Samplers(run, self._policies, self._pending, stop)
        self.checkpoints = Checkpoints(run.folder / STATES)
        self._steps = run.steps
        self._moved = asyncio.Event()
        self._loads = dict[str, int]()  # by path: steps before its last load
        self._kinds = {
            "create_model": self._create,
            "forward_backward": self._pass,
            "optim_step": self._step,
            "save_weights": self._save,
            "load_weights": self._load,
            "save_weights_for_sampler": self._publish,
        }

    # --- start

    def restore(self) -> None:
        """Make the calls again that no checkpoint holds. Call in the event loop."""
        facts = list(self._log.facts())
        calls = list(self._log.calls())
        steps = self._run.steps
        last = max(
            (number for number, call in calls if steps and call.step == steps), default=0
        )
        has_policies = all(
            fact.get("adapter", "") in self._policies.by_adapter
            for fact in facts
            if fact["kind"] == "model"
        )
        if not has_policies or (steps and calls and not last):
            lacks = (
                f"serve/calls lacks step {steps}"
                if has_policies
                else "it had another model.lora.policies"
            )
            self._stop(
                ConfigError(f"run.name={self._run.folder.name}: {lacks}. Choose another.")
            )
            return
        for fact in facts:
            self._take(**fact)
        if (
            last and self._log.answer_of(last) is None
        ):  # killed between the checkpoint and the answer
            self._log.answer(last, json_answer(metrics={}))
        self.checkpoints.remove_deleted()
        if not self.checkpoints.is_complete(INITIAL):
            self._run.save(INITIAL, adapter=next(iter(self._policies.by_adapter)))
        self._resume(
            [numbered_call for numbered_call in calls if numbered_call[0] <= last], last
        )
        for number, call in calls:
            self._numbers[call.model_id, call.seq_id] = number
            self._next[call.model_id] = max(
                self._next.get(call.model_id, 0), call.seq_id + 1
            )
            self._steps = max(self._steps, call.step)
            policy = self._policies.of_model.get(call.model_id)
            # A checkpoint at the step of one model lacks gradients of the others since theirs.
            if number > last or (
                call.kind == "forward_backward" and policy and number > policy.since
            ):
                self._again(number, call)

    def _resume(self, calls: list[tuple[int, Call]], last: int) -> None:
        """Follow calls up to the checkpoint's, and send engines its weights, for samplers of weights before
        it.
        """
        step = 0
        for number, call in calls:
            policy = self._policies.of_model.get(call.model_id)
            step = max(step, call.step)
            if call.kind == "load_weights":
                self._loads[_content(call.kind, self._log.body(number))["path"]] = step
            if policy and call.kind in ("create_model", "optim_step", "load_weights"):
                policy.weights = 0 if call.kind == "create_model" else number
                policy.since = number
        for policy in self._policies.by_adapter.values():
            if policy.adapter and not policy.model:
                continue
            if policy.adapter:
                self._policies.send_weights(policy)
            old_published = policy.published
            policy.published = policy.weights
            for name, sampler in self.samplers.weights.items():
                if old_published <= last and sampler == (policy.model, old_published):
                    self.samplers.weights[name] = policy.model, policy.published

    def _again(self, number: int, call: Call) -> None:
        try:
            begin = self._kinds[call.kind](
                _content(call.kind, self._log.body(number)), True
            )
        except RefusedError as error:
            self._log.answer(number, wire.failure(error))
        else:
            self._start(number, begin)

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

    # --- calls in order

    async def submit(self, kind: str, body: bytes) -> dict[str, str]:
        """Accept a call once, after the call before it. Returns its future's name. Raises RefusedError."""
        content = _content(kind, body)
        fields = (
            {"model_id": content.model_id, "seq_id": content.seq_id}
            if kind == "forward_backward"
            else content
        )
        if kind in BEGINNING and wire.optional_text(content, "session_id"):
            model_id = _name(content)
            seq_id = 0
        else:
            model_id = wire.text(fields, "model_id")
            seq_id = wire.whole(fields, "seq_id", -1, 1, wire.LARGEST)
        await self._turn(model_id, seq_id)
        if (number := self._numbers.get((model_id, seq_id))) is None:
            number = self._accept(kind, content, body, model_id, seq_id)
        return {"request_id": f"call-{number}", "model_id": model_id}

    async def _turn(self, model_id: str, seq_id: int) -> None:
        if seq_id and model_id not in self._next:
            raise RefusedError(f"model_id={model_id!r:.80}: unknown. Create a model.", 404)
        try:
            async with asyncio.timeout(TURN_SECONDS):
                while seq_id > self._next.get(model_id, 0):
                    await self._moved.wait()
        except TimeoutError:
            missing, self._next[model_id] = self._next[model_id], seq_id + 1
            raise RefusedError(
                f"seq_id={seq_id}: call {missing} before it never came. Make both again."
            ) from None

    def _accept(
        self, kind: str, content: Any, body: bytes, model_id: str, seq_id: int
    ) -> int:
        if seq_id < self._next.get(model_id, 0):
            raise RefusedError(
                f"seq_id={seq_id}: it was refused, or its answer is no longer kept. Make a new call."
            )
        try:
            if seq_id and model_id != (now := self._policies.of_model[model_id].model):
                raise RefusedError(
                    f"model_id={model_id}: {now} has replaced it. Create a new one."
                )
            begin = self._kinds[kind](content, False)
        except RefusedError:  # it had its turn, also for a restarted server
            self._note(kind="refused", name=model_id, seq_id=seq_id)
            raise
        finally:
            if seq_id:
                self._next[model_id] = seq_id + 1
                self._moved.set()  # those who wait look again
                self._moved = asyncio.Event()
        step = self._steps + 1 if kind == "optim_step" else 0
        number = self._log.add(Call(kind, model_id, seq_id, step, time.time()), body)
        self._steps = max(self._steps, step)
        self._numbers[model_id, seq_id] = number
        self._start(number, begin)
        return number

    def _start(self, number: int, begin: Begin) -> None:
        name = f"call-{number}"
        self._pending[name] = asyncio.wrap_future(begin(number))
        self._pending[name].add_done_callback(lambda done: self._pending.pop(name))

    def _answer_when_done(
        self,
        number: int,
        future: Future[Any],
        make: Callable[[Any], Answer],
        *,
        step: bool = False,
    ) -> Any:
        """Return a future that is done when the answer is on disk. step: an error of it ends the server."""
        answered = Future[None]()

        def finish(done: Future[Any]) -> None:  # in the lane's thread, before its next work
            if done.cancelled():
                answered.cancel()
                return
            error = done.exception()
            if isinstance(error, STOPS) or (error and step):
                self._stop(error)
                return
            try:
                answer = wire.failure(error) if error else make(done.result())
            except Exception as error:
                answer = wire.failure(error)
            self._log.answer(number, answer)
            answered.set_result(None)

        future.add_done_callback(finish)
        return answered

    async def answer(self, name: str) -> Answer | None:
        """Return the answer of a future, or None if the client must ask again. Raises RefusedError."""
        if name in self._pending:
            waited = self._pending[name]
            await asyncio.wait({waited}, timeout=POLL_SECONDS)
            if not waited.done():
                return None
        if name.startswith("call-") and name.removeprefix("call-").isdecimal():
            answer = self._log.answer_of(int(name.removeprefix("call-")))
        else:
            answer = self.samplers.answers.pop(name, None)
        if answer is None:
            raise RefusedError(
                f"request_id={name!r:.80}: no answer is kept. Make the call again.", 410
            )
        return answer

    # --- kinds of calls: read and refuse at once, begin when it is in the log

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
        name = _name(request)
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

    def _create(self, request: dict[str, Any], again: bool) -> Begin:
        name, policy = self._claim(request, again)

        def begin(number: int) -> Future[Answer]:
            if policy.model:  # has left weights, moments and perhaps gradients
                self._run.load(INITIAL, optimizer=False, adapter=policy.adapter)
            self._note(
                kind="model",
                name=name,
                session=request["session_id"],
                adapter=policy.adapter,
            )
            policy.weights = 0
            answer = json_answer(model_id=name, type="create_model")
            return self._answer_when_done(number, self._send(policy), lambda _: answer)

        return begin

    def _pass(self, message: Any, again: bool) -> Begin:
        limits = {
            "vocabulary": self._run.vocabulary,
            "longest": self.config.max_model_tokens,
        }
        rows, loss = wire.read_pass(message, **limits)
        adapter = self._policies.of_model[message.model_id].adapter

        def make(passed: Any) -> Answer:
            metrics = {} if message.forward_only else {"loss:sum": passed.metrics["loss"]}
            return wire.pass_answer(passed.log_probs, metrics)

        def begin(number: int) -> Future[Answer]:
            batch = self._run.batch(rows)
            run = self._run
            if message.forward_only:
                return self._answer_when_done(
                    number, run.forward(batch, adapter=adapter), make
                )
            return self._answer_when_done(
                number, run.forward_backward(batch, loss, adapter=adapter), make
            )

        return begin

    def _step(self, request: dict[str, Any], again: bool) -> Begin:
        settings = wire.read_step(request)
        policy = self._policies.of_model[request["model_id"]]

        def make(metrics: dict[str, float]) -> Answer:
            if (
                self.config.run.checkpoint_every
                and self._run.steps % self.config.run.checkpoint_every == 0
            ):
                self._forget()
            return json_answer(metrics=metrics)

        def begin(number: int) -> Future[Answer]:
            policy.weights = number
            return self._answer_when_done(
                number, self._run.step(adapter=policy.adapter, **settings), make, step=True
            )

        return begin

    def _forget(self) -> None:
        """Forget calls before the step before the oldest checkpoint, and before the last one of their model,
        whose answers no client still asks for.
        """
        oldest = oldest_step(self._run.folder)
        calls = list(self._log.calls())
        first = next(
            (number for number, call in calls if call.step and call.step == oldest - 1), 0
        )
        steps = {call.model_id: number for number, call in calls if call.step}
        for number, call in calls:
            replaced = self._policies.of_model[call.model_id].model != call.model_id
            if number < first and (replaced or number < steps.get(call.model_id, 0)):
                self._log.forget(number)

    async def delete(self, model: str, kind: str, name: str) -> dict[str, Any]:
        """Delete a checkpoint, once. Raises RefusedError for another path, and for a state that a restart may
        load.
        """
        if (path := f"tinker://{model}/{kind}/{name}") not in self.checkpoints.deleted:
            state = (
                "" if path in self.checkpoints.samplers else self.checkpoints.state(path)
            )
            if self._loads.get(path, -1) >= oldest_step(self._run.folder):
                raise RefusedError(
                    f"path={path}: a restart may load it again. Delete it after more checkpoints."
                )
            self._note(kind="deleted", name=path)
            if state:
                await asyncio.to_thread(remove, self.checkpoints.states / state)
        return {}

    def _save(self, request: dict[str, Any], again: bool) -> Begin:
        path = path_of(request, "weights")
        adapter = self._policies.of_model[request["model_id"]].adapter
        state = state_of(path)
        exists = path in self.checkpoints.deleted or self.checkpoints.is_complete(state)
        if (exists or wire.flag(request, "overwrite")) and not again:
            raise RefusedError(f"path={path}: a name can be saved once. Choose another.")

        def begin(number: int) -> Future[Answer]:
            saved = _done() if exists else self._run.save(state, adapter=adapter)
            return self._answer_when_done(
                number, saved, lambda _: json_answer(path=path, type="save_weights")
            )

        return begin

    def _load(self, request: dict[str, Any], again: bool) -> Begin:
        path = wire.text(request, "path")
        session = wire.optional_text(request, "session_id")
        optimizer = wire.flag(request, "optimizer")
        state = self.checkpoints.state(path)
        model = wire.optional_text(request, "model_id")
        model, policy = (
            self._claim(request, again)
            if session
            else (model, self._policies.of_model[model])
        )

        def begin(number: int) -> Future[Answer]:
            if session:
                self._note(
                    kind="model", name=model, session=session, adapter=policy.adapter
                )
            policy.weights, self._loads[path] = number, self._steps
            loaded = self._run.load(state, optimizer=optimizer, adapter=policy.adapter)
            return self._answer_when_done(
                number,
                loaded,
                lambda _: json_answer(path=path, model_id=model, type="load_weights"),
            )

        return begin

    def _publish(self, request: dict[str, Any], again: bool) -> Begin:
        model = wire.text(request, "model_id")
        path = (
            path_of(request, "sampler_weights")
            if wire.optional_text(request, "path")
            else ""
        )
        policy = self._policies.of_model[model]
        kind = wire.optional_text(request, "kind")
        if kind not in ("", "snapshot", "inflight"):
            raise RefusedError(f"kind={kind!r:.40}: unknown. Choose snapshot or inflight.")
        if path in self.checkpoints.deleted and not again:
            raise RefusedError(f"path={path}: it was deleted. Choose another name.")

        def begin(number: int) -> Future[Answer]:
            sampler = f"{model}:sampler:{number}"
            sent = self._send(policy)
            weights = NEWEST if kind == "inflight" else policy.weights
            self._note(
                kind="sampler", name=sampler, model=model, weights=weights, path=path
            )
            answer = {
                "type": "save_weights_for_sampler",
                "path": path or None,
                "sampling_session_id": sampler,
            }
            return self._answer_when_done(number, sent, lambda _: json_answer(**answer))

        return begin

    def _send(self, policy: Policy) -> Future[Any]:
        """Send the trainer's weights to the engines, unless they have them."""
        if policy.published == policy.weights:
            return _done()
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


def _name(request: dict[str, Any]) -> str:
    """Name of a new model, as the SDK derives it."""
    session = wire.text(request, "session_id")
    number = wire.whole(request, "model_seq_id", -1, 0, wire.LARGEST)
    return f"{session}:train:{number}"


def _done() -> Future[Any]:
    done = Future[Any]()
    done.set_result(None)
    return done


def _content(kind: str, body: bytes) -> Any:
    return wire.read_message(body) if kind == "forward_backward" else wire.read_json(body)
