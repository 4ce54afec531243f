"""Attention written out in the precision of its input, with the mask that transformers makes: the tests'
reference.

transformers' own eager functions take the softmax in float32, which would hide errors below 1e-7 in float64.
"""

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


AttentionInterface.register(REFERENCE_ATTENTION, reference_attention)
AttentionMaskInterface.register(REFERENCE_ATTENTION, eager_mask)
