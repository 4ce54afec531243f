"""Samplers: sampling clients of the base model or of a model's weights, and their samples.

sampling_session_id --find_policy--> Policy, version --OpenRun.sample, forward--> answers
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from ballast.loop.open_run import OpenRun
from ballast.serve import wire
from ballast.serve.policies import NEWEST, Policies, Policy
from ballast.serve.wire import Answer, RefusedError
from workers.errors import LostError, RolloutError, UnfinishedError

MOST_ANSWERS = 4096  # samples that nobody has fetched
STOPS = (LostError, RolloutError)


class Samplers:
    """weights: (model, weights) by a sampler's name. answers: of samples, by their futures' names."""

    def __init__(
        self,
        run: OpenRun,
        policies: Policies,
        pending: dict[str, asyncio.Future[Any]],
        stop: Callable[[BaseException], None],
    ) -> None:
        """pending: receives the futures, by name. stop: see `Service`."""
        self._run = run
        self._config = run.config
        self._policies = policies
        self._pending = pending
        self._stop = stop
        self.weights = dict[str, tuple[str, int]]()
        self.answers = dict[str, Answer]()

    def check(self, name: str) -> None:
        if name not in self.weights:
            raise RefusedError(
                f"sampling_session_id={name!r:.80}: unknown. Create a sampling client.", 404
            )

    def sample(self, request: dict[str, Any]) -> dict[str, Any]:
        """Begin to sample, once a `seq_id` of the sampler. Returns its future. Raises RefusedError."""
        sampler = wire.text(request, "sampling_session_id")
        seq_id = wire.whole(request, "seq_id", 0, 0, wire.LARGEST)
        name = f"sample-{sampler}-{seq_id}"
        count = wire.whole(request, "num_samples", 1, 1, 4096)
        future = {
            "request_id": name,
            "sample_sequence_ids": [f"{name}-{n}" for n in range(count)],
        }
        if name in self._pending or name in self.answers:
            return future
        policy, version = self._find_policy(sampler)
        longest = self._config.max_model_tokens
        prompt = wire.read_prompt(
            request, vocabulary=self._run.vocabulary, longest=longest - 1
        )
        settings = wire.read_sampling(
            request, self._config.rollout.sampling, self._run.vocabulary
        )
        if len(prompt) + settings.max_new_tokens > longest:
            raise RefusedError(
                f"max_tokens={settings.max_new_tokens}: with the prompt above {longest}. Ask for fewer."
            )
        seed = wire.read_seed(request)
        with_prompt = wire.flag(request, "prompt_logprobs")
        passed = (
            [self._prompt_log_probs(prompt, policy, version)]
            if with_prompt and len(prompt) > 1
            else []
        )
        sampled = self._run.sample(
            [prompt],
            count,
            settings,
            seed=seed,
            record=False,
            adapter=policy.adapter,
            version=version,
        )
        task = asyncio.ensure_future(self._answer(name, [sampled, *passed], with_prompt))
        self._pending[name] = task
        task.add_done_callback(lambda done: self._pending.pop(name))
        return future

    def _find_policy(self, sampler: str) -> tuple[Policy, int | None]:
        """Return a sampler's policy and version, None for the newest. Raises RefusedError if
        engines lack it.
        """
        self.check(sampler)
        model, weights = self.weights[sampler]
        policy = self._policies.of_model[model] if model else self._policies.base
        if weights in (policy.published, NEWEST) and model in ("", policy.model):
            return policy, None
        sent = policy.sent.get((model, weights)) if policy.adapter else None
        if sent is None or not sent.done():
            raise RefusedError(
                "sampling_session_id: newer weights are served. Use the newest sampling client."
            )
        return policy, sent.result()

    def _prompt_log_probs(
        self, prompt: list[int], policy: Policy, version: int | None
    ) -> Future[Any]:
        if policy.weights != policy.published or version is not None:
            raise RefusedError(
                "prompt_logprobs: the trainer has newer weights. Save them for a sampler first."
            )
        row = {
            "input_ids": np.array(prompt, np.int32),
            "loss_mask": np.arange(len(prompt)) > 0,
        }
        role = "policy" if policy.adapter in self._policies.by_adapter else "reference"
        return self._run.forward(self._run.batch([row]), role, adapter=policy.adapter)

    async def _answer(
        self, name: str, futures: list[Future[Any]], with_prompt: bool
    ) -> None:
        try:
            samples, *passed = await asyncio.gather(*map(asyncio.wrap_future, futures))
            after_first = (
                passed[0].log_probs[0][1:]
                if passed
                else np.empty(0)
                if with_prompt
                else None
            )
            answer = await asyncio.to_thread(
                wire.sample_answer, samples.sequences, after_first
            )
        except UnfinishedError as error:  # of this request alone: the engines go on
            answer = wire.failure(error)
        except STOPS as error:
            self._stop(error)
            return
        except Exception as error:
            answer = wire.failure(error)
        self.answers[name] = answer
        while len(self.answers) > MOST_ANSWERS:
            self.answers.pop(next(iter(self.answers)))
