"""The request for a trace of memory: what `workers.model.memory.memory_trace` reads of a configuration."""

from dataclasses import asdict
from typing import Any

from balancing.cost_model import image_flops
from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.model_files import ModelFiles, read_model_files
from controller.config.role_table import RoleSpec
from workers.config.model import ATTENTION_KEPT
from workers.config.roles import LossConfig

LAYERS = (3, 4)
"""Layers of the measured model. With two, none is gathered ahead. From three on, each adds the same."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def request(config: TrainingConfig, layers: tuple[int, ...] = LAYERS) -> dict[str, Any]:
    """Build the request for `workers.model.memory.memory_trace.trace`. layers: the numbers of layers that are
    built.
    """
    loss = config.algorithm.loss if isinstance(config, Config) else LossConfig()
    return {
        "ranks": config.training_workers,
        "layers": layers,
        "longest": config.longest_sequence,
        "parallel": asdict(config.policy.parallel),
        "reshard_after_forward": config.policy.reshard_after_forward,
        "entropy_coefficient": loss.entropy_coefficient,
        "hidden_states": loss.hidden_states,
        "distillation": asdict(loss.distillation),
        "roles": {
            f"{role} {name}".strip(): _role(config, role, name)
            for role in config.training_roles
            for name in config.models_of(role)
        },
    }


def _role(config: TrainingConfig, role: str, name: str) -> dict[str, Any]:
    from workers.model.rules.model_rules import compiles

    spec = config.spec(role)
    model = config.models_of(role)[name]
    files = read_model_files(model.path, spec.path_setting(name))
    description = dict(files.description)
    settings = asdict(model) | {
        "path": "",
        "logprob_chunk_tokens": model.chunk_tokens("cuda"),
    }
    # Without checkpointing a compiled layer keeps about 0.7 of what is measured.
    settings["compile"] = "never"
    compiled = compiles(
        model, config.policy.parallel, cuda=True, images="vision_config" in description
    )
    if compiled and model.gradient_checkpointing == "selective":
        settings["gradient_checkpointing"] = ATTENTION_KEPT
    sharing = config.policy.parallel.context_parallel
    return {
        "description": description,
        "model": settings | {"dtype": "bfloat16" if model.dtype == "auto" else model.dtype},
        "head": spec.head,
        "trains": spec.learns,
        "tokens": {
            call: limits.max_tokens * sharing
            for call in spec.passes
            if (limits := config.limits.get(f"{role}.{call}"))
        },
        "cpu_offload": is_offloaded(config, role),
        "optimizer_offload": offloads_optimizer(config, role),
        "optimizer": {
            option: value_of(config, f"{spec.settings_section}.optimizer.{option}")
            for option in ("name", "function", "momentum", "state_dtype")
        }
        if spec.learns
        else {},
        "images": _images(config, files, role),
    }


def _images(config: TrainingConfig, files: ModelFiles, role: str) -> dict[str, Any]:
    """Return `memory_trace.Role.images`: nothing for a model of text, or without a processor's files."""
    processor_texts = [
        file.read_text() for name in PROCESSORS if (file := files.folder / name).is_file()
    ]
    if "vision_config" not in files.description or not processor_texts:
        return {}
    cap = config.limits[f"{role}.update"].max_patches if role == "policy" else 0
    return {
        "folder": str(files.folder),
        "processor": processor_texts,  # for the cache
        "pixels": value_of(config, "data.image_pixels.max"),
        "prompt": config.data.max_prompt_tokens
        if isinstance(config, Config)
        else config.longest_sequence,
        "update": int(cap / image_flops(files.description)[2]),
    }


def is_offloaded(config: TrainingConfig, role: str) -> bool:
    return value_of(
        config, f"{measured_role(config, role).settings_section}.cpu_offload"
    ) in (
        True,
        "all",
    )


def offloads_optimizer(config: TrainingConfig, role: str) -> bool:
    return bool(
        value_of(config, f"{measured_role(config, role).settings_section}.cpu_offload")
        == "optimizer"
    )


def measured_role(config: TrainingConfig, measured: str) -> RoleSpec:
    """Return the role of a measured model: a role's name, which one of its models' may follow."""
    return config.spec(measured.partition(" ")[0])
