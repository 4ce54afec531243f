"""Describe the model, the layout and the work of a training step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from balancing.basics.grouping import Floats, Integers
from balancing.basics.validation import whole_numbers
from balancing.basics.windows import Window, attended_squares
from balancing.model_counts import (
    LayerCounts,
    attention_windows,
    count_layers,
    forward_flops,
    key_value_heads,
)
from balancing.model_fields import Fields

Placement = Literal["colocated", "apart", "shared_memory"]


@dataclass(frozen=True)
class ModelShape:
    """Counts of a model.

    parameters: all weights. active: weights that a token's products read, and its products with states.
    experts: number, of which a token uses experts_active. expert_parameters: weights of all experts.
    attention: forward FLOPs per squared token, as far as `windows` see it. kv: numbers that a token keeps in
    an engine. kv_windows: (tokens, numbers of each of the last ones) of layers with a window. state:
    numbers that a sequence keeps. state_parameters: weights of all modules with a state. kv_share: kv heads
    over heads. trained: parameters with a gradient.
    """

    layers: int
    hidden: int
    vocabulary: int
    parameters: float
    active: float
    attention: float
    kv: int
    kv_share: float = 1.0
    windows: tuple[Window, ...] = ()
    kv_windows: tuple[tuple[int, int], ...] = ()
    state: int = 0
    state_parameters: float = 0.0
    experts: int = 1
    experts_active: int = 1
    expert_parameters: float = 0.0
    trained: float = 0.0

    @property
    def trained_share(self) -> float:
        return self.trained / self.parameters if self.trained else 1.0

    def kept(self, tokens: float | Floats) -> Any:
        """Return the numbers that an engine keeps of a sequence of so many tokens."""
        recent = sum(
            numbers * np.minimum(tokens, reach) for reach, numbers in self.kv_windows
        )
        return self.kv * tokens + recent + self.state

    @classmethod
    def from_model_config(cls, config: Mapping[str, Any] | object) -> "ModelShape":
        """Count a Hugging Face config.json. Raises CostModelError for a missing key."""
        fields, (linear, attention) = Fields(config), forward_flops(config)
        layers = count_layers(fields)
        hidden = fields.integer("hidden_size")
        words = fields.integer("vocab_size")
        heads = fields.integer("num_attention_heads", default=1)
        weights = sum(layer.weights for layer in layers) + hidden * words
        parameters = float(
            weights + (0 if fields.get("tie_word_embeddings") else hidden * words)
        )
        shape = cls(
            layers=len(layers),
            hidden=hidden,
            vocabulary=words,
            parameters=parameters,
            active=linear / 2,
            attention=attention,
            kv=sum(layer.kv for layer in layers if not layer.window),
            windows=attention_windows(layers),
            kv_windows=_kv_windows(layers),
            state=sum(layer.state for layer in layers),
            state_parameters=float(sum(layer.state_weights for layer in layers)),
            kv_share=key_value_heads(fields, heads) / heads,
        )
        expert = sum(layer.expert for layer in layers)
        if not expert:
            return shape
        experts = fields.integer("num_experts")
        used = fields.integer("num_experts_per_tok")
        return replace(
            shape,
            parameters=parameters + expert * (experts - used),
            expert_parameters=float(expert * experts),
            experts=experts,
            experts_active=used,
        )


def _kv_windows(layers: list[LayerCounts]) -> tuple[tuple[int, int], ...]:
    numbers: dict[int, int] = {}
    for layer in layers:
        if layer.window:
            numbers[layer.window] = numbers.get(layer.window, 0) + layer.kv
    return tuple(numbers.items())


@dataclass(frozen=True)
class Layout:
    """Where the roles of a run lie, and how ranks share a model.

    gpus_per_node: on CPUs its cores. dp, cp, tp, pp, ep, virtual_stages, replicate, reshard_after_forward,
    defer_gradient_reduction: as in policy.parallel. max_tokens: policy.max_tokens_per_micro_batch.
    recomputed: share of a forward pass that the backward pass repeats. compiled: layers are compiled.
    engine_gib: memory of a GPU for an engine, weights included. placement, staleness, window: as in rollout.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    replicate: int = 1
    reshard_after_forward: bool = True
    defer_gradient_reduction: bool = False
    max_tokens: int = 16384
    recomputed: float = 0.0
    compiled: bool = True
    shared_prompts: bool = True
    engines: int = 1
    engine_tp: int = 1
    engine_gib: float = 40.0
    max_concurrent: int = 256
    placement: Placement = "colocated"
    staleness: int = 0
    window: float = 0.3
    dtype: str = "bfloat16"

    @property
    def ranks(self) -> int:
        """Return the GPUs of the training roles."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def gpus(self) -> int:
        """Return the GPUs that the run uses."""
        return self.ranks + (
            0 if self.placement == "colocated" else self.engines * self.engine_tp
        )

    @property
    def bytes(self) -> int:
        """Return the bytes of a weight in passes and engines."""
        return 4 if self.dtype == "float32" else 2

    def crowded(self, processes: int) -> bool:
        """Return whether a role of so many processes shares its memory with others that compute at the same
        time.
        """
        return self.placement == "shared_memory" and (processes > 1 or self.staleness > 0)


@dataclass(frozen=True, eq=False)
class Workload:
    """The samples of a step, and what is done with them.

    prompt_tokens, response_tokens: int64 [N], groups of `samples_per_prompt` in consecutive rows. updates:
    optimiser steps, over all epochs. forward_passes: without gradient (old log-probs, reference, teacher).
    trained_models: 2 with a critic. reward_seconds: of a sample, on one of reward_workers. tokens: of all
    samples. repeated_tokens: of all prompts but the first of each group. order: rows, longest response
    first. Raises LengthError unless lengths are whole.
    """

    prompt_tokens: ArrayLike
    response_tokens: ArrayLike
    samples_per_prompt: int = 8
    updates: int = 1
    epochs: int = 1
    forward_passes: int = 0
    trained_models: int = 1
    reward_seconds: float = 0.0
    reward_workers: int = 1
    prompts: Floats = field(init=False)
    responses: Floats = field(init=False)
    samples: int = field(init=False)
    tokens: float = field(init=False)
    repeated_tokens: float = field(init=False)
    longest: float = field(init=False)
    order: Integers = field(init=False)

    def __post_init__(self) -> None:
        prompts = whole_numbers(self.prompt_tokens, "prompt_tokens", minimum=0).astype(
            np.float64
        )
        responses = whole_numbers(
            self.response_tokens, "response_tokens", minimum=1
        ).astype(np.float64)
        counted = {
            "tokens": float((prompts + responses).sum()),
            "repeated_tokens": float(prompts[self._repeats(len(prompts))].sum()),
            "samples": len(responses),
            "longest": float((prompts + responses).max()),
        }
        order = np.argsort(-responses, kind="stable")
        vars(self).update(counted, prompts=prompts, responses=responses, order=order)

    def squares(self, windows: tuple[Window, ...]) -> tuple[float, float]:
        """Return the squared tokens that attention computes of all samples, and of the prompts that
        repeat.
        """
        lengths = self.prompts + self.responses
        again = self.prompts[self._repeats(len(lengths))]
        return float(attended_squares(lengths, windows).sum()), float(
            attended_squares(again, windows).sum()
        )

    def _repeats(self, samples: int) -> Any:
        return np.arange(samples) % self.samples_per_prompt > 0
