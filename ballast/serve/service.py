"""Service: policies behind Tinker's calls. Accepts each call once, makes them in order, and keeps their
answers.

    POST call --its turn by (model_id, seq_id)--> log --> OpenRun --> answer on disk <--retrieve_future
    kill --> run.resume=auto: the last checkpoint, of step k --> the log's calls after step k are made again

`models` knows which model has which policy of the run, and `samplers` samples.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ballast.loop.open_run import OpenRun
from ballast.serve import wire
from ballast.serve.checkpoints import oldest_step, path_of, state_of
from ballast.serve.log import Call, CallLog
from ballast.serve.models import Models, completed, model_name
from ballast.serve.policies import NEWEST
from ballast.serve.samplers import STOPS
from ballast.serve.wire import Answer, RefusedError, json_answer
from workers.errors import ConfigError
from workers.model.checkpoint.checkpoint_folder import remove

POLL_SECONDS = 20.0  # that a request for an answer waits: clients give up after 45
TURN_SECONDS = 30.0  # that a call waits for the call before it
INITIAL = "initial"
BEGINNING = ("create_model", "load_weights")  # calls that may begin a model

Begin = Callable[[int], Future[Answer]]


class Service(Models):
    """Accept calls, and make them in order. See `Models` for the arguments."""

    def __init__(
        self, run: OpenRun, log: CallLog, stop: Callable[[BaseException], None]
    ) -> None:
        super().__init__(run, log, stop)
        self._numbers = dict[tuple[str, int], int]()
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
        # Killed between the checkpoint and the answer.
        if last and self._log.answer_of(last) is None:
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
            model_id = model_name(content)
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
            saved = completed() if exists else self._run.save(state, adapter=adapter)
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


def _content(kind: str, body: bytes) -> Any:
    return wire.read_message(body) if kind == "forward_backward" else wire.read_json(body)
