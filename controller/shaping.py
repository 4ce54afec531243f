"""Changes to rewards that follow from light facts of a sample."""

import numpy as np


def overlong_penalty(tokens: np.ndarray, longest: int, overlong_tokens: int) -> np.ndarray:
    """Soft punishment of long responses (Yu et al. 2025, DAPO, eq. 13), with L_max `longest` and L_cache
    `overlong_tokens`, at least 1:

        0                                 |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache         in between
        -1                                |y| >= L_max

    tokens: int [B], those after the prompt. Returns float64 [B] in [-1, 0].
    """
    free = longest - overlong_tokens
    return np.clip((free - tokens) / overlong_tokens, -1.0, 0.0)
