"""Models that cannot be trained, given to the command: refused by their files alone, in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import sampling_params
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from controller.config import load
from controller.fit import main
from controller.lifecycle.model_checks import (
    CPU_HEAD_SIZES,
    KV_BLOCK_TOKENS,
    check_all_weights_are_sent,
)
from controller.preflight.engine_checks import COLDEST
from tests.benchmarks.families.shrinking import tiny_config
from tests.controller.config_workspace import MODEL, check_everything, refusal, write_model
from tests.controller.tokenizer_file import END
from tests.controller.weight_files import qwen2_weights, write_weight_file
from workers.config.model import ModelConfig
from workers.engine.vllm_interface import CPU_KV_BLOCK_TOKENS
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.skeleton import build_skeleton, check_kind

WEIGHTS, INDEX = Path("model/model.safetensors"), Path("model/model.safetensors.index.json")
Break = Callable[[], object]


def cut(count: int) -> Break:
    return lambda: WEIGHTS.write_bytes(WEIGHTS.read_bytes()[:count])


def weights_of(**changes: object) -> Break:
    """The files of another model beside the config.json of this one."""
    return lambda: write_weight_file(WEIGHTS, qwen2_weights(MODEL | changes))


def without(*names: str) -> Break:
    kept = {
        name: shape
        for name, shape in qwen2_weights(MODEL).items()
        if not name.startswith(names)
    }
    return lambda: write_weight_file(WEIGHTS, kept)


def reshaped(name: str, *shape: int) -> Break:
    return lambda: write_weight_file(WEIGHTS, qwen2_weights(MODEL) | {name: shape})


def described(**changes: object) -> Break:
    return lambda: Path("model/config.json").write_text(json.dumps(MODEL | changes))


def of_another_family() -> None:
    """A family whose sizes are not known by name: its embedding alone is compared."""
    described(model_type="gpt_neox")()
    write_weight_file(WEIGHTS, {"gpt_neox.embed_in.weight": (32, 128)})


def pickled() -> None:
    WEIGHTS.rename("model/pytorch_model.bin")


def pointer() -> None:
    WEIGHTS.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


def under_another_name() -> None:
    WEIGHTS.rename("model/adapter_model.safetensors")


def with_more(*names: str) -> Break:
    return lambda: write_weight_file(
        WEIGHTS, qwen2_weights(MODEL) | dict.fromkeys(names, (64,))
    )


def sharded(listed: dict[str, str], *written: str) -> Break:
    def write() -> None:
        WEIGHTS.unlink()
        INDEX.write_text(json.dumps({"weight_map": listed}))
        for name in written:
            write_weight_file(WEIGHTS.with_name(name), {"model.norm.weight": (256,)})

    return write


CASES = {
    "empty": (cut(0), "Fetch it again"),
    "header cut": (cut(99), "Fetch it again"),
    "cut": (cut(99_999), "Fetch it again"),
    "LFS pointer": (pointer, "git lfs pull"),
    "not JSON": (lambda: WEIGHTS.write_bytes(bytes(64)), "not a whole safetensors file"),
    "other hidden size": (
        weights_of(hidden_size=128),
        "(32, 128) in the weight files and (32, 256)",
    ),
    "other vocabulary": (
        weights_of(vocab_size=33),
        "(33, 256) in the weight files and (32, 256)",
    ),
    "other width": (
        weights_of(intermediate_size=512),
        "(256, 512) in the weight files and (256, 704)",
    ),
    "other heads": (
        weights_of(num_key_value_heads=1),
        "(64,) in the weight files and (128,)",
    ),
    "other output": (reshaped("lm_head.weight", 31, 256), "lm_head.weight is (31, 256)"),
    "fewer layers": (
        weights_of(num_hidden_layers=3),
        "lacks 12 weights, the first is model.layers.3.",
    ),
    "more layers": (weights_of(num_hidden_layers=6), "has no model.layers.4."),
    "no output layer": (without("lm_head"), "lacks 1 weights, the first is lm_head.weight"),
    "no last norm": (
        without("model.norm"),
        "lacks 1 weights, the first is model.norm.weight",
    ),
    "other family": (of_another_family, "embed_in.weight is (32, 128)"),
    "pickle": (pickled, "; pytorch_model.bin is a pickle"),
    "adapter": (
        under_another_name,
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "file missing": (sharded({"a": "1.safetensors"}), "model lacks 1.safetensors"),
    "weight missing": (
        sharded({"a": "1.safetensors"}, "1.safetensors"),
        "model/1.safetensors lacks a,",
    ),
    "no map": (lambda: (WEIGHTS.unlink(), INDEX.write_text("{}")), "has no weight_map"),
    "index out of the folder": (
        sharded({"a": "../1.safetensors"}),
        "lacks ../1.safetensors",
    ),
    "index of lists": (sharded({"a": [1]}), "lacks [1]"),
    "biases": (described(model_type="llama"), "has no model.layers."),
    "norms of heads": (
        with_more("model.layers.0.self_attn.q_norm.weight"),
        "has no model.layers.0.self_attn.q_norm",
    ),
    "text": (described(num_hidden_layers="four"), "cannot be loaded"),
    "huge": (described(hidden_size=10**30), "cannot be loaded"),
    "list": (described(text_config=[1]), ""),
    "inside": (described(text_config=MODEL | {"vocab_size": "x"}), ""),
    "no factor": (described(rope_scaling={"rope_type": "linear", "factor": "x"}), ""),
    "deep": (
        lambda: Path("model/config.json").write_text('{"a":' * 100_000),
        "config.json is not valid JSON",
    ),
    "digits": (
        lambda: Path("model/config.json").write_text(f'{{"a": {"1" * 5001}}}'),
        "config.json is not valid JSON",
    ),
    "unknown type": (described(model_type="qwen9"), "model_type=qwen9"),
    "no type": (described(model_type=None), "no model_type"),
    "a list as type": (described(model_type=[1]), "model_type=[1]"),
    "remote code": (
        described(model_type="own", auto_map={"AutoModelForCausalLM": "own.Model"}),
        "code from",
    ),
    "BERT": (
        described(model_type="bert", architectures=["BertForMaskedLM"]),
        "BertForMaskedLM is not a causal",
    ),
    "vision": (described(model_type="vit"), "vit is not a causal language model"),
    "judge as policy": (
        described(architectures=["Qwen2ForSequenceClassification"]),
        "is not a causal language model",
    ),
    "end outside": (
        described(eos_token_id=32),
        "eos_token_id 32 is outside the vocabulary of 32",
    ),
    "quantized": (
        described(quantization_config={"quant_method": "gptq"}),
        "quantized by gptq",
    ),
}


@pytest.mark.parametrize(("broken", "message"), CASES.values(), ids=CASES)
def test_a_folder_that_cannot_be_trained_is_refused_in_one_line(
    workspace: Path, capsys: pytest.CaptureFixture[str], broken: Break, message: str
) -> None:
    broken()
    assert main(["--config", "config.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: model.path") and message in line
    assert not Path("runs").exists()


RING = (
    "policy.parallel.context_parallel=2",
    "policy.parallel.context_parallel_method=ring",
)
EXPERTS = ("policy.parallel.expert_parallel=2",)
TENSOR = ("policy.parallel.tensor_parallel=2",)
GPU = "resources.device=cuda"
ADAPTERS = "model.lora.sync=adapters"
LORA = "model.lora.rank=4"
SEQUENCE = 2 * 4 * 128 * 4 * 96 / 2**30
"""GiB: keys and values, 4 layers, 2 x 64 wide, float32, of 96 tokens."""
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
}
SPARSE = LATENT | {
    "model_type": "glm_moe_dsa",
    "index_topk": 16,
    "index_n_heads": 4,
    "index_head_dim": 64,
}
GATED_DELTA = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8}


def changed(**changes: Any) -> None:
    """Describe another model; its weight files are removed, as on a machine that describes a cluster."""
    described(**changes)()
    write_model_weights()


def write_model_weights() -> None:
    """Save what the configuration describes, without the numbers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained("model")
    AutoModelForCausalLM.from_config(config).save_pretrained("model")


@pytest.mark.parametrize(
    ("changes", "overrides", "named"),
    [
        ({"attention_soft_cap": 5.0}, (), "attention_soft_cap"),
        ({"index_topk": 2048}, (), "index_topk"),
        ({"compress_rates": {"a": 4}}, ("model.layout=padded",), "compress_rates"),
        (
            SPARSE,
            ("policy.parallel.context_parallel=2",),
            "policy.parallel.context_parallel=2",
        ),
        (
            SPARSE,
            ("policy.parallel.pipeline_parallel=2",),
            "policy.parallel.pipeline_parallel=2",
        ),
        (SPARSE, ("model.share_prefixes=always",), "share_prefixes=always"),
        (SPARSE, (), "vLLM on CPUs has no attention to selected tokens"),
        (LATENT | {"kv_lora_rank": 32}, (), "vLLM on CPUs"),
        ({"is_encoder_decoder": True}, (), "model.layout=padded"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            (),
            "rope_type=dynamic",
        ),
        ({"use_bidirectional_attention": True}, (), "use_bidirectional_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            RING,
            "sliding_window",
        ),
        ({"model_type": "mistral", "sliding_window": 64}, RING, "sliding_window"),
        ({"attn_logit_softcapping": 50.0}, (GPU, "model.attention=varlen"), "softcap"),
        (
            {"attn_logit_softcapping": 50.0},
            ("model.layout=padded", "model.attention=sdpa"),
            "softcap",
        ),
        ({"model_type": "mixtral", "num_local_experts": 3}, EXPERTS, "expert_parallel=2"),
        ({"model_type": "olmoe", "num_experts": 4}, TENSOR, "tensor_parallel"),
        (
            {"model_type": "olmo2"},
            ("model.router_z_loss_coefficient=0.1",),
            "model.router_z_loss_coefficient",
        ),
        ({"model_type": "gemma2"}, TENSOR, "tensor_parallel"),
        (
            GATED_DELTA | {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
            (GPU, *TENSOR),
            "policy.parallel.tensor_parallel=2: ",
        ),
        (
            {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 2},
            (LORA,),
            "model.lora.rank",
        ),
        (LATENT, (LORA, ADAPTERS), "without kv_b_proj"),
        (
            LATENT,
            (LORA, ADAPTERS, "model.lora.target_modules=o_proj,kv_b_proj"),
            "without kv_b_proj",
        ),
        (
            {"intermediate_size": 712},
            (LORA, "model.base_dtype=int8"),
            "model.base_dtype=int8",
        ),
        ({"num_attention_heads": 16}, (), "vLLM on CPUs"),
    ],
)
def test_a_model_that_the_settings_cannot_train_is_refused(
    workspace: Path, changes: dict[str, Any], overrides: tuple[str, ...], named: str
) -> None:
    changed(**changes)
    text = refusal(*overrides)
    assert named in text
    assert "model.path=None" not in text


QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("changes", "overrides", "sees", "named"),
    [
        (
            QUANTIZED,
            ("model.lora.rank=4", "model.lora.policies=2"),
            False,
            "model.lora.policies=2",
        ),
        (
            QUANTIZED,
            ("model.lora.rank=4", "model.lora.sync=adapters"),
            False,
            "model.lora.sync=adapters",
        ),
        (QUANTIZED, (), True, "model.train_vision=true"),
        (QUANTIZED, ("model.train_vision=true",), True, ""),
        (QUANTIZED, (GPU, "rollout.placement=colocated"), True, ""),
        (QUANTIZED, (), False, ""),
        ({}, ("model.lora.rank=4", "model.lora.policies=2"), True, ""),
    ],
)
def test_engines_that_read_no_weights_get_all(
    workspace: Path,
    changes: dict[str, Any],
    overrides: tuple[str, ...],
    sees: bool,
    named: str,
) -> None:
    described(**changes)()
    model = Mock(spec=["get_image_features"] if sees else [])
    config = load("config.yaml", list(overrides))
    if not named:
        check_all_weights_are_sent(config, model)
        return
    with pytest.raises(ConfigError, match=named):
        check_all_weights_are_sent(config, model)


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({"use_sliding_window": False, "sliding_window": 131072}, RING),
        ({"model_type": "mistral", "sliding_window": None}, (*RING, *TENSOR)),
        ({"use_sliding_window": True, "sliding_window": 64}, ()),
        ({"attn_logit_softcapping": 50.0}, (GPU,)),
        ({"attn_logit_softcapping": 50.0}, ("model.layout=padded",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ()),
        ({"model_type": "gpt_neox"}, ()),
        ({"num_attention_heads": 16}, (GPU,)),
        ({"num_attention_heads": 8}, ()),
        ({"auto_map": {"AutoModel": "own.Model"}}, ()),
        ({"architectures": ["Qwen2ForCausalLM"]}, ()),
        (MIXTURE, EXPERTS),
        (GATED_DELTA, (GPU, *TENSOR, "policy.parallel.pipeline_parallel=2")),
        (SPARSE, (GPU,)),
        (
            SPARSE | {"model_type": "deepseek_v32"},
            (GPU, "policy.parallel.pipeline_parallel=2"),
        ),
        (SPARSE, (GPU, LORA, "model.lora.target_modules=q_b_proj")),
        (LATENT, ()),
        (LATENT, (LORA,)),
        (LATENT, (LORA, ADAPTERS, "model.lora.target_modules=o_proj,q_b_proj")),
        ({}, (LORA, "model.lora.target_modules=q_proj, down_proj")),
        ({}, (LORA,)),
        ({}, (LORA, *TENSOR)),
        ({}, (f"rollout.cpu_kv_cache_gib={SEQUENCE}",)),
        ({}, (f"rollout.cpu_kv_cache_gib={SEQUENCE / 2}", "model.dtype=bfloat16")),
    ],
)
def test_a_model_that_the_settings_can_train_is_accepted(
    workspace: Path, changes: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    if changes:
        changed(**changes)
    check_everything(*overrides)


HYBRIDS = {
    **dict.fromkeys(("bamba", "granitemoehybrid", "lfm2", "lfm2_moe", "qwen3_5_text"), ""),
    "falcon_h1": "out_proj",
    "qwen3_next": "down_proj, gate_proj, up_proj",
}
"""Families with states that vLLM computes on CPUs, and the modules that `all-linear` leaves out."""


def write_hybrid(family: str, head: int = 64) -> None:
    sizes = {"linear_key_head_dim": head, "linear_value_head_dim": head}
    AutoModelForCausalLM.from_config(tiny_config(family, sizes)).save_pretrained("model")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_dry_run_of_a_hybrid_names_what_all_linear_leaves_out(
    dry_run: Callable[..., str], family: str
) -> None:
    write_hybrid(family)
    note = f"target_modules=all-linear leaves out {HYBRIDS[family]}:"
    assert (note in dry_run(LORA, "model.dtype=bfloat16")) == bool(HYBRIDS[family])


@pytest.mark.parametrize(
    ("family", "head", "dtype", "reason"),
    [
        (
            "qwen3_next",
            64,
            "auto",
            "model.dtype=auto: vLLM's gated delta nets on CPUs compute in bfloat16",
        ),
        ("qwen3_5_text", 32, "bfloat16", "take heads of 64 or 128 numbers, not 32"),
        ("jamba", 64, "auto", "vLLM computes jamba on GPUs alone"),
        ("kimi_linear", 64, "auto", "vLLM computes kimi_linear on GPUs alone"),
        ("nemotron_h", 64, "auto", "vLLM computes nemotron_h on GPUs alone"),
        ("olmo_hybrid", 64, "bfloat16", "vLLM computes olmo_hybrid on GPUs alone"),
    ],
)
def test_a_state_that_vllm_does_not_compute_on_cpus_is_refused_before_the_start(
    workspace: Path, family: str, head: int, dtype: str, reason: str
) -> None:
    write_hybrid(family, head)
    assert reason in refusal(f"model.dtype={dtype}")


def test_a_model_in_several_files_is_read_as_one(workspace: Path) -> None:
    weights = qwen2_weights(MODEL)
    files = {name: f"{number % 2}.safetensors" for number, name in enumerate(weights)}
    INDEX.write_text(json.dumps({"weight_map": files}))
    WEIGHTS.unlink()
    for file in ("0.safetensors", "1.safetensors"):
        write_weight_file(
            WEIGHTS.with_name(file),
            {n: shape for n, shape in weights.items() if files[n] == file},
        )
    check_everything()


def test_every_model_is_looked_at(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference, the critic and the reward model, too; a critic may be either kind."""
    judge = {"architectures": ["Qwen2ForSequenceClassification"]}
    for overrides, key in (
        (["algorithm.loss.kl_coefficient=0.1", "reference.path=other"], "reference.path"),
        (["algorithm.advantage=gae", "critic.path=other"], "critic.path"),
        (["reward.model.path=other"], "reward.model.path"),
    ):
        write_model(workspace / "other", **(judge if key != "reference.path" else {}))
        check_everything(*overrides)
        (workspace / "other" / "model.safetensors").write_bytes(b"")
        assert main(["--config", "config.yaml", *overrides]) == 2
        assert f"error: {key}=other: other/model.safetensors" in capsys.readouterr().err
    shapes = qwen2_weights(MODEL | judge) | {"score.weight": (3, MODEL["hidden_size"])}
    write_weight_file(workspace / "other" / "model.safetensors", shapes)
    assert "reward.model.paths.a=other: it has 3 labels" in refusal(
        "reward.model.paths.a=other"
    )
    write_model(workspace / "other")
    (workspace / "other" / "config.json").write_text(json.dumps(MODEL | judge))
    assert "reward.model.path=other: the weight files have no score.weight" in refusal(
        "reward.model.path=other"
    )


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            ("algorithm.loss.kl_coefficient=0.1", "reference.path=other"),
            "reference.path=other",
        ),
        (("algorithm.advantage=gae", "critic.path=other"), "critic.path=other"),
    ],
)
def test_a_model_of_another_vocabulary_or_length_is_refused(
    workspace: Path, overrides: tuple[str, ...], key: str
) -> None:
    write_model(workspace / "other", vocab_size=33)
    assert refusal(*overrides).startswith(f"{key}: it has 33 tokens")
    write_model(workspace / "other", max_position_embeddings=64)
    assert refusal(*overrides).startswith(
        f"{key}: it takes 64 tokens, and sequences may reach 96"
    )


def test_a_critic_does_not_read_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        AutoConfig.for_model("qwen2_5_vl").to_json_string()
    )
    with pytest.raises(UnsupportedModelError, match="qwen2_5_vl reads images"):
        check_kind(tmp_path, ("value", "lm"))
    check_kind(tmp_path, ("lm",))


def test_key_value_heads_must_go_with_tensor_parallel(workspace: Path) -> None:
    write_model(
        workspace / "model", num_attention_heads=12, num_key_value_heads=4, hidden_size=384
    )
    assert refusal("rollout.tensor_parallel=6").startswith(
        "rollout.tensor_parallel=6: it neither divides"
    )


def test_rotary_scaling_lengthens_what_a_model_takes(workspace: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    write_model(workspace / "model", rope_scaling=scaling)
    check_everything("data.max_prompt_tokens=192")
    assert "takes 256 tokens, and sequences may reach 257" in refusal(
        "data.max_prompt_tokens=193"
    )


@pytest.mark.parametrize(
    "family", ["llama", "mixtral", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_neox"]
)
def test_what_transformers_saves_is_what_is_expected(tmp_path: Path, family: str) -> None:
    """Experts that it fuses in memory, and names that it changes, are converted before they are compared."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "pad_token_id": None,
        "moe_intermediate_size": 8,
    }
    sizes |= {
        "num_local_experts" if family == "mixtral" else "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    sizes |= {"shared_expert_intermediate_size": 8}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(
        tmp_path
    )
    build_skeleton(ModelConfig(path="a model"), tmp_path, "lm", trained=True, weights=True)


def test_numbers_of_vllm_that_settings_are_held_to() -> None:
    assert KV_BLOCK_TOKENS == CPU_KV_BLOCK_TOKENS
    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES
    assert sampling_params._MAX_TEMP == COLDEST


@pytest.mark.parametrize(
    ("file", "content", "warned"),
    [
        ("", {}, True),
        ("generation_config.json", {"eos_token_id": [2, 3]}, False),
        ("tokenizer_config.json", {"eos_token": END}, False),
        ("special_tokens_map.json", {"eos_token": {"content": END}}, False),
        ("generation_config.json", {"eos_token_id": None}, True),
    ],
)
def test_a_model_without_an_end_of_sequence_is_warned_of(
    dry_run: Callable[..., str], file: str, content: dict[str, object], warned: bool
) -> None:
    described(eos_token_id=None)()
    if file:
        Path("model", file).write_text(json.dumps(content))
    warning = "model.path=model names no end-of-sequence token"
    assert (warning in dry_run()) == warned
