"""Adapters alone are trained, and merged they are the same model."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.benchmarks.families.shrinking import tiny_config as family_config
from tests.refusals import refused
from tests.workers.model.checkpoint.test_checkpoint import saved_at, train
from tests.workers.model.cpu_engine import assert_same, backward, build_engine, weights
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import (
    random_sequences,
    relative_error,
    unpacked_log_probs,
)
from workers.config.roles import LoraConfig, OptimizerConfig
from workers.errors import CheckpointError, OutputError
from workers.model.checkpoint.lora import (
    adapter_weights,
    add_adapters,
    modules_left_out,
    write_adapters,
)
from workers.model.checkpoint.stored_adapters import FILE, _last_parts
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, sft
from workers.model.sharding.parallel import full_tensor

# Rank 3 over 2 and 4 processes: shards of unequal size, and on the last of 4 none.
LORA = LoraConfig(rank=3, alpha=6.0)
ALL = [(0, 11)]


def build(model: str, lora: LoraConfig = LORA, dtype: str = "float64") -> TrainingEngine:
    return build_engine(
        model, dtype=dtype, lora=lora, optimizer=OptimizerConfig(learning_rate=3e-2)
    )


def base(model: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)


def masked_log_probs(module: torch.nn.Module) -> torch.Tensor:
    """As `TrainingEngine.log_probs` gives them, but of transformers' own forward pass, float64 [T]."""
    sequences = random_sequences()
    with torch.no_grad():
        outputs = [log_probs for log_probs, _ in unpacked_log_probs(module, sequences)]
    return torch.cat(outputs) * sequences.tokens["loss_mask"]


def float64_log_probs(engine: TrainingEngine) -> torch.Tensor:
    """The engine's log-probs before they are rounded to float32, through its loss function."""
    seen = []

    def look(predictions, denominators):
        seen.append(predictions.log_probs.detach())
        return sft(predictions, denominators)

    sequences = random_sequences()
    engine.forward_backward(sequences, ALL, look, Denominators.of(sequences))
    engine.module.zero_grad()
    result = torch.zeros(sequences.num_tokens, dtype=torch.float64)
    result[sequences.tokens["loss_mask"]] = seen[0]
    return result


def test_only_adapters_get_gradients_and_change(model):
    engine = build(model)
    before = {
        name: parameter.detach().clone()
        for name, parameter in engine.module.named_parameters()
    }
    sequences = random_sequences()
    backward(engine, sequences)
    with_gradient = {
        name
        for name, parameter in engine.module.named_parameters()
        if parameter.grad is not None
    }
    adapters = {name for name in before if "lora_" in name}
    assert with_gradient == adapters
    assert len(adapters) == 2 * 2 * 7  # A and B, layers, q k v o gate up down
    train(engine, range(3))
    for name, parameter in engine.module.named_parameters():
        changed = bool((full_tensor(parameter) != full_tensor(before[name])).any())
        assert changed == (name in adapters), name


def test_it_begins_as_the_base_model_and_merged_weights_are_the_adapted_one(
    model, tmp_path
):
    engine = build(model)
    before = masked_log_probs(base(model))
    assert relative_error(float64_log_probs(engine), before) < 1e-9
    train(engine, range(3))
    adapted = float64_log_probs(engine)
    assert relative_error(adapted, before) > 1e-3
    merged = base(model)
    sent = weights(engine)
    assert sent.keys() == merged.state_dict().keys()
    merged.load_state_dict(sent)
    assert relative_error(masked_log_probs(merged), adapted) < 1e-9
    engine.save_pretrained(tmp_path / "merged")
    assert relative_error(masked_log_probs(base(str(tmp_path / "merged"))), adapted) < 1e-9


def from_folder(
    model: str, lora: LoraConfig, path: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    engine = build(model, replace(lora, path=path))
    return weights(engine), engine.log_probs(random_sequences(), ALL)[0]


@pytest.mark.parametrize("lora", [LORA, replace(LORA, rslora=True)], ids=["lora", "rslora"])
def test_a_policy_begins_with_the_adapters_of_a_folder(
    model, tmp_path, ranks: RankPool, lora: LoraConfig
):
    first = build(model, lora)
    train(first, range(3))
    path = tmp_path / "adapters"
    first.save_adapters(path)
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1
    loaded = peft.PeftModel.from_pretrained(base(model), path).eval()
    assert relative_error(masked_log_probs(loaded), float64_log_probs(first)) < 1e-9
    second = build(model, replace(lora, path=str(path)))
    assert torch.equal(float64_log_probs(second), float64_log_probs(first))
    assert_same(weights(second), weights(first), 0)
    with second.without_adapters():
        reference, _ = second.log_probs(random_sequences(), ALL)
    torch.testing.assert_close(
        reference, masked_log_probs(base(model)).float(), rtol=1e-6, atol=1e-6
    )
    for sent, _ in ranks.run(from_folder, 2, model, lora, str(path)):
        assert_same(sent, weights(first), 1e-9)


def written_again(model: str, path: Path, parallel: str) -> None:
    lora = replace(LORA, path=str(path))
    build_engine(model, lora=lora, **{parallel: 2}).save_adapters(path / "again")


@pytest.mark.parametrize("parallel", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_that_share_adapters_read_and_write_whole_ones(
    model, tmp_path, ranks: RankPool, parallel
):
    engine = build(model)
    train(engine, range(3))
    engine.save_adapters(tmp_path / "adapters")
    ranks.run(written_again, 2, model, tmp_path / "adapters", parallel)
    expected = load_file(tmp_path / "adapters" / FILE)
    assert_same(load_file(tmp_path / "adapters" / "again" / FILE), expected, 0)


def test_a_folder_of_peft_itself_is_a_beginning(model, tmp_path):
    settings = peft.LoraConfig(
        r=3, lora_alpha=6.0, target_modules=["v_proj", "o_proj"], lora_dropout=0.1
    )
    settings.init_lora_weights = False  # B is random, too
    adapted = peft.get_peft_model(base(model), settings).eval()
    adapted.save_pretrained(tmp_path)
    engine = build(model, replace(LORA, path=str(tmp_path), target_modules="o_proj,v_proj"))
    assert relative_error(float64_log_probs(engine), masked_log_probs(adapted)) < 1e-9


OTHER_FOLDERS = [
    ({"r": 2}, "model.lora.rank=3"),
    ({"lora_alpha": 7}, "model.lora.alpha=6.0"),
    ({"use_rslora": True}, "model.lora.rslora=False"),
    ({"use_dora": True}, "use_dora=True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ({"bias": "all"}, "bias=all"),
    ({"peft_type": "LOHA"}, "peft_type=LOHA"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
    ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    ({"future": True}, "future=True"),
    ({"weights": {"model.lm_head.weight": (4, 4)}}, "lm_head"),
    (
        {"weights": {"model.layers.0.self_attn.k_proj.lora_A.weight": (3, 64)}},
        "target_modules=k_proj,q_proj",
    ),
    (
        {"weights": {"model.layers.0.self_attn.q_proj.lora_A.weight": (3, 65)}},
        "of another model",
    ),
    ({"without": "model.layers.1.self_attn.v_proj.lora_B.weight"}, "is missing there"),
    ({"file": None}, "adapter_model.safetensors is missing"),
    ({"file": None, "pickle": "adapter_model.bin"}, "adapter_model.bin is a pickle"),
    ({"file": b"cut"}, "cannot be read"),
]


@pytest.mark.parametrize(
    ("change", "named"), OTHER_FOLDERS, ids=[named for _, named in OTHER_FOLDERS]
)
@pytest.mark.parametrize("skeleton", [False, True], ids=["model", "skeleton"])
def test_adapters_that_the_settings_do_not_describe_are_refused_by_name(
    model, tmp_path, change: dict[str, Any], named: str, skeleton: bool
):
    lora = replace(LORA, target_modules="q_proj,v_proj", path=str(tmp_path))
    change = dict(change)
    engine = base(model)
    add_adapters(engine, replace(lora, path=""))
    values = {
        name: value.clone() for name, value in adapter_weights(engine, torch.device("cpu"))
    }
    for name, shape in change.pop("weights", {}).items():
        values[f"base_model.model.{name}"] = torch.zeros(shape)
    values.pop(f"base_model.model.{change.pop('without', '')}", None)
    write_adapters(engine, values, tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    if "file" in change:
        (tmp_path / FILE).unlink()
        if content := change.pop("file"):
            (tmp_path / FILE).write_bytes(content)
    if name := change.pop("pickle", ""):
        torch.save(values, tmp_path / name)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | change))
    with torch.device("meta") if skeleton else nullcontext():
        policy = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=torch.float64
        )
    with refused(named):
        add_adapters(policy, lora)


def test_weights_of_experts_are_compared_by_their_last_two_names():
    names = ["layers.0.mlp.experts.gate_up_proj", "experts.down_proj"]
    assert _last_parts(names) == ["experts.down_proj", "experts.gate_up_proj"]
    assert _last_parts(None) == []


def test_without_adapters_the_policy_is_its_own_reference(model):
    """Also as the very first pass, and training goes on afterwards as if nothing had been."""
    engine, undisturbed = build(model), build(model)
    sequences = random_sequences()
    expected = masked_log_probs(base(model)).float()
    for _ in range(2):
        with engine.without_adapters():
            reference, _ = engine.log_probs(sequences, ALL)
        torch.testing.assert_close(reference, expected, rtol=1e-6, atol=1e-6)
        train(engine, range(2))
        train(undisturbed, range(2))
    assert torch.equal(float64_log_probs(engine), float64_log_probs(undisturbed))


def on_ranks(model: str, path: Path) -> dict[str, torch.Tensor]:
    """Two steps and a checkpoint, unless it is there; another engine goes on from it for one more."""
    there = path.exists()
    engine = build(model)
    if not there:
        train(engine, range(2))
        saved_at(engine, path.parent, 2)
    resumed = build(model)
    resumed.load_checkpoint(path)
    train(resumed, range(2, 3))
    return weights(resumed)


def test_ranks_and_checkpoints_hold_adapters_alone_and_change_nothing(
    model, tmp_path, ranks: RankPool
):
    engine = build(model)
    train(engine, range(3))
    expected = weights(engine)
    path = tmp_path / "step-2"
    for found in (
        ranks.run(on_ranks, 2, model, path)[0],
        ranks.run(on_ranks, 4, model, path)[3],
    ):
        assert_same(found, expected, 1e-9)
    stored = {name for file in path.glob("*.safetensors") for name in load_file(file)}
    assert all(".lora_" in name or name.startswith("random.") for name in stored)
    with pytest.raises(CheckpointError):
        build(model, LoraConfig(rank=2)).load_checkpoint(path)


def test_a_frozen_engine_has_no_adapters(model):
    engine = build_engine(model, lora=LORA, optimizer=None)
    assert not [name for name, _ in engine.module.named_parameters() if "lora" in name]
    with refused("model.lora.rank"), engine.without_adapters():
        pass


def test_target_modules_are_those_named(model):
    for wrong in ("w_pack", "lm_head", ""):
        with refused(f"no linear module '{wrong}'"):
            add_adapters(base(model), LoraConfig(rank=2, target_modules=f"q_proj, {wrong}"))
    adapted = base(model)
    add_adapters(adapted, LoraConfig(rank=2, target_modules="q_proj,v_proj"))
    names = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name, p in adapted.named_parameters()
        if p.requires_grad
    }
    assert names == {"q_proj", "v_proj"}


def linear_names(model: torch.nn.Module) -> set[str]:
    """Names of the decoder's linear modules, by the last part."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    return {name.rpartition(".")[2] for name in modules if not name.startswith("lm_head")}


FUSED_EXPERTS = ("down_proj", "gate_proj", "up_proj")
LEFT_OUT = {
    **dict.fromkeys(("falcon_h1", "nemotron_h"), ("out_proj",)),
    **dict.fromkeys(
        ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "qwen3_next"), FUSED_EXPERTS
    ),
    **dict.fromkeys(
        ("bamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"), ()
    ),
    **dict.fromkeys(
        ("gemma3_text", "gpt_oss", "olmo_hybrid", "qwen2_moe", "qwen3_5_text", "qwen3_moe"),
        (),
    ),
}
"""Linear modules of a family that peft refuses, or takes for its experts'."""


@pytest.mark.parametrize("family", LEFT_OUT)
def test_all_linear_modules_get_an_adapter_but_those_that_peft_cannot_adapt(family):
    policy = AutoModelForCausalLM.from_config(family_config(family))
    expected = linear_names(policy) - set(LEFT_OUT[family])
    assert tuple(modules_left_out(policy, LORA)) == LEFT_OUT[family]
    add_adapters(policy, LORA)
    trained = [
        name for name, parameter in policy.named_parameters() if parameter.requires_grad
    ]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == expected


@pytest.mark.parametrize(
    ("family", "module"), [("nemotron_h", "out_proj"), ("qwen3_next", "gate_proj")]
)
def test_a_module_that_peft_cannot_adapt_is_refused_by_name(family, module):
    policy = AutoModelForCausalLM.from_config(family_config(family))
    with refused(f"no linear module {module!r} that takes an adapter"):
        add_adapters(policy, LoraConfig(rank=2, target_modules=f"q_proj,{module}"))


def test_adapters_compute_in_bfloat16_and_are_kept_in_float32(model):
    engine = build(model, dtype="bfloat16")
    train(engine, range(1))
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}


def test_checkpointed_layers_stay_so_and_nothing_else_is_in_training_mode(model):
    engine = build_engine(model, gradient_checkpointing="full", lora=LORA)
    in_training = [module for module in engine.module.modules() if module.training]
    assert in_training == engine.module.layers
    assert all(layer.gradient_checkpointing for layer in in_training)


def test_adapters_replace_those_that_were_there_and_say_where_they_cannot_be_written(
    model, tmp_path
):
    engine = build(model)
    for _ in range(2):
        engine.save_adapters(tmp_path / "adapters")
    assert [path.name for path in tmp_path.iterdir()] == ["adapters"]
    (tmp_path / "file").touch()
    with refused("file/adapters", OutputError):
        engine.save_adapters(tmp_path / "file" / "adapters")
