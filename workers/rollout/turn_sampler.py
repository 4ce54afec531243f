"""TurnSampler: one turn of the policy, as one request to vLLM, or two with a thinking budget.

Episode, SamplingConfig --sample_turn--> [vLLM: up to the budget] --> Response
                                         open thought, closed --> [vLLM: the answer] --> Response
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.config.roles import SamplingConfig
from workers.engine.adapters import EngineAdapters
from workers.engine.image_inputs import ImageInputs
from workers.engine.kept_caches import KeptCaches
from workers.engine.requests import LENGTH, Response, SampleRequest, turn_seed
from workers.engine.vllm_interface import as_response, sampling_parameters
from workers.episodes.episode import Episode
from workers.episodes.thinking import Thinking

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class TurnSampler:
    def __init__(
        self,
        engine: "AsyncLLM",
        caches: KeptCaches,
        images: ImageInputs,
        adapters: EngineAdapters,
        *,
        model_path: str,
        reasoning_parser: str,
    ) -> None:
        self._engine = engine
        self._caches = caches
        self._images = images
        self._adapters = adapters
        self._model_path = model_path
        self._reasoning_parser = reasoning_parser
        self._numbers = itertools.count()
        self._under_way: dict[str, SampleRequest] = {}  # by vLLM's name of the request

    @cached_property
    def thinking(self) -> Thinking:
        return Thinking(load_tokenizer(self._model_path), self._reasoning_parser)

    async def sample_turn(
        self, request: SampleRequest, sampling: SamplingConfig, episode: Episode
    ) -> Response:
        """Sample a turn. With a thinking budget in two requests, unless it ends within the budget."""
        limit = min(sampling.max_new_tokens, episode.room)
        budget = min(limit, sampling.max_thinking_tokens or limit)
        turn = await self._sample_rest(request, sampling, episode, request.begun, budget)
        if turn.finish_reason != LENGTH or budget == limit:
            return turn
        is_open = self.thinking.is_open(episode.ids, turn.ids)
        partial_response = turn
        if is_open:
            partial_response = self.thinking.closing(sampling, int(turn.ids[-1])).after(
                turn
            )
        if len(partial_response.ids) >= limit:  # no room for an answer
            return turn
        full_turn = await self._sample_rest(
            request, sampling, episode, partial_response, limit
        )
        full_turn = replace(
            full_turn, read_tokens=turn.read_tokens, cached_tokens=turn.cached_tokens
        )
        return (
            full_turn
            if is_open
            else self.thinking.stop_at_text(full_turn, len(turn.ids), sampling.stop)
        )

    async def _sample_rest(
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
        changed = replace(
            sampling, max_new_tokens=limit - sampled_tokens, min_new_tokens=max(0, minimum)
        )
        seed = turn_seed(turn_seed(request.seed, len(episode.turns)), sampled_tokens)
        parameters = sampling_parameters(changed, seed)
        if sampling.may_continue:
            self._under_way[name] = request
        try:
            with self._caches.request(request.seed) as salt:
                prompt = await self._images.prompt(ids, episode.images, salt)
                adapters = self._adapters.of(request.adapter)
                outputs = self._engine.generate(
                    prompt,
                    parameters,
                    name,
                    lora_request=adapters,
                    priority=request.priority,
                )
                (output,) = [output async for output in outputs]
        finally:
            self._under_way.pop(name, None)
        response = as_response(output).after(partial_response)
        if request.adapter:  # vLLM knows the version that was published last, of any policy
            response = replace(
                response, versions=np.full_like(response.versions, request.adapter)
            )
        return response

    def partial_responses(self, unfinished: Mapping[str, Response]) -> dict[int, Response]:
        """Return the responses of single turns, by attempt. unfinished: by vLLM's name."""
        responses = {}
        for name, response in unfinished.items():
            request = self._under_way.get(name)
            if request is not None and request.start is None:
                responses[request.attempt] = response.after(request.begun)
        return responses


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
