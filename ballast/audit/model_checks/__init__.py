"""Checks of a step with the model: its log-probs are computed again, and a difference is explained.

    sample         rows of the bundle that are computed, one at a time
    scoring        a model and its logits in float32, with transformers alone
    from_logits    temperature, shift, top-p and top-k, another end token
    from_context   positions, rows of a pack, end tokens and thoughts left out, adapters
    check          which explanation makes the difference fall to rounding

Differences are means in nats a token.
"""

from ballast.audit.model_checks.check import check_with_models

__all__ = ["check_with_models"]
