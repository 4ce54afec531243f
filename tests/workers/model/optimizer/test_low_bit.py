"""States of low precision: exact where they can be, unbiased elsewhere, and the same bits in any layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.model.cases import way
from tests.workers.model.cpu_engine import assert_same, backward, build_engine
from tests.workers.model.optimizer.test_muon import arguments_of, trained
from tests.workers.model.ranks import RankError, RankPool
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.config.roles import OptimizerConfig
from workers.model.optimizer import low_bit
from workers.model.optimizer.low_bit import decode, encode, rounded_to_bfloat16
from workers.model.optimizer.optimizer import clear_state, make_optimizer, optimizer_state
from workers.model.sharding.parallel import full_tensor

LOW = ("bfloat16", "int8")
ERRORS = {"float32": 1e-5, "bfloat16": 0.006, "int8": 0.08}
"""Largest accepted |update - exact update| / |exact update| after 50 steps, norms over all weights."""


@pytest.mark.parametrize("signed", [True, False])
def test_values_of_8_bits_come_back_and_others_are_rounded_without_bias(
    signed: bool,
) -> None:
    exponents = torch.arange(0.0, -15.0, -1.0)
    fractions = torch.arange(1.0, 2.0, 0.125)
    exact = (exponents.exp2()[:, None] * fractions).flatten()[None]
    exact = torch.cat([exact, -exact if signed else exact, torch.zeros(1, 16)], dim=-1)
    noise = torch.randint(-(2**31), 2**31, exact.shape, dtype=torch.int64).to(torch.int32)
    codes, block_exponents = encode(exact, noise, 128, signed=signed)
    assert (codes.itemsize, block_exponents.itemsize, block_exponents.shape) == (
        1,
        1,
        (1, 2),
    )
    assert torch.equal(decode(codes, block_exponents), exact)
    between = torch.full((4096, 16), 1.04)
    noise = torch.randint(-(2**31), 2**31, between.shape, dtype=torch.int64).to(torch.int32)
    rounded = decode(*encode(between, noise, 16, signed=signed))
    assert set(rounded.unique().tolist()) == {1.0, 1.125}
    assert rounded.double().mean().item() == pytest.approx(1.04, abs=2e-3)
    assert rounded_to_bfloat16(between, noise).double().mean().item() == pytest.approx(
        1.04, abs=2e-4
    )


def test_a_second_moment_below_the_range_of_its_block_is_not_0() -> None:
    values = torch.tensor([[1.0, 1e-20] + [0.0] * 14])
    noise = torch.zeros(1, 16, dtype=torch.int32)
    assert 0 < decode(*encode(values, noise, 16, signed=False))[0, 1] < 1e-9
    assert decode(*encode(values, noise, 16, signed=True))[0, 1] == 0


@given(st.integers(-(2**31), 2**31 - 1))
def test_the_noise_of_a_place_is_its_lowbias32(number: int) -> None:
    """https://nullprogram.com/blog/2018/07/31, in whole numbers of any size."""
    expected = number % 2**32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        expected = (expected ^ expected >> shift) * factor % 2**32
    mixed = low_bit._mixed(torch.tensor([number], dtype=torch.int32))
    assert mixed.item() % 2**32 == expected


def updates(
    state_dtype: str, dtype: torch.dtype, name: str = "adamw"
) -> tuple[Tensor, Any]:
    """Train 50 steps on gradients of four decades, shrinking a hundredfold at half time."""
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn(24, 64, generator=generator) / 20
    scales = 10 ** (4 * torch.rand(24, 64, generator=generator) - 4)
    weight = torch.nn.Parameter(begin.to(dtype, copy=True))
    config = OptimizerConfig(
        name=name, learning_rate=1e-3, weight_decay=0.1, state_dtype=state_dtype
    )
    optimizer = make_optimizer([("w", weight)], config, {weight})
    for step in range(50):
        gradient = (torch.randn(24, 64, generator=generator) + 0.5) * scales
        weight.grad = (gradient / (100 if step > 24 else 1)).to(dtype)
        optimizer.step()
    return weight.detach() - begin, optimizer


@pytest.mark.parametrize("state_dtype", ERRORS)
def test_fifty_steps_stay_near_those_of_float64(state_dtype: str) -> None:
    exact, _ = updates("float32", torch.float64)
    error = updates(state_dtype, torch.float32)[0].double() - exact
    assert (error.norm() / exact.norm()).item() < ERRORS[state_dtype]
    assert (error * exact.sign()).mean().abs() / exact.abs().mean() < ERRORS[
        state_dtype
    ] / 4


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_states_take_the_bytes_that_they_promise(name: str) -> None:
    moments = 2 if name == "adamw" else 1
    sizes = {"float32": 4, "bfloat16": 2, "int8": 1 + 1 / 64}
    for state_dtype, size in sizes.items():
        _, optimizer = updates(state_dtype, torch.float32, name)
        (state,) = optimizer_state(optimizer).values()
        assert (
            sum(part.nbytes for part in state.values() if part.ndim)
            == moments * size * 24 * 64
        )
        clear_state(optimizer)
        assert not any(part.any() for part in state.values())


def test_vectors_keep_moments_in_float32_with_int8_alone() -> None:
    for state_dtype, expected in (("int8", torch.float32), ("bfloat16", torch.bfloat16)):
        vector = torch.nn.Parameter(torch.ones(64))
        optimizer = make_optimizer(
            [("norm", vector)], OptimizerConfig(state_dtype=state_dtype)
        )
        assert optimizer_state(optimizer)[vector]["exp_avg"].dtype == expected


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((5, 16), 16),
        ((5, 15), 0),
        ((16, 24), 0),
        ((3, 5, 48), 16),
        ((3, 96), 32),
        ((2, 1024), 256),
        ((256,), 0),
    ],
)
def test_blocks_divide_rows_and_have_16_to_256_values(
    shape: tuple[int, ...], block: int
) -> None:
    assert low_bit.block_of(torch.empty(shape, device="meta")) == block


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (4, 3, 5), (2, 3, 2, 4), (0, 6)])
def test_pieces_hold_every_row_once_and_the_places_of_their_elements(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit, "PIECE", 12)
    tensor = torch.empty(shape)
    parts = list(low_bit.pieces(tensor))
    rows = [
        row for part, places in parts for row in range(part.start, part.start + len(places))
    ]
    assert rows == list(range(len(rows)))
    assert all(places.numel() <= 12 for _, places in parts)
    places = torch.cat([torch.empty(0), *(places.flatten() for _, places in parts)])
    assert places.tolist() == list(range(tensor.numel()))


def stepped(path: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return whole moments after steps on gradients that do not depend on the layout."""
    shared = {"dtype": "float32", **vars(arguments["parallel"])}
    engine = build_engine(path, optimizer=arguments["optimizer"], **shared)
    generator = torch.Generator().manual_seed(1)
    parameters = dict(engine.module.named_parameters())
    for _ in range(2):
        for parameter in parameters.values():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.zeros_like(parameter)
            distributed = torch.distributed.tensor.distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.grad.copy_(distributed)
        engine.optimizer.step()
    states = optimizer_state(engine.optimizer)
    return {
        f"{name}.{part}": full_tensor(value)
        for name, parameter in parameters.items()
        for part, value in states[parameter].items()
    }


@pytest.mark.parametrize("state_dtype", LOW)
def test_moments_are_the_same_bits_on_any_number_of_ranks(
    tmp_path: Path, ranks: RankPool, state_dtype: str
) -> None:
    path = save_tiny_model(tmp_path / "tiny", tie_word_embeddings=False, hidden_size=64)
    arguments = arguments_of(path, tmp_path, f"policy.optimizer.state_dtype={state_dtype}")
    expected = stepped(path, arguments)
    assert any(name.endswith("exponents") for name in expected) == (state_dtype == "int8")
    for layout in (way("dp 4"), way("dp 4, copies 2")):
        (moments, *_) = ranks.run(
            stepped, layout.ranks, path, arguments | {"parallel": layout.parallel}
        )
        assert_same(moments, expected, 0)


def test_a_skipped_step_leaves_the_states_as_they_are(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "tiny", hidden_size=64)
    engine = build_engine(
        path, optimizer=OptimizerConfig(state_dtype="int8"), dtype="float32"
    )
    sequences = random_sequences(4, seed=0)
    for is_finite in (True, False):
        backward(engine, sequences, [(0, 4)])
        before = [
            part.clone()
            for state in engine.optimizer.state.values()
            for part in state.values()
        ]
        if not is_finite:
            next(engine.module.parameters()).grad.fill_(torch.nan)
        engine.optimizer_step()
    after = [part for state in engine.optimizer.state.values() for part in state.values()]
    assert before and all(
        map(torch.equal, map(full_tensor, before), map(full_tensor, after))
    )


def test_blocks_of_another_tensor_parallelism_are_refused_by_the_first_tensor(
    tmp_path: Path, ranks: RankPool
) -> None:
    """A rank's part of a row of `down_proj` is not a multiple of 16 there: its moments would be float32."""
    path = save_tiny_model(tmp_path / "tiny", tie_word_embeddings=False, hidden_size=64)
    arguments = arguments_of(path, tmp_path, "policy.optimizer.state_dtype=int8")
    saved = str(tmp_path / "saved")
    trained(path, arguments, 1, range(1), "float32", saved)
    shared = arguments | {"parallel": way("tp 2").parallel}
    with pytest.raises(RankError, match=r"down_proj\.weight\.exp_avg_exponents has shape"):
        ranks.run(trained, 2, path, shared, 1, range(1, 2), "float32", saved)
