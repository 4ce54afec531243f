"""What vLLM's trainer side is told of a transfer between GPUs. `test_transfers` sends weights through it."""

from typing import Any

import pytest
import torch

from workers.engine.weights import gpu_transfer

METADATA = {
    "wide.weight": torch.empty(10, 4, dtype=torch.float32, device="meta"),
    "long.weight": torch.empty(50, dtype=torch.bfloat16, device="meta"),
}
LARGEST_BYTES = 10 * 4 * 4


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns what vLLM is told, in turn."""
    infos: list[Any] = []

    class TrainerSide:
        def shutdown(self) -> None: ...

    def trainer_init(info: Any, **options: Any) -> TrainerSide:
        infos.append(info)
        return TrainerSide()

    monkeypatch.setattr(
        gpu_transfer.WeightTransferTrainerFactory, "trainer_init", trainer_init
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return infos


def connect(
    placement: str, engines: int, tensor_parallel: int, buffer_bytes: int
) -> gpu_transfer.WeightSender:
    return gpu_transfer.WeightSender(
        placement,
        [object()] * engines,
        lambda: iter(()),
        METADATA,
        rank=0,
        tensor_parallel=tensor_parallel,
        address="10.0.0.1",
        port=29_500,
        buffer_bytes=buffer_bytes,
    )


@pytest.mark.parametrize(
    ("engines", "tensor_parallel", "members"), [(1, 1, 2), (3, 1, 4), (2, 4, 9)]
)
def test_a_broadcast_has_the_first_policy_rank_and_every_rank_of_engines(
    told: list[Any], engines: int, tensor_parallel: int, members: int
) -> None:
    connect("apart", engines, tensor_parallel, 64)
    assert told[0].world_size == members
    assert (told[0].rank, told[0].packed_buffer_size_bytes) == (0, 64)


@pytest.mark.parametrize(
    ("asked", "expected"), [(1, LARGEST_BYTES), (LARGEST_BYTES + 1, LARGEST_BYTES + 1)]
)
def test_a_buffer_on_shared_gpus_holds_the_largest_weight(
    told: list[Any], asked: int, expected: int
) -> None:
    connect("colocated", 1, 1, asked)
    assert told[0].packed_buffer_size_bytes == expected
