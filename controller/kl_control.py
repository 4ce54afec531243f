"""How much the KL to the reference costs: a weight that follows the KL it keeps.

KL of a step's sequences, target --adapted--> weight of the next step, kept in Progress: a resumed run has it
"""

from workers.config import KlInRewardConfig

LARGEST_ERROR = 0.2  # beyond it an error counts no more, so that one far step does not throw the weight off


def adapted(coefficient: float, kl: float, sequences: int, settings: KlInRewardConfig) -> float:
    """The weight of the next step (Ziegler et al. 2019, section 2.2), with a gain of `sequences / horizon`:

        e = clip((KL - target) / target, -0.2, 0.2)        beta' = beta (1 + e sequences / horizon)

    kl: mean over the step's sequences, nats. Without a target it is the weight that was.
    """
    if not settings.target:
        return coefficient
    error = (kl - settings.target) / settings.target
    error = min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * (1 + error * sequences / settings.horizon)
