"""The parts of a proof, in order of value, and their shares of the time."""

from collections.abc import Sequence
from dataclasses import dataclass

TRAINING = ("torch", "transformers", "tensordict")
WHOLE = (*TRAINING, "ray", "vllm")
SUITE = (*TRAINING, "pytest", "hypothesis")


@dataclass(frozen=True)
class Part:
    """One part of a proof.

    module, arguments: a program, run with `python -m`. share: weight of its time, about the minutes that an H200
    took. least_s: seconds without which it is not worth a start. packages, gpus: without these it is left out.
    """

    name: str
    title: str
    module: str
    arguments: tuple[str, ...] = ()
    share: float = 1.0
    least_s: float = 20.0
    packages: tuple[str, ...] = TRAINING
    gpus: int = 0


def suite(file: str, title: str, share: float, *packages: str, gpus: int = 0) -> Part:
    return Part(
        file,
        title,
        "tests.gpu.prove.suite",
        (file,),
        share,
        least_s=30.0,
        packages=(*SUITE, *packages),
        gpus=gpus,
    )


def whole_run(name: str, title: str, share: float, least_s: float, gpus: int = 0) -> Part:
    return Part(
        name, title, "tests.gpu.prove.whole_run", (name,), share, least_s, WHOLE, gpus
    )


def parts_of(device: str) -> list[Part]:
    """Return the parts of a proof on `device`, the most valuable first.

    They run one after the other: an engine that measures the card's memory fails if another program frees some.
    """
    on_gpus = device == "cuda"
    apart = 2 if on_gpus else 0
    start_s = 150.0 if on_gpus else 60.0  # a run's processes, engine and first step
    benchmark = () if on_gpus else ("--tiny", "--device", "cpu", "--repeats", "1")
    whole_run_tests = suite(
        "test_loop", "weights after every update, float32", 3, "ray", "vllm", gpus=1
    )
    return [
        Part(
            "versions",
            "versions and the card",
            "tests.gpu.prove.versions",
            share=0.5,
            packages=(),
        ),
        suite("test_attention_kernels", "attention kernels against float64", 1),
        suite("test_invariance", "packed equals unpacked", 1.5),
        whole_run("quickstart", "quickstart, colocated", 4, start_s),
        whole_run("qwen3_0_6b", "Qwen3-0.6B, random weights", 4, start_s),
        whole_run_tests,
        suite(
            "test_batch_invariance",
            "engine and trainer bit for bit",
            3,
            "ray",
            "vllm",
            gpus=1,
        ),
        whole_run("frozen_tower", "images, frozen tower", 3, start_s),
        whole_run("lora", "LoRA, merged weights sent", 3, start_s),
        suite("test_flash_kernels", "operators of rings and sinks", 0.5),
        suite("test_shared_prefixes", "prompts computed once", 1),
        whole_run("hybrid", "gated delta nets and attention", 4, start_s),
        whole_run("qwen3_4b", "Qwen3-4B, random weights", 5, start_s + 60),
        whole_run("tools", "tools", 3, start_s),
        whole_run("agent", "an agent", 3, start_s),
        whole_run("trained_tower", "images, trained tower", 3, start_s),
        whole_run("apart", "engines apart, one update ahead", 3, start_s, gpus=apart),
        whole_run(
            "adapters", "engines apart, LoRA's adapters sent", 3, start_s, gpus=apart
        ),
        suite("test_training", "compiled layers, offload, memory of an update", 2),
        suite("test_doctor", "the doctor", 2, "ray", "vllm", gpus=1),
        Part(
            "benchmark",
            "training speed",
            "tests.gpu.benchmark",
            benchmark,
            share=6,
            least_s=60.0,
        ),
    ]


def seconds_of(parts: Sequence[Part], seconds_left: float) -> float:
    """Return the seconds of the first of the parts that are left: its share, or what it needs at least.

    What a part does not use is shared by those after it.
    """
    share = parts[0].share / sum(part.share for part in parts)
    return min(seconds_left, max(parts[0].least_s, share * seconds_left))
