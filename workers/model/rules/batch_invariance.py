"""Rules of `model.batch_invariant`: which settings and models have the engine's kernels in the trainer.

settings           --settings_problems--> lines, for the checks before a run and the engine
model's config     --model_problem--> why it is refused
"""

from collections.abc import Mapping
from typing import Any

from workers.config.model import ModelConfig
from workers.config.roles import ParallelConfig
from workers.errors import ConfigError, UnsupportedModelError, raise_all

FAMILY = "qwen3"
SHARING = (
    "context_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
)
SETTING = "model.batch_invariant=true"


def settings_problems(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Return a line for each setting with which trainer and engine would compute differently."""
    problems: list[str] = []
    for name in SHARING:
        size = getattr(parallel, name)
        if size > 1:
            problems.append(
                f"policy.parallel.{name}={size}: ranks that share a model add in another order than "
                f"the engine, against {SETTING}. Set 1."
            )
    if model.lora.rank:
        problems.append(
            f"model.lora.rank={model.lora.rank}: engines round merged weights, and the trainer adds "
            f"the adapter to each product, against {SETTING}. Set 0."
        )
    if model.dtype == "float32":
        problems.append(
            f"model.dtype=float32: with {SETTING}, kernels would round products to TF32. Set bfloat16."
        )
    if model.attention != "auto":
        problems.append(
            f"model.attention={model.attention}: with {SETTING}, attention is the engine's. Set auto."
        )
    layouts = {"layout": model.layout, "forward_layout": model.rows(forward=True)[0]}
    for name, layout in layouts.items():
        if layout == "padded":
            problems.append(
                f"model.{name}=padded: {SETTING} computes packed rows. Set packed."
            )
            break
    if model.compile == "always":
        problems.append(
            f"model.compile=always: compiled layers have other kernels than {SETTING}. Set auto."
        )
    if model.share_prefixes == "always":
        problems.append(
            "model.share_prefixes=always: shared prompts merge two attentions, which rounds "
            f"otherwise than an engine, against {SETTING}. Set auto."
        )
    return problems


def model_problem(text: Mapping[str, Any]) -> str:
    """Return why a model has no such kernels here, by its text configuration, or an empty string."""
    family = text.get("model_type")
    if family != FAMILY:
        return f"is of the family {family}, and the kernels are put into {FAMILY} alone"
    if "sliding_attention" in (text.get("layer_types") or ()):
        return "has sliding windows"
    if text.get("attention_bias"):
        return "has biases in its attention"
    if text.get("hidden_act") != "silu":
        return f"has the activation {text.get('hidden_act')}, not silu"
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        return f"scales its rotary positions ({rope['rope_type']})"
    return ""


def check_batch_invariance(
    model: ModelConfig,
    parallel: ParallelConfig,
    name: str,
    text: Mapping[str, Any],
    *,
    head: str,
) -> None:
    """Raise ConfigError or UnsupportedModelError unless the trainer has the engine's kernels.

    name: of the model in messages. text: its text configuration. head: as in `TrainingEngine`.
    """
    if not model.batch_invariant:
        return
    raise_all([ConfigError(problem) for problem in settings_problems(model, parallel)])
    if head != "lm":
        raise ConfigError(
            f"{SETTING}: it makes log-probs equal, and this model has a {head} head. Set false."
        )
    if problem := model_problem(text):
        raise UnsupportedModelError(f"{SETTING}: {name} {problem}. Set false.")
