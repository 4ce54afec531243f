"""Aggregation of token losses by denominators of the whole mini-batch, known before the first forward pass.

    loss = sum over tokens of weight_t * loss_t       weight_t from `Denominators`, never from the micro-batch

N predicted tokens of a micro-batch, B sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.config.loss import check_constant_length
from workers.errors import ConfigError, DataError
from workers.model.losses.predictions import PackedTokens


@dataclass(frozen=True)
class Denominators:
    """Count tokens with `loss_mask`, and sequences and groups with at least one, over all micro-batches and
    ranks.

    Only `group_mean_token_mean` needs groups. Raises DataError unless positive.
    """

    tokens: float
    sequences: float
    groups: float | None = None

    def __post_init__(self) -> None:
        if (
            self.tokens <= 0
            or self.sequences <= 0
            or (self.groups is not None and self.groups <= 0)
        ):
            raise DataError(
                f"a mini-batch has {self.tokens} loss tokens in {self.sequences} sequences: nothing to learn"
            )

    @classmethod
    def of(cls, sequences: DataProto, groups: Tensor | None = None) -> "Denominators":
        """Count a mini-batch that one process holds whole. groups: int [B]."""
        learned = sequences.loss_token_counts > 0
        group_count = None if groups is None else len(groups[learned].unique())
        return cls(sequences.num_loss_tokens, int(learned.sum()), group_count)


def group_tokens(sequences: DataProto, groups: Tensor) -> Tensor:
    """Return the column `group_tokens`: loss tokens in the group of each sequence, int64 [B]. groups: int64
    [B].
    """
    return groups.new_zeros(int(groups.max()) + 1).index_add_(
        0, groups, sequences.loss_token_counts
    )[groups]


def token_weights(
    predictions: PackedTokens,
    denominators: Denominators,
    aggregation: str,
    constant_length: int = 0,
) -> Tensor:
    """Return the weight of each token's loss, float64 [N]. The aggregate is the weighted sum over the
    mini-batch.

        token_mean                     1 / tokens                               DAPO, Yu et al. 2025, 3.3
        sequence_mean_token_mean       1 / (sequences * tokens of its sequence) GRPO, Shao et al. 2024, eq. 3
        sequence_mean_token_sum        1 / sequences                            the policy gradient
        sequence_mean_token_sum_norm   1 / (sequences * constant_length)        Dr. GRPO, Liu et al. 2025
        group_mean_token_mean          1 / (groups * tokens of its group)       DAPO's eq. 8 for each group

    A sample of several rows is one sequence, by the columns `sample_tokens` and `mini_batch_samples`.

    Raises ConfigError for an unknown name or a norm without `constant_length`, DataError if groups are not
    counted.
    """
    ones = torch.ones(
        len(predictions), dtype=torch.float64, device=predictions.sequence_index.device
    )
    sequences = predictions.columns.get("mini_batch_samples", denominators.sequences)
    if aggregation == "token_mean":
        return ones / denominators.tokens
    if aggregation == "sequence_mean_token_mean":
        return ones / (
            sequences
            * predictions.columns.get("sample_tokens", predictions.sequence_tokens)
        )
    if aggregation == "sequence_mean_token_sum":
        return ones / sequences
    if aggregation == "sequence_mean_token_sum_norm":
        check_constant_length("", aggregation, constant_length)
        return ones / (sequences * constant_length)
    if aggregation == "group_mean_token_mean":
        if denominators.groups is None:
            raise DataError(
                "aggregation=group_mean_token_mean needs Denominators.groups, the groups of the mini-batch"
            )
        return ones / (denominators.groups * predictions["group_tokens"])
    raise ConfigError(f"aggregation={aggregation} is not a known aggregation")


def aggregate(
    losses: Tensor,
    predictions: PackedTokens,
    denominators: Denominators,
    aggregation: str,
    constant_length: int = 0,
) -> Tensor:
    """Return the micro-batch's share, 0-d, of the aggregate of token losses [N]. See `token_weights`."""
    weights = token_weights(predictions, denominators, aggregation, constant_length)
    return (losses * weights.to(losses.dtype)).sum()
