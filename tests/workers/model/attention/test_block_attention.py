"""Blocks of queries give what all scores at once give, forward and backward, and never hold all scores."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.model.attention.reference_attention import all_scores_at_once
from tests.workers.model.tiny import relative_error
from workers.model.attention.block_attention import (
    FEWEST_QUERIES,
    block_attention,
    query_blocks,
)

HEADS, PAIRS, DIM, SCALE = 4, 2, 8, 0.5


def inputs(
    length: int, sinks: bool, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (1, HEADS, length, DIM),
        "key": (1, PAIRS, length, DIM),
        "value": (1, PAIRS, length, DIM),
    }
    if sinks:
        shapes["sinks"] = (HEADS,)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }


def all_at_once(
    tensors: dict[str, torch.Tensor], window: int | None, softcap: float | None
) -> torch.Tensor:
    row = [tensors[name] for name in ("query", "key", "value")]
    output = all_scores_at_once(
        row, [row[0].shape[2]], SCALE, window, softcap, tensors.get("sinks")
    )
    return output.transpose(1, 2)


def gradients(
    output: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    weights = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    found = torch.autograd.grad(
        (output * weights.to(output.dtype)).sum(), list(tensors.values())
    )
    return dict(zip(tensors, found, strict=True))


@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("window", [None, 1, 7, 40, 500])
@pytest.mark.parametrize("length", [1, 33, 100])
def test_output_and_gradients_are_those_of_all_scores_at_once(
    length, window, softcap, sinks
):
    """Blocks of 1, 7 and 32 queries, the last of them shorter; two query heads on each key-value head."""
    tensors = inputs(length, sinks)
    actual = block_attention(
        **tensors, scale=SCALE, window=window, softcap=softcap, most_scores=1
    )
    expected = all_at_once(tensors, window, softcap)
    assert relative_error(actual, expected) < 1e-9
    expected_gradients = gradients(expected, tensors)
    for name, gradient in gradients(actual, tensors).items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-9, atol=1e-12, msg=name
        )


def test_a_frozen_sink_gets_no_gradient_and_the_others_keep_theirs():
    tensors = inputs(40, sinks=True)
    expected = gradients(all_at_once(tensors, None, None), tensors)
    frozen = tensors | {"sinks": tensors["sinks"].detach()}
    learned = {name: tensors[name] for name in ("query", "key", "value")}
    for name, gradient in gradients(
        block_attention(**frozen, scale=SCALE), learned
    ).items():
        assert relative_error(gradient, expected[name]) < 1e-9


def test_in_bfloat16_it_is_as_near_to_float64_as_all_scores_at_once():
    exact = inputs(100, sinks=True)
    narrow = {
        name: tensor.detach().bfloat16().requires_grad_() for name, tensor in exact.items()
    }
    expected = gradients(all_at_once(exact, None, 1.5), exact)
    noise = gradients(all_at_once(narrow, None, 1.5), narrow)
    actual = gradients(block_attention(**narrow, scale=SCALE, softcap=1.5), narrow)
    for name, gradient in actual.items():
        assert gradient.dtype == torch.bfloat16
        # One bit of bfloat16, which four sinks do not average out.
        rounding = 2**-7 * expected[name].norm()
        assert (gradient - expected[name]).norm() < 1.5 * (
            noise[name] - expected[name]
        ).norm() + rounding, name


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(
                    self.elements,
                    tensor.untyped_storage().nbytes() // tensor.element_size(),
                )
        return result


@pytest.mark.parametrize(("window", "keys"), [(None, 1024), (64, FEWEST_QUERIES + 63)])
def test_no_tensor_is_larger_than_the_scores_of_a_block_forward_or_backward(window, keys):
    tensors, saved = inputs(1024, sinks=True, dtype=torch.float32), []
    with LargestTensor() as whole:
        all_at_once(tensors, window, 1.5)
    assert whole.elements >= HEADS * 1024 * 1024

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with LargestTensor() as largest:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = block_attention(
                **tensors, scale=SCALE, window=window, softcap=1.5, most_scores=1
            )
        gradients(output.double(), tensors)
    whole_rows = HEADS * 1024 * DIM
    assert largest.elements <= max(HEADS * FEWEST_QUERIES * keys, whole_rows)
    assert sum(saved) < 5 * whole_rows


def test_keys_outside_the_window_are_not_touched():
    """A NaN in them would reach the output, even with a weight of 0."""
    tensors = inputs(100, sinks=True)
    with torch.no_grad():
        tensors["key"][:, :, :20] = torch.nan
        tensors["value"][:, :, :20] = torch.nan
        output = block_attention(**tensors, scale=SCALE, window=10, most_scores=1)
    assert output[:, :, 40:].isfinite().all()


def test_a_short_segment_is_one_block_and_a_long_one_many_of_bounded_size():
    assert len(query_blocks(500, 500, heads=16)) == 1
    blocks = query_blocks(16_384, 16_384, heads=64)
    assert (
        max(
            (block.stop - block.start) * (block.stop - block.first) * 64 for block in blocks
        )
        <= 2**26
    )
    assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
    assert len(query_blocks(131_072, 131_072, heads=64)) == 131_072 // FEWEST_QUERIES
