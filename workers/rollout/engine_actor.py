"""VllmEngineActor: the actor around one vLLM engine.

    requests --generate--> [vLLM: scheduler, model, sampler] --every 0.25 s--> DataProto, SampleResults
                               turn | ^ observation              with an environment
                                    v |
                            [EnvironmentPool: a process an episode]   or an agent's process --HTTP--> Gateway
    payload --update_weights--> pause, load, resume (requests in flight continue)

On GPUs `AsyncLLM` runs its model in separate processes. On a CPU the model runs in a thread of this process.
"""

import asyncio
import time
from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.agents.gateway import Gateway
from workers.agents.processes import AgentPool
from workers.batch.dataproto import DataProto
from workers.collections_paused import collections_paused
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.adapters import EngineAdapters
from workers.engine.image_inputs import ImageInputs
from workers.engine.kept_caches import KeptCaches
from workers.engine.placement import check_placement
from workers.engine.requests import Response, SampleRequest, SampleResult, WeightLoad
from workers.engine.root_cause import prepare_error_file, root_cause
from workers.engine.session_record import SessionRecord
from workers.engine.vllm_interface import (
    build_engine,
    check_prompt,
    engine_arguments,
    hold_requests,
    prepare_environment,
    unfinished_responses,
    unfinished_tokens,
)
from workers.engine.weights import left_groups
from workers.engine.weights.update_state import Update
from workers.engine.weights.weight_delta import Payload, WeightFile
from workers.engine.weights.weight_transfer import private_file
from workers.episodes.episode import Episode
from workers.errors import BallastError, LostError, RolloutError, WorkerError
from workers.network import LOOPBACK, use_rays_interface
from workers.rollout.engine_life import describe_death, end_engine, wait_while_alive
from workers.rollout.players import AgentPlayer, EpisodePlayer, Player, load_renderer
from workers.rollout.pools import (
    make_agent_pool,
    make_tool_pool,
    prepare_sandboxes,
    remove_sandboxes,
)
from workers.rollout.results import Row, Sample, failed_result, finish_sample, flush
from workers.rollout.turn_sampler import TurnSampler
from workers.user_code.environments import EnvironmentPool

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

FLUSH_SECONDS = 0.25
# Between looks at requests whose keys and values are computed again.
RECOMPUTE_SECONDS = 0.02


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
        transfer_timeout_s: float = 600.0,
    ) -> None:
        """placement: of `workers.engine.placement.BACKENDS`. environment: of EnvironmentPool, ToolPool or
        AgentPool.

        front: actor of SessionFront, for agents elsewhere. needs_reward: whether an agent must give the
        reward, because nothing else does. transfer_timeout_s: after which it leaves a broadcast of weights.
        """
        prepare_environment(rollout, placement, batch_invariant=model.batch_invariant)
        use_rays_interface()  # between an engine's GPUs, and for new weights from the policy's node
        self.model = model
        self.config = rollout
        self.index = index
        self._placement = placement
        self._max_model_tokens = max_model_tokens
        self._seed = seed
        self._transfer_timeout_s = transfer_timeout_s
        self._groups = 0  # transfer groups that it was told to join
        self._front = front
        self._engine: AsyncLLM | None = None
        self._environments: EnvironmentPool | None = None
        self._agents: AgentPool | None = None
        self._gateway: Gateway | None = None
        self._player: Player | None = None
        self._needs_reward = needs_reward
        if rollout.sandbox.kind:
            prepare_sandboxes(rollout.sandbox)
        if rollout.runs_agent and front is None:
            self._agents = make_agent_pool(rollout, environment)
            self._environments = self._agents
        elif rollout.tools:
            self._environments = make_tool_pool(rollout, environment, environment_timeout_s)
        elif environment:
            self._environments = EnvironmentPool(environment, environment_timeout_s)
        self._caches = KeptCaches(rollout)
        self._version = 0
        self._update = Update.NONE
        self._update_began = 0.0
        self._recomputes = False
        self._loads: list[WeightLoad] = []
        self._weights = WeightFile()  # empty unless rollout.weight_sync=delta
        self._recomputing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"rollout {self.index}"

    @property
    def engine(self) -> "AsyncLLM":
        """Raises RolloutError before `start` and after `stop`."""
        if self._engine is None:
            raise RolloutError(
                f"rollout replica {self.index} has no engine. Call start first."
            )
        return self._engine

    async def start(self) -> None:
        """Build the engine, with the weights of `model.path` as version 0. Takes 15 to 60 s.

        Raises ConfigError for an impossible placement, and WorkerError with the root cause of vLLM's errors.
        """
        import torch

        check_placement(self._placement, has_gpu=torch.cuda.is_available())
        prepare_error_file()
        self._left_groups = left_groups.prepare_file()
        try:
            # In a thread, so that `stop` and `pids` answer while the engine loads.
            engine = await asyncio.to_thread(self._build)
        except BallastError:
            raise
        except Exception as error:  # vLLM's differ by version
            raise WorkerError(root_cause(error)) from error
        images = ImageInputs(engine)
        self._adapters = EngineAdapters(engine)
        self._sampler = TurnSampler(
            engine,
            self._caches,
            images,
            self._adapters,
            model_path=self.model.path,
            reasoning_parser=self.config.reasoning_parser,
        )
        if self.config.runs_agent:
            self._player = await self._make_agent_player(engine, images)
        elif self._environments is not None:
            renderer = await asyncio.to_thread(load_renderer, self.model)
            self._player = EpisodePlayer(
                self.config, self._sampler, self._environments, renderer
            )
        if self.config.sampling.max_thinking_tokens:
            await asyncio.to_thread(
                lambda: self._sampler.thinking.closing(self.config.sampling)
            )
        await engine.update_weight_version("0")
        self._engine = engine

    async def _make_agent_player(
        self, engine: "AsyncLLM", images: ImageInputs
    ) -> AgentPlayer:
        import ray

        self._gateway = Gateway(
            engine, self.model, self.config, self._caches, images, self._adapters
        )
        await self._gateway.start(
            LOOPBACK if self._front is None else ray.util.get_node_ip_address()
        )
        return AgentPlayer(
            engine,
            self.config,
            self._gateway,
            self._agents,
            self._front,
            needs_reward=self._needs_reward,
        )

    def _build(self) -> "AsyncLLM":
        with collections_paused():
            arguments = engine_arguments(
                self.model,
                self.config,
                placement=self._placement,
                max_model_tokens=self._max_model_tokens,
                seed=self._seed + self.index,
                transfer_timeout_s=self._transfer_timeout_s,
            )
            return build_engine(arguments)

    # --- samples

    async def generate(
        self, requests: list[SampleRequest], sampling: SamplingConfig
    ) -> AsyncIterator[DataProto | list[SampleResult]]:
        """Yield a DataProto of `Episode.rows` and then the list of their results, repeatedly, as samples
        finish.

        The block comes first, so that it exists when a caller gets the list. Failed samples have no row. If
        the engine dies, RolloutError ends the stream.
        """
        pending = {
            asyncio.create_task(self._sample(request, sampling)) for request in requests
        }
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                )
                if done:
                    block, results = flush(
                        [task.result() for task in done],
                        self.engine.model_config.get_num_experts(),
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
            check_prompt(
                request.prompt_ids,
                vocab_size=vocabulary,
                max_model_tokens=self._max_model_tokens,
            )
            async with asyncio.timeout(request.timeout_s):
                result, rows = await self._play(request, sampling)
        except EngineDeadError as error:
            raise RolloutError(
                f"the engine of rollout replica {self.index} died: {describe_death(error)}"
            ) from error
        except Exception as error:  # other errors of vLLM concern this request alone
            result = failed_result(request, error)
        finally:
            self._caches.end(request.seed)
        # The weights at the start may have computed keys and values that all tokens read.
        if self._caches.oldest:
            result = replace(result, weight_version=min(result.weight_version, began))
        return replace(
            result, replica=self.index, start=start, seconds=time.time() - start
        ), rows

    async def _play(self, request: SampleRequest, sampling: SamplingConfig) -> Sample:
        if request.start is None:  # one turn, or a question to a judge
            limits = {
                "max_turns": self.config.max_turns,
                "max_tokens": sampling.max_new_tokens,
            }
            episode = Episode(request.prompt_ids, request.images, **limits)
            turn = await self._sampler.sample_turn(request, sampling, episode)
            episode.add(turn)
            return finish_sample(request, episode, turn.finish_reason)
        assert self._player is not None
        return await self._player.play(request, sampling)

    async def partial_responses(self) -> dict[int, Response | SessionRecord]:
        """Return what another engine can continue, by attempt: responses and sessions, not
        episodes.
        """
        unfinished = unfinished_responses(self.engine)
        sessions = self._player.records() if isinstance(self._player, AgentPlayer) else {}
        return {**sessions, **self._sampler.partial_responses(unfinished)}

    # --- weights

    async def update_weights(self, payload: np.ndarray, version: int) -> None:
        """Load `payload` (see `pack_weights`) as `version`. Requests in flight continue with the new weights.

        Raises RolloutError if they do not fit the model or are incomplete, and LostError if the engine dies.
        """
        with private_file(payload) as path:
            await self._load_weights(path, version)

    async def follow_weights(
        self, payloads: Sequence[tuple[int, Awaitable[Payload]]]
    ) -> None:
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

    async def update_adapters(self, files: Mapping[str, np.ndarray], version: int) -> None:
        """Load the only policy's adapters as `version`. Requests in flight continue with them.

        files: of `export_adapters`. Raises as `update_weights`.
        """
        try:
            await self._hold_requests()
            await self._answer("load adapters", self._adapters.replace(files))
            await self._answer(
                f"take version {version}", self.engine.update_weight_version(str(version))
            )
            await self._resume(version)
        except RolloutError:
            await self.engine.resume_generation()
            raise

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's transfer group. See `gpu_transfer`. Needs GPUs."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._groups += 1
        request = WeightTransferInitRequest(init_info)
        await self._answer(
            "join the transfer", self.engine.init_weight_transfer_engine(request)
        )

    async def leave_group(self) -> None:
        """Leave the transfer group, of which a member was lost, also in the middle of a broadcast."""
        left_groups.leave(self._left_groups, self._groups)

    async def begin_update(self) -> None:
        """Hold requests and prepare for weights, also after an update that ended for a lost engine's sake."""
        await self._hold_requests()
        # vLLM refuses to begin twice.
        if self._update is Update.RECEIVED:
            await self._finish_weights(self._version)
        if self._update is Update.NONE:
            await self._answer("prepare for new weights", self.engine.start_weight_update())
        self._update = Update.BEGUN

    async def _hold_requests(self) -> None:
        self._update_began = time.time()
        self._recomputes = self._caches.begin_update()
        clear = {"clear_cache": self._recomputes, "clear_images": self.model.train_vision}
        await self._answer("hold its requests", hold_requests(self.engine, **clear))

    async def receive_update(self, update_info: dict[str, Any]) -> None:
        """Fetch weights. update_info: the backend's. Raises as `update_weights`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._update = Update.NONE  # an error ends vLLM's update
        await self._answer(
            "load the weights",
            self.engine.update_weights(WeightTransferUpdateRequest(update_info)),
        )
        self._update = Update.RECEIVED

    async def finish_update(self, version: int) -> None:
        """Put the weights in place under `version` and resume requests, which stay paused after an error."""
        await self._finish_weights(version)
        await self._resume(version)

    async def _finish_weights(self, version: int) -> None:
        await self._answer(
            f"take version {version}", self.engine.finish_weight_update(str(version))
        )
        self._update = Update.NONE

    async def _resume(self, version: int) -> None:
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
        while (
            not self.engine.errored
            and held.items() & unfinished_tokens(self.engine).items()
        ):
            await sleep(RECOMPUTE_SECONDS)
        self._loads.append(replace(load, recompute_seconds=time.time() - began))

    async def _answer(self, doing: str, call: Awaitable[None]) -> None:
        """Wait for the engine. Raises LostError if it dies meanwhile, RolloutError for other errors."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await wait_while_alive(self.engine, call)
        except EngineDeadError as error:
            raise LostError(
                f"the engine of rollout replica {self.index} died and could not {doing}: "
                f"{describe_death(error)}"
            ) from error
        except Exception as error:
            raise RolloutError(
                f"rollout replica {self.index} could not {doing}: {error}"
            ) from error

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
            if self.config.sandbox.kind:
                await asyncio.to_thread(remove_sandboxes, self.config.sandbox)
        if self._gateway is not None:
            await self._gateway.stop()
        await asyncio.to_thread(end_engine, engine)
