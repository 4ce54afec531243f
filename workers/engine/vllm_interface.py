"""Translate between Ballast and vLLM: environment, engine arguments and sampling parameters in, responses
out.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.adapters import adapter_arguments
from workers.engine.batch_invariance import (
    ENVIRONMENT,
    batch_invariant_arguments,
    check_options,
)
from workers.engine.engine_options import check_engine_options
from workers.engine.placement import BACKENDS, needs_frozen_tower
from workers.engine.requests import LENGTH, STOP, Response
from workers.engine.weights.weight_transfer import (
    ENGINE_OF_BACKEND,
    FROZEN_VISION,
    TRANSFER_TIMEOUT,
    mark_actor,
)
from workers.errors import ConfigError, DataError, RolloutError

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

GIB = 2**30
# Tokens of a forward pass. Longer prompts are prefilled in pieces. vLLM's default outside a server is 2,048.
# A 7B's activations stay below 1 GiB.
PREFILL_TOKENS = 8192
# The only size of keys' heads in flashinfer's prefill of gated delta nets.
FLASHINFER_HEAD = 128
FIELD_OF_WEIGHT = {"e_score_correction_bias": "topk_method"}
"""Fields of config.json without which vLLM has no place for a weight of the files."""
CPU_KV_BLOCK_TOKENS = 32
"""The smallest block of vLLM's fast CPU kernels: prompts of a group share their full blocks."""


def prepare_environment(
    config: RolloutConfig, placement: str, *, batch_invariant: bool = False
) -> None:
    """Set variables that vLLM reads at import and its processes inherit. Call before importing vllm.

    batch_invariant: `model.batch_invariant`.
    """
    if batch_invariant:
        os.environ.update(ENVIRONMENT)
    mark_actor()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if placement == "colocated":
        # CUDA handles travel to the engine's processes pickled.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if placement == "shared_memory":
        os.environ.update(cpu_environment(config))


def cpu_environment(config: RolloutConfig) -> dict[str, str]:
    threads = config.threads or max(
        1, len(os.sched_getaffinity(0)) // config.tensor_parallel
    )
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin at a barrier while another process has their partner's core make a step ten times
        # longer.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, engines of one node would share their first core
        # Pages of 2 MiB for tensors of that size: with 4 KiB a KV cache has a fault at the first use of each
        # page, and the activations of prompts have them at every use.
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),
        # Both ways are eager. Without this vLLM compiles a helper at the first request, for ten seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # vLLM's switch. With 0 the engine is a thread of its actor: see workers.engine.engine_thread.
        "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
        )
        if config.tensor_parallel == 1
        else "1",
    }


def engine_arguments(
    model: ModelConfig,
    config: RolloutConfig,
    *,
    placement: str,
    max_model_tokens: int,
    seed: int,
    transfer_timeout_s: float = 600.0,
) -> "AsyncEngineArgs":
    """Return engine arguments: log-probs are at the engine's temperature, before truncation if vLLM can.

    See `SamplingConfig.log_probs_are_whole`. transfer_timeout_s: of a transfer between
    GPUs. Raises ConfigError for a refused option in `rollout.engine`.
    """
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig

    on_cpu = placement == "shared_memory"
    before_cut = config.sampling.cuts and config.sampling.log_probs_are_whole
    device = (
        _cpu_arguments(config) if on_cpu else _gpu_arguments(config, placement, model.path)
    )
    arguments = dict(
        model=model.path,
        dtype=_dtype(model, on_cpu),
        seed=seed % 2**32,
        max_model_len=max_model_tokens,
        max_num_seqs=config.max_concurrent,
        scheduling_policy="priority" if config.max_staleness else "fcfs",
        tensor_parallel_size=config.tensor_parallel,
        # With layers that carry a state it needs chunked prefill, which a CPU's engine has not: see
        # `_cpu_arguments`.
        enable_prefix_caching=not (on_cpu and carries_state(model.path)),
        enable_return_routed_experts=model.router_replay != "none",
        logprobs_mode="raw_logprobs" if before_cut else "processed_logprobs",
        disable_log_stats=True,
        limit_mm_per_prompt={"video": 0, "audio": 0},
        mm_processor_cache_gb=0,  # ImageInputs keeps what is processed
        use_tqdm_on_load=False,
        max_num_batched_tokens=max(
            PREFILL_TOKENS, config.max_concurrent, max_model_tokens if on_cpu else 0
        ),
        weight_transfer_config=WeightTransferConfig(
            backend=ENGINE_OF_BACKEND[
                "shared_memory" if config.weight_sync == "delta" else BACKENDS[placement]
            ]
        ),
        additional_config={
            FROZEN_VISION: not model.train_vision and not needs_frozen_tower(placement),
            TRANSFER_TIMEOUT: transfer_timeout_s,
        },
        # By default vLLM would choose Ray here, and look for its placement groups.
        distributed_executor_backend="uni" if config.tensor_parallel == 1 else "mp",
        **adapter_arguments(model),
        **device,
    )
    check_engine_options(config.engine)
    if model.batch_invariant:
        check_options(config.engine)
        arguments |= batch_invariant_arguments(enforce_eager=config.enforce_eager)
    return AsyncEngineArgs(**(arguments | config.engine | plain_arguments(model.path)))


def plain_arguments(path: str) -> dict[str, Any]:
    """Return arguments for a quantized checkpoint: the trainer sends plain weights before the first request,
    and vLLM's quantized layers would not take them.
    """
    from workers.model.quantized import quantization_of, without_quantization

    if quantization_of(_description(path), f"model.path={path}") is None:
        return {}
    return {"load_format": "dummy", "hf_overrides": without_quantization}


def carries_state(path: str) -> bool:
    """Return whether vLLM's model class has layers that carry a state from token to token (Mamba, gated
    delta, ...).

    Asks vLLM, because many a config.json (Falcon-H1, Jamba) does not list such layers.
    """
    from vllm import ModelRegistry

    import workers.engine.cpu_registry  # noqa: F401  takes the place of vLLM's process

    names = _description(path).get("architectures") or ()
    models = [ModelRegistry.models[name] for name in names if name in ModelRegistry.models]
    return any(model.inspect_model_cls().is_hybrid for model in models)


def _description(path: str) -> dict[str, Any]:
    """Return config.json, or nothing without one: vLLM's own message, when it starts, says more."""
    from transformers import PretrainedConfig

    try:
        return dict(PretrainedConfig.get_config_dict(path, local_files_only=True)[0])
    except OSError:
        return {}


def delta_net_arguments(path: str) -> dict[str, Any]:
    """Choose the prefill kernel of gated delta nets where vLLM 0.32 would take one that fails.

    On Hopper it takes flashinfer's, whatever the head size and whether or not flashinfer is installed.
    """
    description = _description(path)
    text = description.get("text_config") or description
    size = text.get("linear_key_head_dim")
    if size is None or (size == FLASHINFER_HEAD and find_spec("flashinfer") is not None):
        return {}
    return {"gdn_prefill_backend": "triton"}


def build_engine(arguments: "AsyncEngineArgs") -> "AsyncLLM":
    """Build the engine, with its core in a process or a thread as `prepare_environment` chose.

    Raises ConfigError for a config.json without a field that vLLM reads, and vLLM's other errors.
    """
    try:
        return _build_engine(arguments)
    except (AttributeError, KeyError) as error:
        field = missing_field(error)
        if not field:
            raise
        raise ConfigError(
            f"model.path={arguments.model}: its config.json has no {field}, which vLLM reads. Add it, as in "
            "the published checkpoint."
        ) from error


def missing_field(error: AttributeError | KeyError) -> str:
    """Return the field of config.json that vLLM did not find, or an empty string for another error.

    transformers fills such a field, so that the trainer loads the model.
    """
    from transformers import PretrainedConfig

    if isinstance(error, AttributeError):
        return error.name if error.name and isinstance(error.obj, PretrainedConfig) else ""
    weight = str(error.args[0]) if error.args else ""
    return FIELD_OF_WEIGHT.get(weight.rpartition(".")[2], "")


def _build_engine(arguments: "AsyncEngineArgs") -> "AsyncLLM":
    from vllm import envs
    from vllm.v1.engine.async_llm import AsyncLLM

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return AsyncLLM.from_engine_args(arguments)
    from workers.engine.engine_thread import engine_in_a_thread

    return engine_in_a_thread(arguments)


async def hold_requests(
    engine: "AsyncLLM", *, clear_cache: bool, clear_images: bool = False
) -> None:
    """Stop scheduling, keeping requests in flight, until `resume_generation`.

    clear_cache: of keys and values, and all others. clear_images: forget what a vision tower computed.
    `AsyncLLM.pause_generation` also sleeps 20 ms, to return outputs first: a third of an update of a small
    model.
    """
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
    if clear_images and not clear_cache:
        await engine.reset_encoder_cache()


def _dtype(model: ModelConfig, on_cpu: bool) -> str:
    if model.dtype != "auto":
        return model.dtype
    return "float32" if on_cpu else "bfloat16"


def _cpu_arguments(config: RolloutConfig) -> dict[str, Any]:
    import workers.engine.cpu_experts  # noqa: F401  # takes the place of vLLM's choice
    from workers.engine.cpu_kernels import NORMS, PROVIDER

    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(config.cpu_kv_cache_gib * GIB),
        "block_size": CPU_KV_BLOCK_TOKENS,
        # A prompt that is taken in parts ends the engine: vLLM 0.32 then asks a seeded request's generator
        # for its offset, which a CPU's does not have.
        "enable_chunked_prefill": False,
        "skip_mm_profiling": True,  # which measures memory, and the KV cache has its own size
        "ir_op_priority": {norm: [PROVIDER] for norm in NORMS},
    }


def _gpu_arguments(config: RolloutConfig, placement: str, path: str) -> dict[str, Any]:
    return {
        "enforce_eager": config.enforce_eager,
        "gpu_memory_utilization": config.gpu_share(placement),
        "enable_sleep_mode": placement == "colocated",
    } | delta_net_arguments(path)


def sampling_parameters(sampling: SamplingConfig, seed: int) -> "SamplingParams":
    """One sample: token ids and their log-probs, returned once, when it is finished."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    form = sampling.structured_outputs

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias or None,
        bad_words=sampling.bad_words,
        structured_outputs=StructuredOutputsParams(**form) if form else None,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        # else a stop text such as </tool_call> is never seen where it is one token
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def check_prompt(prompt_ids: np.ndarray, *, vocab_size: int, max_model_tokens: int) -> None:
    """Raise DataError for a prompt that the engine cannot take: some would end it, with all its requests."""
    if len(prompt_ids) == 0:
        raise DataError("the prompt is empty.")
    if len(prompt_ids) >= max_model_tokens:
        raise DataError(
            f"the prompt of {len(prompt_ids)} tokens leaves no room for a response in "
            f"rollout.max_model_tokens={max_model_tokens}. Lower data.max_prompt_tokens or raise "
            "rollout.max_model_tokens."
        )
    outside = prompt_ids[(prompt_ids < 0) | (prompt_ids >= vocab_size)]
    if len(outside):
        raise DataError(
            f"token id {outside[0]} of the prompt is outside the model's vocabulary of {vocab_size}."
        )


def as_response(output: "RequestOutput") -> Response:
    """Convert the output of a finished request. Raises RolloutError for another finish reason than stop or
    length.
    """
    completion = output.outputs[0]
    if completion.finish_reason not in (STOP, LENGTH):
        raise RolloutError(
            f"vLLM ended the request with finish reason {completion.finish_reason!r}."
        )
    experts = completion.routed_experts
    return Response(
        ids=np.asarray(completion.token_ids, dtype=np.int32),
        # Flat: one a token, the sampled one's.
        log_probs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        versions=_versions(completion.weight_versions),
        finish_reason=completion.finish_reason,
        read_tokens=len(output.prompt_token_ids or ()),
        cached_tokens=output.num_cached_tokens or 0,
        routed_experts=None if experts is None else experts.astype(np.int16),
        stop_string=isinstance(completion.stop_reason, str),
    )


def unfinished_responses(engine: "AsyncLLM") -> dict[str, Response]:
    """Return unfinished responses with tokens, by request name, from vLLM's output processor.

    vLLM reports the versions of weights only with finished outputs.
    """
    states = engine.output_processor.request_states.values()
    return {
        state.external_req_id: Response(
            np.array(state.detokenizer.output_token_ids, dtype=np.int32),
            np.array(state.logprobs_processor.logprobs.logprobs, dtype=np.float32),
            _versions(state._weight_version_spans()),
        )
        for state in states
        if state.detokenizer.num_output_tokens()
    }


def unfinished_tokens(engine: "AsyncLLM") -> dict[str, int]:
    """Return the sampled tokens of unfinished requests that have some, by vLLM's inner name of
    the request.
    """
    states = engine.output_processor.request_states.items()
    return {
        name: tokens
        for name, state in states
        if (tokens := state.detokenizer.num_output_tokens())
    }


def _versions(spans: Sequence[Any]) -> np.ndarray:
    return np.repeat(
        [int(span.version) for span in spans], [span.end - span.start for span in spans]
    ).astype(np.int32)
