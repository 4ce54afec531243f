"""Which settings and models `model.batch_invariant` refuses."""

from dataclasses import replace

import pytest
from transformers import Qwen3Config

from tests.refusals import refused
from workers.config.model import LoraConfig, ModelConfig
from workers.config.roles import ParallelConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.rules.batch_invariance import check_batch_invariance, model_problem
from workers.model.rules.model_rules import compiles, shares_prefixes

MODEL = ModelConfig(path="model", batch_invariant=True)
QWEN3 = Qwen3Config(num_hidden_layers=2).to_dict()


def check(model=MODEL, parallel=None, text=QWEN3, head="lm"):
    check_batch_invariance(
        model, parallel or ParallelConfig(), "the model", text, head=head
    )


def test_a_dense_qwen3_is_taken_and_other_settings_are_not_looked_at():
    check()
    check(replace(MODEL, batch_invariant=False, dtype="float32"), head="value")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float32"}, "model.dtype=float32"),
        ({"attention": "varlen"}, "model.attention=varlen"),
        ({"layout": "padded"}, "model.layout=padded"),
        ({"forward_layout": "padded"}, "model.forward_layout=padded"),
        ({"compile": "always"}, "model.compile=always"),
        ({"share_prefixes": "always"}, "model.share_prefixes=always"),
        ({"lora": LoraConfig(rank=8)}, "model.lora.rank=8"),
    ],
)
def test_a_setting_with_other_kernels_is_refused_by_its_name(changes, named):
    with refused(named):
        check(replace(MODEL, **changes))


@pytest.mark.parametrize(
    "name",
    ["context_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel"],
)
def test_ranks_that_share_a_model_are_refused(name):
    with refused(f"policy.parallel.{name}=2"):
        check(parallel=ParallelConfig(**{name: 2}))


def test_several_problems_are_told_together():
    with pytest.raises(ConfigError) as caught:
        check(replace(MODEL, dtype="float32", attention="sdpa"))
    message = str(caught.value)
    assert "model.dtype=float32" in message and "model.attention=sdpa" in message


def test_another_head_is_refused():
    with refused("model.batch_invariant=true"):
        check(head="value")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_moe"},
        {"model_type": "qwen3_5_text"},
        {"model_type": "llama"},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    ],
    ids=str,
)
def test_another_model_is_refused(changes):
    assert model_problem(QWEN3) == ""
    with refused("model.batch_invariant=true", UnsupportedModelError):
        check(text=QWEN3 | changes)


def test_auto_leaves_out_what_rounds_otherwise():
    arguments = {"states": "", "cuda": True, "half": True}
    assert not shares_prefixes(MODEL, frozenset(), "the model", **arguments)
    assert not compiles(MODEL, ParallelConfig(), cuda=True)
    ordinary = replace(MODEL, batch_invariant=False)
    assert shares_prefixes(ordinary, frozenset(), "the model", **arguments)
    assert compiles(ordinary, ParallelConfig(), cuda=True)


def test_other_roles_compute_as_before():
    assert not MODEL.of_another_role("").batch_invariant
