"""What goes to an engine and the light facts that come back; importable without torch or vLLM.

SampleRequest --engine--> SampleResult (to the driver) + one row of a TokenBlock (stays in the object store)
"""

import hashlib
from dataclasses import dataclass

import numpy as np

STOP, LENGTH, ERROR = "stop", "length", "error"


@dataclass(frozen=True)
class SampleRequest:
    """One response wanted. prompt_ids: int32 [prompt tokens]; the samples of a group share the array."""

    uid: str
    sample: int
    prompt_ids: np.ndarray
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the sample within a round."""
        return self.uid, self.sample


@dataclass(frozen=True)
class SampleResult:
    """What became of one request.

    finish_reason: `stop` (end of sequence), `length` (sampling.max_new_tokens or the engine's longest sequence) or
    `error`, with the reason in `error`. weight_version: the oldest weights that any of its tokens was sampled with.
    row: its row in the TokenBlock that came with it; -1 after an error.
    """

    uid: str
    sample: int
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    weight_version: int
    error: str = ""
    row: int = -1

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the sample within a round."""
        return self.uid, self.sample

    @property
    def failed(self) -> bool:
        """No response came of it."""
        return self.finish_reason == ERROR


def sample_seed(run_seed: int, step: int, uid: str, sample: int) -> int:
    """A seed in [0, 2^63) that is the same on every machine and in every process, unlike `hash`."""
    text = f"{run_seed}/{step}/{sample}/{uid}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
