"""Weights as bytes, the file that carries them, our engines' names, and processes that end with their actor."""

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
from safetensors.torch import load
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tests.workers.rollout import tiny
from workers.rollout.complete_update import CompleteUpdate
from workers.rollout.weight_transfer import ACTOR, ENGINES, end_with_actor, pack_weights, private_file, register


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
    torch.testing.assert_close(found["lm_head.weight"], found["model.embed_tokens.weight"], rtol=0, atol=0)


def test_the_file_is_private_and_gone_afterwards_whatever_happens() -> None:
    payload = np.arange(1000, dtype=np.uint8)
    with pytest.raises(KeyError), private_file(payload) as path:
        assert Path(path).read_bytes() == payload.tobytes()
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        raise KeyError
    assert not os.path.exists(path)


def test_registering_again_does_no_harm_and_names_our_engines() -> None:
    register()
    register()
    found = [WeightTransferEngineFactory._registry[name]() for name in ENGINES]
    assert [engine.__name__ for engine in found] == [engine for _, engine in ENGINES.values()]
    assert all(issubclass(engine, CompleteUpdate) for engine in found)


CHILD = """
import time
from workers.rollout.weight_transfer import end_with_actor
end_with_actor()
print("up", flush=True)
time.sleep(100)
"""
ACTOR_SCRIPT = f"""
import subprocess, sys, time
from workers.rollout.weight_transfer import mark_actor
mark_actor()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(100)
"""


def test_a_process_below_a_killed_actor_ends() -> None:
    actor = subprocess.Popen([sys.executable, "-c", ACTOR_SCRIPT], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(actor.stdout.readline()))
    assert child.is_running()
    actor.kill()
    actor.wait()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert alive == []


@pytest.mark.parametrize("marked", [False, True])
def test_an_actor_and_processes_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch, marked: bool) -> None:
    monkeypatch.delenv(ACTOR, raising=False)
    if marked:
        monkeypatch.setenv(ACTOR, str(os.getpid()))
    end_with_actor()
    signal_of_death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal_of_death))  # PR_GET_PDEATHSIG
    assert signal_of_death.value == 0
