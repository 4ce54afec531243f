"""Attention written out in the precision of its input, with the mask that transformers makes: the tests'
reference.

transformers' own eager functions take the softmax in float32, which would hide errors below 1e-7 in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

REFERENCE_ATTENTION = "reference_eager"


def reference_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, H, L, D], key and value [1, K, L, D], attention_mask additive [1, 1, L, L] -> [1,
    L, H, D].
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat(
            [scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1
        )
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None


def all_scores_at_once(
    tensors: Sequence[Tensor],
    lengths: Sequence[int],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of query, key and value within segments of a row, [1, L, H, D]."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(owner))
    distance = place[:, None] - place
    visible = (owner[:, None] == owner) & (distance >= 0)
    visible &= distance < (window or len(place))
    mask = torch.zeros(visible.shape, dtype=tensors[0].dtype)
    mask.masked_fill_(~visible, -torch.inf)
    module = torch.nn.Identity()
    return reference_attention(module, *tensors, mask, scale, softcap, sinks)[0]


AttentionInterface.register(REFERENCE_ATTENTION, reference_attention)
AttentionMaskInterface.register(REFERENCE_ATTENTION, eager_mask)
