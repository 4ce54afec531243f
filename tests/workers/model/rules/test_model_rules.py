"""Settings that a model cannot be trained with are refused by name, by one rule for preflight and engine."""

from contextlib import nullcontext

import pytest

from tests.refusals import refused
from tests.workers.model.tiny import tiny_config
from workers.config import LoraConfig, ModelConfig, ParallelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.rules.model_rules import (
    check_context_parallel,
    check_experts,
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
    with refused("policy.parallel.context_parallel_method=ring", UnsupportedModelError):
        check_sharing(ParallelConfig(context_parallel=cp, tensor_parallel=tp))
    check_sharing(ParallelConfig(context_parallel=cp, tensor_parallel=tp, context_parallel_method="ring"))


def test_c3_ring_is_causal_only_and_passes_no_state_on():
    with refused("sinks, sliding_window", UnsupportedModelError):
        check_sharing(RING, "sliding_window", "sinks")
    with refused("policy.parallel.context_parallel=1", UnsupportedModelError):
        check_sharing(RING, recurrent=True)
    check_sharing(RING)
    check_sharing(ParallelConfig(context_parallel=2), "sliding_window", "sinks")
    check_sharing(ParallelConfig(), recurrent=True)


def test_ring_on_gpus_needs_half_precision_and_no_kernel():
    with refused("policy.parallel.context_parallel_method=ring"):
        check_ring_settings(RING, "auto", cuda=True, half=False)
    with refused("model.attention=sdpa"):
        check_ring_settings(RING, "sdpa", cuda=False, half=False)
    check_ring_settings(RING, "auto", cuda=True, half=True)
    check_ring_settings(RING, "auto", cuda=False, half=False)


@pytest.mark.parametrize(
    ("config", "settings", "error", "named"),
    [
        (tiny_config("gemma"), ModelConfig(), UnsupportedModelError, "llama, mistral, mixtral, qwen2, qwen3"),
        (tiny_config(num_key_value_heads=1), ModelConfig(), UnsupportedModelError, "num_key_value_heads=1"),
        (tiny_config(intermediate_size=47), ModelConfig(), UnsupportedModelError, "intermediate_size=47"),
        (tiny_config(), ModelConfig(lora=LoraConfig(rank=4)), ConfigError, "model.lora.rank"),
    ],
)
def test_models_that_tensor_parallelism_cannot_share_are_refused(config, settings, error, named):
    with refused(named, error):
        check_tensor_parallel(SHARED, settings, "it", config.model_type, config.to_dict())
    check_tensor_parallel(ParallelConfig(), settings, "it", config.model_type, config.to_dict())


@pytest.mark.parametrize(
    ("experts", "ep", "replay", "named"),
    [
        (0, 3, "none", "policy.parallel.expert_parallel=3"),
        (4, 3, "none", "policy.parallel.expert_parallel=3"),
        (0, 1, "replay", "model.router_replay=replay"),
        (6, 3, "compare", None),
        (0, 1, "none", None),
    ],
)
def test_models_whose_experts_do_not_suit_the_settings_are_refused(experts, ep, replay, named):
    settings = ModelConfig(router_replay=replay)
    with refused(named, UnsupportedModelError) if named else nullcontext():
        check_experts(ParallelConfig(expert_parallel=ep), settings, "it", experts)


def test_a_value_head_is_not_shared():
    with refused("critic"):
        check_value_head(SHARED, "critic")
    check_value_head(RING, "critic")


def test_padded_kernels_are_not_for_packed_rows():
    assert kernel_problem("eager", "packed", cuda=False, half=False)
    assert kernel_problem("eager", "padded", cuda=False, half=False) == ""
