"""Packages that layers with a state need on GPUs, by the names of config.json."""

from typing import Any

import pytest

from tests.benchmarks.families.shrinking import tiny_config
from workers.model.attention.states import KERNELS
from workers.model.rules import state_packages
from workers.model.rules.state_packages import PACKAGES, missing_kernels, missing_packages


@pytest.mark.parametrize(
    ("family", "packages"),
    [
        ("qwen3_5_text", ["flash-linear-attention", "causal-conv1d"]),
        ("qwen3_next", ["flash-linear-attention", "causal-conv1d"]),
        ("kimi_linear", ["flash-linear-attention", "causal-conv1d"]),
        ("olmo_hybrid", ["flash-linear-attention", "causal-conv1d"]),
        ("nemotron_h", ["mamba-ssm", "causal-conv1d"]),
        ("falcon_h1", ["mamba-ssm", "causal-conv1d"]),
        ("granitemoehybrid", ["mamba-ssm", "causal-conv1d"]),
        ("bamba", ["mamba-ssm", "causal-conv1d"]),
        ("lfm2", ["causal-conv1d"]),
        ("qwen3", []),
    ],
)
def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, family: str, packages: list[str]
) -> None:
    features: dict[str, Any] = tiny_config(family).to_dict()
    monkeypatch.setattr(state_packages, "find_spec", lambda name: None)
    assert missing_packages(features) == packages
    assert all(name in missing_kernels(features) for name in packages)
    assert bool(missing_kernels(features)) == bool(packages)
    monkeypatch.setattr(state_packages, "find_spec", lambda name: object())
    assert missing_kernels(features) == ""


def test_the_packages_are_those_of_the_kernels() -> None:
    modules = {module for packages in PACKAGES.values() for module in packages}
    assert modules == {kernel.module.partition(".")[0] for kernel in KERNELS.values()}
