"""`model.batch_invariant` in an engine: what vLLM is told, and options that are refused."""

import os

import pytest

from tests.refusals import refused
from workers.config.roles import ModelConfig, RolloutConfig
from workers.engine.batch_invariance import CONTRADICTING, ENVIRONMENT
from workers.engine.engine_options import ALLOWED
from workers.engine.vllm_interface import engine_arguments, prepare_environment

OPTIONS = {"placement": "apart", "max_model_tokens": 64, "seed": 1}


@pytest.fixture
def environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_gets_one_attention_kernel_and_no_compiled_layers(eager):
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = ModelConfig(path="model", batch_invariant=True)
    rollout = RolloutConfig(enforce_eager=eager)
    arguments = engine_arguments(model, rollout, **OPTIONS)
    compilation = arguments.compilation_config
    assert (
        AttentionBackendEnum[arguments.attention_backend]
        .get_class()
        .supports_batch_invariance()
    )
    assert arguments.disable_cascade_attn
    assert compilation.mode == CompilationMode.NONE
    assert compilation.custom_ops == ["all"]
    graphs = CUDAGraphMode.NONE if eager else CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.cudagraph_mode == graphs
    plain = engine_arguments(ModelConfig(path="model"), rollout, **OPTIONS)
    assert plain.attention_backend is None
    assert plain.compilation_config.mode is None


def test_the_switch_is_set_before_vllm_is_imported(environment):
    prepare_environment(RolloutConfig(), "apart")
    assert not ENVIRONMENT.keys() & os.environ.keys()
    prepare_environment(RolloutConfig(), "apart", batch_invariant=True)
    from vllm import envs

    assert envs.VLLM_BATCH_INVARIANT is True
    assert envs.VLLM_USE_V2_MODEL_RUNNER is True
    assert envs.VLLM_TRITON_USE_TD is False


@pytest.mark.parametrize("name", CONTRADICTING)
def test_an_option_with_other_kernels_is_refused(name):
    assert name in ALLOWED
    options = {"speculative_config": {"method": "ngram"}, "quantization": "fp8"}
    rollout = RolloutConfig(engine={name: options.get(name, 1)})
    model = ModelConfig(path="model", batch_invariant=True)
    with refused(f"rollout.engine.{name}"):
        engine_arguments(model, rollout, **OPTIONS)
    engine_arguments(ModelConfig(path="model"), RolloutConfig(), **OPTIONS)
