"""Weights as a safetensors file that has the mode of the files beside it."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write contiguous tensors. Raises what `safetensors.torch.save_file` does.

    The library makes the file readable for its owner alone, whatever the umask: a model could not be read by others.
    """
    file.touch()
    mode = file.stat().st_mode & 0o777
    save_file(dict(weights), file, metadata={"format": "pt"})
    file.chmod(mode)
