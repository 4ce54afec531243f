"""What is computed (Case), on which ranks (Way) and in which micro-batches (random_plan); what comes out
(Outcome).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tests.workers.model.tiny import random_sequences
from workers.batch.dataproto import DataProto
from workers.config.loss import DistillationConfig
from workers.config.roles import LoraConfig, LossConfig, OptimizerConfig, ParallelConfig
from workers.model.losses import (
    Predictions,
    Statistics,
    group_tokens,
    policy_loss,
    ppo_clip,
)

CONSTANT_LENGTH = 40
CENTRED = 0.3  # coefficient of a reward model's loss
GROUPS = torch.arange(11) // 3  # of the sequences
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, max_grad_norm=0.1, warmup_steps=1, weight_decay=0.1
)

NOT_TAUGHT = DistillationConfig()
OWN_LOSS: dict[str, Any] = {
    "name": "custom",
    "function": "tests.workers.model.cases:with_hidden",
    "hidden_states": True,
}


@policy_loss("with_hidden", aggregation="token_mean")
def with_hidden(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    losses, statistics = ppo_clip(predictions, config)
    return losses + of_hidden(predictions.hidden), statistics


def of_hidden(hidden: Tensor) -> Tensor:
    return 0.3 * (hidden[:, :1] * hidden[:, 1:]).tanh().mean(-1)


@dataclass(frozen=True)
class Case:
    family: str = "qwen2"
    tied: bool = True
    layers: int = 2
    sizes: tuple[tuple[str, Any], ...] = ()  # more of the model's configuration
    head: str = "lm"  # value: a critic and its loss
    dtype: str = "float64"
    aggregation: str = "token_mean"
    temperature: float = 1.0
    reshard_after_forward: bool = True
    gradient_checkpointing: str = "none"
    recompute_num_layers: int = 0
    activation_offload: bool = False
    optimizer_offload: bool = False
    layout: str = "packed"
    forward_layout: str = "same"
    length_multiple: int = 1
    share_prefixes: str = "never"
    # attention of shared tokens: a call a tree as on CPUs, a level or a path as on GPUs
    shared_by: str = "tree"
    router_replay: str = "none"
    # Coefficients of load-balancing and z-loss.
    router_losses: tuple[float, float] = (0.0, 0.0)
    lora: tuple[tuple[str, Any], ...] = ()
    base_dtype: str = "float32"
    compiled: bool = False  # by a backend that only traces
    distillation: tuple[str, str] = ("", "reverse_kl")  # over, divergence
    scored: str = ""  # with head=value, a reward model's loss instead of a critic's
    hidden_states: bool = False  # in the loss, by `with_hidden`
    calls: int = 1  # of forward_backward, each with some of the micro-batches

    @property
    def taught(self) -> DistillationConfig:
        over, divergence = self.distillation
        return (
            DistillationConfig(coefficient=0.7, over=over, divergence=divergence, top_k=3)
            if over
            else NOT_TAUGHT
        )

    @property
    def tolerance(self) -> float:
        return 1e-9 if self.dtype == "float64" else 1e-5

    @property
    def adapters(self) -> LoraConfig:
        return LoraConfig(**dict(self.lora))

    @property
    def model(self) -> tuple[Any, ...]:
        return self.family, self.tied, self.layers, self.sizes, self.head

    @property
    def sequences(self) -> DataProto:
        sequences = random_sequences(branching=self.share_prefixes == "always")
        columns = sequences.columns | {"group_tokens": group_tokens(sequences, GROUPS)}
        tokens = sequences.tokens
        if self.router_replay != "none":
            tokens = tokens | {"routed_experts": recorded_choices(sequences, self.layers)}
        if self.head == "value":
            tokens = tokens | {
                "returns": torch.linspace(-1, 2, sequences.num_tokens, dtype=torch.float64)
            }
        if self.scored == "process":
            tokens = tokens | {
                "label": torch.linspace(0, 1, sequences.num_tokens, dtype=torch.float64)
            }
        elif self.scored:
            columns = columns | {
                "label": torch.linspace(-1, 2, len(sequences), dtype=torch.float64)
            }
            last = torch.zeros_like(tokens["loss_mask"])
            last[sequences.lengths.cumsum(0) - 1] = True
            tokens = tokens | {"loss_mask": last}
        return replace(sequences, columns=columns, tokens=tokens)

    @property
    def loss(self) -> LossConfig:
        return LossConfig(
            aggregation=self.aggregation,
            constant_length=CONSTANT_LENGTH
            if self.aggregation == "sequence_mean_token_sum_norm"
            else 0,
            clip_high=0.3,
            entropy_coefficient=0.02,
            kl_coefficient=0.1,
            distillation=self.taught,
            **OWN_LOSS if self.hidden_states else {},
        )


@dataclass(frozen=True)
class Way:
    ranks: int
    parallel: ParallelConfig

    @property
    def dp(self) -> int:
        parallel = self.parallel
        return self.ranks // (
            parallel.context_parallel
            * parallel.tensor_parallel
            * parallel.pipeline_parallel
        )


NAMES = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "virtual": "virtual_stages",
    "copies": "replicate",
}
NAMES |= {
    "ulysses": "context_parallel",
    "ring": "context_parallel",
    "ep": "expert_parallel",
}


def way(text: str) -> Way:
    """From sizes such as "dp 2, ring 2, deferred"; dp counts the ranks of all copies, and is their number by
    default.
    """
    words = [part.split() for part in text.split(", ")]
    sizes = {word[0]: int(word[1]) for word in words if word[-1].isdecimal()}
    settings: dict[str, Any] = {
        NAMES[name]: size for name, size in sizes.items() if name != "dp"
    }
    if "ring" in sizes:
        settings["context_parallel_method"] = "ring"
    degree = "auto" if "by step" in text else "fixed"
    deferred = "deferred" in text
    parallel = ParallelConfig(
        **settings, context_parallel_degree=degree, defer_gradient_reduction=deferred
    )
    dp = sizes.get("dp", parallel.replicate)
    return Way(
        dp
        * parallel.context_parallel
        * parallel.tensor_parallel
        * parallel.pipeline_parallel,
        parallel,
    )


@dataclass(frozen=True)
class RankShare:
    """What a plan gives one dp rank: rows of `random_sequences()`, and micro-batches over these."""

    rows: list[int]
    micro_batches: list[tuple[int, int]]
    # Of the rows, if micro-steps choose them.
    degrees: list[int] = field(default_factory=list)


def random_plan(dp: int, seed: int, count: int = 11) -> list[RankShare]:
    """Sequences in random order; ranks with at least one; micro-batches of any size, none included, in random
    order.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    bounds = (
        (torch.randperm(count - 1, generator=generator)[: dp - 1] + 1)
        .sort()
        .values.tolist()
    )
    steps = int(torch.randint(1, 5, (), generator=generator))
    shares = []
    for rows in order.tensor_split(bounds):
        cuts = (
            torch.randint(0, len(rows) + 1, (steps - 1,), generator=generator)
            .sort()
            .values.tolist()
        )
        spans = list(zip([0, *cuts], [*cuts, len(rows)], strict=True))
        shares.append(
            RankShare(
                rows.tolist(),
                [spans[i] for i in torch.randperm(steps, generator=generator)],
            )
        )
    return shares


def random_plan_by_step(
    ranks: int, degrees: Sequence[int], seed: int, count: int = 11
) -> list[RankShare]:
    """As `random_plan`, in five micro-steps that take the degrees in turn: neighbours have the same rows."""
    generator = torch.Generator().manual_seed(seed)
    shares = [RankShare([], []) for _ in range(ranks)]
    parts = torch.randint(0, 5, (count,), generator=generator)
    for step in range(5):
        degree = degrees[(seed + step) % len(degrees)]
        block_of = torch.randint(0, ranks // degree, (count,), generator=generator)
        for rank, share in enumerate(shares):
            rows = (
                ((parts == step) & (block_of == rank // degree))
                .nonzero()
                .squeeze(1)
                .tolist()
            )
            share.micro_batches.append((len(share.rows), len(share.rows) + len(rows)))
            share.rows.extend(rows)
            share.degrees.extend([degree] * len(rows))
    return shares


@cache
def seed_with_gaps(dp: int, first: int) -> int:
    for seed in count(100 * first):
        plan = random_plan(dp, seed)
        spans = [span for share in plan for span in share.micro_batches]
        if len(plan[0].micro_batches) == 4 and any(start == stop for start, stop in spans):
            return seed
    raise AssertionError


@dataclass
class Outcome:
    """outputs: by row of the mini-batch, [L, 2], log-probs and entropies, or values and the score of the
    sequence.
    """

    outputs: dict[int, Tensor]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def recorded_choices(sequences: DataProto, layers: int) -> Tensor:
    """uint8 [T, layers, 2]: two of four experts, the same where sequences begin alike; 255 for each last
    token.
    """
    ids, ends = sequences.tokens["input_ids"], sequences.lengths.cumsum(0)
    places = torch.arange(len(ids)) - torch.repeat_interleave(
        ends - sequences.lengths, sequences.lengths
    )
    mixed = (7 * ids + 3 * places)[:, None] + 5 * torch.arange(layers)
    first = mixed % 4
    chosen = torch.stack([first, (first + 1 + mixed // 4 % 3) % 4], dim=-1)
    chosen[ends - 1] = -1
    return chosen.to(torch.uint8)
