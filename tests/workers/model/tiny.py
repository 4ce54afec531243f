"""Tiny random models, their sequences, and the reference that packing must equal."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from workers.batch.dataproto import DataProto

VOCABULARY = 37
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SELECTED_TOKENS = {"index_topk": 4, "index_n_heads": 8, "index_head_dim": 16}
GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
FAMILIES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2 windowed": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        EXPERTS | {"head_dim": 16},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        EXPERTS | {"shared_expert_intermediate_size": 24},
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "llama": (transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral windowed": (transformers.MistralConfig, {"sliding_window": 4}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "head_dim": 16,
            "sliding_window": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        # The last two stand in the real config.json: transformers does not read them, and vLLM needs them.
        LATENT_ATTENTION | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "deepseek_v32": (transformers.DeepseekV32Config, LATENT_ATTENTION | SELECTED_TOKENS),
    "glm_moe_dsa": (
        transformers.GlmMoeDsaConfig,
        LATENT_ATTENTION | SELECTED_TOKENS | {"indexer_types": ["full", "shared"]},
    ),
    "qwen3_5": (transformers.Qwen3_5TextConfig, GATED_DELTA),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        GATED_DELTA | EXPERTS | {"shared_expert_intermediate_size": 24},
    ),
    "nemotron_h": (
        transformers.NemotronHConfig,
        {
            "layer_types": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "head_dim": 8,
        },
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "kimi_linear": (
        transformers.KimiLinearConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "pad_token_id": None,
        },
    ),
}
"""Windows and soft-capping are small enough that one that is left out moves the log-probs of these tests."""
WITH_STATES = ("qwen3_5", "qwen3_next", "nemotron_h", "lfm2", "kimi_linear")


def tiny_config(
    family: str = "qwen2", **overrides: object
) -> transformers.PreTrainedConfig:
    config_class, extra = FAMILIES[family]
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # large enough that attention and log-probs are far from uniform
        "tie_word_embeddings": True,
    }
    return config_class(**(settings | extra | overrides))


def save_tiny_model(path: Path, family: str = "qwen2", **overrides: object) -> str:
    """A random model in float64 with a tokenizer, at `path`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **overrides), dtype=torch.float64
    )
    for name, parameter in model.named_parameters():
        # transformers starts biases at 0, where a forgotten one goes unnoticed.
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    save_tokenizer(path, VOCABULARY)
    return str(path)


TEACHERS_VOCABULARY = 41  # its table is larger than the student's


def teacher_of(path: str) -> str:
    """The folder beside a student's with its teacher."""
    return f"{path}-teacher"


def save_tokenizer(path: Path, size: int) -> None:
    vocabulary = {f"t{index}": index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(
        path
    )


def files_beside(folder: Path) -> dict[str, bytes]:
    """The files of a model but for weights, hidden ones and a card of ours, by name."""
    weights = (".safetensors", ".bin", ".gguf", ".index.json")
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    ]
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if not path.name.endswith(weights)
    }
    return {
        name: content
        for name, content in found.items()
        if b"<!-- written by Ballast -->" not in content
    }


def random_sequences(
    count: int = 11,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    *,
    branching: bool = False,
) -> DataProto:
    """Long-tailed lengths with prompts, one response with a hole, one sequence without any loss token.

    branching: each sequence begins as one before it does, for a random number of tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(3 + 30 * torch.rand((), generator=generator) ** 2)
        loss_mask = torch.ones(length, dtype=torch.bool)
        loss_mask[: 1 + index % (length - 1)] = False
        if index == 1:
            loss_mask[:] = False
        if index == 2:
            loss_mask[length // 2] = False
        noise = torch.randn(3, length, generator=generator, dtype=dtype)
        rows.append(
            {
                "input_ids": torch.randint(0, VOCABULARY, (length,), generator=generator),
                "loss_mask": loss_mask,
                "old_log_probs": -3.6 + noise[0],
                "reference_log_probs": -3.6 + noise[1],
                "rollout_log_probs": -3.6 + noise[2],
            }
        )
    advantages = torch.randn(count, generator=generator, dtype=dtype)
    if branching:
        branch([row["input_ids"] for row in rows], seed)
    return DataProto.from_list(rows, {"advantages": advantages})


def branch(rows: list[Tensor], seed: int) -> None:
    """Let each of these ids [L] begin as one before it does, for a random number of tokens; in place."""
    generator = torch.Generator().manual_seed(seed)
    for index, ids in enumerate(rows[1:], start=1):
        parent = rows[int(torch.randint(index, (), generator=generator))]
        tokens = int(torch.randint(min(len(ids), len(parent)) + 1, (), generator=generator))
        ids[:tokens] = parent[:tokens]


def unpacked_log_probs(
    model: PreTrainedModel, sequences: DataProto, temperature: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """(log_probs, entropy), each [L], of every sequence run alone by transformers' own forward pass; position
    0 holds 0.
    """
    return log_probs_in(unpacked_distributions(model, sequences, temperature), sequences)


def log_probs_in(
    distributions: Iterable[Tensor], sequences: DataProto
) -> list[tuple[Tensor, Tensor]]:
    """(log_probs, entropy) of the sequences' own tokens, from `unpacked_distributions`."""
    outputs = []
    each = sequences.tokens["input_ids"].split(sequences.lengths.tolist())
    for ids, all_log_probs in zip(each, distributions, strict=True):
        log_probs = all_log_probs.gather(-1, ids[1:, None]).squeeze(-1)
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        zero = log_probs.new_zeros(1)
        outputs.append((torch.cat([zero, log_probs]), torch.cat([zero, entropy])))
    return outputs


def unpacked_distributions(
    model: PreTrainedModel, sequences: DataProto, temperature: float = 1.0
) -> Iterator[Tensor]:
    """Log-probs [L - 1, V] of every sequence's tokens from its second on."""
    for ids in sequences.tokens["input_ids"].split(sequences.lengths.tolist()):
        yield (
            model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
        ).log_softmax(-1)


def reward_model(**overrides: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(
        tiny_config(num_labels=1, **overrides), dtype=torch.float64
    )


def unpacked_values(model: PreTrainedModel, sequences: DataProto) -> list[Tensor]:
    """The head on transformers' own hidden states, [L] of every sequence run alone."""
    values = []
    for ids in sequences.tokens["input_ids"].split(sequences.lengths.tolist()):
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        values.append(model.score(hidden).squeeze(-1))
    return values


def compute_in_float64(model: PreTrainedModel) -> None:
    """What transformers computes in float32, also in a float64 model: norms, and routers of
    Qwen3's experts.
    """
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_norm, module)
        if hasattr(module, "norm_topk_prob") and hasattr(module, "weight"):
            module.forward = MethodType(_route, module)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped product takes no float64


def _norm(module: Any, hidden: Tensor) -> Tensor:
    return (
        module.weight
        * hidden
        * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
    )


def _route(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, module.weight)
    weights, chosen = logits.softmax(-1).topk(module.top_k, dim=-1)
    return (
        logits,
        weights / (weights.sum(-1, keepdim=True) if module.norm_topk_prob else 1),
        chosen,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
