"""Compute a decoder's sizes from config.json: parameters, and bytes per token of activations and KV cache.

Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts. Symbols: h hidden size, q and k widths of all query and
key-value heads, f width of a feed-forward block, V vocabulary, n layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workers.errors import ConfigError
from workers.model.sharding.stage_split import relative_costs, split_layers

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types that `model_shape` counts exactly."""

QUERY_KEY_VALUE_BIAS = ("qwen2", "qwen2_moe")
HEAD_NORMS = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. experts: per layer, 0 if dense. active, shared: widths that a token passes through."""

    layers: int
    hidden: int
    query: int
    key_value: int
    head: int
    vocabulary: int
    tied: bool
    feed_forward: int
    experts: int = 0
    active_feed_forward: int = 0
    shared_feed_forward: int = 0
    query_key_value_bias: bool = False
    head_norms: bool = False

    @property
    def linear_modules(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of a dense layer's matrices by name, to place adapters."""
        h, q, k, f = self.hidden, self.query, self.key_value, self.feed_forward
        attention = {"q_proj": (h, q), "k_proj": (h, k), "v_proj": (h, k), "o_proj": (q, h)}
        feed_forward = {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}
        return attention if self.experts else attention | feed_forward

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer with all experts: matrices, biases, norms."""
        h, q, k = self.hidden, self.query, self.key_value
        count = 2 * h * (q + k) + 2 * h + self.query_key_value_bias * (q + 2 * k) + 2 * self.head_norms * self.head
        if not self.experts:
            return count + 3 * h * self.feed_forward
        gate = h if self.shared_feed_forward else 0
        return count + 3 * h * (self.experts * self.feed_forward + self.shared_feed_forward) + h * self.experts + gate

    @property
    def expert_parameters(self) -> int:
        """Weights of one layer's experts, which expert parallelism divides; 0 if dense."""
        return 3 * self.hidden * self.experts * self.feed_forward

    @property
    def chosen_experts(self) -> int:
        """Experts per token in a layer."""
        return self.active_feed_forward // self.feed_forward

    @property
    def root_parameters(self) -> int:
        """Embedding, separate output layer, last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self.layer_parameters + self.root_parameters

    def of_fullest_stage(self, stages: int, virtual_stages: int, *, checkpointing: bool) -> "ModelShape":
        """Stage of a pipeline with most layers, as if it also had embedding and output layer."""
        if stages == 1:
            return self
        layer = 2 * self.hidden * (self.query + self.key_value) + 3 * self.hidden * self.feed_forward_width
        costs = relative_costs([layer] * self.layers, self.vocabulary * self.hidden, checkpointing=checkpointing)
        sizes = [len(layers) for layers in split_layers(*costs, stages * virtual_stages)]
        return replace(self, layers=max(sum(sizes[stage::stages]) for stage in range(stages)))

    @property
    def feed_forward_width(self) -> int:
        """Width that a token passes through."""
        return self.active_feed_forward + self.shared_feed_forward if self.experts else self.feed_forward

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in half precision: 2 x 2 bytes x k x n."""
        return 4 * self.key_value * self.layers

    def with_value_head(self) -> "ModelShape":
        """The same decoder with one number per token instead of logits; the head's h weights are not counted."""
        return replace(self, tied=True)

    def activation_bytes_per_token(self, tensor_parallel: int = 1) -> float:
        """Bytes per token that one layer keeps until its backward pass, in half precision with flash attention.

            16 h + 4 q + 4 k + 8 f        two norms keep a float32 and a bfloat16 row each (12 h), attention and
                                          feed-forward their input (4 h), q, k, v, its output (4 q + 4 k), and the
                                          feed-forward block gate, its activation, up and their product (8 f)

        Tensor parallelism divides all but the 4 h of gathered inputs.
        """
        shared = 12 * self.hidden + 4 * self.query + 4 * self.key_value + 8 * self.feed_forward_width
        return 4 * self.hidden + shared / tensor_parallel


def model_shape(description: Mapping[str, Any], key: str = "model.path") -> ModelShape:
    """Read the shape from config.json, which setting `key` names.

    Raises ConfigError if its family is not one of FAMILIES, or a size is missing.
    """
    family = description.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"memory is estimated for {', '.join(FAMILIES)}, and {key} is of type {family}; leave out --cluster."
        )
    try:
        return _shape({name: value for name, value in description.items() if not isinstance(value, list)}, family)
    except KeyError as error:
        raise ConfigError(f"{key}: config.json has no {error.args[0]}, which the memory estimate needs.") from None


def _shape(description: Mapping[str, Any], family: str) -> ModelShape:
    hidden, heads = description["hidden_size"], description["num_attention_heads"]
    head = description.get("head_dim") or hidden // heads
    experts = description.get("num_experts", description.get("num_local_experts")) or 0
    width = description.get("moe_intermediate_size") if experts else None
    width = width or description["intermediate_size"]
    return ModelShape(
        layers=description["num_hidden_layers"],
        hidden=hidden,
        query=heads * head,
        key_value=(description.get("num_key_value_heads") or heads) * head,
        head=head,
        vocabulary=description["vocab_size"],
        tied=bool(description.get("tie_word_embeddings", False)),
        feed_forward=width,
        experts=experts,
        active_feed_forward=width * description["num_experts_per_tok"] if experts else 0,
        shared_feed_forward=description.get("shared_expert_intermediate_size", 0) or 0,
        query_key_value_bias=family in QUERY_KEY_VALUE_BIAS,
        head_norms=family in HEAD_NORMS,
    )
