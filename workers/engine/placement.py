"""Placement of engines: the device each kind needs, how weights reach it, and which ranks share its GPUs."""

from workers.errors import ConfigError

BACKENDS = {"shared_memory": "shared_memory", "colocated": "ipc", "apart": "nccl"}
"""The way that weights take to the engines, by rollout.placement."""


def fits_device(placement: str, *, has_gpu: bool) -> bool:
    """Return whether an engine can run: `shared_memory` needs a CPU, `colocated` and `apart` a GPU."""
    return (placement == "shared_memory") != has_gpu


def check_placement(placement: str, *, has_gpu: bool) -> None:
    """Raise ConfigError if an engine on this device cannot have this placement."""
    if placement not in BACKENDS:
        raise ConfigError(
            f"rollout.placement={placement} is unknown. Use one of {', '.join(BACKENDS)}."
        )
    if not fits_device(placement, has_gpu=has_gpu):
        device = "GPU" if has_gpu else "CPU"
        fit = "colocated or apart" if has_gpu else "shared_memory"
        raise ConfigError(
            f"rollout.placement={placement} sends weights by {BACKENDS[placement]}, which an engine on a "
            f"{device} cannot receive. Set rollout.placement to {fit}."
        )


def needs_frozen_tower(placement: str) -> bool:
    """Return whether an update brings a frozen vision tower too: a colocated engine's sleep drops every
    weight.
    """
    return placement == "colocated"


def ranks_of_engine(replica: int, tensor_parallel: int) -> range:
    """Return the policy ranks whose GPUs a colocated engine shares: consecutive, engine after engine."""
    return range(replica * tensor_parallel, (replica + 1) * tensor_parallel)
