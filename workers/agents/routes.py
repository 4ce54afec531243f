"""Serve vLLM's routes of OpenAI's and Anthropic's APIs over an engine: ids in as prompts, turns out.

    messages --preprocess_chat--> ids of the turn that they extend, and of the new text
    ids --generate--> [vLLM: engine] --text--> [vLLM: parsers, answer]
                         '-- ids, log-probs, versions --> Prompt.turns

vLLM's templates and sampling options are not used: prompts are rendered by `Renderer`, and sampling is the
run's.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from workers.agents.prompt_renderer import PromptRenderer
from workers.agents.recording_client import RecordingClient
from workers.agents.session_requests import CALL, LARGE, SessionRequest
from workers.config.roles import ModelConfig, RolloutConfig
from workers.engine.vllm_interface import check_prompt
from workers.episodes.parsing import TurnParser, opens_reasoning
from workers.errors import ConfigError, DataError, EpisodeError
from workers.image_parts import image_parts
from workers.model.vision.processor import load_placeholders
from workers.rendering import Renderer

# Constrain what is sampled.
FORCED = ("response_format", "structured_outputs", "tool_choice", "text")
OTHERS = {
    "bad_words", "allowed_token_ids", "logit_bias", "min_tokens", "ignore_eos", "use_beam_search",
    "watermarking", "repetition_detection", "prompt_logprobs", "echo", "suffix", "prompt_embeds",
    "continue_final_message", "truncate_prompt_tokens", "documents", "previous_response_id", "background",
    "functions", "function_call", "best_of", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
}  # fmt: skip
CHARACTERS = 32  # bytes of a token at most, on average
REQUIRED = "required"  # stock agents send it always: taken out
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def refusal(request: Any, *, may_force: bool) -> tuple[str, str] | None:
    """Return an option of a request that a session cannot have, and why, or None."""
    if any(
        getattr(tool, "type", "function") != "function"
        for tool in getattr(request, "tools", None) or ()
    ):
        return "tools", "tools: the policy calls functions alone. Leave out other tools."
    if name := next(
        (name for name in OTHERS & request.model_fields_set if getattr(request, name)), ""
    ):
        return name, f"{name}: a session samples with rollout.sampling alone. Leave it out."
    if not may_force and (
        name := next(
            (
                option
                for option in FORCED
                if _forces(option, getattr(request, option, None))
            ),
            "",
        )
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


def _strict(tool: Any) -> bool:
    return bool(getattr(getattr(tool, "function", tool), "strict", False))


def _check_request(request: Any, call: SessionRequest, longest: int) -> None:
    """Refuse what a session cannot have, and take out what only looks like it. longest: in tokens."""
    from vllm.exceptions import VLLMValidationError

    may_force = bool(call.opened.sampling.changes)
    if call.samples and (problem := refusal(request, may_force=may_force)):
        raise VLLMValidationError(problem[1], parameter=problem[0])
    if getattr(request, "tool_choice", None) == REQUIRED and not may_force:
        request.tool_choice = "auto"
        _warn_of_option("tool_choice=required")
    if (
        any(_strict(tool) for tool in getattr(request, "tools", None) or ())
        and not may_force
    ):
        _warn_of_option("strict of tools")
    for name in LIMITS:  # vLLM refuses one above the longest sequence
        if getattr(request, name, None):
            setattr(request, name, min(getattr(request, name), longest))


def _check_size(size: int, longest: int) -> None:
    """Refuse what cannot fit, without a tokenizer, which takes seconds. size: in bytes, without images."""
    from vllm.exceptions import VLLMValidationError

    if size > LARGE + CHARACTERS * longest:
        message = f"the request of {size:,} bytes exceeds the maximum context length of {longest} tokens."
        raise VLLMValidationError(message, parameter="messages")


@cache
def _warn_of_option(option: str) -> None:
    logging.getLogger(__name__).warning(
        "Agents' requests: %s is taken out, as it changes what is sampled.", option
    )


def _online_renderer(base: type, prompts: PromptRenderer) -> type:
    """Return vLLM's renderer of requests, with ids of ours."""
    from vllm.exceptions import VLLMValidationError

    class SessionRenderer(base):  # type: ignore[misc]
        async def preprocess_chat(
            self,
            request: Any,
            messages: list[Any],
            *arguments: Any,
            tool_dicts: Any = None,
            **named: Any,
        ) -> Any:
            call = CALL.get()
            _check_request(request, call, self.model_config.max_model_len)
            try:
                options = prompts.options(call.opened.options, request, tool_dicts)
                messages = prompts.messages(messages)
                images = sum(len(part["image"]) for part in image_parts(messages))
                _check_size(call.size - images, self.model_config.max_model_len)
                session_request, prompt = await call.render(
                    partial(prompts.read, call.opened, messages, options), images > 0
                )
                call.take(session_request, prompt, getattr(request, "n", None) or 1)
            # A model that reads no images raises ConfigError.
            except (
                ConfigError,
                DataError,
                EpisodeError,
            ) as error:
                raise VLLMValidationError(str(error), parameter="messages") from None
            # vLLM takes these as they are.
            request.kv_transfer_params = {"prompt_token_ids": prompt.ids.tolist()}
            result = await super().preprocess_chat(
                request, [], *arguments, tool_dicts=tool_dicts, **named
            )
            request.kv_transfer_params = None
            return result

        async def preprocess_completion(
            self, request: Any, prompt_input: Any, prompt_embeds: Any, **_: Any
        ) -> list[Any]:
            from vllm.inputs.engine import tokens_input

            call = CALL.get()
            _check_request(request, call, self.model_config.max_model_len)
            _check_size(call.size, self.model_config.max_model_len)
            if not prompt_input:
                raise VLLMValidationError("the request has no prompt.", parameter="prompt")
            one = isinstance(prompt_input, str) or isinstance(prompt_input[0], int)
            limits = {
                "vocab_size": self.model_config.get_vocab_size(),
                "max_model_tokens": self.model_config.max_model_len,
            }
            for prompt in [prompt_input] if one else prompt_input:
                try:
                    session_request, prompt_tokens = await call.render(
                        partial(prompts.read_text, call.opened.session, prompt)
                    )
                    check_prompt(prompt_tokens.ids, **limits)
                    call.take(session_request, prompt_tokens, request.n or 1)
                except (DataError, EpisodeError) as error:
                    raise VLLMValidationError(str(error), parameter="prompt") from None
            return [tokens_input(prompt.ids.tolist()) for prompt in call.prompts]

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
            self._opened = opens_reasoning(self.model_tokenizer, ids, marks)
            super().set_prompt_token_ids(ids)

        def parse(self, text: str, *arguments: Any, **named: Any) -> Any:
            if not (self._opened or start in text or end in text):
                self._reasoning_parser = None
            return super().parse(text, *arguments, **named)

        def parse_delta(
            self, delta_text: str, delta_token_ids: list[int], request: Any, **named: Any
        ) -> Any:
            if self._thinks is None:
                if named.get("prompt_token_ids") and not self._ids:
                    self.set_prompt_token_ids(named["prompt_token_ids"])
                delta_text, delta_token_ids = (
                    self._begun + delta_text,
                    [*self._ids, *delta_token_ids],
                )
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


async def build(
    client: RecordingClient, model: ModelConfig, rollout: RolloutConfig, tokenizer: Any
) -> Any:
    """Return vLLM's application over the engine of `client`, for calls in `CALL`."""
    # Errors of clients, and texts of the policy that no parser can read.
    for quiet in (
        "vllm.tool_parsers",
        "vllm.parser",
        "vllm.reasoning",
        "vllm.entrypoints.anthropic",
    ):
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
    placeholders = await asyncio.to_thread(load_placeholders, model.path)
    renderer = replace(
        Renderer.with_template(tokenizer, model.chat_template), placeholders=placeholders
    )
    parser = TurnParser(tokenizer, rollout.tool_parser, rollout.reasoning_parser, {})
    app = await application(client, model.path, *parser.names)
    app.state.openai_serving_models.is_base_model = lambda _: True  # agents name any model
    for name in (
        "openai_serving_chat",
        "openai_serving_responses",
        "anthropic_serving_messages",
    ):
        serving = getattr(app.state, name)
        kind = "parser" if name == "openai_serving_responses" else "parser_cls"
        if parser.names[1] and all(parser.marks):
            setattr(serving, kind, _parser_class(getattr(serving, kind), parser.marks))
    online = app.state.online_renderer
    online.__class__ = _online_renderer(type(online), PromptRenderer(renderer))
    return app


async def application(
    engine: Any, path: str, tool_parser: str, reasoning_parser: str
) -> Any:
    """Return vLLM's own application over an engine, or what stands for one."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = [
        "--model",
        path,
        "--served-model-name",
        "policy",
        "--disable-fastapi-docs",
        "--api-key",
        "",
    ]
    flags += ["--anthropic-disabled-thinking-effort", "none", "--fingerprint-mode", "none"]
    flags += (
        ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser]
        if tool_parser
        else []
    )
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    arguments.structured_outputs_config.reasoning_parser = reasoning_parser
    tasks = await engine.get_supported_tasks()
    app = build_app(arguments, tasks, engine.model_config)
    await init_app_state(engine, app.state, arguments, tasks)
    # vLLM's error handlers stop the server when the engine died.
    app.state.server = SimpleNamespace(should_exit=False)
    return app
