"""Settings that the sizes of the model contradict, given to the command."""

import json
from pathlib import Path

import pytest

from controller.config import load
from controller.fit import main
from controller.preflight.checks import check
from controller.preflight.engine_checks import COLDEST, CPU_HEAD_SIZES
from controller.preflight.model_shape import model_shape
from tests.controller.config_workspace import MODEL, refusal, write_model
from tests.controller.tokenizer_file import END
from workers.rollout.engine import CPU_KV_BLOCK_TOKENS

LORA = "model.lora.rank=4"
SEQUENCE = 2 * 4 * 128 * 4 * 96 / 2**30
"""GiB: keys and values, 4 layers, 2 x 64 wide, float32, of 96 tokens."""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (LORA, "model.lora.target_modules=q_proj,c_attn"),
            "model.lora.target_modules=q_proj,c_attn: model has no module 'c_attn' that takes an adapter; it has "
            "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.",
        ),
        (
            (f"rollout.cpu_kv_cache_gib={0.99 * SEQUENCE}",),
            "rollout.cpu_kv_cache_gib=0.000362549 is less than the 0.00037 GiB that the keys and values of one "
            "sequence of 96 tokens take; raise it, or lower rollout.max_model_tokens",
        ),
        (("rollout.cpu_kv_cache_gib=3e-4", "rollout.max_model_tokens=97"), "rollout.cpu_kv_cache_gib=0.0003 is less"),
    ],
)
def test_what_does_not_go_with_the_model_is_refused(workspace: Path, overrides: tuple[str, ...], message: str) -> None:
    assert refusal(*overrides).startswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        (LORA, "model.lora.target_modules=q_proj, down_proj"),
        (LORA,),
        (f"rollout.cpu_kv_cache_gib={SEQUENCE}",),
        (f"rollout.cpu_kv_cache_gib={SEQUENCE / 2}", "model.dtype=bfloat16"),
    ],
)
def test_what_goes_with_the_model_is_accepted(workspace: Path, overrides: tuple[str, ...]) -> None:
    check(load("config.yaml", overrides))


def test_the_cache_is_counted_in_the_engines_blocks() -> None:
    from controller.preflight.model_sizes import KV_BLOCK_TOKENS

    assert KV_BLOCK_TOKENS == CPU_KV_BLOCK_TOKENS
    assert 2 * model_shape(MODEL).kv_bytes_per_token * 96 / 2**30 == SEQUENCE


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
    workspace: Path, capsys: pytest.CaptureFixture[str], file: str, content: dict[str, object], warned: bool
) -> None:
    Path("model/config.json").write_text(json.dumps(MODEL | {"eos_token_id": None}))
    if file:
        (workspace / "model" / file).write_text(json.dumps(content))
    assert main(["--config", "config.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert ("model.path=model names no end-of-sequence token" in shown) == warned


def test_heads_that_vllm_cannot_compute_on_cpus_are_refused(workspace: Path) -> None:
    """With others an engine starts, and dies in its first step."""
    write_model(workspace / "model", num_attention_heads=16)
    assert refusal().startswith("model.path=model: vLLM on CPUs has no attention for heads of 16 numbers, only of 32,")
    check(load("config.yaml", ["resources.device=cuda"]))
    write_model(workspace / "model", num_attention_heads=8)
    check(load("config.yaml"))


def test_numbers_of_vllm_that_settings_are_held_to() -> None:
    from vllm import sampling_params
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES
    assert sampling_params._MAX_TEMP == COLDEST
