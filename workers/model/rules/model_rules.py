"""Rules on the settings that a model can be trained with, for the checks before a run and the engine.

    settings, skeleton     --check_model--> refused in seconds     controller.lifecycle.model_checks
    settings, loaded model --check_model--> refused                the engine

`model` is the name of the model in messages. Settings have the names of a run's configuration.
"""

from collections.abc import Mapping
from typing import Any

from workers.config.model import CUDA_KERNELS, ModelConfig
from workers.config.roles import ParallelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.rules.batch_invariance import check_batch_invariance
from workers.model.rules.families import (
    KERNEL_FEATURES,
    ROUTER_LOSS_FAMILIES,
    SELECTED_TOKENS,
    SELECTION,
    TENSOR_PARALLEL_FAMILIES,
    expert_count,
    uncomputed_features,
)

WITHOUT_LINEAR = "has no linear modules that take an adapter. Set model.lora.rank=0."


def check_model(
    packed: Any,
    settings: ModelConfig,
    parallel: ParallelConfig,
    *,
    head: str,
    cuda: bool,
    half: bool,
) -> None:
    """Raise ConfigError or UnsupportedModelError unless the engine supports a model, loaded or a skeleton.

    packed: a `PackedModel`. head: as in `TrainingEngine`. cuda, half: the device, and whether it uses half
    precision.
    """
    name = packed.name
    features = packed.required_features
    config = packed.model.config
    text = config.get_text_config().to_dict()
    kernel = settings.attention
    layout = settings.attention_layout(
        shared=parallel.context_parallel * parallel.tensor_parallel > 1
    )
    check_kernel_features(kernel, layout, features, name)
    heads = text.get("num_attention_heads")
    sharing = parallel.context_parallel * parallel.tensor_parallel
    check_states(parallel, name, packed.unshared_states(sharing))
    check_context_parallel(parallel, name, heads=heads, features=features)
    check_ring_settings(parallel, kernel, cuda=cuda, half=half)
    shares_prefixes(
        settings, features, name, states=packed.unshared_states(1), cuda=cuda, half=half
    )
    if head == "value":
        check_value_head(parallel, "value model")
    _check_pipeline_parallel(parallel, name, len(packed.layers), text)
    check_tensor_parallel(parallel, name, config.get_text_config().model_type, text)
    check_vision(parallel, settings, name, packed.vision, config)
    check_experts(parallel, settings, name, expert_count(text))
    if settings.base_dtype == "bfloat16" and not half:
        raise ConfigError(
            "model.base_dtype=bfloat16: this run computes in float32. Set model.dtype=bfloat16, or float32."
        )
    _check_router_losses(settings, name, config.model_type)
    compiles(settings, parallel, cuda=cuda, images=packed.vision is not None)
    check_batch_invariance(settings, parallel, name, text, head=head)


def check_layout(
    features: Mapping[str, Any], layout: str, model: str, *, shared: bool = False
) -> None:
    """Raise UnsupportedModelError for `uncomputed_features`. shared: whether ranks share
    sequences or layers.
    """
    missing_features = uncomputed_features(features, layout)
    if not missing_features:
        return
    advice = "Take another model"
    if layout == "packed" and not uncomputed_features(features, "padded"):
        advice = "Set model.layout=padded" + " and policy.parallel to 1" * shared
    raise UnsupportedModelError(
        f"{model} with {', '.join(missing_features)}, which model.layout={layout} does not compute. {advice}."
    )


def kernel_problem(kernel: str, layout: str, *, cuda: bool, half: bool) -> str:
    """Return why `model.attention=kernel` does not run on this device in this precision, or an
    empty string.
    """
    kernels = ("auto", *KERNEL_FEATURES[layout])
    if kernel not in kernels:
        return (
            "is for padded rows that ranks do not share (policy.parallel). Set "
            f"one of {', '.join(kernels)}"
        )
    if kernel in CUDA_KERNELS and not cuda:
        return "is a CUDA kernel and the run uses CPUs. Set auto or sdpa"
    if kernel in CUDA_KERNELS and not half:
        return "takes half precision only. Set model.dtype=bfloat16, or attention=sdpa"
    return ""


def check_kernel_features(
    kernel: str, layout: str, features: frozenset[str], model: str
) -> None:
    """Raise UnsupportedModelError if an attention kernel, other than `auto`, lacks a feature of a model."""
    missing = features - KERNEL_FEATURES[layout].get(kernel, features)
    if missing:
        raise UnsupportedModelError(
            f"{model} with {', '.join(sorted(missing))}, which model.attention={kernel} does not compute "
            f"with model.layout={layout}. Set model.attention=auto."
        )


def check_states(parallel: ParallelConfig, model: str, unshared: str) -> None:
    """Raise UnsupportedModelError if ranks that share a model's sequences or layers cannot share its states.

    unshared: what they cannot share, see `families.unshared_states`.
    """
    sizes = {
        name: getattr(parallel, name) for name in ("context_parallel", "tensor_parallel")
    }
    shared = [f"policy.parallel.{name}={size}" for name, size in sizes.items() if size > 1]
    if shared and unshared:
        raise UnsupportedModelError(
            f"{', '.join(shared)}: {model} has {unshared}. Set 1, or a product that divides the heads."
        )


def check_context_parallel(
    parallel: ParallelConfig,
    model: str,
    *,
    heads: int | None,
    features: frozenset[str],
) -> None:
    """Raise UnsupportedModelError if ranks cannot share the sequences of a model.

    heads: of the queries, None if unknown.
    """
    sharing = parallel.context_parallel * parallel.tensor_parallel
    if parallel.context_parallel == 1:
        return
    if SELECTION in features:
        raise UnsupportedModelError(
            f"policy.parallel.context_parallel={parallel.context_parallel}: {model} selects tokens "
            f"({SELECTED_TOKENS}) of a whole sequence. Set it to 1."
        )
    if (
        parallel.context_parallel_method == "ulysses"
        and heads is not None
        and heads % sharing
    ):
        raise UnsupportedModelError(
            f"{model} has {heads} attention heads, which policy.parallel.context_parallel * tensor_parallel "
            f"= {sharing} does not divide. Set policy.parallel.context_parallel_method=ring."
        )
    if parallel.context_parallel_method == "ring" and features:
        raise UnsupportedModelError(
            f"{model} with {', '.join(sorted(features))}, and ring attention is causal only. Set "
            "policy.parallel.context_parallel_method=ulysses."
        )


def check_ring_settings(
    parallel: ParallelConfig, kernel: str, *, cuda: bool, half: bool
) -> None:
    """Raise ConfigError if ring attention conflicts with `model.attention=kernel`, device or precision."""
    if parallel.context_parallel == 1 or parallel.context_parallel_method != "ring":
        return
    if kernel != "auto":
        raise ConfigError(
            f"model.attention={kernel} has no effect without "
            "policy.parallel.context_parallel_method=ulysses (ring has other kernels). Set that, or remove "
            "model.attention."
        )
    if cuda and not half:
        raise ConfigError(
            "policy.parallel.context_parallel_method=ring needs half precision on GPUs. Set "
            "model.dtype=bfloat16, or ulysses."
        )


def _sharing_problem(
    settings: ModelConfig, features: frozenset[str], *, states: str, cuda: bool, half: bool
) -> str:
    if "padded" in {settings.rows(forward=forward)[0] for forward in (False, True)}:
        return "needs model.layout=packed, also of forward passes"
    if max(settings.rows(forward=forward)[1] for forward in (False, True)) > 1:
        return "needs model.length_multiple=1, also of forward passes"
    if settings.attention not in ("auto", "varlen", "flash4", "flash3"):
        return f"needs the log-sum-exp, which model.attention={settings.attention} does not give. Set auto"
    if settings.batch_invariant:
        return "rounds otherwise than engines (model.batch_invariant=true). Set never"
    if states:
        return f"cannot hand a state from a prompt to its responses: {states}. Set never"
    if features:
        return f"needs a model without {', '.join(sorted(features))}"
    if cuda and not half:
        return "needs half precision on GPUs. Set model.dtype=bfloat16"
    return ""


def shares_prefixes(
    settings: ModelConfig,
    features: frozenset[str],
    model: str,
    *,
    states: str,
    cuda: bool,
    half: bool,
) -> bool:
    """Return whether sequences share prefixes. Raises ConfigError for share_prefixes=always if
    they cannot.

    states: which states a prompt cannot hand on to its responses, of layers with a state, or empty.
    """
    if settings.share_prefixes == "never":
        return False
    problem = _sharing_problem(settings, features, states=states, cuda=cuda, half=half)
    if problem and settings.share_prefixes == "always":
        raise ConfigError(
            f"{model}: model.share_prefixes=always {problem}, or share_prefixes=auto."
        )
    return not problem


def check_value_head(parallel: ParallelConfig, role: str) -> None:
    """Raise ConfigError if ranks would share the layers of a model with a value head."""
    if parallel.tensor_parallel > 1:
        raise ConfigError(
            f"policy.parallel.tensor_parallel={parallel.tensor_parallel} cannot split a {role}, because "
            "of its value head. Set it to 1, or use context_parallel."
        )


def check_vision(
    parallel: ParallelConfig, settings: ModelConfig, model: str, vision: Any, config: Any
) -> None:
    """Raise ConfigError or UnsupportedModelError if settings do not suit a model's images. vision: None if it
    has none.
    """
    if settings.train_vision and vision is None:
        raise ConfigError(
            f"model.train_vision=true: {model} takes no images. Set model.train_vision=false."
        )
    deepstack = getattr(
        getattr(config, "vision_config", None), "deepstack_visual_indexes", None
    )
    if vision is not None and deepstack and parallel.pipeline_parallel > 1:
        raise UnsupportedModelError(
            f"policy.parallel.pipeline_parallel={parallel.pipeline_parallel}: {model} adds images to its "
            "first layers (deepstack), which stages do not pass on. Set it to 1."
        )


def check_experts(
    parallel: ParallelConfig, settings: ModelConfig, model: str, experts: int
) -> None:
    """Raise UnsupportedModelError if a model with so many experts a layer, 0 if dense, does not suit the
    settings.
    """
    ep = parallel.expert_parallel
    needs = {f"policy.parallel.expert_parallel={ep}": ep > 1}
    needs[f"model.router_replay={settings.router_replay}"] = (
        settings.router_replay != "none"
    )
    for setting, needed in needs.items():
        if needed and not experts:
            raise UnsupportedModelError(
                f"{setting}: {model} has no experts. Remove the setting."
            )
    if experts % ep:
        raise UnsupportedModelError(
            f"policy.parallel.expert_parallel={ep}: {model} has {experts} experts a layer. Set a divisor."
        )


def _check_router_losses(settings: ModelConfig, model: str, family: str) -> None:
    if settings.has_router_losses and family not in ROUTER_LOSS_FAMILIES:
        raise UnsupportedModelError(
            f"{model}: model.router_aux_loss_coefficient and model.router_z_loss_coefficient are for "
            f"{', '.join(ROUTER_LOSS_FAMILIES)}, whose routers choose by a softmax. Set them to 0."
        )


def compiles(
    settings: ModelConfig, parallel: ParallelConfig, *, cuda: bool, images: bool = False
) -> bool:
    """Return whether layers are compiled. images: whether the model reads them.

    Raises ConfigError for compile=always with tensor parallelism or images. With torch 2.13, graphs end
    inside DTensor's hooks, and the gradient of a DTensor comes back as a plain tensor. A layer of Qwen2.5-VL
    was still being traced after 400 s.
    """
    if settings.compile == "always" and images:
        raise ConfigError(
            "model.compile=always: does not work with models that read images. Set auto or never."
        )
    shared = parallel.tensor_parallel > 1 or images
    if settings.compile == "always" and shared:
        raise ConfigError(
            "model.compile=always: does not work with policy.parallel.tensor_parallel above 1. Set auto or "
            "never."
        )
    return settings.compile == "always" or (
        settings.compile == "auto" and cuda and not shared and not settings.batch_invariant
    )


def _check_pipeline_parallel(
    parallel: ParallelConfig, model: str, layers: int, features: Mapping[str, Any]
) -> None:
    stages = parallel.pipeline_parallel
    if stages > 1 and features.get("indexer_types"):
        raise UnsupportedModelError(
            f"policy.parallel.pipeline_parallel={stages}: layers of {model} pass selected tokens on "
            "(indexer_types), which stages do not. Set it to 1."
        )
    virtual = parallel.virtual_stages
    if layers < stages * virtual:
        key = f"virtual_stages={virtual}" if virtual > 1 else f"pipeline_parallel={stages}"
        raise UnsupportedModelError(
            f"policy.parallel.{key}: {model} has {layers} layers, fewer than its stages' parts. Lower it."
        )


def check_tensor_parallel(
    parallel: ParallelConfig, model: str, family: str, sizes: Mapping[str, Any]
) -> None:
    """Raise if ranks cannot share the layers of a model, by its `model_type` and its config.json's sizes."""
    tp = parallel.tensor_parallel
    if tp == 1:
        return
    if family not in TENSOR_PARALLEL_FAMILIES:
        raise UnsupportedModelError(
            f"{model} is not shared by policy.parallel.tensor_parallel, which is for "
            f"{', '.join(TENSOR_PARALLEL_FAMILIES)}. Set it to 1."
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = sizes.get(name)
        if size is not None and size % tp:
            raise UnsupportedModelError(
                f"{model} has {name}={size}, which policy.parallel.tensor_parallel={tp} does not divide. "
                "Set it to 1."
            )
