"""Settings that a model cannot be trained with are refused by name, by one rule for preflight and engine."""

import pytest

from tests.workers.model.tiny import tiny_config
from workers.config import LoraConfig, ModelConfig, ParallelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.rules.model_rules import (
    check_context_parallel,
    check_expert_parallel,
    check_ring_settings,
    check_tensor_parallel,
    check_value_head,
    kernel_problem,
)

RING = ParallelConfig(context_parallel=2, context_parallel_method="ring")
SHARED = ParallelConfig(tensor_parallel=2)


def check_sharing(parallel: ParallelConfig, *features: str, recurrent: bool = False) -> None:
    check_context_parallel(parallel, "it", recurrent=recurrent, heads=4, features=frozenset(features))


@pytest.mark.parametrize(("cp", "tp"), [(3, 1), (8, 1), (2, 4)])
def test_c2_ulysses_refuses_heads_that_do_not_divide_and_names_ring(cp, tp):
    with pytest.raises(UnsupportedModelError, match=rf"4 attention heads.*{cp * tp}.*=ring"):
        check_sharing(ParallelConfig(context_parallel=cp, tensor_parallel=tp))
    check_sharing(ParallelConfig(context_parallel=cp, tensor_parallel=tp, context_parallel_method="ring"))


def test_c3_ring_is_causal_only():
    with pytest.raises(UnsupportedModelError, match=r"sinks, sliding_window.*ulysses"):
        check_sharing(RING, "sliding_window", "sinks")
    check_sharing(RING)
    check_sharing(ParallelConfig(context_parallel=2), "sliding_window", "sinks")


def test_a_state_is_not_handed_on():
    with pytest.raises(UnsupportedModelError, match="context_parallel=1"):
        check_sharing(RING, recurrent=True)
    check_sharing(ParallelConfig(), recurrent=True)


def test_ring_on_gpus_needs_half_precision_and_no_kernel():
    with pytest.raises(ConfigError, match="ring"):
        check_ring_settings(RING, "auto", cuda=True, half=False)
    with pytest.raises(ConfigError, match=r"attention=sdpa.*=ulysses"):
        check_ring_settings(RING, "sdpa", cuda=False, half=False)
    check_ring_settings(RING, "auto", cuda=True, half=True)
    check_ring_settings(RING, "auto", cuda=False, half=False)


@pytest.mark.parametrize(
    ("config", "settings", "error", "message"),
    [
        (
            tiny_config("gemma"),
            ModelConfig(),
            UnsupportedModelError,
            "for llama, mistral, mixtral, qwen2, qwen3, qwen3_moe; ",
        ),
        (tiny_config(num_key_value_heads=1), ModelConfig(), UnsupportedModelError, "num_key_value_heads=1, which"),
        (tiny_config(intermediate_size=47), ModelConfig(), UnsupportedModelError, "intermediate_size=47, which"),
        (tiny_config(), ModelConfig(lora=LoraConfig(rank=4)), ConfigError, "adapters are not shared"),
        (
            tiny_config(),
            ModelConfig(compile=True),
            ConfigError,
            r"model\.compile does not support",
        ),
    ],
)
def test_models_that_tensor_parallelism_cannot_share_are_refused(config, settings, error, message):
    with pytest.raises(error, match=message):
        check_tensor_parallel(SHARED, settings, "it", config.model_type, config.to_dict())
    check_tensor_parallel(ParallelConfig(), settings, "it", config.model_type, config.to_dict())


@pytest.mark.parametrize(
    ("config", "settings", "error", "message"),
    [
        (tiny_config(), ModelConfig(), UnsupportedModelError, "it has no experts for .*expert_parallel=3"),
        (tiny_config("mixtral"), ModelConfig(), UnsupportedModelError, "it has 4 experts a layer, which .* not divide"),
        (
            tiny_config("mixtral", num_local_experts=6),
            ModelConfig(compile=True),
            ConfigError,
            "layers whose experts ranks share",
        ),
    ],
)
def test_models_whose_experts_cannot_be_shared_are_refused(config, settings, error, message):
    with pytest.raises(error, match=message):
        check_expert_parallel(ParallelConfig(expert_parallel=3), settings, "it", config.to_dict())
    check_expert_parallel(ParallelConfig(), settings, "it", config.to_dict())
    check_expert_parallel(ParallelConfig(expert_parallel=3), ModelConfig(), "it", {"num_local_experts": 6})


def test_a_value_head_is_not_shared():
    with pytest.raises(ConfigError, match="critic"):
        check_value_head(SHARED, "critic")
    check_value_head(RING, "critic")


def test_padded_kernels_are_not_for_packed_rows():
    assert "for padded rows" in kernel_problem("eager", "packed", cuda=False, half=False)
    assert kernel_problem("eager", "padded", cuda=False, half=False) == ""
