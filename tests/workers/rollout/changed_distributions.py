"""Log-probs of vLLM's sampling options, token by token as their documentation says, for `tiny`'s models."""

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from tests.workers.rollout import tiny
from workers.config.roles import SamplingConfig

NONE = -torch.inf


def log_probs(
    model: Qwen2ForCausalLM, input_ids: np.ndarray, begin: int, sampling: SamplingConfig
) -> np.ndarray:
    """log p of the tokens from `begin` on, float32, under the distribution that `sampling` makes of the
    model's.
    """
    ids = torch.from_numpy(input_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    found = []
    for place in range(begin, len(ids)):
        changed = one(logits[place - 1].clone(), ids[:place].tolist(), begin, sampling)
        found.append(changed.log_softmax(-1)[ids[place]].item())
    return np.array(found, np.float32)


def one(
    x: torch.Tensor, read: list[int], begin: int, sampling: SamplingConfig
) -> torch.Tensor:
    """read: prompt and response before the token. A character is a token in `tiny`."""
    response = read[begin:]
    if sampling.structured_outputs:  # of the test: {regex: "[ab]{2,4}"}
        allowed = [tiny.ID["a"], tiny.ID["b"]] * (len(response) < 4) + [tiny.EOS] * (
            len(response) >= 2
        )
        x[[token for token in range(len(x)) if token not in allowed]] = NONE
    for word in sampling.bad_words:
        *first, last = (tiny.ID[character] for character in word)
        if response[len(response) - len(first) :] == first:
            x[last] = NONE
    if len(response) < sampling.min_new_tokens:
        x[[tiny.EOS, *sampling.stop_token_ids]] = NONE
    for token, bias in sampling.logit_bias.items():
        x[token] += bias
    for token in set(read):
        x[token] *= (
            1 / sampling.repetition_penalty if x[token] > 0 else sampling.repetition_penalty
        )
    for token in set(response):
        x[token] -= (
            sampling.frequency_penalty * response.count(token) + sampling.presence_penalty
        )
    x /= sampling.temperature
    probabilities = x.softmax(-1)
    x[probabilities < sampling.min_p * probabilities.max()] = NONE
    return x
