"""The last lines of `--dry-run`: every model of the run that is small enough is loaded and measured.

Config --models--> weights of up to 2 GiB --workers.model.parity, one process--> "parity: packed rows match ..."

Larger models, ranks and engines are measured when the run starts. Importing torch takes seconds, so this comes after
the plan, and not at all if no model has weights to measure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from controller.config import Config, TrainingConfig
from controller.config.model_files import weight_bytes
from controller.config.training import ReferenceSettings
from workers.config import ModelConfig
from workers.errors import BallastError, ConfigError

GIB = 1 << 30
MOST_BYTES = 2 * GIB
SHARE_OF_MEMORY = 1 / 6  # weights in bfloat16 take twice their files in float32, and as much again while they are read


@dataclass(frozen=True)
class Role:
    """A model that the run trains or reads. key: the setting that names it. head: as in `TrainingEngine`."""

    key: str
    model: ModelConfig
    head: str


def parity_lines(config: TrainingConfig) -> Iterator[str]:
    """A line for each model of the run, as it is measured; a model that two roles share is measured once.

    Raises UnsupportedModelError for one that the training engine would not compute as the model itself does,
    ConfigError for weights that cannot be loaded or are not finite.
    """
    measured = set()
    for role in _roles(config):
        if (role.model.path, role.head) not in measured and (line := _line(role)):
            measured.add((role.model.path, role.head))
            yield line


def _roles(config: TrainingConfig) -> list[Role]:
    roles = {"policy": Role("model.path", config.model, "lm")}
    if isinstance(config, ReferenceSettings):
        roles["reference"] = Role("reference.path", config.reference_model, "lm")
    if isinstance(config, Config):
        roles["critic"] = Role("critic.path", config.critic_model, "value")
        roles["reward_model"] = Role("reward.model.path", config.reward_model, "value")
    return [role for name, role in roles.items() if name in config.training_roles]


def _line(role: Role) -> str:
    size, limit = weight_bytes(role.model.path, role.key), _most_bytes()
    if not size:
        return f"parity: {role.key} has no weights on this machine; the run measures it when it starts"
    if size > limit:
        return (
            f"parity: {role.key} has {size / GIB:.1f} GiB of weights and is not loaded here (up to {limit / GIB:.1f}); "
            "the run measures it when it starts"
        )
    difference, unit = _measured(role)
    rows = f"{role.model.layout} rows"
    return f"parity: {rows} of {role.key} match the model's own forward pass within {difference:.1e}{unit}"


def _most_bytes() -> float:
    import psutil

    return min(MOST_BYTES, SHARE_OF_MEMORY * psutil.virtual_memory().available)


def _measured(role: Role) -> tuple[float, str]:
    import torch
    from transformers.utils import logging

    from workers.model.engine import LOADERS
    from workers.model.parity import check_parity

    logging.disable_progress_bar()
    # A GPU's kernel cannot run here; it is measured where it runs.
    layout = role.model.attention_layout()
    attention = role.model.attention if layout == "padded" else "auto"
    model = replace(role.model, attention=attention, layout=layout, forward_layout="same", activation_offload=False)
    try:
        module = LOADERS[role.head](model, torch.float32)
    except BallastError:
        raise
    except Exception as error:  # of a file reader or a model class
        raise ConfigError(f"{role.key}={role.model.path} cannot be loaded: {type(error).__name__}: {error}") from error
    return check_parity(module, model).largest, " nats" if role.head == "lm" else " of a hidden state's size"
