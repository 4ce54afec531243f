"""Check a run's models with transformers: build each without weights, and compute small ones.

    Config --roles--> skeleton of each model --> nothing, or ConfigError     before anything is started
                  '-> whole model, up to 2 GiB --> "numerics: ..."           the last lines of `--dry-run`

It imports torch and transformers first, after all checks that need neither.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.model_files import positions, read_model_files, weight_bytes
from controller.config.sampler import SamplerConfig
from controller.preflight.engine_checks import response_limit, samplings
from workers.config.loss import DistillationConfig
from workers.config.roles import ModelConfig
from workers.errors import BallastError, ConfigError
from workers.user_code.functions import check_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from workers.model.quantized import Quantization

GIB = 1 << 30
MOST_BYTES = 2 * GIB
# Weights in bfloat16 take twice their files in float32, and as much again while they are read.
SHARE_OF_MEMORY = 1 / 6
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads that vLLM's attention on CPUs has kernels for. With others an engine dies in its
first step.
"""
CPU_LATENT_SIZE = 576
"""Numbers of a token in latent attention that vLLM's CPU kernel takes: `kv_lora_rank` and the rotary part."""
WITHOUT_LATENTS = ("minicpm3",)
"""Model types whose latents vLLM expands to heads."""
ABSORBED = "kv_b_proj"
"""The module of latent attention that vLLM 0.32 computes with other weights. An engine with its adapter
differed by 6.6 nats."""
CPU_DELTA_HEADS = (64, 128)
"""Sizes of keys' heads that vLLM's gated delta nets on CPUs have kernels for, in bfloat16 alone."""
GPU_ONLY = {
    "falcon_mamba": "its selective scan has no other kernel",
    "jamba": "its selective scan has no other kernel",
    "kimi_linear": "its delta attention imports CUTLASS",
    "mamba": "its selective scan has no other kernel",
    "olmo_hybrid": "its gated delta nets import Triton",
}
"""Model types that vLLM 0.32 computes on GPUs alone, and why."""
KV_BLOCK_TOKENS = 32  # for an engine on CPU, see workers.engine.vllm_interface


@dataclass(frozen=True)
class Role:
    """A model that the run trains or reads.

    key: setting that names it. head: as in `TrainingEngine`. trained: whether a value head may be new.
    """

    key: str
    model: ModelConfig
    head: str = "lm"
    trained: bool = True


def _roles(config: TrainingConfig) -> list[Role]:
    """Return the models of the training roles, each once."""
    specs = [config.spec(role) for role in config.training_roles]
    roles = [
        Role(spec.path_setting(name), model, spec.head, spec.takes_new_head)
        for spec in specs
        for name, model in config.models_of(spec.name).items()
    ]
    return list({(role.model.path, role.head): role for role in reversed(roles)}.values())[
        ::-1
    ]


def check_models(config: TrainingConfig, log: Callable[[str], None] = print) -> None:
    """Check that every model can be built, and that both engines support it.

    log: called with a line about what the run leaves out. Raises ConfigError or UnsupportedModelError.
    """
    policy = _model(config, Role("model.path", config.model, config.head))
    _note_modules_without_adapter(config, policy, log)
    _check_ends(config, policy)
    if config.head == "value":
        _check_pad_token(config)
    _check_positions(config, "model.path", config.model.path, policy)
    if isinstance(config, Config):
        _check_token_ids(config, _vocabulary(policy))
        _check_engine(config, policy)
        check_all_weights_are_sent(config, policy)
        _check_absorbed_modules(config, policy)
    for role in _roles(config):
        if role.key == "model.path":
            continue
        model = _model(config, role)
        if role.key.startswith("teacher."):
            _check_tokens(config, role)
            _check_top(config, _vocabulary(policy))
        elif (tokens := _vocabulary(model)) != (expected := _vocabulary(policy)):
            raise ConfigError(
                f"{role.key}={role.model.path}: it has {tokens} tokens and model.path={config.model.path} "
                f"{expected}. Take a model that reads the policy's tokens."
            )
        _check_positions(config, role.key, role.model.path, model)
    _check_optimizers(config)


def _check_optimizers(config: TrainingConfig) -> None:
    """Try custom optimisers and schedules."""
    specs = [config.spec(role) for role in config.training_roles]
    for section in [spec.settings_section for spec in specs if spec.learns]:
        optimizer = value_of(config, f"{section}.optimizer")
        total = max(
            optimizer.total_steps or config.run.steps or 100, optimizer.warmup_steps + 1
        )
        names = [
            name for name in ("function", "schedule_function") if getattr(optimizer, name)
        ]
        for name in names[:1]:  # a trial is of both
            key = f"{section}.optimizer.{name}"
            timeout_s = config.resources.user_code_timeout_s
            check_optimizer(
                key, getattr(optimizer, name), optimizer, total, timeout_s=timeout_s
            )


def _model(config: TrainingConfig, role: Role) -> "PreTrainedModel":
    from workers.model.checkpoint.lora import add_adapters, lower_base
    from workers.model.rules.model_rules import check_model
    from workers.model.skeleton import build_sampled, build_skeleton

    files = read_model_files(role.model.path, role.key)
    try:
        if role.key == "model.path" and isinstance(config, SamplerConfig):
            return build_sampled(role.model, files.folder, weights=files.weights)
        layout = role.model.attention_layout(shared=config.shares_model)
        settings = replace(role.model, layout=layout, forward_layout="same")
        packed = build_skeleton(
            settings, files.folder, role.head, trained=role.trained, weights=files.weights
        )
        on = {"cuda": config.uses_gpus, "half": config.compute_dtype != "float32"}
        check_model(packed, role.model, config.policy.parallel, head=role.head, **on)
        if role.model.lora.rank:
            add_adapters(packed.model, role.model.lora)
            lower_base(
                packed.model, role.model.base_dtype, config.policy.parallel.tensor_parallel
            )
    except ConfigError as error:  # the engine, which knows one model, names model.path
        text = str(error).replace(
            f"model.path={files.folder}", f"{role.key}={role.model.path}", 1
        )
        raise type(error)(text) from error
    return packed.model


def _note_modules_without_adapter(
    config: TrainingConfig, policy: "PreTrainedModel", log: Callable[[str], None]
) -> None:
    from workers.model.checkpoint.lora import modules_left_out

    lora = config.model.lora
    if lora.rank and (names := modules_left_out(policy, lora)):
        log(
            f"note: model.lora.target_modules={lora.target_modules} leaves out {', '.join(names)}: "
            "peft adds no "
            f"adapter to these modules of a {policy.config.model_type} model"
        )


def _vocabulary(model: "PreTrainedModel") -> int:
    return int(model.get_input_embeddings().num_embeddings)


def _check_tokens(config: TrainingConfig, role: Role) -> None:
    """Raise ConfigError unless the tokenizer of `role` gives every token of the policy's the same id."""
    from workers.model.pretrained import load_tokenizer

    policy, role_vocabulary = (
        load_tokenizer(path).get_vocab() for path in (config.model.path, role.model.path)
    )
    different = [
        token for token, number in policy.items() if role_vocabulary.get(token) != number
    ]
    if different:
        first = min(different, key=policy.__getitem__)
        raise ConfigError(
            f"{role.key}={role.model.path}: its tokenizer gives {len(different):,} of the policy's "
            f"{len(policy):,} tokens other ids, such as {first!r}. Take a teacher with the tokenizer of "
            f"model.path={config.model.path}."
        )


def _check_top(config: TrainingConfig, vocabulary: int) -> None:
    settings = (
        config.algorithm.loss.distillation
        if isinstance(config, Config)
        else DistillationConfig()
    )
    if settings.over == "top_k" and settings.top_k >= vocabulary:
        raise ConfigError(
            f"algorithm.loss.distillation.top_k={settings.top_k}: model.path={config.model.path} has "
            f"{vocabulary} tokens. Lower it, or set algorithm.loss.distillation.over=vocabulary."
        )


def _check_ends(config: TrainingConfig, model: "PreTrainedModel") -> None:
    for end in read_model_files(config.model.path, "model.path").ends:
        if not isinstance(end, int) or not 0 <= end < _vocabulary(model):
            raise ConfigError(
                f"model.path={config.model.path}: eos_token_id {end!r} is outside the vocabulary of "
                f"{_vocabulary(model)}. Correct config.json or generation_config.json."
            )


def _check_pad_token(config: TrainingConfig) -> None:
    """Raise ConfigError without a pad token, behind which transformers finds the scores of a batch."""
    from workers.model.pretrained import load_tokenizer

    if load_tokenizer(config.model.path).pad_token_id is None:
        raise ConfigError(
            f"model.path={config.model.path}: its tokenizer has no pad token, without which transformers "
            "scores no batch. Set pad_token in tokenizer_config.json to a token that ends no response."
        )


def _check_token_ids(config: Config, vocabulary: int) -> None:
    for key, sampling in samplings(config).items():
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(sampling, name):
                if not 0 <= token < vocabulary:
                    raise ConfigError(
                        f"{key}.{name}: {token} is outside the vocabulary of {vocabulary}. Correct it."
                    )


def _check_positions(
    config: TrainingConfig, key: str, path: str, model: "PreTrainedModel"
) -> None:
    most = positions(model.config.get_text_config().to_dict())
    longest = config.longest_sequence
    lower = ""
    if isinstance(config, Config):
        lower = (
            f"data.max_prompt_tokens, {response_limit(config)} or rollout.max_model_tokens"
        )
        longest = max(longest, config.max_model_tokens) if key == "model.path" else longest
    if most is not None and longest > most:
        raise ConfigError(
            f"{key}={path}: it takes {most} tokens, and sequences may reach {longest}. "
            f"Lower {lower or 'data.max_tokens'}."
        )


def _check_engine(config: Config, model: "PreTrainedModel") -> None:
    from balancing.model_fields import Fields
    from workers.model.rules.families import SELECTED_TOKENS
    from workers.model.rules.layer_sizes import head_sizes, kv_bytes

    text = model.config.get_text_config()
    key = f"model.path={config.model.path}"
    parallel = config.rollout.tensor_parallel
    # Plain access raises for fields that layers of Gemma 4 have of their own.
    fields = Fields(text)
    heads = fields.get("num_attention_heads")
    pairs = fields.get("num_key_value_heads") or heads
    if heads and heads % parallel:
        raise ConfigError(
            f"rollout.tensor_parallel={parallel}: it does not divide the {heads} heads of {key}."
        )
    if pairs and pairs % parallel and parallel % pairs:
        raise ConfigError(
            f"rollout.tensor_parallel={parallel}: it neither divides nor is a multiple of the {pairs} "
            f"key-value heads of {key}."
        )
    if config.uses_gpus:
        return
    if getattr(text, SELECTED_TOKENS, None):
        raise ConfigError(
            f"{key}: vLLM on CPUs has no attention to selected tokens ({SELECTED_TOKENS}). "
            "Take another model, or GPUs."
        )
    _check_cpu_states(config, text)
    latent = getattr(text, "kv_lora_rank", None)
    if (
        latent
        and text.model_type not in WITHOUT_LATENTS
        and latent + text.qk_rope_head_dim != CPU_LATENT_SIZE
    ):
        raise ConfigError(
            f"{key}: vLLM on CPUs computes no latents of {latent + text.qk_rope_head_dim} numbers "
            f"(kv_lora_rank + qk_rope_head_dim), only of {CPU_LATENT_SIZE}. Take another model, or GPUs."
        )
    for size in head_sizes(text):
        if size not in CPU_HEAD_SIZES:
            raise ConfigError(
                f"{key}: vLLM on CPUs computes no heads of {size} numbers, only of "
                f"{', '.join(map(str, CPU_HEAD_SIZES))}. Take another model, or GPUs."
            )
    if "kv_cache_dtype" in config.rollout.engine:
        return
    tokens = KV_BLOCK_TOKENS * math.ceil(config.max_model_tokens / KV_BLOCK_TOKENS)
    width = 1 if config.model.dtype == "bfloat16" else 2  # in values of half precision
    needed = width * kv_bytes(text, tokens, windows=False) / parallel / GIB
    if needed > config.rollout.cpu_kv_cache_gib:
        raise ConfigError(
            f"rollout.cpu_kv_cache_gib={config.rollout.cpu_kv_cache_gib:g}: keys and values of one sequence "
            f"of {config.max_model_tokens} tokens take {needed:.2g} GiB. Raise it, or lower "
            "rollout.max_model_tokens, data.max_prompt_tokens or the limits of a response."
        )


def check_all_weights_are_sent(config: Config, model: "PreTrainedModel") -> None:
    """Raise ConfigError if the engines of a quantized checkpoint, which read no weights, would miss some."""
    quantization = _quantization(config.model.path, "model.path")
    if quantization is None:
        return
    key = (
        f"model.path={config.model.path}: engines get weights quantized by {quantization.method} from the "
        "trainer"
    )
    lora = config.model.lora
    if lora.sends_adapters:
        setting = (
            "model.lora.sync=adapters"
            if lora.policies == 1
            else f"model.lora.policies={lora.policies}"
        )
        raise ConfigError(
            f"{key}, which sends adapters alone with {setting}. Set merged and 1 policy, or take the model "
            "in bfloat16."
        )
    sees = hasattr(model, "get_image_features")
    if sees and not config.model.train_vision and config.rollout_placement != "colocated":
        raise ConfigError(
            f"{key}, which sends no frozen vision tower. Set model.train_vision=true or "
            "rollout.placement=colocated, or take the model in bfloat16."
        )


def _check_absorbed_modules(config: Config, model: "PreTrainedModel") -> None:
    """Raise ConfigError for an adapter that vLLM would load and never compute. model: with adapters."""
    lora = config.model.lora
    names = [name for name, _ in model.named_parameters() if f".{ABSORBED}.lora_A." in name]
    if lora.sends_adapters and names and model.config.model_type not in WITHOUT_LATENTS:
        raise ConfigError(
            f"model.lora.target_modules={lora.target_modules}: vLLM's latent attention multiplies {ABSORBED} "
            "into other weights when it loads them, without its adapter. Set model.lora.sync=merged with 1 "
            f"policy, or name the modules without {ABSORBED}."
        )


def _quantization(path: str, key: str) -> "Quantization | None":
    from workers.model.quantized import quantization_of

    return quantization_of(read_model_files(path, key).description, f"{key}={path}")


def _check_cpu_states(config: Config, text: Any) -> None:
    """Raise ConfigError for layers with a state that vLLM's kernels on CPUs do not compute."""
    key = f"model.path={config.model.path}"
    reason = GPU_ONLY.get(text.model_type, "")
    if text.model_type == "nemotron_h" and "moe" in text.layers_block_type:
        reason = "its experts have no gate (is_act_and_mul=False)"
    if reason:
        raise ConfigError(
            f"{key}: vLLM computes {text.model_type} on GPUs alone, because {reason}. "
            "Set resources.device=cuda."
        )
    size = getattr(text, "linear_key_head_dim", None)
    if size is None:
        return
    if size not in CPU_DELTA_HEADS:
        raise ConfigError(
            f"{key}: vLLM's gated delta nets on CPUs take heads of "
            f"{' or '.join(map(str, CPU_DELTA_HEADS))} numbers, not {size}. Set resources.device=cuda."
        )
    if config.model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype={config.model.dtype}: vLLM's gated delta nets on CPUs compute in bfloat16 alone. "
            "Set model.dtype=bfloat16."
        )


def numerics_lines(config: TrainingConfig) -> Iterator[str]:
    """Yield a line per model: its check against the reference if it is small enough, else the reason.

    Raises UnsupportedModelError if the training engine's numbers differ from the model's own, ConfigError for
    weights that cannot be loaded or are not finite.
    """
    for role in _roles(config):
        size = weight_bytes(role.model.path, role.key)
        limit = _most_bytes()
        if size and (quantization := _quantization(role.model.path, role.key)):
            stored = size
            size = _plain_bytes(role, quantization)
            yield (
                f"weights: {role.key} has {stored / GIB:.1f} GiB quantized by {quantization.method}, read as "
                f"{size / GIB:.1f} in bfloat16 for engines and {2 * size / GIB:.1f} in float32 for training"
            )
        if not size:
            yield f"numerics: {role.key} has no weights on this machine. The run checks it at its start"
        elif size > limit:
            yield (
                f"numerics: {role.key} has {size / GIB:.1f} GiB of weights and is not loaded here (limit "
                f"{limit / GIB:.1f}). The run checks it at its start"
            )
        else:
            largest, unit = _measure(role)
            rows = f"{role.model.layout} rows of {role.key}"
            yield f"numerics: {rows} match the model's own forward pass within {largest:.1e}{unit}"
        yield from _selection_lines(config, role)


def _selection_lines(config: TrainingConfig, role: Role) -> Iterator[str]:
    from workers.model.rules.families import SELECTED_TOKENS

    limit = read_model_files(role.model.path, role.key).text.get(SELECTED_TOKENS)
    if not limit:
        return
    longest = config.longest_sequence
    effect = f"sequences of up to {longest} tokens select all of their tokens"
    if longest > limit:
        effect = (
            f"in sequences of {limit + 1} to {longest} tokens, engine and trainer "
            "may select other tokens"
        )
    yield f"selection: {role.key} has {SELECTED_TOKENS}={limit}: {effect}. Its indexers are frozen"


def _plain_bytes(role: Role, quantization: "Quantization") -> int:
    """Return the bytes of a quantized model's weights in half precision."""
    from workers.model.weight_files import weight_shapes

    shapes = weight_shapes(read_model_files(role.model.path, role.key).folder)
    plain = quantization.plain_shapes(shapes, f"{role.key}={role.model.path}")
    return 2 * sum(math.prod(shape) for shape in plain.values())


def _most_bytes() -> float:
    import psutil

    return min(MOST_BYTES, SHARE_OF_MEMORY * psutil.virtual_memory().available)


def _measure(role: Role) -> tuple[float, str]:
    import torch
    from transformers.utils import logging

    from workers.model.numerics_check import check_numerics
    from workers.model.value_head import LOADERS

    logging.disable_progress_bar()
    # A GPU's kernel cannot run here. It is measured where it runs.
    layout = role.model.attention_layout()
    attention = role.model.attention if layout == "padded" else "auto"
    model = replace(
        role.model,
        attention=attention,
        layout=layout,
        forward_layout="same",
        activation_offload=False,
    )
    try:
        module = LOADERS[role.head](model, torch.float32)
    except BallastError:
        raise
    except Exception as error:  # from a file reader or a model class
        raise ConfigError(
            f"{role.key}={role.model.path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return check_numerics(
        module, model
    ).largest, " nats" if role.head == "lm" else " of a hidden state's size"
