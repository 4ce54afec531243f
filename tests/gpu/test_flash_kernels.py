"""The CUDA kernels that ring attention merges: parts of an attention give the whole, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.conftest import NEEDS_CUDA
from tests.workers.model.tiny import relative_error
from workers.model.attention.attention import (
    BACKENDS,
    IMPLEMENTATIONS,
    Installed,
    use_flash_implementation,
)
from workers.model.attention.flash_kernels import (
    Block,
    Segments,
    flash_backward,
    flash_forward,
)

pytestmark = list(NEEDS_CUDA)
CUDA = torch.device("cuda")
SCALE = 0.2


@pytest.fixture(autouse=True, params=["varlen", *IMPLEMENTATIONS])
def implementation(request):
    if obstacle := BACKENDS[request.param].obstacle(Installed.here(CUDA)):
        pytest.skip(f"{request.param} {obstacle}")
    use_flash_implementation(IMPLEMENTATIONS.get(request.param))
    yield
    use_flash_implementation(None)


def test_two_halves_of_the_keys_give_the_whole_attention_and_its_gradients():
    """Not causal; segments of unlike length, fewer key heads than query heads."""
    lengths, generator = [64, 256, 128], torch.Generator(CUDA).manual_seed(0)
    half, whole = (
        Segments.of(lengths, CUDA),
        Segments.of([2 * length for length in lengths], CUDA),
    )
    block = Block(half, half, causal=False)
    shapes = [
        (sum(lengths), 4, 64),
        (2 * sum(lengths), 2, 64),
        (2 * sum(lengths), 2, 64),
        (sum(lengths), 4, 64),
    ]
    query, key, value, grad = (
        torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)
        for shape in shapes
    )
    is_first = torch.cat(
        [torch.arange(2 * length, device=CUDA) < length for length in lengths]
    )
    outputs, sums = zip(
        *(
            flash_forward(query, key[mask], value[mask], block, SCALE)
            for mask in (is_first, ~is_first)
        ),
        strict=True,
    )
    lse = torch.logaddexp(*sums)
    weights = [(part - lse).exp().transpose(0, 1).unsqueeze(-1) for part in sums]
    output = sum(
        weight * part for weight, part in zip(weights, outputs, strict=True)
    ).bfloat16()
    expected, gradients = in_float32(query, key, value, grad, half, whole)
    assert relative_error(output.float(), expected) < 2e-2
    grad_query, grad_key, grad_value = (
        torch.zeros_like(query),
        torch.zeros_like(key),
        torch.zeros_like(value),
    )
    for mask in (is_first, ~is_first):
        part = flash_backward(
            grad, query, key[mask], value[mask], output, lse, block, SCALE
        )
        grad_query += part[0]
        grad_key[mask], grad_value[mask] = part[1], part[2]
    for actual, gradient in zip((grad_query, grad_key, grad_value), gradients, strict=True):
        assert relative_error(actual.float(), gradient) < 2e-2


def test_the_causal_kernel_keeps_segments_apart():
    segments, generator = Segments.of([96, 32], CUDA), torch.Generator(CUDA).manual_seed(0)
    query, key, value = (
        torch.randn(128, 4, 64, generator=generator, device=CUDA, dtype=torch.bfloat16)
        for _ in range(3)
    )
    output, lse = flash_forward(
        query, key, value, Block(segments, segments, causal=True), SCALE
    )
    expected, _ = in_float32(
        query, key, value, torch.zeros_like(query), segments, segments, causal=True
    )
    assert relative_error(output.float(), expected) < 2e-2
    assert lse.shape == (4, 128)


def in_float32(query, key, value, grad, query_segments, key_segments, causal=False):
    """Output and gradients of the segments one by one, by scaled_dot_product_attention in float32."""
    inputs = [tensor.float().requires_grad_() for tensor in (query, key, value)]
    splits = zip(
        inputs[0].split(query_segments.lengths),
        inputs[1].split(key_segments.lengths),
        inputs[2].split(key_segments.lengths),
        strict=True,
    )
    outputs = [
        F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts),
            is_causal=causal,
            scale=SCALE,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for parts in splits
    ]
    output = torch.cat(outputs)
    output.backward(grad.float())
    return output.detach(), [tensor.grad for tensor in inputs]
