"""At load the engine is compared with the model's own forward pass: exact models pass, and no broken one
does.
"""

from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoConfig

from tests.refusals import refused
from tests.workers.model.broken import BROKEN, RunningMean, save_broken_model
from tests.workers.model.cpu_engine import backward, build_engine, weights
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.config.roles import LoraConfig, ModelConfig
from workers.errors import UnsupportedModelError
from workers.model.attention import attention
from workers.model.model import load_model
from workers.model.numerics_check import check_numerics
from workers.model.numerics_probe import make_probe
from workers.model.value_head import load_value_model

FLOAT32 = torch.float32


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("broken")
    return {name: save_broken_model(folder / name, name) for name in BROKEN}


build = partial(build_engine, dtype="float32", temperature=0.7, check_numerics=True)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_an_exact_model_is_exact_to_rounding(model, layout):
    config = ModelConfig(path=model, layout=layout)
    found = check_numerics(load_model(config, FLOAT32), config)
    assert 0 < found.largest < 1e-5 and 0 < found.gradient < 1e-5


def test_a_value_head_is_compared_though_a_new_one_gives_0(model):
    config = ModelConfig(path=model)
    module = load_value_model(config, FLOAT32)
    assert 0 < check_numerics(module, config).largest < 1e-5
    module.model.model.layers[0].mlp.__class__ = RunningMean
    with pytest.raises(
        UnsupportedModelError, match=r"values differ by up to .* of a hidden state's size"
    ):
        check_numerics(module, config)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        (
            "louder",
            "packed",
            r"\(louder\): with model.layout=packed log-probs differ by up to [\d.]+ nats",
        ),
        (
            "louder",
            "padded",
            r"\(louder\): with model.layout=padded log-probs differ .*\. Take another model",
        ),
        (
            "leaking",
            "packed",
            r"\(leaking\): with model.layout=packed .*\. Set model.layout=padded",
        ),
        (
            "fading",
            "packed",
            r"\(fading\): with model.layout=packed .*\. Set model.layout=padded",
        ),
        (
            "crashing",
            "packed",
            r"\(crashing\): model.layout=packed raises RuntimeError: view size is not compatible$",
        ),
    ],
)
def test_a_model_that_rows_would_compute_wrongly_is_refused_by_family_layout_and_difference(
    broken, name, layout, message
):
    config = ModelConfig(path=broken[name], layout=layout)
    with pytest.raises(UnsupportedModelError, match=message):
        check_numerics(load_model(config, FLOAT32), config)
    with pytest.raises(UnsupportedModelError, match=message):
        build(broken[name], layout=layout)


def test_a_model_whose_padded_rows_do_not_meet_is_exact_there(broken):
    padded = ModelConfig(path=broken["leaking"], layout="padded")
    assert check_numerics(load_model(padded, FLOAT32), padded).largest < 1e-5


def test_packed_attention_is_never_compared_with_itself(model, monkeypatch):
    packed, padded = (
        load_model(ModelConfig(path=model, layout=name), FLOAT32)
        for name in ("packed", "padded")
    )

    def refuse(model: object, name: str) -> None:
        raise ValueError(f"{name} is not supported")

    monkeypatch.setattr(type(packed.model), "set_attn_implementation", refuse)
    with refused("model.layout=padded", UnsupportedModelError):
        check_numerics(packed, ModelConfig(path=model))
    assert check_numerics(padded, ModelConfig(path=model, layout="padded")).largest < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(tmp_path, value):
    path = save_tiny_model(tmp_path)
    file = f"{path}/model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, file, metadata={"format": "pt"})
    with refused("model.layers.1.mlp.up_proj.weight"):
        build(path)


def test_half_precision_is_judged_by_what_rounding_does_to_the_model_itself(model, broken):
    build(model, dtype="bfloat16")
    for name in ("louder", "leaking"):
        with refused("rounding in bfloat16", UnsupportedModelError):
            build(broken[name], dtype="bfloat16")


def test_the_engine_is_left_as_it_was(model):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    engine = build(model, gradient_checkpointing="full")
    assert torch.rand(1) == expected
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    assert not engine.optimizer.state
    assert [layer.training for layer in engine.module.layers] == [True, True]
    assert engine.module.model.config._attn_implementation == "ballast_packed"


def test_adapters_are_probed_by_their_gradient_and_frozen_models_and_value_heads_without(
    model,
):
    assert (
        ".lora_B."
        in make_probe(build(model, lora=LoraConfig(rank=2)).module, FLOAT32).parameters[0]
    )
    for settings in ({"optimizer": None}, {"head": "value"}):
        assert make_probe(build(model, **settings).module, FLOAT32).parameters == ()


def test_a_window_that_packed_attention_left_out_is_found_whatever_its_size(
    tmp_path, monkeypatch
):
    config = ModelConfig(
        path=save_tiny_model(tmp_path, "mistral windowed", sliding_window=4096)
    )
    packed = load_model(config, FLOAT32)
    assert check_numerics(packed, config).largest < 1e-5
    assert packed.model.config.sliding_window == 4096, "it is as it was"
    monkeypatch.delitem(attention.COMPUTED_FEATURES, "sliding_window")
    with refused("log-probs differ", UnsupportedModelError):
        check_numerics(packed, config)


@pytest.mark.parametrize(
    ("window", "positions", "message"),
    [(30, 128, ""), (2000, 2000, ""), (2000, 2001, "=2000")],
)
def test_a_length_that_the_model_is_built_with_is_exceeded_or_refused(
    tmp_path, window, positions, message
):
    sizes = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
    }
    settings = {
        "vocab_size": 37,
        "window_size": window,
        "max_position_embeddings": positions,
    }
    AutoModelForCausalLM.from_config(GPTNeoConfig(**sizes, **settings)).save_pretrained(
        tmp_path
    )
    config = ModelConfig(path=str(tmp_path), layout="padded")
    packed = load_model(config, FLOAT32)
    if message:
        with refused(f"window_size{message}", UnsupportedModelError):
            check_numerics(packed, config)
    else:
        assert check_numerics(packed, config).largest < 1e-5
        longest = int(make_probe(packed, FLOAT32).sequences.lengths.max())
        assert (longest > window) == (positions > window)


def test_the_probe_is_within_the_models_positions(tmp_path):
    short = save_tiny_model(tmp_path / "short", max_position_embeddings=10)
    probe = make_probe(load_model(ModelConfig(path=short), FLOAT32), FLOAT32)
    assert probe.sequences.lengths.tolist() == [7, 10, 10]


def trained_weights(path: str, check_numerics: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    engine = build_engine(path, dtype="float32", check_numerics=check_numerics)
    sequences = random_sequences(dtype=FLOAT32)
    for _ in range(2):
        backward(engine, sequences)
        engine.optimizer_step()
    return weights(engine)


def test_training_goes_on_to_the_bit_as_if_nothing_had_been_measured(model):
    measured, expected = trained_weights(model, True), trained_weights(model, False)
    assert all(torch.equal(weight, expected[name]) for name, weight in measured.items())


def refusal(path: str, options: dict[str, Any]) -> str:
    try:
        build_engine(path, dtype="float32", check_numerics=True, **options)
    except UnsupportedModelError as error:
        return str(error)
    return ""


CONTEXT = {"context_parallel": 2}
RING = CONTEXT | {"context_parallel_method": "ring"}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", CONTEXT),
        ("qwen2", RING),
        ("qwen2", {"tensor_parallel": 2}),
        ("qwen2", {"replicate": 2}),
        ("qwen2", {}),
        ("qwen2", CONTEXT | {"head": "value"}),
        ("qwen3_moe", {"expert_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 2, "head": "value"}),
    ],
    ids=str,
)
def test_engines_over_ranks_pass_the_check(ranks, tmp_path, family, options):
    refusals = ranks.run(refusal, 2, save_tiny_model(tmp_path, family), options)
    assert refusals == ["", ""]


def test_two_ranks_refuse_a_broken_model_alike(ranks, broken):
    found = ranks.run(refusal, 2, broken["louder"], CONTEXT)
    assert found[0] == found[1]
    assert "policy.parallel.context_parallel=2 log-probs differ" in found[0]
