"""A VllmEngineActor that keeps what its engine returned, and opens sessions without an agent. Not the
driver's.
"""

from dataclasses import dataclass, field
from typing import Any

from workers.agents.session import Session
from workers.engine.session_record import SessionRecord
from workers.rollout.engine_actor import VllmEngineActor


@dataclass
class Sampled:
    """An answer of the engine as `AsyncLLM.generate` returned it. finished: why it ended, empty if it was
    stopped.
    """

    prompt: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: str = ""

    def take(self, output: Any, delta: bool) -> None:
        found = getattr(output.logprobs, "logprobs", None)
        if found is None:
            found = [
                step[token].logprob
                for step, token in zip(output.logprobs, output.token_ids, strict=True)
            ]
        if not delta:
            self.ids, self.log_probs = [], []
        self.ids += output.token_ids
        self.log_probs += found
        self.finished = output.finish_reason or ""


class RecordedActor(VllmEngineActor):
    def _build(self) -> Any:
        engine = super()._build()
        self.sampled: list[Sampled] = []
        self.opened: dict[str, Session] = {}
        generate = engine.generate

        async def recorded(prompt: Any, parameters: Any, name: str, **named: Any) -> Any:
            answers: dict[int, Sampled] = {}
            async for output in generate(prompt, parameters, name, **named):
                for each in output.outputs:
                    if each.index not in answers:
                        answers[each.index] = Sampled(tuple(output.prompt_token_ids))
                        self.sampled.append(answers[each.index])
                    answers[each.index].take(each, parameters.output_kind.name == "DELTA")
                yield output

        engine.generate = recorded  # type: ignore[method-assign]
        return engine

    async def recorded(self) -> list[Sampled]:
        return self.sampled

    async def open_session(
        self,
        name: str,
        options: dict[str, Any] | None = None,
        record: SessionRecord | None = None,
    ) -> tuple[str, str]:
        """Let somebody play a session. Returns its URL and its key."""
        self.opened[name] = session = Session(
            name, max_turns=self.config.max_turns, record=record
        )
        access = self._gateway.open(
            session, self.config.sampling, len(self.opened), options or {}
        )
        return access.session_url, access.key

    async def session_record(self, name: str) -> SessionRecord:
        return self.opened[name].snapshot()

    async def session_images(self, name: str) -> list[Any]:
        """Return the images of a session's rows."""
        return self.opened[name].row_images

    async def close_session(self, name: str) -> tuple[list[Any], list[dict[str, Any]]]:
        """Return a session's rows and turns."""
        session = self.opened[name]
        await self._gateway.close(session)
        return session.rows() if session.kept else [], session.describe_turns()
