"""A mixture of experts, from its configuration: the engine samples with the experts that the policy has learned."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, OlmoeConfig, OlmoeForCausalLM

from tests.end_to_end.test_whole_loop import run_loop


def create_experts(folder: Path, tokenizer: Path) -> None:
    """A small random OLMoE, whose experts matter: without them the log-probs move by nats."""
    torch.manual_seed(0)
    characters = AutoTokenizer.from_pretrained(tokenizer)
    config = OlmoeConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=64,
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
    )
    OlmoeForCausalLM(config).save_pretrained(folder)
    characters.save_pretrained(folder)


@pytest.mark.slow
def test_samples_come_from_the_experts_that_were_trained(ray_session, settings: list[str], workspace: Path) -> None:
    create_experts(workspace / "experts", workspace / "model")
    overrides = [*settings, "run.name=experts", "run.steps=2", f"model.path={workspace / 'experts'}", "policy.ranks=1"]
    overrides += ["policy.optimizer.learning_rate=1e-2", "algorithm.advantage=reinforce_plus_plus"]
    overrides += ["data.validation=''", "validation.prompts=0", "batch.mini_batches=2"]
    first, second = run_loop(overrides).outcome.steps
    assert [first["rollout/weight_version"], second["rollout/weight_version"]] == [1.0, 2.0]
    assert abs(first["policy/approximate_kl"]) > 1e-3, "an update that changes nothing would not show old experts"
    for step in (first, second):
        assert step["policy/rollout_mismatch_max"] < 3e-5
