"""Quantized checkpoints compute what the weights compute that they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, MiniMaxM2Config

from tests.workers.model.checkpoint.test_checkpoint_names import leave
from tests.workers.model.cpu_engine import assert_same, build_engine
from tests.workers.model.quantized_checkpoints import CHANNELS, INT4, quantize_checkpoint
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import FAMILIES, save_tiny_model
from workers.config.roles import ModelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.model import load_model
from workers.model.quantized import quantization_of
from workers.model.skeleton import build_sampled, build_skeleton

SPARSE = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "hidden_size": 192,
    "intermediate_size": 160,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
FAMILY_SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek_v3": (DeepseekV3Config, SPARSE | LATENT),
    "minimax_m2": (
        MiniMaxM2Config,
        SPARSE | {"num_local_experts": 4, "head_dim": 16, "rotary_dim": 8},
    ),
}
CASES = [
    ("deepseek_v3", "fp8 blocks", {}),
    ("minimax_m2", "fp8 blocks", {}),
    ("qwen3", "fp8 channels", {"hidden_size": 64}),
    ("gpt_oss", "mxfp4", {"hidden_size": 64, "intermediate_size": 96}),
    ("qwen3_moe", "int4", {"hidden_size": 64, "moe_intermediate_size": 96}),
    ("deepseek_v3", "int4", {}),
]


def save_quantized(
    folder: Path,
    family: str,
    form: str,
    overrides: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, Path]:
    for name, settings in FAMILY_SETTINGS.items():
        monkeypatch.setitem(FAMILIES, name, settings)
    path = Path(save_tiny_model(folder / "quantized", family, **overrides))
    assert quantize_checkpoint(path, folder / "plain", form) > 0
    return path, folder / "plain"


@pytest.mark.parametrize(
    ("family", "form", "overrides"), CASES, ids=[" ".join(case[:2]) for case in CASES]
)
def test_a_quantized_checkpoint_computes_what_its_weights_compute(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    form: str,
    overrides: dict[str, Any],
) -> None:
    path, plain = save_quantized(tmp_path, family, form, overrides, monkeypatch)
    packed = load_model(ModelConfig(path=str(path), layout="padded"), torch.float64)
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64)
    for model in (packed.model, expected):
        if model._can_set_experts_implementation():
            # The grouped product takes no float64.
            model.set_experts_implementation("eager")
    ids = torch.arange(20)[None] % 37
    with torch.no_grad():
        actual = packed.model(ids).logits.log_softmax(-1)
        wanted = expected(ids).logits.log_softmax(-1)
    assert (actual - wanted).abs().max() < 1e-9
    assert getattr(packed.model.config, "quantization_config", None) is None
    skeleton = build_skeleton(
        ModelConfig(path=str(path)), path, "lm", trained=True, weights=True
    )
    names = {name: weight.shape for name, weight in skeleton.model.state_dict().items()}
    assert names == {name: weight.shape for name, weight in expected.state_dict().items()}


def test_a_saved_model_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = save_quantized(tmp_path, "qwen3_moe", "int4", CASES[4][2], monkeypatch)
    config = json.loads((path / "config.json").read_text()) | {"dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    engine = build_engine(str(path), dtype="float32")
    engine.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    del config["quantization_config"]
    assert saved == config
    expected = load_file(plain / "model.safetensors")
    assert_same(
        load_file(tmp_path / "saved" / "model.safetensors"),
        {name: weight.float() for name, weight in expected.items()},
    )


def test_ranks_that_share_a_quantized_model_give_out_plain_weights(
    tmp_path: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = save_quantized(tmp_path, *CASES[3], monkeypatch)
    expected = {
        name: weight.bfloat16()
        for name, weight in load_file(plain / "model.safetensors").items()
    }
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]  # tied
    for (sent,) in ranks.run(leave, 2, str(path), [None], {"expert_parallel": 2}):
        assert_same(sent, expected)


REFUSED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "nvfp4-pack-quantized": INT4 | {"format": "nvfp4-pack-quantized"},
    "asymmetric": INT4
    | {
        "config_groups": {
            "a": {"weights": {"num_bits": 4, "type": "int", "symmetric": False}}
        }
    },
    "several forms": INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "None": {"bits": 4},
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("name", "description"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_made_plain_is_refused_by_name(
    name: str, description: dict[str, Any], nested: bool
) -> None:
    config = {"quantization_config": description}
    with pytest.raises(UnsupportedModelError, match=name):
        quantization_of({"text_config": config} if nested else config, "model.path=x")


def drop(suffix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda stored: {
        name: part for name, part in stored.items() if not name.endswith(suffix)
    }


def widen_scales(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: part.repeat(3, 1) if name.endswith("_scale") else part
        for name, part in stored.items()
    }


def add_zero_points(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return stored | {"model.layers.0.mlp.up_proj.weight_zero_point": torch.zeros(1)}


@pytest.mark.parametrize(
    ("family", "form", "overrides", "damage", "error"),
    [
        (*CASES[2], drop("q_proj.weight_scale"), ConfigError),
        (*CASES[2], widen_scales, ConfigError),
        (*CASES[3], drop("_scales"), ConfigError),
        (*CASES[4], drop("_shape"), ConfigError),
        (*CASES[4], add_zero_points, UnsupportedModelError),
    ],
    ids=["scale", "shape of scales", "exponents", "shape", "zero points"],
)
def test_a_damaged_quantized_checkpoint_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    form: str,
    overrides: dict[str, Any],
    damage: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    error: type[Exception],
) -> None:
    path, _ = save_quantized(tmp_path, family, form, overrides, monkeypatch)
    save_file(damage(load_file(path / "model.safetensors")), path / "model.safetensors")
    with pytest.raises(error, match=f"model.path={path}"):
        load_model(ModelConfig(path=str(path), layout="padded"), torch.float32)


def test_a_quantized_model_that_nobody_trains_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = save_quantized(tmp_path, *CASES[2], monkeypatch)
    assert CHANNELS["quant_method"] == "compressed-tensors"
    with pytest.raises(UnsupportedModelError, match="compressed-tensors"):
        build_sampled(ModelConfig(path=str(path)), path, weights=True)
