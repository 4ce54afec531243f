"""Packages whose kernels a model's layers with a state run on, by its config.json. Imports nothing heavy.

The modules are those of `workers.model.attention.states.KERNELS`.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

CONVOLUTION = {"causal_conv1d": "causal-conv1d"}
GATED_DELTA = {"fla": "flash-linear-attention"} | CONVOLUTION
STATE_SPACE = {"mamba_ssm": "mamba-ssm"} | CONVOLUTION
PACKAGES = {
    "linear_num_value_heads": GATED_DELTA,
    "linear_num_heads": GATED_DELTA,
    "linear_attn_config": GATED_DELTA,  # of Kimi's own files
    "mamba_num_heads": STATE_SPACE,
    "mamba_n_heads": STATE_SPACE,
    "conv_L_cache": CONVOLUTION,
}
"""Distribution by module, by the setting of a config.json that names such layers."""


def missing_packages(features: Mapping[str, Any]) -> list[str]:
    """Return the distributions that are not installed here of a config.json's kernels for states."""
    wanted: dict[str, str] = {}
    for name, packages in PACKAGES.items():
        if features.get(name):
            wanted |= packages
    return [
        distribution for module, distribution in wanted.items() if find_spec(module) is None
    ]


def missing_kernels(features: Mapping[str, Any]) -> str:
    """Return what packages a model lacks on GPUs and what it costs, or an empty string."""
    missing = missing_packages(features)
    if not missing:
        return ""
    text = f"its layers with a state run without {' and '.join(missing)}"
    if missing != ["causal-conv1d"]:
        text += ", by transformers' references, which wait for thousands of small kernels"
    return text
