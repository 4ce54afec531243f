"""Weights as bytes, and the file that carries them."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tests.workers.rollout import tiny
from workers.rollout.complete_update import (
    CompleteIPCWeightTransferEngine,
    CompleteNCCLWeightTransferEngine,
    CompleteUpdate,
    SharedMemoryWeightTransferEngine,
)
from workers.rollout.weight_transfer import ENGINES, pack_weights, private_file, register, unpack_weights


def test_packed_weights_come_back_bit_for_bit_with_their_types() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "transposed": torch.randn(4, 6).t(),
        "b": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2, dtype=torch.int64),
    }
    payload = pack_weights(tensors.items())
    assert payload.dtype == np.uint8 and payload.ndim == 1
    found = unpack_weights(payload)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_tied_weights_are_packed_under_both_names() -> None:
    model = tiny.random_model(0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = unpack_weights(pack_weights(model.state_dict().items()))
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
    found = {name: WeightTransferEngineFactory._registry[name]() for name in ENGINES}
    assert list(found.values()) == [
        SharedMemoryWeightTransferEngine,
        CompleteIPCWeightTransferEngine,
        CompleteNCCLWeightTransferEngine,
    ]
    assert all(issubclass(engine, CompleteUpdate) for engine in found.values())
