"""What an update has not brought, by vLLM's bookkeeping of its layers, and weights that need a way of their own."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from workers.engine.weights import complete_update, left_groups

WAIT_S = 60.0
WEIGHT = "layer.weight"
BIAS = "layer.bias"
PARTS = [f"a part of {BIAS}", f"a part of {WEIGHT}"]


def without_arguments(kind: type) -> Any:
    """An instance of a class of vLLM whose constructor wants a whole model's settings."""
    instance = kind.__new__(kind)
    if isinstance(instance, nn.Module):
        nn.Module.__init__(instance)
    return instance


class Model(nn.Module):
    """A linear layer of 2 x 3 weights and 2 biases beside a tower."""

    def __init__(self, method: type | None = UnquantizedLinearMethod) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(3, 2)
        self.layer.quant_method = without_arguments(method) if method else None
        self.tower = nn.Linear(1, 1, bias=False)


def loading(*names: str, values: int = 8) -> SimpleNamespace:
    """vLLM's record of a layer that waits, of which `values` values of the parameters `names` have come."""
    loaded = [(name, None) for name in names]
    return SimpleNamespace(can_load=lambda: True, loaded_weights=loaded, load_numel=values)


COMPLETE = SimpleNamespace(can_load=lambda: False, loaded_weights=[], load_numel=0)


@pytest.mark.parametrize(
    ("record", "method", "expected"),
    [
        (COMPLETE, UnquantizedLinearMethod, []),
        (loading("weight", "bias"), UnquantizedLinearMethod, []),
        (loading("weight", values=6), UnquantizedLinearMethod, [BIAS]),
        (loading(values=0), UnquantizedLinearMethod, [BIAS, WEIGHT]),
        (loading("weight", "bias", values=7), UnquantizedLinearMethod, PARTS),
        (loading("weight", "bias", values=7), UnquantizedFusedMoEMethod, PARTS),
        (loading("weight", "bias", values=7), None, []),  # such layers may be padded
    ],
)
def test_what_an_update_has_not_brought_is_named(
    record: SimpleNamespace,
    method: type | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(method)
    records = {model.layer: record}
    monkeypatch.setattr(
        complete_update, "get_layerwise_info", lambda module: records.get(module, COMPLETE)
    )
    assert complete_update.find_missing(model) == expected


@pytest.mark.parametrize("frozen", [(), ("tower",), ("tow",)])
def test_a_frozen_module_keeps_its_weights(
    frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    records = {model.tower: loading(values=0)}
    monkeypatch.setattr(
        complete_update, "get_layerwise_info", lambda module: records.get(module, COMPLETE)
    )
    expected = [] if frozen == ("tower",) else ["tower.weight"]
    assert complete_update.find_missing(model, frozen) == expected


def test_a_layer_whose_loading_is_put_off_is_not_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    monkeypatch.setattr(
        complete_update, "get_layerwise_info", lambda module: loading(values=0)
    )
    monkeypatch.setattr(
        complete_update,
        "is_deferred_attention_layer",
        lambda module: module is not model.tower,
    )
    assert complete_update.find_missing(model) == ["tower.weight"]


class SinksModel(nn.Module):
    """A rank's two of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.attn = nn.Module()
        self.layer.attn.sinks = nn.Parameter(torch.zeros(2))
        self.layer.attn.attention_sink_bias = nn.Parameter(torch.zeros(2))
        for parameter in self.parameters():
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    @staticmethod
    def load(parameter: Tensor, weight: Tensor) -> None:
        parameter.data.copy_(weight)


@pytest.mark.parametrize(
    ("translate", "sent_name", "name"),
    [
        (complete_update._gpt_oss, "layer.self_attn.sinks", "layer.attn.sinks"),
        (
            complete_update._mimo,
            "layer.attn.attention_sink_bias",
            "layer.attn.attention_sink_bias",
        ),
    ],
)
def test_a_rank_loads_the_sinks_of_its_heads(
    translate: Any, sent_name: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SinksModel()
    sent = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for rank, expected in enumerate([[1.0, 2.0], [3.0, 4.0]]):
        monkeypatch.setattr(
            complete_update, "get_tensor_model_parallel_rank", lambda rank=rank: rank
        )
        assert list(translate(model, sent_name, sent)) == []
        assert model.get_parameter(name).tolist() == expected
    assert list(translate(model, "other.weight", sent)) == [("other.weight", sent)]


@pytest.mark.parametrize(
    ("method", "local_experts", "stacks"),
    [
        (UnquantizedFusedMoEMethod, 4, True),
        (UnquantizedFusedMoEMethod, 2, False),
        (object, 4, False),
    ],
)
def test_experts_are_loaded_stacked_where_a_layer_holds_all_of_them_as_sent(
    method: type, local_experts: int, stacks: bool
) -> None:
    layer = without_arguments(RoutedExperts)
    layer.quant_method = without_arguments(method)
    layer.local_num_experts = local_experts
    layer.global_num_experts = 4
    complete_update._stack_experts(nn.ModuleList([layer]))
    assert ("load_weights" in vars(layer)) == stacks


class Group:
    """A broadcast that hangs until it is left."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def destroy(self) -> None:
        self.left.set()


def test_an_engine_leaves_the_group_that_its_actor_names_and_joins_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def join(engine: Any, info: Any) -> None:
        engine.model_update_group = Group()

    def receive(engine: Any, is_whole: bool) -> None:
        if not is_whole:
            assert engine.model_update_group.left.wait(WAIT_S)

    kind = complete_update.TimedNCCLWeightTransferEngine
    for name, function in (
        ("shutdown", lambda engine: None),
        ("init_transfer_engine", join),
        ("receive_weights", receive),
    ):
        monkeypatch.setattr(complete_update.NCCLWeightTransferEngine, name, function)
    monkeypatch.setenv(left_groups.FILE, "")
    file = left_groups.prepare_file()
    engine = without_arguments(kind)
    options = {complete_update.TRANSFER_TIMEOUT: WAIT_S}
    engine.vllm_config = SimpleNamespace(additional_config=options)
    for group in (1, 2):
        engine.init_transfer_engine(None)
        engine.receive_weights(True)
        left_groups.leave(file, group)
        with pytest.raises(TimeoutError, match="was lost"):
            engine.receive_weights(False)
