"""The rules that keep the parts apart: what may import what (`[tool.importlinter]` in pyproject.toml)."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def test_the_drawing_of_the_rooms_is_the_rule_that_is_checked() -> None:
    """CONTRIBUTING.md shows the layers of controller in pyproject.toml: the same modules, from
    top to bottom.
    """
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    drawing = re.search(r"```text\n(fit sft.*?)```", text, re.S).group(1)
    lines = [line.partition("|") for line in drawing.splitlines()]
    drawn: list[set[str]] = []
    for names, bar, _ in lines:
        drawn += [set()] if bar else []
        drawn[-1] |= {name.removesuffix("/") for name in names.split()}
        assert all(
            (REPOSITORY / "controller" / name).is_dir()
            for name in names.split()
            if name.endswith("/")
        )
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    (layers,) = [
        contract["layers"]
        for contract in contracts
        if contract.get("containers") == ["controller"]
    ]
    assert drawn == [set(re.findall(r"\w+", layer)) for layer in layers]


def test_the_spine_has_every_module_of_the_training_engine() -> None:
    """The contract lists them, because it cannot say "without vision and memory"."""
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    (spine,) = [
        contract
        for contract in contracts
        if contract["name"] == "the spine imports no capability"
    ]
    listed = [*spine["source_modules"], *spine["forbidden_modules"]]
    paths = (REPOSITORY / "workers" / "model").glob("[!_]*")
    modules = {
        path.stem
        for path in paths
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {
        name.removeprefix("workers.model.") for name in listed if "workers.model." in name
    } == modules


def test_the_dependency_rule_holds() -> None:
    """ballast -> controller -> workers -> balancing; the rooms of controller; who does without torch, Ray and
    vLLM.
    """
    process = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ballast.commands", ("controller", "workers", "balancing", "numpy")),
        ("ballast", ("controller", "workers", "balancing", "numpy")),
        ("ballast.training", ("torch", "ray", "vllm", "transformers", "tensordict")),
        ("balancing", ("torch", "ray", "vllm", "transformers", "tensordict")),
        (
            "workers.config.roles",
            ("torch", "ray", "vllm", "transformers", "tensordict", "numpy"),
        ),
        ("workers.errors", ("torch", "ray", "vllm", "transformers", "tensordict", "numpy")),
        ("workers.rollout.engine_actor", ("torch", "vllm", "transformers", "numba")),
        ("workers.roles.reward", ("torch", "vllm", "transformers", "numba")),
        ("controller.config", ("torch", "ray", "vllm", "transformers", "tensordict")),
        (
            "controller.preflight.checks",
            ("torch", "ray", "vllm", "transformers", "tensordict"),
        ),
        (
            "controller.preflight.describe",
            ("torch", "ray", "vllm", "transformers", "tensordict"),
        ),
        ("controller.fit", ("torch", "ray", "vllm", "transformers", "tensordict")),
        ("controller.sft", ("torch", "ray", "vllm", "transformers", "tensordict")),
        ("controller.reward_model", ("torch", "ray", "vllm", "transformers", "tensordict")),
        ("controller.preferences", ("torch", "ray", "vllm", "transformers", "tensordict")),
    ],
)
def test_a_light_module_imports_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    """Import-linter sees what is written; this sees what is loaded, through every library in between."""
    script = (
        f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, text=True, capture_output=True
    )
    assert (process.stdout, process.stderr) == ("[]\n", "")
