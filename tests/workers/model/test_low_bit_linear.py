"""Base weights of 8 and 4 bits: what they round to, what they take, and that engines get the same numbers."""

from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.workers.model.checkpoint.test_checkpoint import saved_at, train
from tests.workers.model.cpu_engine import assert_same, build_engine, weights
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.config.roles import LoraConfig, OptimizerConfig
from workers.errors import ConfigError
from workers.model.engine import TrainingEngine
from workers.model.low_bit_linear import (
    NF4,
    LowBitLinear,
    block_of,
    check_width,
    dequantize,
    quantize,
)

ROUNDED = ("int8", "nf4")
LORA = LoraConfig(rank=3, alpha=6.0)
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **SIZES)


def build(model: str, base_dtype: str, dtype: str = "float32") -> TrainingEngine:
    """Build an engine, which compares with transformers' forward pass of the rounded weights."""
    return build_engine(
        model,
        dtype=dtype,
        lora=LORA,
        base_dtype=base_dtype,
        optimizer=OptimizerConfig(learning_rate=3e-2),
        check_numerics=True,
    )


def test_levels_come_back_and_all_else_goes_to_the_nearest_level() -> None:
    scales = torch.tensor([[0.5, 3.0]])
    levels = {"nf4": torch.tensor(NF4 * 4), "int8": torch.arange(-127, 1, 2)[:64] / 127}
    for base_dtype, row in levels.items():
        exact = (scales.bfloat16().float()[..., None] * row).flatten(-2)
        assert torch.allclose(dequantize(*quantize(exact, base_dtype)), exact, rtol=5e-3)
    weight = torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    codes, block_scales = quantize(weight, "nf4")
    assert (codes.dtype, codes.shape, block_scales.shape) == (torch.uint8, (7, 96), (7, 3))
    candidates = block_scales.float()[..., None, None] * torch.tensor(NF4)
    distances = (weight.unflatten(-1, (3, 64))[..., None] - candidates).abs()
    nearest = distances.amin(-1).flatten(-2)
    assert torch.allclose(
        (dequantize(codes, block_scales) - weight).abs(), nearest, atol=1e-6
    )
    codes, block_scales = quantize(weight, "int8")
    errors = (dequantize(codes, block_scales) - weight).abs().unflatten(-1, (3, 64))
    assert (errors <= 0.51 * block_scales.float()[..., None]).float().mean() > 0.99
    assert not dequantize(*quantize(torch.zeros(2, 16), "nf4")).any()


def test_codes_on_another_device_than_the_table_are_read_there() -> None:
    """FSDP2 with offloaded weights gathers codes on the GPU, and leaves the table on the host."""
    layer = LowBitLinear(nn.Linear(32, 4, bias=False), "nf4")
    layer.codes = nn.Parameter(layer.codes.to("meta"), requires_grad=False)
    layer.scales = nn.Parameter(layer.scales.to("meta"), requires_grad=False)
    input = torch.empty(3, 32, device="meta", requires_grad=True)
    output = layer(input)
    output.sum().backward()
    assert (output.device.type, output.shape) == ("meta", (3, 4))
    assert input.grad is not None and input.grad.shape == (3, 32)


@pytest.mark.parametrize("base_dtype", ROUNDED)
def test_output_and_gradient_are_those_of_the_rounded_weight(base_dtype: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 48)
    low = LowBitLinear(linear, base_dtype)
    linear.weight.data = low.weight
    x = torch.randn(5, 128, requires_grad=True)
    outputs = [module(x) for module in (low, linear)]
    gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in outputs]
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)


def base_bytes(engine: TrainingEngine) -> dict[str, int]:
    """Return the bytes of frozen parameters, those of modules with adapters apart."""
    sizes = {"adapted": 0, "others": 0}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            sizes["adapted" if ".base_layer." in name else "others"] += parameter.nbytes
    return sizes


@pytest.mark.parametrize(
    ("base_dtype", "adapted", "others"),
    [
        ("float32", 4, 4),
        ("bfloat16", 2, 2),
        ("int8", 1 + 2 / 64, 2),
        ("nf4", 0.5 + 2 / 64, 2),
    ],
)
def test_frozen_weights_take_the_bytes_that_they_promise(
    model: str, base_dtype: str, adapted: float, others: float
) -> None:
    plain = base_bytes(build_engine(model, dtype="float32", lora=LORA))
    sizes = base_bytes(
        build_engine(model, dtype="bfloat16", lora=LORA, base_dtype=base_dtype)
    )
    expected = {
        "adapted": plain["adapted"] / 4 * adapted,
        "others": plain["others"] / 4 * others,
    }
    assert sizes == expected


@pytest.mark.parametrize("base_dtype", ["bfloat16", *ROUNDED])
def test_engines_get_the_numbers_that_the_trainer_computes_with(
    model: str, base_dtype: str
) -> None:
    engine = build(model, base_dtype, "bfloat16")
    sent = dict(engine.named_weights(torch.bfloat16))
    original = dict(build(model, "float32", "bfloat16").named_weights(torch.bfloat16))
    assert sent.keys() == original.keys()
    for name, module in engine.module.model.named_modules():
        if isinstance(module, LowBitLinear):
            weight = f"{name.removesuffix('.base_layer')}.weight"
            computed = module.weight.full_tensor().bfloat16()
            assert torch.equal(sent.pop(weight), computed)
            assert not torch.equal(original.pop(weight), computed)
    assert_same(sent, original)


def continued(
    model: str, base_dtype: str, folder: Path, steps: range
) -> tuple[dict[str, Tensor], Tensor]:
    """Train, from the checkpoint in `folder` unless these are the first steps."""
    engine = build(model, base_dtype)
    if steps.start:
        engine.load_checkpoint(folder / f"step-{steps.start}")
    train(engine, steps)
    saved_at(engine, folder, steps.stop)
    with engine.without_adapters():
        reference, _ = engine.log_probs(random_sequences(), [(0, 11)])
    return weights(engine), reference


@pytest.mark.parametrize("base_dtype", ROUNDED)
def test_a_run_resumes_to_the_bit_and_on_two_ranks(
    model: str, tmp_path: Path, ranks: RankPool, base_dtype: str
) -> None:
    expected, reference = continued(model, base_dtype, tmp_path / "whole", range(3))
    continued(model, base_dtype, tmp_path, range(2))
    resumed, resumed_reference = continued(model, base_dtype, tmp_path, range(2, 3))
    assert_same(resumed, expected)
    assert torch.equal(resumed_reference, reference)
    ((on_two, _), _) = ranks.run(
        continued, 2, model, base_dtype, tmp_path / "two", range(3)
    )
    assert_same(on_two, expected, 1e-4)


@given(
    width=st.integers(1, 640),
    ranks=st.integers(1, 9),
    base_dtype=st.sampled_from(ROUNDED),
)
@example(width=48, ranks=3, base_dtype="nf4")
@example(width=192, ranks=2, base_dtype="int8")
def test_rows_are_refused_unless_each_rank_has_whole_blocks(
    width: int, ranks: int, base_dtype: str
) -> None:
    """Ranks that share columns of rows that pass read the numbers of the whole weight."""
    linear = nn.Linear(width, 3, bias=False)
    try:
        check_width(linear, "up_proj", base_dtype, ranks)
    except ConfigError as error:
        block = block_of(width)
        setting = "policy.parallel.tensor_parallel=" if block else "model.base_dtype="
        assert str(error).startswith(setting)
        assert not block or width // block % ranks
        return
    codes, scales = quantize(linear.weight.detach(), base_dtype)
    parts = zip(codes.chunk(ranks, -1), scales.chunk(ranks, -1), strict=True)
    shared = torch.cat([dequantize(*part) for part in parts], -1)
    assert shared.equal(dequantize(codes, scales))
