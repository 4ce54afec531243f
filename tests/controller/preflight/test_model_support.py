"""A model that training cannot compute is refused by its config.json, before anything heavy is imported."""

from pathlib import Path
from typing import Any

import pytest

from controller.config import load
from controller.preflight.model_support import check_supported_model
from tests.controller.config_workspace import MODEL, write_workspace
from workers.errors import ConfigError

RING = ("policy.parallel.context_parallel=2", "policy.parallel.context_parallel_method=ring")
CONTEXT = ("policy.parallel.context_parallel=2",)
HYBRID = {"layers_block_type": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
EXPERTS = ("policy.parallel.expert_parallel=2",)
TENSOR = ("policy.parallel.tensor_parallel=2",)
GPU = "resources.device=cuda"


def check(tmp_path: Path, changes: dict[str, Any], *overrides: str) -> None:
    check_supported_model(load(write_workspace(tmp_path), overrides), MODEL | changes, "model.path")


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"attention_soft_cap": 5.0}, (), "with attention_soft_cap, which model.layout=packed does not compute; take"),
        ({"index_topk": 2048}, ("model.layout=padded",), "with index_topk, which model.layout=padded does not"),
        ({"layer_types": ["chunked_attention"] * 4}, (), "with chunked_attention, which .* set model.layout=padded."),
        ({"is_encoder_decoder": True}, (), "with is_encoder_decoder, which .* set model.layout=padded."),
        (HYBRID, CONTEXT, r"carries a state from token to token, .* set policy\.parallel\.context_parallel=1\."),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, (), "with rope_type=dynamic, which"),
        ({"rope_scaling": {"rope_type": "longrope"}}, ("model.layout=padded",), "with rope_type=longrope, which"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, (), "with rope_type=dynamic, which"),
        ({"layer_types": ["linear_attention"] * 4}, (), "with linear_attention, which .* set model.layout=padded."),
        ({"text_config": {"index_topk": 2048}}, (), "with index_topk, which"),
        ({"use_bidirectional_attention": True}, (), "with use_bidirectional_attention, which"),
        ({"use_sliding_window": True, "sliding_window": 64}, RING, "with sliding_window, and ring attention is causal"),
        ({"model_type": "mistral", "sliding_window": 64}, RING, "mistral with sliding_window, and ring"),
        ({"attn_logit_softcapping": 50.0}, (GPU, "model.attention=varlen"), "with softcap, which model.attention=varl"),
        ({"attn_logit_softcapping": 50.0}, ("model.layout=padded", "model.attention=sdpa"), "model.layout=padded; set"),
        ({"model_type": "mixtral", "num_local_experts": 3}, EXPERTS, "mixtral has 3 experts a layer, which"),
        ({"model_type": "olmoe", "num_experts": 4}, (*EXPERTS, *TENSOR), "olmoe is not shared by .*tensor_parallel"),
        (
            {"model_type": "qwen2"},
            (GPU, "model.router_replay=replay"),
            "has no experts, whose choice model.router_repl",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4},
            (GPU, "model.router_replay=compare", "model.compile=true"),
            "router_replay=compare does not follow the routers of compiled layers; set model.compile=false",
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 4},
            ("model.router_z_loss_coefficient=0.1",),
            "router_z_loss_coefficient are for gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe, whose routers",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4},
            (GPU, "model.router_aux_loss_coefficient=0.1", "model.compile=true"),
            "do not reach the routers of compiled layers; set model.compile=false",
        ),
        ({"model_type": "gemma2"}, TENSOR, "of type gemma2 is not shared by policy.parallel.tensor_parallel"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            (),
            "of type gpt_oss has weights quantized by mxfp4, which are not trained; take them in bfloat16",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, changes, *overrides)


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({"use_sliding_window": False, "sliding_window": 131072}, RING),
        ({"model_type": "mistral", "sliding_window": None}, (*RING, *TENSOR)),
        ({"use_sliding_window": True, "sliding_window": 64}, ()),
        ({"model_type": "gpt_oss"}, ()),
        ({"attn_logit_softcapping": 50.0}, (GPU,)),
        ({"attn_logit_softcapping": 50.0}, ("model.layout=padded",)),
        ({"layer_types": ["linear_attention"] * 4}, ("model.layout=padded",)),
        (HYBRID, ()),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ()),
        ({"logit_scale": 0.0625}, ()),
        ({"logits_soft_cap": 30.0}, ()),
    ],
)
def test_what_is_computed_is_accepted(tmp_path: Path, changes: dict[str, Any], overrides: tuple[str, ...]) -> None:
    check(tmp_path, changes, *overrides)
