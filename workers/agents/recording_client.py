"""An engine client for vLLM's serving classes. It keeps what the engine samples in the request's `Prompt`."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from workers.agents.session_requests import CALL, Prompt, SessionRequest
from workers.engine.adapters import EngineAdapters
from workers.engine.image_inputs import ImageInputs
from workers.engine.kept_caches import KeptCaches
from workers.engine.requests import STOP, Response, turn_seed
from workers.engine.session_record import Node
from workers.engine.vllm_interface import as_response, sampling_parameters
from workers.episodes.parsing import TAIL

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# Tokens in a part of a streamed answer: vLLM writes each token by itself, which takes a tenth of a call.
STREAM_TOKENS = 8


class RecordingClient:
    """An engine client for vLLM's serving classes, which keeps what the engine samples."""

    def __init__(
        self,
        engine: "AsyncLLM",
        caches: KeptCaches,
        images: ImageInputs,
        adapters: EngineAdapters,
    ) -> None:
        self._engine = engine
        self._caches = caches
        self._images = images
        self._adapters = adapters
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, _: Any, wanted: Any, *_more: Any, **_named: Any
    ) -> AsyncIterator[Any]:
        """Sample the call's next prompt, or give its recorded answers. wanted: vLLM's parameters for the
        request.
        """
        from vllm.outputs import RequestOutput
        from vllm.sampling_params import RequestOutputKind

        call = CALL.get()
        prompt = call.prompts[call.begun]
        opened = call.opened
        call.begun += 1
        delta = wanted.output_kind == RequestOutputKind.DELTA
        recorded = [
            _output_of(node, index, wanted) for index, node in enumerate(prompt.replayed)
        ]
        if recorded and (delta or not prompt.numbers):
            yield RequestOutput(
                "recorded",
                None,
                prompt.ids.tolist(),
                None,
                recorded,
                finished=not prompt.numbers,
            )
        if not prompt.numbers:
            return
        self._count += 1
        name = f"{opened.session.name}/{prompt.numbers[0]}/{self._count}"
        parameters = _parameters(call, prompt, wanted)
        collected: dict[int, _Collected] = {}
        opened.engine_names.add(name)
        with ExitStack() as request:
            request.callback(opened.engine_names.discard, name)
            salt = request.enter_context(self._caches.request(opened.seed))
            engine_prompt = await self._images.prompt(prompt.ids, prompt.images, salt)
            outputs = self._engine.generate(
                engine_prompt,
                parameters,
                name,
                lora_request=self._adapters.of(0),
                priority=opened.priority,
            )
            async for output in outputs:
                if not collected:
                    _forget_tokenizer(self._engine, name, wanted)
                for completion in output.outputs:
                    if not parameters.detokenize:
                        completion.text = self._text(prompt, completion, wanted)
                    turn = collected.setdefault(completion.index, _Collected())
                    turn.take(completion, delta)
                    if completion.finish_reason is not None:
                        prompt.turns[completion.index] = (
                            turn.response(completion, prompt, output),
                            turn.text,
                        )
                    completion.index += len(recorded)
                if not delta:
                    output.outputs = [*recorded, *output.outputs]
                yield output

    def _text(self, prompt: Prompt, completion: Any, wanted: Any) -> str:
        """Decode a whole answer behind the prompt's end, without its end token."""
        decode = partial(
            self._engine.get_tokenizer().decode,
            skip_special_tokens=wanted.skip_special_tokens,
        )
        ids = list(completion.token_ids)
        tail = prompt.ids[-TAIL:].tolist()
        ids = ids[:-1] if completion.finish_reason == STOP else ids
        prompt_text, full_text = decode(tail), decode([*tail, *ids])
        return str(
            full_text[len(prompt_text) :]
            if full_text.startswith(prompt_text)
            else decode(ids)
        )


def _forget_tokenizer(engine: "AsyncLLM", name: str, wanted: Any) -> None:
    """Let vLLM not decode each token again for log-probs whose text nobody reads: a third of its time for a
    stream.
    """
    if wanted.logprobs is None:
        for internal in engine.output_processor.external_req_ids.get(name, ()):
            engine.output_processor.request_states[
                internal
            ].logprobs_processor.tokenizer = None


class _Collected:
    """Tokens of a turn so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.text = ""

    def take(self, completion: Any, delta: bool) -> None:
        if not delta:
            self.ids = []
            self.log_probs = []
            self.text = ""
        # The sampled token's is the first at each position.
        if log_probs := completion.logprobs:
            self.log_probs += [
                log_probs.logprobs[start] for start in log_probs.start_indices
            ]
        self.ids += completion.token_ids
        self.text += completion.text

    def response(self, completion: Any, prompt: Prompt, output: Any) -> Response:
        full_completion = replace(
            completion,
            token_ids=self.ids,
            logprobs=SimpleNamespace(logprobs=self.log_probs),
        )
        counts = {
            "prompt_token_ids": prompt.ids.tolist(),
            "num_cached_tokens": output.num_cached_tokens,
        }
        return as_response(SimpleNamespace(outputs=[full_completion], **counts))


def _parameters(call: SessionRequest, prompt: Prompt, wanted: Any) -> Any:
    """Return the run's sampling parameters, with the client's limit, stop texts and form of the answer."""
    from vllm.sampling_params import RequestOutputKind

    sampling = call.opened.sampling
    limit = min(wanted.max_tokens, sampling.max_new_tokens)
    ours = replace(
        sampling,
        max_new_tokens=limit,
        min_new_tokens=min(limit, sampling.min_new_tokens),
        stop=list(dict.fromkeys([*sampling.stop, *wanted.stop])),
        stop_token_ids=list(
            dict.fromkeys([*sampling.stop_token_ids, *wanted.stop_token_ids])
        ),
    )
    parameters = sampling_parameters(ours, turn_seed(call.opened.seed, prompt.numbers[0]))
    parameters.n = len(prompt.numbers)
    parameters.output_kind = wanted.output_kind
    if wanted.output_kind == RequestOutputKind.DELTA:
        parameters.stream_interval = wanted.stream_interval or STREAM_TOKENS
    # A whole answer is decoded at once.
    parameters.detokenize = (
        bool(ours.stop or wanted.logprobs is not None)
        or wanted.output_kind == RequestOutputKind.DELTA
    )
    parameters.skip_special_tokens = wanted.skip_special_tokens and not ours.stop
    if wanted.logprobs is not None:
        parameters.logprobs = wanted.logprobs
    if wanted.structured_outputs and sampling.changes:
        parameters.structured_outputs = wanted.structured_outputs
    return parameters


def _output_of(node: Node, index: int, wanted: Any) -> Any:
    """Return a recorded answer as the engine's."""
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput

    response = node.response
    pairs = zip(response.ids.tolist(), response.log_probs.tolist(), strict=True)
    logprobs = (
        None
        if wanted.logprobs is None
        else [{token: Logprob(log_prob)} for token, log_prob in pairs]
    )
    return CompletionOutput(
        index,
        node.text,
        response.ids.tolist(),
        None,
        logprobs,
        finish_reason=response.finish_reason,
    )
