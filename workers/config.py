"""Settings of the worker roles: plain dataclasses, importable without torch, Ray or vLLM.

A field's documentation, default and range stand where it is declared: `setting(default, "what it does", ...)`.
`controller.config` composes these into the whole schema and checks them.
"""

from dataclasses import dataclass, field
from typing import Any


def setting(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    exclusive_minimum: bool = False,
    exclusive_maximum: bool = False,
) -> Any:
    """A dataclass field with its documentation and range; an `exclusive_` bound is itself not allowed."""
    metadata = {
        "doc": doc,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "exclusive_minimum": exclusive_minimum,
        "exclusive_maximum": exclusive_maximum,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    path: str = setting("???", "Folder with a Hugging Face model and tokenizer, or a name in the local hub cache.")
    dtype: str = setting(
        "auto",
        "Parameter and compute type; `auto` is float32 on CPU and bfloat16 on GPU (parameters kept in float32).",
        choices=("auto", "float32", "bfloat16"),
    )
    attention: str = setting(
        "auto",
        "Packed attention kernel: `varlen` (CUDA), `sdpa` (one call a sequence, any device); `auto` picks by device.",
        choices=("auto", "varlen", "sdpa"),
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    logprob_chunk_tokens: int = setting(
        2048, "Tokens whose logits exist at one time; bounds the memory of log-probs (tokens x vocabulary).", minimum=1
    )


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) with linear warm-up."""

    learning_rate: float = setting(1e-6, "Peak learning rate.", minimum=0, exclusive_minimum=True)
    weight_decay: float = setting(0.0, "Decoupled weight decay, on matrices only.", minimum=0)
    beta1: float = setting(0.9, "Decay of the first moment.", minimum=0, maximum=1, exclusive_maximum=True)
    beta2: float = setting(0.95, "Decay of the second moment.", minimum=0, maximum=1, exclusive_maximum=True)
    epsilon: float = setting(1e-8, "Added to the root of the second moment.", minimum=0, exclusive_minimum=True)
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this L2 norm.", minimum=0, exclusive_minimum=True)
    schedule: str = setting("constant", "Learning rate after warm-up.", choices=("constant", "linear", "cosine"))
    warmup_steps: int = setting(0, "Optimiser steps of linear warm-up from 0.", minimum=0)
    total_steps: int = setting(
        0, "Optimiser steps until `linear` or `cosine` reach 0; 0 takes run.steps times batch.mini_batches.", minimum=0
    )


@dataclass
class PolicyConfig:
    ranks: int = setting(1, "Data-parallel ranks (one worker actor each).", minimum=1)
    max_tokens: int = setting(
        16384, "Cap on packed tokens of a training micro-batch; twice the longest sequence is a good start.", minimum=1
    )
    forward_max_tokens: int = setting(
        0, "Cap on packed tokens of a forward-only micro-batch; 0 takes policy.max_tokens.", minimum=0
    )
    max_sequences: int = setting(0, "Cap on sequences of a micro-batch; 0 is no cap.", minimum=0)
    cpu_offload: bool = setting(False, "Keep parameters, gradients and optimiser state in host memory (FSDP2).")
    reshard_after_forward: bool = setting(True, "Free gathered parameters after each layer's forward pass (FSDP2).")
    threads: int = setting(0, "CPU threads of a rank; 0 divides the node's cores by policy.ranks.", minimum=0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class ReferenceConfig:
    """The frozen policy that the KL term compares with; started only if algorithm.loss.kl_coefficient > 0."""

    path: str = setting("", "Model of the reference; empty takes model.path.")
    forward_max_tokens: int = setting(0, "Cap on packed tokens of a micro-batch; 0 takes policy.max_tokens.", minimum=0)
    cpu_offload: bool = setting(False, "Keep parameters in host memory (FSDP2).")


@dataclass
class SamplingConfig:
    temperature: float = setting(1.0, "Softmax temperature; 0 is greedy (validation only).", minimum=0)
    top_p: float = setting(1.0, "Nucleus mass.", minimum=0, maximum=1, exclusive_minimum=True)
    top_k: int = setting(0, "Candidates kept; 0 keeps all.", minimum=0)
    max_new_tokens: int = setting(1024, "Longest response, in tokens.", minimum=1)


@dataclass
class RolloutConfig:
    replicas: int = setting(1, "vLLM engines.", minimum=1)
    tensor_parallel: int = setting(1, "GPUs (or processes) that share one engine.", minimum=1)
    samples_per_prompt: int = setting(8, "Responses sampled for each prompt: the size of a group.", minimum=1)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    placement: str = setting(
        "auto",
        "`colocated` shares the policy's GPUs (sleep and wake, weights by ipc); `apart` has its own (weights by nccl); "
        "`shared_memory` is the CPU's. `auto` is shared_memory without GPUs, else colocated.",
        choices=("auto", "colocated", "apart", "shared_memory"),
    )
    max_model_tokens: int = setting(
        0,
        "Longest prompt plus response an engine takes; 0 takes data.max_prompt_tokens + sampling.max_new_tokens.",
        minimum=0,
    )
    max_concurrent: int = setting(
        256, "Requests that one engine works on at a time; others wait in the router.", minimum=1
    )
    memory_fraction: float = setting(
        0.5,
        "Share of a GPU's memory for an engine (weights and KV cache).",
        minimum=0,
        maximum=1,
        exclusive_minimum=True,
    )
    cpu_kv_cache_gib: float = setting(1.0, "KV cache of an engine on CPU, GiB.", minimum=0, exclusive_minimum=True)
    enforce_eager: bool = setting(False, "Do not capture CUDA graphs. On CPU vLLM is always eager here.")
    max_retries: int = setting(
        2, "Times that a failed sample is sent again before it is dropped and counted.", minimum=0
    )
    threads: int = setting(0, "CPU threads of an engine; 0 takes all cores of the node.", minimum=0)


@dataclass
class LossConfig:
    """The policy loss; formulas stand at the functions in `workers.model.losses`."""

    name: str = setting("ppo_clip", "Policy loss.", choices=("ppo_clip",))
    clip_low: float = setting(0.2, "Lower clip: ratios below 1 - clip_low give no gradient.", minimum=0, maximum=1)
    clip_high: float = setting(0.2, "Upper clip: ratios above 1 + clip_high give no gradient.", minimum=0)
    aggregation: str = setting(
        "token_mean",
        "How token losses become one number; every denominator is that of the whole mini-batch.",
        choices=("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"),
    )
    entropy_coefficient: float = setting(0.0, "Weight of the entropy bonus.", minimum=0)
    kl_coefficient: float = setting(
        0.0, "Weight of the KL to the reference in the loss; 0 starts no reference.", minimum=0
    )
    kl_estimator: str = setting("k3", "Estimator of the KL (Schulman 2020).", choices=("k1", "k2", "k3"))
