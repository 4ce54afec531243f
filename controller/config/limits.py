"""Limits: the caps, counts and rows that hold for the micro-batches of one pass.

policy.update, critic.values, ... --Config.limits--> Limits --> the planner, the checks, the dry run
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one pass of a role over a batch.

    cap: key of the setting that gives `max_tokens`. max_tokens, max_sequences: of a micro-batch of one rank; 0
    sequences is no cap. min_micro_batches: of a rank in each mini-batch. length_multiple: lengths are rounded up to a
    multiple of this many tokens, for kernels and for the ranks that share a sequence.
    """

    cap: str
    max_tokens: int
    max_sequences: int
    min_micro_batches: int
    layout: str
    length_multiple: int
