"""Shared beginnings with the CUDA kernels, a call a level or over all paths, against a mask in float64.

It needs torch, transformers, pytest and hypothesis, and of this project `workers` and `balancing`.
"""

from functools import partial

import pytest
import torch

from tests.gpu.test_invariance import learned
from tests.workers.model.rows.test_prefix_rows import (
    by_mask,
    computed,
    groups,
    random_inputs,
)
from tests.workers.model.tiny import random_sequences, relative_error, save_tiny_model
from workers.batch.dataproto import DataProto
from workers.model.attention.shared_attention import SharedAttention
from workers.model.rows.prefix_rows import pack_shared

DIM, BFLOAT16_ERROR = 64, 2e-2


def stairs(depth: int) -> DataProto:
    """Sequences of 20 tokens, each of which begins as the one before it does, for three tokens more than that
    one.
    """
    rows = [torch.arange(20) for _ in range(depth + 1)]
    for index, row in enumerate(rows[1:], start=1):
        row[:] = rows[index - 1]
        row[3 * index :] += 100
    return DataProto.from_list(
        [{"input_ids": row, "loss_mask": torch.arange(20) > 0} for row in rows]
    )


ROWS = {
    "two groups": groups((300, [5, 80, 200, 1]), (40, [130, 64, 64])),
    "random trees": random_sequences(30, seed=2, branching=True),
    "four levels": stairs(4),
    "one prompt of 2,048 tokens": groups((2048, [256] * 8)),
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("way", ["level", "path"])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("name", ROWS)
def test_attention_by_levels_and_by_paths_equals_that_of_a_mask(
    name, heads, way, device, monkeypatch
):
    monkeypatch.setattr(SharedAttention, "_way", lambda *_: way)
    row = pack_shared(ROWS[name], 8)
    inputs = [
        tensor.bfloat16().double() for tensor in random_inputs(row, heads, seed=0, dim=DIM)
    ]
    found = computed(
        SharedAttention(row, device),
        [tensor.to(device, torch.bfloat16) for tensor in inputs],
    )
    for one, other in zip(found, by_mask(row, inputs), strict=True):
        assert one.dtype == torch.bfloat16
        assert relative_error(one.cpu().double(), other) < BFLOAT16_ERROR


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", head_dim=16)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_loss_and_gradients_are_as_near_to_float32_with_sharing_as_without(
    path, device, checkpointing
):
    begin_alike = partial(
        learned, path, [(0, 7), (7, 11)], device, branching=True, min_shared_tokens=1
    )
    given = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing}
    _, exact = begin_alike(dtype="float32", share_prefixes="never")
    metrics, gradients = begin_alike(share_prefixes="never", **given)
    shared_metrics, shared = begin_alike(share_prefixes="always", **given)
    assert shared_metrics["loss"] == pytest.approx(metrics["loss"], rel=0.05)
    noise = {name: (gradient - exact[name]).norm() for name, gradient in gradients.items()}
    for name, gradient in shared.items():
        assert (gradient - exact[name]).norm() < 2 * noise[name] + 1e-2 * exact[
            name
        ].norm(), name
