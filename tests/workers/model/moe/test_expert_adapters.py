"""Adapters of fused experts are peft's `target_parameters`: gradients, merged weights and files."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.refusals import refused
from tests.workers.model.cpu_engine import assert_same, backward, build_engine, weights
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import (
    VOCABULARY,
    random_sequences,
    relative_error,
    save_tiny_model,
    save_tokenizer,
    unpacked_log_probs,
)
from workers.config.roles import LoraConfig
from workers.model.checkpoint.lora import add_adapters
from workers.model.engine import TrainingEngine
from workers.model.moe.expert_adapters import stored_expert_weights
from workers.model.sharding.parallel import full_tensor

ALL = [(0, 11)]
BOTH = "experts.gate_up_proj,experts.down_proj"
LORA = LoraConfig(rank=2, alpha=6.0, target_modules="q_proj,o_proj", target_parameters=BOTH)
FAMILIES = ("qwen3_moe", "gpt_oss")  # the second has biases, and transposed weights


def base(path: str) -> torch.nn.Module:
    options: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **options)


def adapted_by_peft(path: str, lora: LoraConfig) -> peft.PeftModel:
    torch.manual_seed(3)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        use_rslora=lora.rslora,
        target_modules=lora.target_modules.split(","),
        target_parameters=[f"mlp.{name}" for name in lora.target_parameters.split(",")],
        init_lora_weights=False,
    )
    return peft.get_peft_model(base(path), settings).eval()


def peft_gradients(model: peft.PeftModel) -> dict[str, Tensor]:
    """Gradients of the mean over tokens of the loss mask, by the names of peft's files."""
    sequences = random_sequences()
    log_probs = torch.cat([values for values, _ in unpacked_log_probs(model, sequences)])
    mask = sequences.tokens["loss_mask"]
    (-log_probs[mask].sum() / mask.sum()).backward()
    named = model.named_parameters()
    return {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in named
        if parameter.requires_grad
    }


def of_engine(path: str, lora: LoraConfig, parallel: dict[str, int]) -> dict[str, Any]:
    """Merged weights, and gradients by peft's names, on one of several ranks that have all sequences each."""
    engine = build_engine(path, lora=lora, **parallel)
    sequences = random_sequences()
    merged = weights(engine)
    backward(engine, sequences)
    return {"merged": merged, "gradients": gradients(engine)}


def gradients(engine: TrainingEngine) -> dict[str, Tensor]:
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(parameter.grad)
    return {
        name: full_tensor(value).clone()
        for name, value in engine._adapter_weights("test").items()
    }


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "ep": (2, {"expert_parallel": 2}),
    "ep and fsdp": (4, {"expert_parallel": 2}),
    "tp": (2, {"tensor_parallel": 2}),
}
# Not shared.
CASES = [case for case in itertools.product(FAMILIES, LAYOUTS) if case != ("gpt_oss", "tp")]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_experts_are_trained_and_merged_as_by_peft(
    ranks: RankPool, tmp_path: Path, family: str, layout: str
) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    lora = replace(LORA, path=str(tmp_path / "adapters"), rslora=family == "gpt_oss")
    by_peft = adapted_by_peft(path, lora)
    by_peft.save_pretrained(lora.path)
    expected = peft_gradients(by_peft)
    count, parallel = LAYOUTS[layout]
    result = ranks.run(of_engine, count, path, lora, parallel)[0]
    copies = count // parallel.get("tensor_parallel", 1)
    assert result["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(result["gradients"][name] / copies, gradient) < 1e-8, name
    by_peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    save_tokenizer(tmp_path / "merged", VOCABULARY)
    assert_same(result["merged"], weights(build_engine(str(tmp_path / "merged"))), 1e-9)


@pytest.mark.parametrize("names", [BOTH, "experts.gate_up_proj", "experts.down_proj"])
def test_what_is_saved_loads_in_peft_and_here(tmp_path: Path, names: str) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen3_moe")
    lora = replace(LORA, target_parameters=names)
    engine = build_engine(path, lora=lora)
    sequences = random_sequences()
    backward(engine, sequences)
    engine.optimizer_step()
    engine.save_adapters(tmp_path / "adapters")
    expected, _ = engine.log_probs(sequences, ALL)
    loaded = peft.PeftModel.from_pretrained(base(path), tmp_path / "adapters").eval()
    with torch.no_grad():
        found = torch.cat([values for values, _ in unpacked_log_probs(loaded, sequences)])
    mask = sequences.tokens["loss_mask"]
    torch.testing.assert_close(found[mask].float(), expected[mask], rtol=1e-6, atol=1e-6)
    again = build_engine(path, lora=replace(lora, path=str(tmp_path / "adapters")))
    assert_same(weights(again), weights(engine), 0)
    with engine.without_adapters():
        reference, _ = engine.log_probs(sequences, ALL)
    plain, _ = build_engine(path).log_probs(sequences, ALL)
    assert torch.equal(reference, plain)


def test_a_models_own_pass_has_the_adapters_of_a_folder(tmp_path: Path) -> None:
    """The check of numerics compares with it."""
    path = save_tiny_model(tmp_path / "model", "qwen3_moe")
    lora = replace(LORA, path=str(tmp_path / "adapters"))
    by_peft = adapted_by_peft(path, lora)
    by_peft.save_pretrained(lora.path)
    own = base(path)
    add_adapters(own, lora)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(own(input_ids=ids).logits, by_peft(input_ids=ids).logits)
    stored = dict(stored_expert_weights(own, torch.device("cpu")))
    assert {tuple(weight.shape) for weight in stored.values()} == {
        (8, 32),
        (32, 8),
        (8, 16),
    }


@pytest.mark.parametrize(
    ("family", "settings", "stored", "named"),
    [
        ("qwen2", {}, {}, "target_parameters=experts"),
        ("qwen3_moe", {"target_parameters": "experts.w1"}, {}, "experts.w1 is not known"),
        (
            "qwen3_moe",
            {"target_parameters": ""},
            {},
            "Set experts.down_proj,experts.gate_up_proj",
        ),
        (
            "qwen3_moe",
            {"target_parameters": "experts.down_proj"},
            {},
            "target_parameters=experts.down_proj",
        ),
        ("qwen3_moe", {}, {"target_parameters": None}, "Set none"),
        ("qwen3_moe", {"rank": 3}, {"r": 3}, "has the shape"),
    ],
)
def test_other_experts_than_the_model_or_the_folder_has_are_refused_by_name(
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    stored: dict[str, Any],
    named: str,
) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    folder = tmp_path / "adapters"
    if family != "qwen2":
        adapted_by_peft(path, LORA).save_pretrained(folder)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    with refused(named):
        add_adapters(base(path), replace(LORA, **{"path": str(folder)} | settings))
