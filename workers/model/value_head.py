"""A value head on the hidden states: critics and reward models read the same rows as the policy.

    rows of tokens --decoder--> hidden states of the cells `predicting` [N, H] --score--> values [N]

    critic         the cell before each token of the policy (`ModelInput.predicting`): V of the state there
    reward model   the cell of each sequence's last token (`packing.read_last`)

Shapes: R rows of W cells, N predicted tokens, B sequences.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from workers.config.roles import ModelConfig
from workers.errors import UnsupportedModelError
from workers.model.model import PackedModel, Shapes, described, load_model, read_rows
from workers.model.pretrained import check_complete, read_pretrained
from workers.model.rows.packing import ModelInput
from workers.model.sharding.stage_layers import Passing

# Transformers' name for the head of sequence classification, in every family.
HEAD = "score"


class PackedValueModel(PackedModel):
    def forward(
        self, rows: ModelInput, temperature: float = 1.0, passing: Passing | None = None
    ) -> Tensor:
        """Return values of the cells `predicting`, at least float32 [N]. See `PackedCausalLM.forward`."""
        hidden = self.hidden_states(rows, passing)
        if passing is not None and not passing.part.last:
            return hidden
        # Summed rather than squeezed over the one label, because FSDP needs outputs that are not views.
        values = getattr(self.model, HEAD)(hidden).sum(-1)
        return values.to(torch.promote_types(values.dtype, torch.float32))


def load_value_model(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    skeleton: bool = False,
    shapes: Shapes | None = None,
) -> PackedValueModel:
    """Load the model at `config.path` with a value head, on the CPU with parameters of `dtype`. See
    `load_model`.

    A causal LM gets a new head of zeros. Raises ConfigError if the model is missing or incomplete or its head
    has several labels, UnsupportedModelError if packing would change its results or the family has no such
    head.
    """
    model, missing = read_pretrained(
        AutoModelForSequenceClassification, config, dtype, skeleton, shapes, num_labels=1
    )
    head = f"{HEAD}.weight"
    check_complete(config.path, [name for name in missing if name != head])
    if not hasattr(model, HEAD):
        raise UnsupportedModelError(f"{described(model)} has no linear head named {HEAD}")
    packed = read_rows(PackedValueModel(model, config.activation_offload), config)
    if head in missing:
        torch.nn.init.zeros_(getattr(model, HEAD).weight)
    return packed


LOADERS: dict[str, Callable[..., PackedModel]] = {
    "lm": load_model,
    "value": load_value_model,
}
"""The loader of each head."""


def name_pad_token(config: Any, tokenizer: Any) -> None:
    """Name the tokenizer's pad token in a model's config that has none: transformers needs it to score a
    batch.
    """
    token = tokenizer and tokenizer.pad_token_id
    if (
        getattr(config, "pad_token_id", None) is None
        and token is not None
        and token < config.vocab_size
    ):
        config.pad_token_id = token
