"""Weights as bytes, the file that carries them, our engines' names, and processes that end with
their actor.
"""

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tests.workers.rollout import tiny
from workers.batch.metrics import Metric
from workers.engine.weights.complete_update import CompleteUpdate
from workers.engine.weights.weight_delta import (
    CHECK_EVERY,
    DENSE,
    DeltaPacker,
    Payload,
    WeightDelta,
    WeightFile,
)
from workers.engine.weights.weight_transfer import (
    ACTOR,
    ENGINES,
    end_with_actor,
    pack_weights,
    private_file,
    register,
)
from workers.errors import RolloutError


def test_packed_weights_come_back_bit_for_bit_with_their_types() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "transposed": torch.randn(4, 6).t(),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2, dtype=torch.int64),
    }
    payload = pack_weights(tensors.items())
    assert payload.dtype == np.uint8 and payload.ndim == 1
    found = load(payload.tobytes())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_tied_weights_are_packed_under_both_names() -> None:
    model = tiny.random_model(0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = load(pack_weights(model.state_dict().items()).tobytes())
    torch.testing.assert_close(
        found["lm_head.weight"], found["model.embed_tokens.weight"], rtol=0, atol=0
    )


def test_the_file_is_private_and_gone_afterwards_whatever_happens() -> None:
    payload = np.arange(1000, dtype=np.uint8)
    with pytest.raises(KeyError), private_file(payload) as path:
        assert Path(path).read_bytes() == payload.tobytes()
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        raise KeyError
    assert not os.path.exists(path)


def random_weights(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Tensors of several types and sizes, some longer than a block of words."""
    shapes = {"b.weight": (300, 301), "a.weight": (7,), "scalar": (), "z.long": (70_000,)}
    weights = {
        name: torch.from_numpy(rng.normal(size=shape)).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    return weights | {
        "float": torch.from_numpy(rng.normal(size=(3, 5))).float().t(),
        "tied": weights["b.weight"],
    }


def changed(
    weights: dict[str, torch.Tensor], share: float, rng: np.random.Generator
) -> dict[str, torch.Tensor]:
    """A share of the values is others: among them NaN, infinities and zeros of either sign."""
    found = {
        name: weight.clone(memory_format=torch.contiguous_format)
        for name, weight in weights.items()
    }
    for weight in found.values():
        at = torch.from_numpy(rng.random(weight.numel()) < share)
        values = rng.choice(
            [np.nan, np.inf, -np.inf, 0.0, -0.0, *rng.normal(size=20)], int(at.sum())
        )
        weight.view(-1)[at] = torch.from_numpy(values).to(weight.dtype)
    return found


@settings(max_examples=20, deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.0, 1e-5, 0.01, 0.15, 0.5]), min_size=1, max_size=15),
    seed=st.integers(0, 99),
)
def test_files_with_deltas_equal_whole_ones_bit_for_bit(
    shares: list[float], seed: int
) -> None:
    """For an engine that follows from the start, for one that starts late, and for one that
    misses updates.
    """
    rng = np.random.default_rng(seed)
    weights, packer = random_weights(rng), DeltaPacker()
    sent: list[tuple[int, Payload]] = []
    always, sometimes = WeightFile(), WeightFile()

    def check(file: WeightFile) -> None:
        for version, payload in sent:
            if version > file.version:
                file.take(payload, version)
        assert Path(file.path).read_bytes() == pack_weights(weights.items()).tobytes()

    for version, share in enumerate([1.0, *shares]):
        weights = changed(weights, share, rng) if version else weights
        payload, metrics = packer.pack(reversed(weights.items()), check=version % 3 == 0)
        whole = isinstance(payload, np.ndarray)
        assert metrics["weights_whole"].value == whole and whole >= (share > DENSE)
        sent = [
            *([] if whole else sent),
            (version, payload.copy() if isinstance(payload, np.ndarray) else payload),
        ]
        assert sum(payload.nbytes for _, payload in sent) <= 2 * sent[0][1].nbytes
        check(always)
        if rng.random() < 0.3:
            check(sometimes)
    check(WeightFile())


def test_metrics_of_a_delta_count_all_its_bytes_and_join_as_the_greatest() -> None:
    weights = {"weight": torch.zeros(100, dtype=torch.bfloat16)}
    packer = DeltaPacker()
    packer.pack(weights.items())
    weights["weight"][:10] = 1.0
    delta, metrics = packer.pack(weights.items())
    assert isinstance(delta, WeightDelta)
    parts = (delta.counts, delta.offsets, delta.values)
    assert min(part.nbytes for part in parts) > 0
    assert metrics["weights_mib"] == Metric.max(
        sum(len(part.tobytes()) for part in parts) / 2**20
    )
    assert metrics["weights_whole"] == Metric.max(0.0)
    words = len(pack_weights(weights.items())) // 2
    assert metrics["weights_changed"] == Metric.max(10 / words)
    same, metrics = packer.pack(weights.items())
    assert isinstance(same, WeightDelta)
    assert (len(same.offsets), len(same.values), same.nbytes) == (0, 0, same.counts.nbytes)
    assert metrics["weights_changed"] == Metric.max(0.0)


def test_a_file_that_differs_from_the_senders_is_noticed() -> None:
    rng = np.random.default_rng(0)
    weights, packer, file = random_weights(rng), DeltaPacker(), WeightFile()
    file.take(packer.pack(weights.items())[0], 0)
    file.take(packer.pack(changed(weights, 0.01, rng).items(), check=True)[0], 1)
    packer.pack(changed(weights, 0.01, rng).items())
    lost = [
        packer.pack(changed(weights, 0.01, rng).items())[0] for _ in range(CHECK_EVERY - 2)
    ]
    with pytest.raises(RolloutError, match=r"rollout\.weight_sync=delta"):
        file.take(lost[-1], 2)


def test_registering_again_does_no_harm_and_names_our_engines() -> None:
    register()
    register()
    found = [WeightTransferEngineFactory._registry[name]() for name in ENGINES]
    assert [engine.__name__ for engine in found] == [
        engine for _, engine in ENGINES.values()
    ]
    assert all(issubclass(engine, CompleteUpdate) for engine in found)


CHILD = """
import time
from workers.engine.weights.weight_transfer import end_with_actor
end_with_actor()
print("up", flush=True)
time.sleep(100)
"""
ACTOR_SCRIPT = f"""
import subprocess, sys, time
from workers.engine.weights.weight_transfer import mark_actor
mark_actor()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(100)
"""


def test_a_process_below_a_killed_actor_ends() -> None:
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR_SCRIPT], stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(actor.stdout.readline()))
    assert child.is_running()
    actor.kill()
    actor.wait()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert alive == []


@pytest.mark.parametrize("marked", [False, True])
def test_an_actor_and_processes_of_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    monkeypatch.delenv(ACTOR, raising=False)
    if marked:
        monkeypatch.setenv(ACTOR, str(os.getpid()))
    end_with_actor()
    signal_of_death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal_of_death))  # PR_GET_PDEATHSIG
    assert signal_of_death.value == 0
