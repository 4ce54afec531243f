"""Changes to rewards that follow from light facts of a sample."""

import numpy as np


def overlong_penalty(response_tokens: np.ndarray, max_new_tokens: int, overlong_tokens: int) -> np.ndarray:
    """Soft punishment of long responses (Yu et al. 2025, DAPO, eq. 13), with L_max `max_new_tokens` and L_cache
    `overlong_tokens`, at least 1:

        0                                 |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache         in between
        -1                                |y| >= L_max

    response_tokens: int [B]. Returns float64 [B] in [-1, 0].
    """
    free = max_new_tokens - overlong_tokens
    return np.clip((free - response_tokens) / overlong_tokens, -1.0, 0.0)
