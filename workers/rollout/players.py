"""Players: how a sample comes about that is more than one turn.

EpisodePlayer    turn --> environment or tools, in a process of an EnvironmentPool --> turn ...
AgentPlayer      an agent's process, or one elsewhere by the front --HTTP--> Gateway --> turns of a Session
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from workers.agents.front import Takeover
from workers.agents.gateway import Access, Gateway
from workers.agents.processes import AgentPool, session_variables
from workers.agents.session import Session
from workers.batch.score import Score
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.image_inputs import png_bytes
from workers.engine.requests import SampleRequest
from workers.engine.session_record import Node, SessionRecord
from workers.episodes.conversation import Conversation
from workers.episodes.episode import Episode, play
from workers.episodes.parsing import TurnParser
from workers.errors import EpisodeError
from workers.image_parts import with_urls
from workers.model.vision.processor import load_placeholders
from workers.rendering import Renderer
from workers.rollout.engine_life import wait_while_alive
from workers.rollout.results import Sample, finish_sample, finish_session
from workers.rollout.turn_sampler import TurnSampler, load_tokenizer
from workers.user_code.environments import EnvironmentPool
from workers.user_code.pictures import Pictures

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


# For a front that has passed the agent's reward on. One that was lost since then waits for the reward again.
END_SECONDS = 30.0


class Player(Protocol):
    async def play(self, request: SampleRequest, sampling: SamplingConfig) -> Sample: ...


class EpisodePlayer:
    def __init__(
        self,
        config: RolloutConfig,
        sampler: TurnSampler,
        environments: EnvironmentPool,
        renderer: Renderer,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._environments = environments
        self._renderer = renderer

    async def play(self, request: SampleRequest, sampling: SamplingConfig) -> Sample:
        """Let the policy and an environment take turns."""
        assert request.start is not None
        start = request.start
        episode = Episode(
            request.prompt_ids,
            request.images,
            max_turns=self._config.max_turns,
            max_tokens=self._config.response_limit(sampling),
        )
        images = [placed.image for placed in request.images]
        conversation = Conversation(
            self._renderer,
            start.prompt,
            start.options,
            self._turn_parser(request),
            rewrites=self._config.history == "template",
            images=images,
            pixels=start.image_pixels,
        )
        record = start.record
        if start.image_key:
            record = record | {
                start.image_key: Pictures([await png_bytes(image) for image in images])
            }
        environment = self._environments.episode(start.options.get("tools", ()))
        sample = partial(self._sampler.sample_turn, request, sampling)
        reason, score = await play(episode, sample, environment, conversation, record)
        return finish_sample(request, episode, reason, score, conversation)

    def _turn_parser(self, request: SampleRequest) -> TurnParser | None:
        """Return a parser of turns as chat messages, None for a prompt that is a text."""
        assert request.start is not None
        if not isinstance(request.start.prompt, list):
            return None
        names = (self._config.tool_parser, self._config.reasoning_parser)
        return TurnParser(self._renderer.tokenizer, *names, request.start.options)


def load_renderer(model: ModelConfig) -> Renderer:
    renderer = Renderer.with_template(load_tokenizer(model.path), model.chat_template)
    # The driver has compared. Here images of prompts are references.
    return replace(renderer, placeholders=load_placeholders(model.path, compared=0))


class AgentPlayer:
    def __init__(
        self,
        engine: "AsyncLLM",
        config: RolloutConfig,
        gateway: Gateway,
        agents: AgentPool | None,
        front: Any,
        *,
        needs_reward: bool,
    ) -> None:
        """agents: None with a front. front: actor of SessionFront, for agents elsewhere. needs_reward:
        whether an agent must give the reward, because nothing else does.
        """
        self._engine = engine
        self._config = config
        self._gateway = gateway
        self._agents = agents
        self._front = front
        self._needs_reward = needs_reward
        self._sessions: dict[int, Session] = {}  # open ones, by attempt

    async def play(self, request: SampleRequest, sampling: SamplingConfig) -> Sample:
        """Let the agent ask the policy. Raises EpisodeError if it received no answer."""
        from vllm.v1.engine.exceptions import EngineDeadError

        assert request.start is not None
        start = request.start
        name = request.session
        if start.image_key:
            images = [
                await png_bytes(placed_image.image) for placed_image in request.images
            ]
            start = replace(
                start,
                record=with_urls(start.record, start.prompt_key, start.image_key, images),
            )
            request = replace(request, start=start)
        takeover = Takeover(request.begun or SessionRecord())
        if self._front is not None:
            takeover = await self._call_front("offer", name, start.record, takeover.record)
        session = Session(
            name,
            max_turns=self._config.max_turns,
            record=takeover.record,
            goes_on=takeover.goes_on,
        )
        self._sessions[request.attempt] = session
        ended = asyncio.Event()
        access = self._gateway.open(
            session,
            sampling,
            request.seed,
            start.options,
            on_turns=partial(self._send_turns, session)
            if self._front is not None
            else None,
            on_end=ended.set,
            priority=request.priority,
            image_pixels=start.image_pixels,
        )
        score = None
        failure = ""
        try:
            if not takeover.ended:
                score = await wait_while_alive(
                    self._engine, self._run_agent(request, access, ended)
                )
        except EpisodeError as error:
            failure = str(error)
            # An engine that is dying takes agents with it.
            await wait_while_alive(self._engine, self._engine.get_weight_version())
        finally:
            del self._sessions[request.attempt]
            await self._gateway.close(session)
        if self._engine.errored:
            raise EngineDeadError()
        if not session.kept:
            raise EpisodeError(failure or "the agent received no answer of the policy")
        return finish_session(
            request, session, score, failure, needs_reward=self._needs_reward
        )

    def records(self) -> dict[int, SessionRecord]:
        """Return the open sessions, by attempt."""
        return {attempt: session.snapshot() for attempt, session in self._sessions.items()}

    async def _run_agent(
        self, request: SampleRequest, access: Access, ended: asyncio.Event
    ) -> Score | None:
        """Return the reward that the agent gives, if any. ended: it has posted one. Raises EpisodeError."""
        assert request.start is not None
        if self._agents is not None:
            variables = session_variables(access.base_url, access.session_url, access.key)
            return await self._agents.run(request.start.record, variables)
        limit_s = self._config.agent_timeout_s
        playing = self._call_front("play", request.session, access.session_url, access.key)
        try:
            await asyncio.wait_for(_wait_for_end(playing, ended), limit_s)
        except TimeoutError:
            raise EpisodeError(
                f"took more than rollout.agent_timeout_s={limit_s:g} s"
            ) from None
        return None  # the gateway has told the session

    async def _send_turns(self, session: Session, nodes: Sequence[Node]) -> None:
        """Send new turns, or all if the front was restarted and lacks the earlier ones."""
        if not await self._call_front(
            "turn", session.name, session.snapshot(nodes), session.known
        ):
            await self._call_front("turn", session.name, session.snapshot(), session.known)

    async def _call_front(self, method: str, *arguments: Any) -> Any:
        from ray.exceptions import RayTaskError

        try:
            return await getattr(self._front, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None  # without the front's traceback


async def _wait_for_end(playing: Awaitable[None], ended: asyncio.Event) -> None:
    """Wait until the front says that a session has ended, or END_SECONDS after its gateway heard so."""
    front_task = asyncio.ensure_future(playing)
    gateway_task = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({front_task, gateway_task}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({front_task}, timeout=END_SECONDS)
        if front_task.done():
            front_task.result()
    finally:
        front_task.cancel()
        gateway_task.cancel()
