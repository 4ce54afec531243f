"""VllmEngineActor: the actor around one vLLM engine.

    requests --generate--> [vLLM: scheduler, model, sampler] --every 0.25 s--> DataProto, SampleResults
                               turn | ^ observation              with an environment
                                    v |
                            [EnvironmentPool: a process an episode]   or an agent's process --HTTP--> Gateway
    payload --update_weights--> pause, load, resume (requests in flight continue)

On GPUs `AsyncLLM` runs its model in separate processes. On a CPU the model runs in a thread of this process.
"""

import asyncio
import itertools
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from workers.agents.front import Taken
from workers.agents.gateway import Access, Gateway
from workers.agents.processes import AgentPool, session_variables
from workers.agents.session import Session
from workers.batch.dataproto import DataProto
from workers.batch.score import Score
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.adapters import EngineAdapters
from workers.engine.image_inputs import ImageInputs, png_bytes
from workers.engine.kept_caches import KeptCaches
from workers.engine.placement import check_placement
from workers.engine.requests import (
    ERROR,
    LENGTH,
    Response,
    SampleRequest,
    SampleResult,
    WeightLoad,
    turn_seed,
)
from workers.engine.session_record import Node, SessionRecord
from workers.engine.vllm_interface import (
    as_response,
    build_engine,
    check_prompt,
    engine_arguments,
    hold_requests,
    prepare_environment,
    sampling_parameters,
    unfinished_responses,
    unfinished_tokens,
)
from workers.engine.weights.weight_delta import Payload, WeightFile
from workers.engine.weights.weight_transfer import private_file
from workers.episodes.conversation import Conversation
from workers.episodes.episode import Episode, play
from workers.episodes.parsing import TurnParser
from workers.episodes.thinking import Thinking
from workers.errors import EpisodeError, LostError, RolloutError
from workers.model.vision.processor import load_placeholders
from workers.network import LOOPBACK, use_rays_interface
from workers.rendering import Renderer, with_urls
from workers.rollout.results import Row, Sample, finished, flush, played
from workers.user_code.environments import EnvironmentPool
from workers.user_code.pictures import Pictures
from workers.user_code.tools import ToolPool

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

FLUSH_SECONDS = 0.25
STOP_SECONDS = 10.0
RECOMPUTE_SECONDS = 0.02  # between looks at requests whose keys and values are computed again
ALIVE_SECONDS = 1.0  # between checks that a silent engine is alive
T = TypeVar("T")


class VllmEngineActor:
    """One engine. Wrapped by `ray.remote`. Its methods are coroutines or async generators."""

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        index: int,
        placement: str,
        max_model_tokens: int,
        seed: int,
        environment: bytes = b"",
        environment_timeout_s: float = 0.0,
        front: Any = None,
        needs_reward: bool = False,
    ) -> None:
        """placement: of `workers.engine.placement.BACKENDS`. environment: of EnvironmentPool, ToolPool or
        AgentPool.

        front: actor of SessionFront, for agents elsewhere. needs_reward: whether an agent must give the
        reward, because nothing else does.
        """
        prepare_environment(rollout, placement)
        use_rays_interface()  # between an engine's GPUs, and for new weights from the policy's node
        self.model = model
        self.config = rollout
        self.index = index
        self._placement = placement
        self._max_model_tokens = max_model_tokens
        self._seed = seed
        self._front = front
        self._engine: AsyncLLM | None = None
        self._numbers = itertools.count()
        self._under_way: dict[str, SampleRequest] = {}  # by vLLM's name of the request
        self._environments: EnvironmentPool | None = None
        self._gateway: Gateway | None = None
        self._sessions: dict[int, Session] = {}  # open ones, by their requests' seeds
        self._needs_reward = needs_reward
        if rollout.runs_agent and front is None:
            self._environments = self._agents = AgentPool(
                rollout.agent_command or environment,
                rollout.agent_timeout_s,
                memory_gib=rollout.agent_memory_gib,
                processes=rollout.agent_processes,
            )
        elif rollout.tools:
            limits = {"max_calls": rollout.max_tool_calls, "max_characters": rollout.max_tool_characters}
            self._environments = ToolPool(environment, environment_timeout_s, **limits)
        elif environment:
            self._environments = EnvironmentPool(environment, environment_timeout_s)
        self._renderer: Renderer | None = None
        self._caches = KeptCaches(rollout)
        self._version, self._update_began, self._recomputes = 0, 0.0, False
        self._loads: list[WeightLoad] = []
        self._weights = WeightFile()  # empty unless rollout.weight_sync=delta
        self._recomputing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"rollout {self.index}"

    @property
    def engine(self) -> "AsyncLLM":
        """Raises RolloutError before `start` and after `stop`."""
        if self._engine is None:
            raise RolloutError(f"rollout replica {self.index} has no engine. Call start first.")
        return self._engine

    async def start(self) -> None:
        """Build the engine, with the weights of `model.path` as version 0. Takes 15 to 60 s.

        Raises ConfigError for an impossible placement, and vLLM's errors.
        """
        import torch

        check_placement(self._placement, has_gpu=torch.cuda.is_available())
        # In a thread, so that `stop` and `pids` answer while the engine loads.
        engine = await asyncio.to_thread(self._build)
        self._images = ImageInputs(engine)
        self._adapters = EngineAdapters(engine)
        if self.config.runs_agent:
            import ray

            self._gateway = Gateway(engine, self.model, self.config, self._caches, self._images)
            await self._gateway.start(LOOPBACK if self._front is None else ray.util.get_node_ip_address())
        elif self._environments is not None:
            self._renderer = await asyncio.to_thread(self._load_renderer)
        if self.config.sampling.max_thinking_tokens:
            await asyncio.to_thread(lambda: self._thinking.closing(self.config.sampling))
        await engine.update_weight_version("0")
        self._engine = engine

    def _build(self) -> "AsyncLLM":
        arguments = engine_arguments(
            self.model,
            self.config,
            placement=self._placement,
            max_model_tokens=self._max_model_tokens,
            seed=self._seed + self.index,
        )
        return build_engine(arguments)

    def _load_renderer(self) -> Renderer:
        renderer = Renderer.with_template(self._load_tokenizer(), self.model.chat_template)
        # The driver has compared. Here images of prompts are references.
        return replace(renderer, placeholders=load_placeholders(self.model.path, compared=0))

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model.path, trust_remote_code=False)

    @cached_property
    def _thinking(self) -> Thinking:
        return Thinking(self._load_tokenizer(), self.config.reasoning_parser)

    # --- samples

    async def generate(
        self, requests: list[SampleRequest], sampling: SamplingConfig
    ) -> AsyncIterator[DataProto | list[SampleResult]]:
        """Yield a DataProto of `Episode.rows` and then the list of their results, repeatedly, as samples
        finish.

        The block comes first, so that it exists when a caller gets the list. Failed samples have no row. If
        the engine dies, RolloutError ends the stream.
        """
        pending = {asyncio.create_task(self._sample(request, sampling)) for request in requests}
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                )
                if done:
                    block, results = flush(
                        [task.result() for task in done], self.engine.model_config.get_num_experts()
                    )
                    yield block
                    yield results
        finally:
            for task in pending:
                task.cancel()

    async def _sample(self, request: SampleRequest, sampling: SamplingConfig) -> Sample:
        from vllm.v1.engine.exceptions import EngineDeadError

        start = time.time()
        engine = self.engine
        began = self._version
        rows: list[Row] = []
        try:
            vocabulary = engine.model_config.get_vocab_size()
            check_prompt(request.prompt_ids, vocab_size=vocabulary, max_model_tokens=self._max_model_tokens)
            async with asyncio.timeout(request.timeout_s):
                result, rows = await self._play(request, sampling)
        except EngineDeadError as error:
            raise RolloutError(
                f"the engine of rollout replica {self.index} died: {_reason(error)}"
            ) from error
        except Exception as error:  # other errors of vLLM concern this request alone
            reason = f"{type(error).__name__}: {error.__cause__ or error}"
            if isinstance(error, TimeoutError) and request.timeout_s:
                reason = f"it took more than {request.timeout_s:g} s"
            tokens = len(request.prompt_ids)
            result = SampleResult(
                request.uid, request.sample, tokens, 0, ERROR, weight_version=-1, error=reason
            )
        finally:
            self._caches.end(request.seed)
        if (
            self._caches.oldest
        ):  # the weights at the start may have computed keys and values that all tokens read
            result = replace(result, weight_version=min(result.weight_version, began))
        return replace(result, replica=self.index, start=start, seconds=time.time() - start), rows

    async def _play(self, request: SampleRequest, sampling: SamplingConfig) -> Sample:
        if self._gateway is not None and request.start is not None:  # not a question to a judge
            return await self._play_session(request, sampling, self._gateway)
        limit = self.config.response_limit(sampling) if request.start else sampling.max_new_tokens
        limits = {"max_turns": self.config.max_turns, "max_tokens": limit}
        episode = Episode(request.prompt_ids, request.images, **limits)
        sample = partial(self._turn, request, sampling)
        if request.start is None:
            turn = await sample(episode)
            episode.add(turn)
            return finished(request, episode, turn.finish_reason)
        assert self._environments is not None and self._renderer is not None
        start = request.start
        parser = None
        if isinstance(start.prompt, list):
            names = self.config.tool_parser, self.config.reasoning_parser
            parser = TurnParser(self._renderer.tokenizer, *names, start.options)
        rewrites = self.config.history == "template"
        images = [placed.image for placed in request.images]
        record = start.record
        of_record = partial(
            Conversation, self._renderer, start.prompt, start.options, parser, rewrites=rewrites
        )
        conversation = of_record(images=images, pixels=start.image_pixels)
        if start.image_key:
            record = record | {start.image_key: Pictures([await png_bytes(image) for image in images])}
        environment = self._environments.episode(start.options.get("tools", ()))
        reason, score = await play(episode, sample, environment, conversation, record)
        return finished(request, episode, reason, score, conversation)

    async def _play_session(
        self, request: SampleRequest, sampling: SamplingConfig, gateway: Gateway
    ) -> Sample:
        """Let the agent ask the policy. Raises EpisodeError if it received no answer."""
        from vllm.v1.engine.exceptions import EngineDeadError

        assert request.start is not None
        start = request.start
        name = request.session
        if start.image_key:
            images = [await png_bytes(placed_image.image) for placed_image in request.images]
            start = replace(start, record=with_urls(start.record, start.prompt_key, start.image_key, images))
            request = replace(request, start=start)
        takeover = Taken(request.begun or SessionRecord())
        if self._front is not None:
            takeover = await self._at_front("offer", name, start.record, takeover.record)
        session = Session(
            name, max_turns=self.config.max_turns, record=takeover.record, goes_on=takeover.goes_on
        )
        self._sessions[request.seed] = session
        on_turns = partial(self._tell_front, session) if self._front is not None else None
        pixels = {"image_pixels": start.image_pixels}
        access = gateway.open(
            session,
            sampling,
            request.seed,
            start.options,
            on_turns=on_turns,
            priority=request.priority,
            **pixels,
        )
        score, failure = None, ""
        try:
            if not takeover.ended:
                score = await self._while_alive(self._ask_agent(request, access))
        except EpisodeError as error:
            failure = str(error)
            await self._while_alive(self.weight_version())  # an engine that is dying takes agents with it
        finally:
            del self._sessions[request.seed]
            await gateway.close(session)
        if self.engine.errored:
            raise EngineDeadError()
        if not session.kept:
            raise EpisodeError(failure or "the agent received no answer of the policy")
        return played(request, session, score, failure, needs_reward=self._needs_reward)

    async def _ask_agent(self, request: SampleRequest, access: Access) -> Score | None:
        """Return the reward that the agent gives, if any. Raises EpisodeError."""
        assert request.start is not None
        if self._front is None:
            variables = session_variables(access.base_url, access.session_url, access.key)
            return await self._agents.run(request.start.record, variables)
        limit_s = self.config.agent_timeout_s
        try:
            playing = self._at_front("play", request.session, access.session_url, access.key)
            await asyncio.wait_for(playing, limit_s)
        except TimeoutError:
            raise EpisodeError(f"took more than rollout.agent_timeout_s={limit_s:g} s") from None
        return None  # the gateway has told the session

    async def _tell_front(self, session: Session, nodes: Sequence[Node]) -> None:
        """Send new turns, or all if the front was restarted and lacks the earlier ones."""
        if not await self._at_front("turn", session.name, session.snapshot(nodes), session.known):
            await self._at_front("turn", session.name, session.snapshot(), session.known)

    async def _at_front(self, method: str, *arguments: Any) -> Any:
        from ray.exceptions import RayTaskError

        try:
            return await getattr(self._front, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None  # without the front's traceback

    async def _while_alive(self, call: Awaitable[T]) -> T:
        """Wait for the call. Raises EngineDeadError if the engine dies meanwhile."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        engine = self.engine
        try:
            while not (await asyncio.wait({task}, timeout=ALIVE_SECONDS))[0]:
                if engine.errored:  # a process that died in a collective never answers
                    raise EngineDeadError()
            return await task
        finally:
            task.cancel()

    async def _turn(self, request: SampleRequest, sampling: SamplingConfig, episode: Episode) -> Response:
        """Sample a turn. With a thinking budget in two requests, unless it ends within the budget."""
        limit = min(sampling.max_new_tokens, episode.room)
        budget = min(limit, sampling.max_thinking_tokens or limit)
        turn = await self._rest(request, sampling, episode, request.begun, budget)
        if turn.finish_reason != LENGTH or budget == limit:
            return turn
        is_open = self._thinking.is_open(episode.ids, turn.ids)
        partial_response = self._thinking.closing(sampling).after(turn) if is_open else turn
        if len(partial_response.ids) >= limit:  # no room for an answer
            return turn
        full_turn = await self._rest(request, sampling, episode, partial_response, limit)
        full_turn = replace(full_turn, read_tokens=turn.read_tokens, cached_tokens=turn.cached_tokens)
        return full_turn if is_open else self._thinking.stopped(full_turn, len(turn.ids), sampling.stop)

    async def _rest(
        self,
        request: SampleRequest,
        sampling: SamplingConfig,
        episode: Episode,
        partial_response: Response | None,
        limit: int,
    ) -> Response:
        """Sample the rest of a turn, of `limit` tokens at most, after what was sampled of it before."""
        ids = episode.ids
        sampled_tokens = 0
        if partial_response is not None:
            ids = np.concatenate([ids, partial_response.ids])
            sampled_tokens = len(partial_response.ids)
        name = f"{request.uid}/{request.sample}/{next(self._numbers)}"
        minimum = min(limit, sampling.min_new_tokens) - sampled_tokens
        changed = replace(sampling, max_new_tokens=limit - sampled_tokens, min_new_tokens=max(0, minimum))
        parameters = sampling_parameters(
            changed, turn_seed(turn_seed(request.seed, len(episode.turns)), sampled_tokens)
        )
        if sampling.may_continue:
            self._under_way[name] = request
        try:
            with self._caches.request(request.seed) as salt:
                prompt = await self._images.prompt(ids, episode.images, salt)
                adapters = self._adapters.of(request.adapter)
                outputs = self.engine.generate(
                    prompt, parameters, name, lora_request=adapters, priority=request.priority
                )
                (output,) = [output async for output in outputs]
        finally:
            self._under_way.pop(name, None)
        response = as_response(output).after(partial_response)
        if request.adapter:  # vLLM knows the version that was published last, of any policy
            response = replace(response, versions=np.full_like(response.versions, request.adapter))
        return response

    async def partial_responses(self) -> dict[int, Response | SessionRecord]:
        """Return what another engine can continue, by its request's seed: responses and sessions, not
        episodes.
        """
        responses: dict[int, Response | SessionRecord] = {
            seed: session.snapshot() for seed, session in self._sessions.items()
        }
        for name, response in unfinished_responses(self.engine).items():
            request = self._under_way.get(name)
            if request is not None and request.start is None:
                responses[request.seed] = response.after(request.begun)
        return responses

    # --- weights

    async def update_weights(self, payload: np.ndarray, version: int) -> None:
        """Load `payload` (see `pack_weights`) as `version`. Requests in flight continue with the new weights.

        Raises RolloutError if they do not fit the model or are incomplete, and LostError if the engine dies.
        """
        with private_file(payload) as path:
            await self._load_weights(path, version)

    async def follow_weights(self, payloads: Sequence[tuple[int, Awaitable[Payload]]]) -> None:
        """Load the newest weights as `update_weights`. payloads: versions and references, a whole file and
        deltas.
        """
        for version, payload in payloads:
            if version > self._weights.version:
                await asyncio.to_thread(self._weights.take, await payload, version)
        await self._load_weights(self._weights.path, self._weights.version)

    async def _load_weights(self, path: str, version: int) -> None:
        try:
            await self.begin_update()
            await self.receive_update({"path": path})
            await self.finish_update(version)
        except RolloutError as error:
            await self.engine.resume_generation()
            raise RolloutError(
                f"rollout replica {self.index} could not load the weights of version {version}: "
                f"{error.__cause__}"
            ) from error

    async def load_adapters(
        self, adapters: Mapping[int, Awaitable[dict[str, np.ndarray]]], version: int
    ) -> None:
        """Have these adapters of LoRA policies alone, as `version` of the weights.

        adapters: by the version that published them, references to `export_adapters`. Requests in flight keep
        theirs. Raises as `update_weights`.
        """
        began = time.time()
        await self._answer("load adapters", self._adapters.load(adapters))
        await self.engine.update_weight_version(str(version))
        self._version = version
        self._loads.append(WeightLoad(version, began, time.time() - began))

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's transfer group. See `gpu_transfer`. Needs GPUs."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info)
        await self._answer("join the transfer", self.engine.init_weight_transfer_engine(request))

    async def begin_update(self) -> None:
        self._update_began = time.time()
        self._recomputes = self._caches.begin_update()
        clear = {"clear_cache": self._recomputes, "clear_images": self.model.train_vision}
        await self._answer("hold its requests", hold_requests(self.engine, **clear))
        await self._answer("prepare for new weights", self.engine.start_weight_update())

    async def receive_update(self, update_info: dict[str, Any]) -> None:
        """Fetch weights. update_info: the backend's. Raises as `update_weights`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._answer(
            "load the weights", self.engine.update_weights(WeightTransferUpdateRequest(update_info))
        )

    async def finish_update(self, version: int) -> None:
        """Put the weights in place under `version` and resume requests, which stay paused after an error."""
        await self._answer(f"take version {version}", self.engine.finish_weight_update(str(version)))
        held = unfinished_tokens(self.engine) if self._recomputes else {}
        await self._answer("resume", self.engine.resume_generation())
        self._version = version
        load = WeightLoad(version, self._update_began, time.time() - self._update_began)
        if held:
            self._recomputing = asyncio.create_task(self._recompute(load, held))
        else:
            self._loads.append(load)

    async def _recompute(self, load: WeightLoad, held: dict[str, int]) -> None:
        """Record the update when all requests that were held have sampled a token more, or have ended."""
        began = time.time()
        while not self.engine.errored and held.items() & unfinished_tokens(self.engine).items():
            await sleep(RECOMPUTE_SECONDS)
        self._loads.append(replace(load, recompute_seconds=time.time() - began))

    async def _answer(self, doing: str, call: Awaitable[None]) -> None:
        """Wait for the engine. Raises LostError if it dies meanwhile, RolloutError for other errors."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._while_alive(call)
        except EngineDeadError as error:
            raise LostError(
                f"the engine of rollout replica {self.index} died and could not {doing}: {_reason(error)}"
            ) from error
        except Exception as error:
            raise RolloutError(f"rollout replica {self.index} could not {doing}: {error}") from error

    async def take_weight_loads(self) -> list[WeightLoad]:
        """Return weight updates since the last call."""
        loads = self._loads
        self._loads = []
        return loads

    async def weight_version(self) -> int:
        return int(await self.engine.get_weight_version())

    # --- memory and life

    async def sleep(self) -> None:
        """Free a colocated engine's GPU for training: drop weights and KV cache. Needs an engine without
        requests.
        """
        # Level 1 would copy the weights to pinned host memory, in buffers rounded up to powers of two. The
        # policy sends its weights at the next wake anyway.
        await self.engine.sleep(level=2)

    async def wake_for_weights(self) -> None:
        """Allocate the weights again. Their values are undefined until an update."""
        await self.engine.wake_up(["weights"])

    async def wake_kv_cache(self) -> None:
        """Allocate the KV cache again, after the update. The engine may then serve."""
        await self.engine.wake_up(["kv_cache"])

    async def alive(self) -> None:
        """Raise vLLM's error if a process died. Returns at once, even while weights load."""
        await self.engine.check_health()

    async def health(self) -> None:
        """Return when the engine's scheduler answers. Raises as `alive`."""
        await self.engine.check_health()  # knows of processes that died
        await self.weight_version()

    async def pids(self) -> list[int]:
        """Return the ids of this process and all below it."""
        import psutil

        process = psutil.Process()
        return [process.pid, *(child.pid for child in process.children(recursive=True))]

    async def stop(self) -> None:
        """End the engine and all its processes. May be called at any time, and repeatedly."""
        engine = self._engine
        self._engine = None
        if self._environments is not None:
            await self._environments.stop()
        if self._gateway is not None:
            await self._gateway.stop()
        await asyncio.to_thread(_end_engine, engine)


def _reason(death: Exception) -> str:
    cause = death.__cause__
    return (
        f"{type(cause).__name__}: {cause}" if cause else "its log is in Ray's session folder, logs/worker-*."
    )


def _end_engine(engine: "AsyncLLM | None") -> None:
    import psutil

    processes = psutil.Process().children(recursive=True)
    if engine is not None:
        engine.shutdown(timeout=STOP_SECONDS)
    for process in processes:  # processes still being built, or late to end
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, STOP_SECONDS)
