"""Joined products of adapters equal peft's forward pass in float64, and launch fewer kernels."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from tests.workers.model.cpu_engine import build_engine
from tests.workers.model.exact import CountedCalls
from tests.workers.model.tiny import (
    VOCABULARY,
    relative_error,
    tiny_config,
)
from workers.config.roles import LoraConfig
from workers.model.adapter_products import _InnerProducts, join_adapter_products
from workers.model.checkpoint.lora import add_adapters, lower_base, without_adapters

LAYERS = 2


def adapted_model(lora: LoraConfig, base_dtype: str = "auto") -> Any:
    """Return a model whose A and B are random, in float64."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"), dtype=torch.float64)
    add_adapters(model, lora)
    lower_base(model, base_dtype, 1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def results(model: Any, recomputed: bool) -> list[torch.Tensor]:
    """Return logits and the gradients of all adapters."""
    ids = torch.arange(12)[None] % VOCABULARY
    model.zero_grad()

    def compute(ids: torch.Tensor) -> torch.Tensor:
        return model(ids).logits

    logits = checkpoint(compute, ids, use_reentrant=False) if recomputed else compute(ids)
    logits.square().mean().backward()
    trained = [part for part in model.parameters() if part.requires_grad]
    return [logits.detach(), *(part.grad for part in trained)]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("base_dtype", ["auto", "nf4"])
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj,down_proj", "up_proj"])
def test_joined_products_are_pefts(
    targets: str, base_dtype: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[_InnerProducts] = []
    start = _InnerProducts.__init__

    def record(products: _InnerProducts, layers: list[Any]) -> None:
        start(products, layers)
        made.append(products)

    monkeypatch.setattr(_InnerProducts, "__init__", record)
    lora = LoraConfig(rank=3, alpha=6.0, target_modules=targets)
    model = adapted_model(lora, base_dtype)
    expected = results(model, recomputed)
    with without_adapters(model):
        without = model(torch.arange(5)[None]).logits
    join_adapter_products(model)
    for reference, actual in zip(expected, results(model, recomputed), strict=True):
        assert relative_error(actual, reference) < 1e-12
    with without_adapters(model):
        assert torch.equal(model(torch.arange(5)[None]).logits, without)
    assert made
    assert all(products._input is None and not products._products for products in made)


def test_products_of_the_same_input_are_one() -> None:
    """Forward, 7 products with B join their sum and 7 with A become 4. Backward, gradients of A do, and of
    their input, which the first layer's attention does not need.
    """
    model = adapted_model(LoraConfig(rank=3))
    counts = []
    for join in (lambda model: None, join_adapter_products):
        join(model)
        with CountedCalls() as calls:
            results(model, recomputed=False)
        counts.append(calls.counts)
    pefts, joined = counts
    saved = (7 + 3) + 3 + (3 - 2) + (7 + 3) + 3 + 3
    assert pefts["aten.mm.default"] - joined["aten.mm.default"] == saved
    assert joined["aten.addmm.default"] - pefts["aten.addmm.default"] == 7 * LAYERS
    assert pefts["aten.add.Tensor"] - joined["aten.add.Tensor"] >= 7 * LAYERS


def test_modules_that_read_other_inputs_are_exact_too() -> None:
    """As in attention to another sequence, whose k_proj and v_proj read that one."""
    model = adapted_model(LoraConfig(rank=3))
    attention = model.model.layers[0].self_attn
    inputs = torch.randn(3, 4, attention.q_proj.in_features, dtype=torch.float64)
    names = ("q_proj", "k_proj", "v_proj", "q_proj")
    order = (0, 1, 1, 2)
    expected = []
    for name, index in zip(names, order, strict=True):
        expected.append(getattr(attention, name)(inputs[index]))
    join_adapter_products(model)
    others = list(inputs)
    for name, index, reference in zip(names, order, expected, strict=True):
        actual = getattr(attention, name)(others[index])
        assert relative_error(actual, reference) < 1e-12


@pytest.mark.parametrize(("compiles", "is_joined"), [("never", True), ("always", False)])
def test_an_engine_joins_products_unless_it_compiles_layers(
    compiles: str, is_joined: bool, model: str
) -> None:
    engine = build_engine(model, lora=LoraConfig(rank=3), compile=compiles)
    module = engine.module.layers[0].self_attn.q_proj
    assert ("forward" in vars(module)) is is_joined
