"""Rules on the settings that a model can be trained with, for the checks before a run and the engine.

    settings, skeleton     --check_model--> refused in seconds     controller.lifecycle.model_checks
    settings, loaded model --check_model--> refused                the engine

`model` is the name of the model in messages. Settings have the names of a run's configuration.
"""

from collections.abc import Mapping
from typing import Any

from workers.config import ParallelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.rules.families import (
    KERNEL_FEATURES,
    ROUTER_LOSS_FAMILIES,
    TENSOR_PARALLEL_FAMILIES,
    expert_count,
    uncomputed_features,
)
from workers.model_config import CUDA_KERNELS, ModelConfig

WITHOUT_LINEAR = "has no linear modules that take an adapter; set model.lora.rank=0."


def check_model(
    packed: Any, settings: ModelConfig, parallel: ParallelConfig, *, head: str, cuda: bool, half: bool
) -> None:
    """Raise ConfigError or UnsupportedModelError unless the engine supports a model, loaded or a skeleton.

    packed: a `PackedModel`. head: as in `TrainingEngine`. cuda, half: the device, and whether it uses half precision.
    """
    name, features, whole = packed.name, packed.required_features, packed.model.config
    text, kernel = whole.get_text_config().to_dict(), settings.attention
    layout = settings.attention_layout(shared=parallel.context_parallel * parallel.tensor_parallel > 1)
    check_kernel_features(kernel, layout, features, name)
    heads, recurrent = text.get("num_attention_heads"), packed.is_recurrent
    check_context_parallel(parallel, name, recurrent=recurrent, heads=heads, features=features)
    check_ring_settings(parallel, kernel, cuda=cuda, half=half)
    shares_prefixes(settings, features, name, recurrent=recurrent, cuda=cuda, half=half)
    if head == "value":
        check_value_head(parallel, "value model")
    check_pipeline_parallel(parallel, settings, name, len(packed.layers))
    check_tensor_parallel(parallel, settings, name, whole.model_type, whole.to_dict())
    check_expert_parallel(parallel, settings, name, text)
    check_router_replay(settings, name, text)
    check_router_losses(settings, name, whole.model_type)


def check_layout(features: Mapping[str, Any], layout: str, model: str, *, shared: bool = False) -> None:
    """Raise UnsupportedModelError, naming the feature, if a configuration has one that `layout` does not compute.

    features: as in `uncomputed_features`. layout: `packed`, or `padded`, which uses transformers' own attention and
    layers. shared: whether ranks share sequences or layers.
    """
    asked = uncomputed_features(features, layout)
    if not asked:
        return
    advice = "take another model"
    if layout == "packed" and not uncomputed_features(features, "padded"):
        advice = "set model.layout=padded" + " and policy.parallel to 1" * shared
    raise UnsupportedModelError(
        f"{model} with {', '.join(asked)}, which model.layout={layout} does not compute; {advice}."
    )


def kernel_problem(kernel: str, layout: str, *, cuda: bool, half: bool) -> str:
    """Return why `model.attention=kernel` does not run on this device in this precision, or an empty string.

    layout: of attention, see `ModelConfig.attention_layout`.
    """
    kernels = ("auto", *KERNEL_FEATURES[layout])
    if kernel not in kernels:
        return f"is for padded rows that ranks do not share (policy.parallel); set one of {', '.join(kernels)}"
    if kernel in CUDA_KERNELS and not cuda:
        return "is a CUDA kernel and the run uses CPUs; set auto or sdpa"
    if kernel in CUDA_KERNELS and not half:
        return "takes half precision only; set model.dtype=bfloat16, or attention=sdpa"
    return ""


def check_kernel_features(kernel: str, layout: str, features: frozenset[str], model: str) -> None:
    """Raise UnsupportedModelError if an attention kernel, other than `auto`, lacks a feature of a model.

    features: see `families.required_features`.
    """
    missing = features - KERNEL_FEATURES[layout].get(kernel, features)
    if missing:
        raise UnsupportedModelError(
            f"{model} with {', '.join(sorted(missing))}, which model.attention={kernel} does not compute with "
            f"model.layout={layout}; set model.attention=auto."
        )


def check_context_parallel(
    parallel: ParallelConfig, model: str, *, recurrent: bool, heads: int | None, features: frozenset[str]
) -> None:
    """Raise UnsupportedModelError if ranks cannot share the sequences of a model.

    recurrent: whether layers carry a state from token to token. heads: of the queries, None if unknown. features: see
    `families.required_features`.
    """
    sharing = parallel.context_parallel * parallel.tensor_parallel
    if parallel.context_parallel == 1:
        return
    if recurrent:
        raise UnsupportedModelError(
            f"{model} carries a state from token to token, which ranks that share a sequence do not pass on; set "
            "policy.parallel.context_parallel=1."
        )
    if parallel.context_parallel_method == "ulysses" and heads is not None and heads % sharing:
        raise UnsupportedModelError(
            f"{model} has {heads} attention heads, which policy.parallel.context_parallel * tensor_parallel = "
            f"{sharing} does not divide; set policy.parallel.context_parallel_method=ring."
        )
    if parallel.context_parallel_method == "ring" and features:
        raise UnsupportedModelError(
            f"{model} with {', '.join(sorted(features))}, and ring attention is causal only; set "
            "policy.parallel.context_parallel_method=ulysses."
        )


def check_ring_settings(parallel: ParallelConfig, kernel: str, *, cuda: bool, half: bool) -> None:
    """Raise ConfigError if ring attention conflicts with `model.attention=kernel`, device or precision."""
    if parallel.context_parallel == 1 or parallel.context_parallel_method != "ring":
        return
    if kernel != "auto":
        raise ConfigError(
            f"model.attention={kernel} has no effect without policy.parallel.context_parallel_method=ulysses (ring "
            "has kernels of its own); set that, or remove model.attention."
        )
    if cuda and not half:
        raise ConfigError(
            "policy.parallel.context_parallel_method=ring needs half precision on GPUs; set model.dtype=bfloat16, or "
            "ulysses."
        )


def sharing_problem(
    settings: ModelConfig,
    features: frozenset[str],
    *,
    recurrent: bool,
    cuda: bool,
    half: bool,
) -> str:
    """Return why sequences cannot share prefixes (`prefix_rows.py`), or an empty string.

    recurrent, features: see `check_context_parallel`.
    """
    if "padded" in {settings.rows(forward=forward)[0] for forward in (False, True)}:
        return "needs model.layout=packed, also of forward passes"
    if max(settings.rows(forward=forward)[1] for forward in (False, True)) > 1:
        return "needs model.length_multiple=1, also of forward passes"
    if settings.attention not in ("auto", "varlen", "flash3"):
        return f"needs the log-sum-exp, which model.attention={settings.attention} does not give; set auto"
    if settings.compile:
        return "does not go with model.compile"
    if recurrent:
        return "needs a model without a state that it hands on from token to token"
    if features:
        return f"needs a model without {', '.join(sorted(features))}"
    if cuda and not half:
        return "needs half precision on GPUs; set model.dtype=bfloat16"
    return ""


def shares_prefixes(
    settings: ModelConfig,
    features: frozenset[str],
    model: str,
    *,
    recurrent: bool,
    cuda: bool,
    half: bool,
) -> bool:
    """Return whether sequences share prefixes; see `sharing_problem`.

    Raises ConfigError, naming `model`, for model.share_prefixes=always if they cannot.
    """
    if settings.share_prefixes == "never":
        return False
    problem = sharing_problem(settings, features, recurrent=recurrent, cuda=cuda, half=half)
    if problem and settings.share_prefixes == "always":
        raise ConfigError(f"{model}: model.share_prefixes=always {problem}, or share_prefixes=auto.")
    return not problem


def check_value_head(parallel: ParallelConfig, role: str) -> None:
    """Raise ConfigError if ranks would share the layers of a model with a value head, the role `role`."""
    if parallel.tensor_parallel > 1:
        raise ConfigError(
            f"policy.parallel.tensor_parallel={parallel.tensor_parallel} would share the {role}'s layers between "
            "ranks, too, which a value head cannot; set it to 1, or use context_parallel."
        )


def check_expert_parallel(
    parallel: ParallelConfig, settings: ModelConfig, model: str, features: Mapping[str, Any]
) -> None:
    """Raise if ranks cannot share the experts of a model.

    features: the keys of config.json. UnsupportedModelError for a dense model, and for experts that do not divide;
    ConfigError for compiled layers, since the number of received tokens is unknown.
    """
    ep, experts = parallel.expert_parallel, expert_count(features)
    if ep == 1:
        return
    if not experts:
        raise UnsupportedModelError(f"{model} has no experts for policy.parallel.expert_parallel={ep}; set it to 1.")
    if experts % ep:
        raise UnsupportedModelError(
            f"{model} has {experts} experts a layer, which policy.parallel.expert_parallel={ep} does not divide; set "
            "it to a divisor."
        )
    if settings.compile:
        raise ConfigError(
            "model.compile does not support layers whose experts ranks share; set model.compile=false or "
            "policy.parallel.expert_parallel=1."
        )


def check_router_replay(settings: ModelConfig, model: str, features: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a dense model, ConfigError for compiled layers, which hide their routers.

    features: the keys of config.json.
    """
    if settings.router_replay == "none":
        return
    if not expert_count(features):
        raise UnsupportedModelError(
            f"{model} has no experts for model.router_replay={settings.router_replay}; set it to none."
        )
    if settings.compile:
        raise ConfigError(
            f"model.router_replay={settings.router_replay} does not follow the routers of compiled layers; set "
            "model.compile=false or model.router_replay=none."
        )


def check_router_losses(settings: ModelConfig, model: str, family: str) -> None:
    """Raise UnsupportedModelError for an unknown family (`model_type`), ConfigError for compiled layers.

    Compiled layers do not call their routers one by one.
    """
    if not settings.has_router_losses:
        return
    names = "model.router_aux_loss_coefficient and model.router_z_loss_coefficient"
    if family not in ROUTER_LOSS_FAMILIES:
        raise UnsupportedModelError(
            f"{model}: {names} are for {', '.join(ROUTER_LOSS_FAMILIES)}, whose routers choose by a softmax; set them "
            "to 0."
        )
    if settings.compile:
        raise ConfigError(
            f"{names} do not reach the routers of compiled layers; set model.compile=false or these to 0."
        )


def check_pipeline_parallel(parallel: ParallelConfig, settings: ModelConfig, model: str, layers: int | None) -> None:
    """Raise UnsupportedModelError if a model's layers, if known, are fewer than the parts of a pipeline."""
    stages, virtual = parallel.pipeline_parallel, parallel.virtual_stages
    if settings.compile and stages > 1:
        raise ConfigError(
            "model.compile is not tested with stages; set model.compile=false or policy.parallel.pipeline_parallel=1."
        )
    if layers is not None and layers < stages * virtual:
        parts = f" * virtual_stages={virtual}" * (virtual > 1)
        raise UnsupportedModelError(
            f"{model} has {layers} layers, fewer than the parts of policy.parallel.pipeline_parallel={stages}{parts}; "
            "lower it."
        )


def check_tensor_parallel(
    parallel: ParallelConfig, settings: ModelConfig, model: str, family: str, sizes: Mapping[str, Any]
) -> None:
    """Raise if ranks cannot share the layers of a model.

    UnsupportedModelError for an unknown family (`model_type`) and for sizes, by their names in config.json, that do not
    divide. ConfigError for adapters, which are too small to share, and for compiled layers: with torch 2.13, tracing a
    layer of DTensors ends in a RecursionError.
    """
    tp = parallel.tensor_parallel
    if tp == 1:
        return
    if family not in TENSOR_PARALLEL_FAMILIES:
        raise UnsupportedModelError(
            f"{model} is not shared by policy.parallel.tensor_parallel, which is for "
            f"{', '.join(TENSOR_PARALLEL_FAMILIES)}; set it to 1."
        )
    if settings.lora.rank:
        raise ConfigError(
            "adapters are not shared between ranks; set model.lora.rank=0 or policy.parallel.tensor_parallel=1."
        )
    if settings.compile:
        raise ConfigError(
            "model.compile does not support layers that ranks share; set model.compile=false or "
            "policy.parallel.tensor_parallel=1."
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = sizes.get(name)
        if size is not None and size % tp:
            raise UnsupportedModelError(
                f"{model} has {name}={size}, which policy.parallel.tensor_parallel={tp} does not divide; set it to 1."
            )
