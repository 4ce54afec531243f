"""RolloutWorker: the actor around one vLLM engine.

    requests --generate--> [vLLM: scheduler, model, sampler] --every 0.25 s--> TokenBlock, list[SampleResult], ...
    payload --update_weights--> pause, load, resume (requests in flight go on)

An `AsyncLLM` keeps its model in processes of its own, so this process only hands requests over and packs what returns.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.config import ModelConfig, RolloutConfig, SamplingConfig
from workers.errors import RolloutError
from workers.remote_batch import TokenBlock
from workers.rollout.engine import (
    check_placement,
    engine_arguments,
    prepare_environment,
    refusal,
    sampling_parameters,
)
from workers.rollout.requests import ERROR, LENGTH, STOP, SampleRequest, SampleResult
from workers.rollout.weight_transfer import private_file

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

FLUSH_SECONDS = 0.25
STOP_SECONDS = 10.0
Row = dict[str, np.ndarray]
Sample = tuple[SampleResult, Row | None]


class RolloutWorker:
    """One engine. Wrapped by `ray.remote`; every method but `__init__` is a coroutine or an async generator."""

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        index: int,
        placement: str,
        max_model_tokens: int,
        seed: int,
    ) -> None:
        """`placement`: one of `workers.rollout.weight_transfer.BACKENDS`. The engine comes with `start`.

        Raises ConfigError if this process's device cannot receive weights the placement's way.
        """
        prepare_environment(rollout, placement)
        self.model = model
        self.config = rollout
        self.index = index
        self.placement = placement
        self.max_model_tokens = max_model_tokens
        self.seed = seed
        self._engine: AsyncLLM | None = None
        self._numbers = itertools.count()

    @property
    def engine(self) -> "AsyncLLM":
        """Raises RolloutError before `start` and after `stop`."""
        if self._engine is None:
            raise RolloutError(f"rollout replica {self.index} has no engine; call start first.")
        return self._engine

    async def start(self) -> None:
        """Build the engine, with the weights of `model.path` as version 0. Takes 15 to 60 s.

        Raises ConfigError for an impossible placement; what vLLM raises passes through.
        """
        import torch

        check_placement(self.placement, has_gpu=torch.cuda.is_available())
        # In a thread, so that `stop` and `pids` answer while the engine loads.
        engine = await asyncio.to_thread(self._build)
        await engine.update_weight_version("0")
        self._engine = engine

    def _build(self) -> "AsyncLLM":
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            engine_arguments(
                self.model,
                self.config,
                placement=self.placement,
                max_model_tokens=self.max_model_tokens,
                seed=self.seed + self.index,
            )
        )

    async def generate(
        self, requests: list[SampleRequest], sampling: SamplingConfig
    ) -> AsyncIterator[TokenBlock | list[SampleResult]]:
        """Yield a TokenBlock and then the list of its results, again and again, as samples finish.

        The block comes first: whoever holds the list knows that the block was made. Its columns are `input_ids` int32,
        `loss_mask` bool (True on the response) and `rollout_log_probs` float32 (0 on the prompt); failed samples have
        no row. A sample that fails, fails alone; only the engine's death ends the stream, with RolloutError.
        """
        pending = {asyncio.create_task(self._sample(request, sampling)) for request in requests}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                if done:
                    block, results = _flush([task.result() for task in done])
                    yield block
                    yield results
        finally:
            for task in pending:
                task.cancel()

    async def _sample(self, request: SampleRequest, sampling: SamplingConfig) -> Sample:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = self.engine
        vocabulary = engine.model_config.get_vocab_size()
        reason = refusal(request.prompt_ids, vocab_size=vocabulary, max_model_tokens=self.max_model_tokens)
        if reason:
            return _failure(request, reason)
        prompt = tokens_input(request.prompt_ids.tolist())
        name = f"{request.uid}/{request.sample}/{next(self._numbers)}"
        try:
            (output,) = [o async for o in engine.generate(prompt, sampling_parameters(sampling, request.seed), name)]
        except EngineDeadError as error:
            raise RolloutError(
                f"the engine of rollout replica {self.index} died; its log is in Ray's session folder, logs/worker-*."
            ) from error
        except Exception as error:  # whatever else vLLM raises concerns this request alone
            return _failure(request, f"{type(error).__name__}: {error.__cause__ or error}")
        return _success(request, output)

    async def update_weights(self, payload: np.ndarray, version: int) -> None:
        """Load `payload` (see `pack_weights`); samples of this engine carry `version` from the next token on.

        Requests in flight go on with the new weights. Raises RolloutError if the weights do not fit the model.
        """
        with private_file(payload) as path:
            try:
                await self.begin_update()
                await self.receive_update({"path": path})
            except Exception as error:
                await self.engine.resume_generation()
                raise RolloutError(
                    f"rollout replica {self.index} could not load the weights of version {version}: {error}"
                ) from error
            await self.finish_update(version)

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's transfer group; see `gpu_transfer`. Needs a GPU; not run on CPU."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    async def begin_update(self) -> None:
        """Hold requests in flight and make ready for new weights."""
        await self.engine.pause_generation(mode="keep", clear_cache=True)
        await self.engine.start_weight_update()

    async def receive_update(self, update_info: dict[str, Any]) -> None:
        """Let the engine's processes fetch weights; `update_info` is the backend's own."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.engine.update_weights(WeightTransferUpdateRequest(update_info))

    async def finish_update(self, version: int) -> None:
        """Put the new weights in place under `version` and go on with the requests in flight."""
        try:
            await self.engine.finish_weight_update(str(version))
        finally:
            await self.engine.resume_generation()

    async def weight_version(self) -> int:
        """Version of the weights that the engine samples with."""
        return int(await self.engine.get_weight_version())

    async def sleep(self) -> None:
        """Free the GPU for training: weights to host memory, KV cache dropped. Only a colocated engine has to."""
        if self.placement == "colocated":
            await self.engine.sleep(level=1)

    async def wake(self) -> None:
        """Undo `sleep`."""
        if self.placement == "colocated":
            await self.engine.wake_up()

    async def health(self) -> None:
        """Return when the engine's scheduler has answered: one that hangs does not.

        Raises what vLLM raises if the engine is dead, RolloutError if there is none.
        """
        await self.engine.check_health()  # knows of processes that died
        await self.weight_version()

    async def pids(self) -> list[int]:
        """This process and all below it."""
        import psutil

        process = psutil.Process()
        return [process.pid, *(child.pid for child in process.children(recursive=True))]

    async def stop(self) -> None:
        """End the engine; returns when none of its processes is left. May be called at any time, and again."""
        engine, self._engine = self._engine, None
        await asyncio.to_thread(_end_engine, engine)


def _end_engine(engine: "AsyncLLM | None") -> None:
    import psutil

    processes = psutil.Process().children(recursive=True)
    if engine is not None:
        engine.shutdown(timeout=STOP_SECONDS)
    for process in processes:  # what is still being built, or did not end in time
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, STOP_SECONDS)


def _flush(samples: list[Sample]) -> tuple[TokenBlock, list[SampleResult]]:
    """One block of the rows, and the results with their row numbers, in the order of (uid, sample)."""
    rows: list[Row] = []
    results = []
    for result, row in sorted(samples, key=lambda sample: sample[0].key):
        if row is None:
            results.append(result)
            continue
        results.append(replace(result, row=len(rows)))
        rows.append(row)
    return TokenBlock.from_rows(rows), results


def _failure(request: SampleRequest, reason: str) -> Sample:
    tokens = len(request.prompt_ids)
    return SampleResult(request.uid, request.sample, tokens, 0, ERROR, weight_version=-1, error=reason), None


def _success(request: SampleRequest, output: "RequestOutput") -> Sample:
    completion = output.outputs[0]
    reason = completion.finish_reason
    if reason not in (STOP, LENGTH):
        return _failure(request, f"vLLM ended the request with finish reason {reason!r}.")
    prompt = len(request.prompt_ids)
    response = np.asarray(completion.token_ids, dtype=np.int32)
    log_probs = np.zeros(prompt + len(response), dtype=np.float32)
    log_probs[prompt:] = completion.logprobs.logprobs  # flat: one entry a token, the sampled one's
    row = {
        "input_ids": np.concatenate([request.prompt_ids, response]),
        "loss_mask": np.arange(len(log_probs)) >= prompt,
        "rollout_log_probs": log_probs,
    }
    version = min(int(span.version) for span in completion.weight_versions)
    return SampleResult(request.uid, request.sample, prompt, len(response), reason, version), row
