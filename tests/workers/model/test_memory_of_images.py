"""The simulated GPU holds as much of a tower and its images as an update of the same engine allocates on a
CPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.config.loss import DistillationConfig
from workers.config.roles import ModelConfig, OptimizerConfig, ParallelConfig
from workers.model.engine import TrainingEngine
from workers.model.memory.fake_gpu import Ledger
from workers.model.memory.memory_trace import (
    _update,
    full_micro_batches,
    largest_image,
    with_images,
)
from workers.model.optimizer.optimizer import optimizer_state

pytestmark = pytest.mark.slow  # six engines in a process of their own
FAMILIES = ("llava", "qwen2_5_vl", "idefics3")
TOKENS, LONGEST, PROMPT = 1024, 256, 64
REQUEST = {
    "ranks": 1,
    "layers": (3, 4),
    "longest": LONGEST,
    "parallel": asdict(ParallelConfig()),
    "reshard_after_forward": True,
    "entropy_coefficient": 0.0,
    "hidden_states": False,
    "distillation": asdict(DistillationConfig()),
}


class Counting(TorchDispatchMode):
    """Count the bytes of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if type(each) is torch.Tensor:
                self.ledger.enter(each.untyped_storage())
        return result


def settings(path: str, *, trains: bool) -> ModelConfig:
    fixed = {
        "dtype": "float32",
        "compile": "never",
        "min_shared_tokens": 0,
        "logprob_chunk_tokens": 256,
    }
    return ModelConfig(path=path, train_vision=trains, **fixed)


def limits(path: Path, cap: int = 0) -> dict[str, Any]:
    return {"folder": str(path), "pixels": 112 * 112, "prompt": PROMPT, "update": cap}


def role(path: Path, images: dict[str, Any], *, trains: bool) -> dict[str, Any]:
    return {
        "description": json.loads((path / "config.json").read_text()),
        "model": asdict(settings("", trains=trains)),
        "head": "lm",
        "trains": True,
        "tokens": {"update": TOKENS},
        "cpu_offload": False,
        "optimizer_offload": False,
        "optimizer": {},
        "images": images,
    }


@pytest.fixture(scope="module")
def measured(vision_model: Callable[[str], Path]) -> dict[str, dict[str, float]]:
    """Bytes that an update of each tower takes beside its states, by one process with a simulated GPU."""
    roles = {
        name: role(vision_model(name), limits(vision_model(name)), trains=True)
        for name in FAMILIES
    }
    path = vision_model("llava")
    roles["text"] = role(path, {}, trains=False)
    roles["frozen"] = role(path, limits(path), trains=False)
    roles["capped"] = role(path, limits(path, cap=16), trains=True)
    done = subprocess.run(
        [sys.executable, "-m", "workers.model.memory.memory_trace"],
        input=json.dumps(REQUEST | {"roles": roles}),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        capture_output=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each.get("problem") for each in found.values()] == [None] * len(roles)
    return {name: each["stages"][0] for name, each in found.items()}


def allocated(path: Path) -> int:
    """Bytes of the same update on the CPU, where windows are attended to one by one."""
    with Counting() as counting:
        engine = TrainingEngine(
            settings(str(path), trains=True),
            optimizer=OptimizerConfig(),
            total_steps=1,
            device="cpu",
        )
        optimizer_state(engine.optimizer)
        sequences, micro_batches = full_micro_batches(
            TOKENS, LONGEST, engine.vocabulary, 2, padded=False
        )
        vision = engine.module.vision
        assert vision is not None
        tower = vision.model.config.vision_config
        own = tower._attn_implementation
        image = largest_image(vision, limits(path))
        tower._attn_implementation = own
        sequences = with_images(sequences, micro_batches, image, PROMPT, 0)
        assert min(map(len, sequences.objects["images"])) * len(image[1]) > PROMPT / 2
        for each in (placed.image for row in sequences.objects["images"] for placed in row):
            vision._processed(each)  # kept on the host, whatever the device
        before = counting.ledger.current
        counting.ledger.restart()
        _update(engine, sequences, micro_batches, REQUEST)
        return counting.ledger.peak - before


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_of_a_tower_takes_what_is_measured(
    measured: dict[str, dict[str, float]], vision_model: Callable[[str], Path], family: str
) -> None:
    found = measured[family]
    assert found["update"] - found["states"] == pytest.approx(
        allocated(vision_model(family)), rel=0.15
    )


def test_towers_take_memory_when_they_train_and_by_the_cap(
    measured: dict[str, dict[str, float]],
) -> None:
    """Frozen, a tower keeps nothing for a backward pass, and neither gradients nor a state of the
    optimiser.
    """
    taken = {name: each["update"] - each["states"] for name, each in measured.items()}
    assert taken["text"] < taken["frozen"] < taken["capped"] < taken["llava"]
    assert (
        measured["text"]["states"]
        == measured["frozen"]["states"]
        < measured["llava"]["states"]
    )
