"""Every kernel of packed rows against all scores at once in float64, forward and backward, and its memory.

It needs torch, transformers and pytest, and of this project `workers.model` alone.
"""

import pytest
import torch
from torch import Tensor

from tests.gpu.conftest import NEEDS_CUDA
from tests.workers.model.attention.reference_attention import reference_attention
from workers.batch.dataproto import DataProto
from workers.model.attention.attention import (
    BACKENDS,
    IMPLEMENTATIONS,
    Installed,
    packed_attention,
    use_flash_implementation,
)
from workers.model.rows.packing import PackedRow, pack
from workers.model.rules.model_rules import kernel_problem

HEADS, PAIRS, DIM, SCALE = 8, 2, 64, 0.125
LENGTHS = (96, 1, 300, 33)
CASES = {
    "causal": {},
    "sliding_window": {"window": 40},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "sinks and sliding_window": {"window": 40, "sinks": True},
}
BFLOAT16_ERROR, FLOAT32_ERROR = 2e-2, 1e-4
"""Of a whole tensor's norm."""


def on_cuda(backend: str) -> object:
    return pytest.param(
        backend, torch.device("cuda"), marks=NEEDS_CUDA, id=f"{backend} on cuda"
    )


KERNELS = [
    pytest.param("sdpa", torch.device("cpu"), id="sdpa on cpu"),
    *(on_cuda(backend) for backend in BACKENDS),
]


@pytest.fixture(autouse=True)
def restored_implementation():
    yield
    use_flash_implementation(None)


def row_of(lengths: tuple[int, ...]) -> PackedRow:
    return pack(
        DataProto.from_list(
            [
                {"input_ids": [1] * length, "loss_mask": [False] * length}
                for length in lengths
            ]
        )
    )


def inputs(
    tokens: int, sinks: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The same numbers on every device, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (1, HEADS, tokens, DIM),
        "key": (1, PAIRS, tokens, DIM),
        "value": (1, PAIRS, tokens, DIM),
    }
    shapes |= {"sinks": (HEADS,)} if sinks else {}
    drawn = {
        name: torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    return {
        name: tensor.to(device, dtype).requires_grad_() for name, tensor in drawn.items()
    }


def expected_output(
    tensors: dict[str, Tensor], window: int | None, softcap: float | None
) -> Tensor:
    """[1, T, H, D]."""
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    distance = place[:, None] - place
    visible = (
        (owner[:, None] == owner) & (distance >= 0) & (distance < (window or len(place)))
    )
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    ordered = (tensors[name] for name in ("query", "key", "value"))
    return reference_attention(
        torch.nn.Identity(), *ordered, mask, SCALE, softcap, tensors.get("sinks")
    )[0]


def gradients(output: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return list(
        torch.autograd.grad((output * weights.to(output)).sum(), list(tensors.values()))
    )


def skip_unless_runnable(
    backend: str, device: torch.device, dtype: torch.dtype, features: set[str]
) -> None:
    """Skip, with the reason, what this machine cannot run or the kernel does not compute."""
    problem = kernel_problem(
        backend, "packed", cuda=device.type == "cuda", half=dtype.itemsize == 2
    )
    if obstacle := problem or BACKENDS[backend].obstacle(Installed.here(device)):
        pytest.skip(f"{backend} {obstacle}")
    if not features <= BACKENDS[backend].features:
        pytest.skip(
            f"{backend} does not compute {', '.join(features - BACKENDS[backend].features)}"
        )
    # As an engine does for all of its rows.
    use_flash_implementation(IMPLEMENTATIONS.get(backend))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_a_kernel_gives_what_all_scores_at_once_give(backend, dtype, case, device):
    features = CASES[case]
    skip_unless_runnable(
        backend,
        device,
        dtype,
        {"sliding_window" if name == "window" else name for name in features},
    )
    tensors = inputs(sum(LENGTHS), "sinks" in features, device, dtype)
    exact = {
        name: tensor.detach().cpu().double().requires_grad_()
        for name, tensor in tensors.items()
    }
    given = {name: features[name] for name in ("window", "softcap") if name in features}
    if "sinks" in features:
        given["sinks"] = tensors["sinks"]
    attention = packed_attention(backend, row_of(LENGTHS), device)
    actual = attention(tensors["query"], tensors["key"], tensors["value"], SCALE, **given)
    expected = expected_output(exact, features.get("window"), features.get("softcap"))
    found = [actual, *gradients(actual, tensors)]
    bound = BFLOAT16_ERROR if dtype == torch.bfloat16 else FLOAT32_ERROR
    for tensor, reference in zip(
        found, [expected, *gradients(expected, exact)], strict=True
    ):
        assert (
            tensor.detach().cpu().double() - reference
        ).norm() < bound * reference.norm()


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_memory_with_sinks_is_not_that_of_all_scores(backend, device):
    """16,384 tokens and 8 heads: 8 GiB of scores in float32, and again in the backward pass. On a CPU, which
    nobody asks for its peak, a shorter row only runs.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    skip_unless_runnable(backend, device, dtype, {"sinks"})
    tokens = 16_384 if device.type == "cuda" else 512
    tensors = inputs(tokens, True, device, dtype)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    attention = packed_attention(backend, row_of((tokens,)), device)
    output = attention(
        tensors["query"], tensors["key"], tensors["value"], SCALE, sinks=tensors["sinks"]
    )
    assert all(gradient.isfinite().all() for gradient in gradients(output, tensors))
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() - before < 2 * 2**30
