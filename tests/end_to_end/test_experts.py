"""Mixtures of experts, from their configuration: the engine samples with the experts that the policy has learned."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeConfig, PreTrainedConfig, Qwen3MoeConfig

from tests.end_to_end.test_whole_loop import Run, assert_engine_equals_saved_model, run_loop

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "olmoe": (OlmoeConfig, {"intermediate_size": 64}),
    "qwen3_moe": (Qwen3MoeConfig, {"intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}),
}


EXPERT_PARALLEL = ["policy.parallel.expert_parallel=2", "model.router_aux_loss_coefficient=0.1"]


def create_experts(family: str, folder: Path, tokenizer: Path) -> None:
    """A small random model whose experts matter: without them the log-probs move by nats."""
    torch.manual_seed(0)
    characters = AutoTokenizer.from_pretrained(tokenizer)
    config_class, sizes = FAMILIES[family]
    config = config_class(
        vocab_size=32,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=characters.eos_token_id,
        pad_token_id=characters.pad_token_id,
        dtype="float32",
        **sizes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    characters.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sharing"),
    [
        ("olmoe", ["policy.ranks=1"]),
        ("qwen3_moe", [*EXPERT_PARALLEL, "policy.ranks=2"]),
        ("qwen3_moe", [*EXPERT_PARALLEL, "policy.ranks=1", "policy.parallel.tensor_parallel=2"]),
    ],
    ids=["one rank", "expert parallel", "expert and tensor parallel"],
)
def test_samples_come_from_the_experts_that_were_trained(
    ray_session, settings: list[str], workspace: Path, family: str, sharing: list[str]
) -> None:
    create_experts(family, workspace / family, workspace / "model")
    overrides = [*settings, f"run.name={family}-{len(sharing)}", "run.steps=2", *sharing]
    overrides += [f"model.path={workspace / family}"]
    overrides += ["policy.optimizer.learning_rate=1e-2", "algorithm.advantage=reinforce_plus_plus"]
    overrides += ["data.validation=''", "validation.prompts=0", "batch.mini_batches=2", "run.checkpoint_every=1"]
    run = run_loop(overrides)
    first, second = run.outcome.steps
    assert [first["rollout/weight_version"], second["rollout/weight_version"]] == [1.0, 2.0]
    assert abs(first["policy/approximate_kl"]) > 1e-3, "an update that changes nothing would not show old experts"
    for step in (first, second):
        assert step["policy/rollout_mismatch_max"] < 3e-5
    assert set(run.versions) == {2}
    assert_engine_equals_saved_model(run)
    assert_every_weight_changed(workspace / family, run.folder / "model")
    assert_goes_on_with_two_ranks(run, overrides)


def assert_goes_on_with_two_ranks(run: Run, overrides: list[str]) -> None:
    """From its first checkpoint, each rank with all experts, the second step is the same."""
    others = ["policy.ranks=2", "policy.parallel.expert_parallel=1", "policy.parallel.tensor_parallel=1"]
    others += [f"run.name={run.folder.name}-again"]
    begin = run.folder / "checkpoints" / "policy" / "step-1"
    (second,) = run_loop([*overrides, *others, f"run.resume={begin}"]).outcome.steps
    names = ["policy/loss", "policy/grad_norm", "reward/mean"]
    for name in (*names, *({"policy/router_aux_loss"} & second.keys())):
        assert second[name] == pytest.approx(run.outcome.steps[1][name], rel=1e-4), name


def assert_every_weight_changed(before: Path, after: Path) -> None:
    """Of the saved model every parameter, each expert's by itself, differs from the first."""
    first, last = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (before, after))
    assert first.keys() == last.keys()
    for name, weight in first.items():
        parts = zip(weight, last[name], strict=True) if ".experts." in name else [(weight, last[name])]
        assert not any(torch.equal(old, new) for old, new in parts), name
