"""Serve vLLM's routes of OpenAI's and Anthropic's APIs over an engine: ids in as prompts, turns out.

    messages --preprocess_chat--> ids of the turn that they extend, and of the new text
    ids --generate--> [vLLM: engine] --text--> [vLLM: parsers, answer]
                         '-- ids, log-probs, versions --> Prompt.turns

vLLM's templates and sampling options are not used: prompts are rendered by `Renderer`, and sampling is the
run's.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import takewhile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.agents.message_forms import MessageForms
from workers.agents.session import Asked, Session
from workers.batch.placed_images import Image, Placed
from workers.chat_messages import cleaned
from workers.chat_templates import variables_of
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.image_inputs import ImageInputs
from workers.engine.kept_caches import KeptCaches
from workers.engine.requests import STOP, Response, joined, not_sampled, turn_seed
from workers.engine.session_record import Node
from workers.engine.vllm_interface import as_response, check_prompt, sampling_parameters
from workers.environment import Turn
from workers.episodes.conversation import Conversation
from workers.episodes.parsing import TurnParser
from workers.errors import ConfigError, DataError, EpisodeError
from workers.images.images import decoded
from workers.model.vision.processor import load_placeholders
from workers.rendering import (
    CONTROLS,
    IMAGE_PART,
    RESERVED,
    Messages,
    Options,
    Renderer,
    image_parts,
    with_image_parts,
)

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CALL: ContextVar["Call"] = ContextVar("call")
FORCED = ("response_format", "structured_outputs", "tool_choice", "text")  # constrain what is sampled
OTHERS = {
    "bad_words", (
        "allowed_token_ids"
    ), "logit_bias", "min_tokens", "ignore_eos", "use_beam_search", "watermarking",
    "repetition_detection", "prompt_logprobs", "echo", "suffix", "prompt_embeds",
    "continue_final_message", "truncate_prompt_tokens", "documents", "previous_response_id", "background",
    "functions", "function_call", "best_of", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
}  # fmt: skip
TAIL = 32  # tokens at a prompt's end that show whether it opens the reasoning
# bytes of a request that is rendered beside others; of a token at most, on average
LARGE = 2**16
CHARACTERS = 32
REQUIRED = "required"  # stock agents send it always: taken out
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
KINDS = {
    "input_text": "text",
    "output_text": "text",
    "input_image": "image_url",
}  # of parts, in OpenAI's Responses
WHERE = "the request"
IMAGES_KEPT = 64  # decoded ones of a session: clients send those of all turns again
STREAM_TOKENS = (
    8  # in a part of a streamed answer: vLLM writes each token by itself, which takes a tenth of a call
)


Found = tuple[Asked, Response]
"""What a request extends, and its whole prompt."""


@dataclass
class Prompt:
    """A prompt of a request. numbers: of the turns to sample. replayed: answers that the session's record
    has.

    turns: the sampled ones and their texts, by choice.
    """

    asked: Asked
    ids: np.ndarray
    images: Placed
    numbers: list[int]
    replayed: list[Node]
    turns: dict[int, tuple[Response, str]] = field(default_factory=dict)


@dataclass(eq=False)
class Opened:
    """A session, as it is asked. image_pixels: see `workers.images.images.resized`. images: decoded ones, by
    their URLs' hashes. engine_names: of its requests, as vLLM calls them.
    """

    session: Session
    sampling: SamplingConfig
    seed: int
    options: Options
    priority: int
    image_pixels: tuple[int, int] = (0, 2**20)
    images: dict[bytes, Image] = field(default_factory=dict)
    engine_names: set[str] = field(default_factory=set)

    def image(self, url: str) -> Image:
        """Decode a data: URL. Raises DataError."""
        key = hashlib.blake2b(url.encode(errors="replace")).digest()
        if (image := self.images.get(key)) is None:
            if len(self.images) >= IMAGES_KEPT:
                self.images.clear()
            image = self.images[key] = decoded(url, WHERE, self.image_pixels)
        return image


@dataclass
class Call:
    """A request of a session. samples: whether it asks for answers, not for a count of tokens. size: in
    bytes.
    """

    opened: Opened
    samples: bool
    size: int
    reserved: ExitStack = field(default_factory=ExitStack)
    prompts: list[Prompt] = field(default_factory=list)
    begun: int = 0

    @property
    def done(self) -> bool:
        """Whether the engine has given all answers."""
        return bool(self.prompts) and all(len(prompt.turns) == len(prompt.numbers) for prompt in self.prompts)

    async def rendered(self, render: Callable[[], Found], has_images: bool = False) -> Found:
        """Render a prompt, for a large request or images in a thread."""
        return await asyncio.to_thread(render) if has_images or self.size > LARGE else render()

    def take(self, session_request: Asked, prompt: Response, choices: int) -> None:
        """Add a prompt, and reserve its turns. Raises EpisodeError if the session has none left."""
        if not self.samples:
            return
        nodes = (
            self.opened.session.recorded(session_request, prompt.ids, prompt.images) for _ in range(choices)
        )
        replayed = [node for node in takewhile(bool, nodes) if node]
        rest = range(choices - len(replayed))
        numbers = [self.reserved.enter_context(self.opened.session.sampling()) for _ in rest]
        self.prompts.append(Prompt(session_request, prompt.ids, prompt.images, numbers, replayed))


class PromptRenderer:
    """Make the ids of requests."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._forms = MessageForms(renderer)
        self._named = set[str]()

    def messages(self, raw_messages: Sequence[Any]) -> Messages:
        """Return a chat's messages, cleaned, with data: URLs in their images' parts. Raises DataError."""
        if not raw_messages:
            raise DataError("the request has no messages.")
        messages: Messages = cleaned([chat_message(message) for message in raw_messages], WHERE)
        urls = [part.get("image") for part in image_parts(messages)]
        if not all(isinstance(url, str) and url.startswith("data:") for url in urls):
            raise DataError(
                "the request has an image that is not a data: URL, and nothing is fetched or read for "
                "agents. Send data:image/png;base64,..."
            )
        if urls and self._renderer.placeholders is None:
            raise DataError("the request has images, which the model does not read. Send text alone.")
        return messages

    def read(self, opened: Opened, messages: Messages, options: Options) -> Found:
        """Read a chat. Raises DataError if the template cannot render it."""
        images = [opened.image(part["image"]) for part in image_parts(messages)]
        messages = with_image_parts(messages, [IMAGE_PART | {"image": image} for image in images])
        digests = [IMAGE_PART | {"digest": f"{image.digest:016x}"} for image in images]
        bare = with_image_parts(messages, [IMAGE_PART] * len(images))
        forms = with_image_parts(self._forms.of(bare, WHERE, options), digests)
        session_request = replace(
            opened.session.find(forms, options), messages=with_image_parts(messages, digests)
        )
        if session_request.parent is not None:
            try:
                following = self._following(session_request, session_request.parent, messages, options)
                return session_request, joined([opened.session.whole(session_request.parent), following])
            except EpisodeError:  # such as two turns of the assistant in sequence
                session_request = replace(session_request, parent=None, covered=0)
        prompt = Conversation(self._renderer, [], options).opened(opened.session.whole(None), messages)
        self._name_unread()
        return session_request, prompt

    def _name_unread(self) -> None:
        for key in self._renderer.unread.keys() - self._named:
            self._named.add(key)
            logging.getLogger(__name__).warning("Agents' requests: %s", self._renderer.unread[key])

    def _following(
        self, session_request: Asked, parent: Node, messages: Messages, options: Options
    ) -> Response:
        """Return the new messages, rendered behind stand-ins for turns."""
        earlier_messages = messages[: session_request.covered]
        opening = list(takewhile(lambda message: message["role"] != "assistant", earlier_messages))
        opening = with_image_parts(opening, [IMAGE_PART] * len(image_parts(opening)))
        calls = earlier_messages[-1].get("tool_calls") or ()
        ended = parent.response.finish_reason == STOP
        turn = (
            parent.response if ended else replace(parent.response, stop_string=True)
        )  # no end token of its own
        conversation = Conversation(self._renderer, opening, options)
        return conversation.observed(turn, Turn("", tool_calls=calls), messages[session_request.covered :])[0]

    def read_text(self, session: Session, prompt: Any) -> Found:
        """Read a prompt of a completion, a text or ids."""
        if not isinstance(prompt, str):
            ids = np.asarray(prompt, np.int32)
            session_request = session.find_ids(ids)
            return session_request, not_sampled(ids, images=session.whole(session_request.parent).images)
        session_request = session.find_text(prompt)
        if session_request.parent is None:
            return session_request, not_sampled(self._renderer.prompt_ids(prompt, WHERE))
        history = session.whole(session_request.parent)
        rest = self._renderer.ids_behind(session_request.text or "", int(history.ids[-1]), WHERE)
        return session_request, joined([history, not_sampled(np.asarray(rest, np.int32))])

    def options(self, of_session: Options, request: Any, tools: Sequence[Any] | None) -> Options:
        """Return the session's options, with the client's tools and variables that the template reads."""
        template_arguments = getattr(request, "chat_template_kwargs", None) or {}
        options = {name: value for name, value in of_session.items() if name != "tools"}
        if template_arguments:
            template = self._renderer.tokenizer.get_chat_template(tools=tools or None)
            names = variables_of(template).arguments - {*CONTROLS, *RESERVED, "chat_template", "tokenize"}
            options |= {name: value for name, value in template_arguments.items() if name in names}
        return options | ({"tools": [_without_strict(tool) for tool in tools]} if tools else {})


def refusal(request: Any, *, may_force: bool) -> tuple[str, str] | None:
    """Return an option of a request that a session cannot have, and why, or None."""
    if any(getattr(tool, "type", "function") != "function" for tool in getattr(request, "tools", None) or ()):
        return "tools", "tools: the policy calls functions alone. Leave out other tools."
    if name := next((name for name in OTHERS & request.model_fields_set if getattr(request, name)), ""):
        return name, f"{name}: a session samples with rollout.sampling alone. Leave it out."
    if not may_force and (
        name := next((option for option in FORCED if _forces(option, getattr(request, option, None))), "")
    ):
        return name, (
            f"{name}: it changes the distribution that the policy is trained on. Leave it out, or set an "
            "option of rollout.sampling that algorithm.loss.rollout_correction corrects."
        )
    return None


def _forces(name: str, value: Any) -> bool:
    if name == "tool_choice":
        return value not in (None, "auto", "none", REQUIRED)
    output_format = getattr(value, "format", None) if name == "text" else value
    return output_format is not None and getattr(output_format, "type", None) != "text"


def chat_message(message: Any) -> dict[str, Any]:
    """Return a message of a request in the form that templates read."""
    fields = message if isinstance(message, Mapping) else message.model_dump()
    filled_fields = {name: value for name, value in fields.items() if value is not None}
    if reasoning := filled_fields.pop("reasoning", None):
        filled_fields["reasoning_content"] = reasoning
    content = filled_fields.get("content", "")
    if isinstance(content, (list, tuple)):
        content = [
            part | {"type": KINDS.get(str(kind := part.get("type")), kind)} for part in map(dict, content)
        ]
    return filled_fields | {
        "role": "system" if filled_fields["role"] == "developer" else filled_fields["role"],
        "content": content,
    }


def _strict(tool: Any) -> bool:
    return bool(getattr(getattr(tool, "function", tool), "strict", False))


def _without_strict(tool: Any) -> dict[str, Any]:
    function = {
        name: value for name, value in tool["function"].items() if name != "strict" and value is not None
    }
    return {**tool, "function": function}


def _online_renderer(base: type, prompts: PromptRenderer) -> type:
    """Return vLLM's renderer of requests, with ids of ours."""
    from vllm.exceptions import VLLMValidationError

    class SessionRenderer(base):  # type: ignore[misc]
        async def preprocess_chat(
            self, request: Any, messages: list[Any], *arguments: Any, tool_dicts: Any = None, **named: Any
        ) -> Any:
            call = CALL.get()
            self._check(request, call)
            try:
                options = prompts.options(call.opened.options, request, tool_dicts)
                messages = prompts.messages(messages)
                images = sum(len(part["image"]) for part in image_parts(messages))
                self._check_size(call.size - images)
                session_request, prompt = await call.rendered(
                    partial(prompts.read, call.opened, messages, options), images > 0
                )
                call.take(session_request, prompt, getattr(request, "n", None) or 1)
            except (
                ConfigError,
                DataError,
                EpisodeError,
            ) as error:  # of a model that reads no images, ConfigError
                raise VLLMValidationError(str(error), parameter="messages") from None
            request.kv_transfer_params = {
                "prompt_token_ids": prompt.ids.tolist()
            }  # vLLM takes these as they are
            result = await super().preprocess_chat(request, [], *arguments, tool_dicts=tool_dicts, **named)
            request.kv_transfer_params = None
            return result

        async def preprocess_completion(
            self, request: Any, prompt_input: Any, prompt_embeds: Any, **_: Any
        ) -> list[Any]:
            from vllm.inputs.engine import tokens_input

            call = CALL.get()
            self._check(request, call)
            self._check_size(call.size)
            if not prompt_input:
                raise VLLMValidationError("the request has no prompt.", parameter="prompt")
            one = isinstance(prompt_input, str) or isinstance(prompt_input[0], int)
            limits = {
                "vocab_size": self.model_config.get_vocab_size(),
                "max_model_tokens": self.model_config.max_model_len,
            }
            for prompt in [prompt_input] if one else prompt_input:
                try:
                    session_request, prompt_tokens = await call.rendered(
                        partial(prompts.read_text, call.opened.session, prompt)
                    )
                    check_prompt(prompt_tokens.ids, **limits)
                    call.take(session_request, prompt_tokens, request.n or 1)
                except (DataError, EpisodeError) as error:
                    raise VLLMValidationError(str(error), parameter="prompt") from None
            return [tokens_input(prompt.ids.tolist()) for prompt in call.prompts]

        def _check(self, request: Any, call: Call) -> None:
            may_force = bool(call.opened.sampling.changes)
            if call.samples and (problem := refusal(request, may_force=may_force)):
                raise VLLMValidationError(problem[1], parameter=problem[0])
            if getattr(request, "tool_choice", None) == REQUIRED and not may_force:
                request.tool_choice = "auto"
                self._taken_out("tool_choice=required")
            if any(_strict(tool) for tool in getattr(request, "tools", None) or ()) and not may_force:
                self._taken_out("strict of tools")
            for name in LIMITS:  # vLLM refuses one above the longest sequence
                if getattr(request, name, None):
                    setattr(request, name, min(getattr(request, name), self.model_config.max_model_len))

        def _check_size(self, size: int) -> None:
            """Refuse what cannot fit, without a tokenizer, which takes seconds. size: in bytes, without
            images.
            """
            longest = self.model_config.max_model_len
            if size > LARGE + CHARACTERS * longest:
                message = (
                    f"the request of {size:,} bytes exceeds the maximum context length of {longest} tokens."
                )
                raise VLLMValidationError(message, parameter="messages")

        @staticmethod
        @cache
        def _taken_out(option: str) -> None:
            logging.getLogger(__name__).warning(
                "Agents' requests: %s is taken out, as it changes what is sampled.", option
            )

    return SessionRenderer


def _parser_class(base: Any, marks: tuple[str, str]) -> Any:
    """Return a subclass of vLLM's parser, which takes a text without the reasoning's marks for unfinished
    reasoning.
    """
    start, end = marks

    class SessionParser(base):  # type: ignore[misc]
        _opened, _thinks, _begun = False, None, ""
        _ids: Sequence[int] = ()

        def set_prompt_token_ids(self, ids: Sequence[int]) -> None:
            text = str(self.model_tokenizer.decode(ids[-TAIL:]))
            self._opened = start in text.rpartition(end)[2]
            super().set_prompt_token_ids(ids)

        def parse(self, text: str, *arguments: Any, **named: Any) -> Any:
            if not (self._opened or start in text or end in text):
                self._reasoning_parser = None
            return super().parse(text, *arguments, **named)

        def parse_delta(self, delta_text: str, delta_token_ids: list[int], request: Any, **named: Any) -> Any:
            if self._thinks is None:
                if named.get("prompt_token_ids") and not self._ids:
                    self.set_prompt_token_ids(named["prompt_token_ids"])
                delta_text, delta_token_ids = self._begun + delta_text, [*self._ids, *delta_token_ids]
                opening = delta_text.lstrip()
                if (
                    start.startswith(opening)
                    and len(opening) < len(start)
                    and not (self._opened or named["finished"])
                ):
                    self._begun = delta_text
                    self._ids = delta_token_ids
                    return None
                self._thinks = self._opened or opening.startswith(start)
                if not self._thinks:
                    self._reasoning_parser = None
            return super().parse_delta(delta_text, delta_token_ids, request, **named)

    return SessionParser


class RecordingClient:
    """An engine client for vLLM's serving classes, which keeps what the engine samples."""

    def __init__(self, engine: "AsyncLLM", caches: KeptCaches, images: ImageInputs) -> None:
        self._engine = engine
        self._caches = caches
        self._images = images
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, _: Any, wanted: Any, *_more: Any, **_named: Any) -> AsyncIterator[Any]:
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
        recorded = [_output_of(node, index, wanted) for index, node in enumerate(prompt.replayed)]
        if recorded and (delta or not prompt.numbers):
            yield RequestOutput(
                "recorded", None, prompt.ids.tolist(), None, recorded, finished=not prompt.numbers
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
            outputs = self._engine.generate(engine_prompt, parameters, name, priority=opened.priority)
            async for output in outputs:
                if not collected:
                    _forget_tokenizer(self._engine, name, wanted)
                for completion in output.outputs:
                    if not parameters.detokenize:
                        completion.text = self._text(prompt, completion, wanted)
                    turn = collected.setdefault(completion.index, _Collected())
                    turn.take(completion, delta)
                    if completion.finish_reason is not None:
                        prompt.turns[completion.index] = turn.response(completion, prompt, output), turn.text
                    completion.index += len(recorded)
                if not delta:
                    output.outputs = [*recorded, *output.outputs]
                yield output

    def _text(self, prompt: Prompt, completion: Any, wanted: Any) -> str:
        """Decode a whole answer behind the prompt's end, without its end token."""
        decode = partial(self._engine.get_tokenizer().decode, skip_special_tokens=wanted.skip_special_tokens)
        ids = list(completion.token_ids)
        tail = prompt.ids[-TAIL:].tolist()
        ids = ids[:-1] if completion.finish_reason == STOP else ids
        prompt_text, full_text = decode(tail), decode([*tail, *ids])
        return str(full_text[len(prompt_text) :] if full_text.startswith(prompt_text) else decode(ids))


def _forget_tokenizer(engine: "AsyncLLM", name: str, wanted: Any) -> None:
    """Let vLLM not decode each token again for log-probs whose text nobody reads: a third of its time for a
    stream.
    """
    if wanted.logprobs is None:
        for internal in engine.output_processor.external_req_ids.get(name, ()):
            engine.output_processor.request_states[internal].logprobs_processor.tokenizer = None


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
        if log_probs := completion.logprobs:  # the sampled token's is the first at each position
            self.log_probs += [log_probs.logprobs[start] for start in log_probs.start_indices]
        self.ids += completion.token_ids
        self.text += completion.text

    def response(self, completion: Any, prompt: Prompt, output: Any) -> Response:
        full_completion = replace(
            completion, token_ids=self.ids, logprobs=SimpleNamespace(logprobs=self.log_probs)
        )
        counts = {"prompt_token_ids": prompt.ids.tolist(), "num_cached_tokens": output.num_cached_tokens}
        return as_response(SimpleNamespace(outputs=[full_completion], **counts))


def _parameters(call: Call, prompt: Prompt, wanted: Any) -> Any:
    """Return the run's sampling parameters, with the client's limit, stop texts and form of the answer."""
    from vllm.sampling_params import RequestOutputKind

    sampling = call.opened.sampling
    limit = min(wanted.max_tokens, sampling.max_new_tokens)
    ours = replace(
        sampling,
        max_new_tokens=limit,
        min_new_tokens=min(limit, sampling.min_new_tokens),
        stop=list(dict.fromkeys([*sampling.stop, *wanted.stop])),
        stop_token_ids=list(dict.fromkeys([*sampling.stop_token_ids, *wanted.stop_token_ids])),
    )
    parameters = sampling_parameters(ours, turn_seed(call.opened.seed, prompt.numbers[0]))
    parameters.n = len(prompt.numbers)
    parameters.output_kind = wanted.output_kind
    if wanted.output_kind == RequestOutputKind.DELTA:
        parameters.stream_interval = wanted.stream_interval or STREAM_TOKENS
    # A whole answer is decoded at once.
    parameters.detokenize = (
        bool(ours.stop or wanted.logprobs is not None) or wanted.output_kind == RequestOutputKind.DELTA
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
    logprobs = None if wanted.logprobs is None else [{token: Logprob(log_prob)} for token, log_prob in pairs]
    return CompletionOutput(
        index, node.text, response.ids.tolist(), None, logprobs, finish_reason=response.finish_reason
    )


async def build(
    engine: "AsyncLLM",
    model: ModelConfig,
    rollout: RolloutConfig,
    tokenizer: Any,
    caches: KeptCaches,
    images: ImageInputs,
) -> Any:
    """Return vLLM's application over the engine, for calls in `CALL`."""
    # Errors of clients, and texts of the policy that no parser can read.
    for quiet in ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning", "vllm.entrypoints.anthropic"):
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    placeholders = await asyncio.to_thread(load_placeholders, model.path)
    renderer = replace(Renderer.with_template(tokenizer, model.chat_template), placeholders=placeholders)
    parser = TurnParser(tokenizer, rollout.tool_parser, rollout.reasoning_parser, {})
    app = await application(RecordingClient(engine, caches, images), model.path, *parser.names)
    app.state.openai_serving_models.is_base_model = lambda _: True  # agents name any model
    for name in ("openai_serving_chat", "openai_serving_responses", "anthropic_serving_messages"):
        serving = getattr(app.state, name)
        kind = "parser" if name == "openai_serving_responses" else "parser_cls"
        if parser.names[1] and all(parser.marks):
            setattr(serving, kind, _parser_class(getattr(serving, kind), parser.marks))
    online = app.state.online_renderer
    online.__class__ = _online_renderer(type(online), PromptRenderer(renderer))
    return app


async def application(engine: Any, path: str, tool_parser: str, reasoning_parser: str) -> Any:
    """Return vLLM's own application over an engine, or what stands for one."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = ["--model", path, "--served-model-name", "policy", "--disable-fastapi-docs", "--api-key", ""]
    flags += ["--anthropic-disabled-thinking-effort", "none", "--fingerprint-mode", "none"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser] if tool_parser else []
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    arguments.structured_outputs_config.reasoning_parser = reasoning_parser
    tasks = await engine.get_supported_tasks()
    app = build_app(arguments, tasks, engine.model_config)
    await init_app_state(engine, app.state, arguments, tasks)
    app.state.server = SimpleNamespace(
        should_exit=False
    )  # vLLM's error handlers stop it when the engine died
    return app
