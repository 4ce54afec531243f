"""Limits: the caps, counts and rows that the micro-batches of one pass keep.

policy.update, critic.values, ... --Config.limits--> Limits --> the planner, the checks, the dry run
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one pass of a role over a batch.

    cap: key of the setting that `max_tokens` comes from. max_tokens: of a micro-batch of one rank. max_sequences: of a
    micro-batch; 0 is no cap. min_micro_batches: of a rank in each mini-batch. length_multiple: tokens that lengths are
    rounded up to, for kernels and for the ranks that share a sequence.
    """

    cap: str
    max_tokens: int
    max_sequences: int
    min_micro_batches: int
    layout: str
    length_multiple: int
