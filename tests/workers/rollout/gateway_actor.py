"""A rollout actor with a gateway, for tests: opens sessions, and tells what its engine sampled for them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from tests.workers.rollout.probed_actor import ProbedActor
from workers.agents.gateway import Access, Gateway
from workers.agents.session import Session
from workers.config.roles import SamplingConfig
from workers.engine.session_record import Node, SessionRecord


class GatewayActor(ProbedActor):
    async def serve(self) -> str:
        """Start the gateway, and keep what the engine samples from now on."""
        self.gateway = Gateway(self.engine, self.model, self.config)
        self.sessions: dict[str, Session] = {}
        self.sampled: dict[
            str, list[list[int]]
        ] = {}  # by session, from the engine's own outputs
        self.heard: list[tuple[int, bool]] = []
        generate = self.engine.generate

        async def kept(
            prompt: Any, parameters: Any, name: str, **options: Any
        ) -> AsyncIterator[Any]:
            ids: dict[int, list[int]] = {}
            async for output in generate(prompt, parameters, name, **options):
                for each in output.outputs:
                    ids.setdefault(each.index, []).extend(each.token_ids)
                    if each.finish_reason in ("stop", "length"):
                        self.sampled.setdefault(name.partition("/")[0], []).append(
                            ids[each.index]
                        )
                yield output

        self.engine.generate = kept  # type: ignore[method-assign, assignment]
        await self.gateway.start()
        self.tasks = len(asyncio.all_tasks())
        return self.gateway.url

    async def open(
        self,
        name: str,
        *,
        max_turns: int = 100,
        record: SessionRecord | None = None,
        options: dict[str, Any] | None = None,
        seed: int = 7,
        **sampling: Any,
    ) -> Access:
        session = self.sessions[name] = Session(name, max_turns=max_turns, record=record)
        given = SamplingConfig(**{"max_new_tokens": 60} | sampling)

        async def on_turns(nodes: Sequence[Node]) -> None:
            self.heard += [(node.number, node.received) for node in nodes]

        return self.gateway.open(session, given, seed, options or {}, on_turns=on_turns)

    async def close(self, name: str) -> None:
        await self.gateway.close(self.sessions[name])

    async def nodes(self, name: str) -> list[tuple[Node, np.ndarray]]:
        """Return the session's turns, each with its prompt's ids."""
        session = self.sessions[name]
        return [
            (node, session.ids(node)[: -len(node.response.ids)]) for node in session.nodes
        ]

    async def told(self, name: str) -> Any:
        session = self.sessions[name]
        return {
            "kept": len(session.kept),
            "rows": session.rows(),
            "told": session.describe_turns(),
            "value": session.value,
        }

    async def record(self, name: str) -> SessionRecord:
        return self.sessions[name].snapshot()

    async def of_engine(self, name: str) -> list[list[int]]:
        return self.sampled.get(name, [])

    async def count_abandoned(self, name: str) -> int:
        """Return how many requests of the session the gateway knows to be without their client."""
        return sum(exchange.abandoned for exchange in self.gateway._open[name].exchanges)

    async def count_unfinished(self) -> int:
        """Return the number of requests that the engine works on."""
        return len(self.engine.output_processor.request_states)

    async def left(self) -> tuple[int, int]:
        """Return the engine's unfinished requests, and tasks beyond those at the start."""
        await asyncio.sleep(0.2)
        return await self.count_unfinished(), len(asyncio.all_tasks()) - self.tasks
