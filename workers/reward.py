"""RewardWorker: decodes finished samples and has them scored, beside generation.

block of tokens (object store) --decode--> response text --RewardProcess--> Score
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.remote_batch import TokenBlock
from workers.reward_process import Call, RewardProcess
from workers.score import Score


@dataclass(frozen=True)
class ScoreRequest:
    """One sample to score: row `row` of a block, whose first `prompt_tokens` tokens are the prompt.

    `columns`: what the reward functions take by name, beside the response.
    """

    row: int
    prompt_tokens: int
    columns: dict[str, Any]


class RewardWorker:
    """An actor that holds a tokenizer and a process that runs the reward functions."""

    def __init__(self, functions: bytes, tokenizer_path: str, *, timeout_s: float, concurrency: int) -> None:
        """`functions`, `timeout_s`, `concurrency`: see RewardProcess."""
        from transformers import AutoTokenizer

        self._process = RewardProcess(functions, timeout_s=timeout_s, concurrency=concurrency)
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False)

    def ready(self) -> bool:
        """True once the worker is built."""
        return True

    def score(self, block: TokenBlock, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One Score for each request, in order; one that could not be scored says why in `failure`."""
        calls = [Call(i, self._response(block, request), request.columns) for i, request in enumerate(requests)]
        scores = self._process.run(calls)
        return [scores[i] for i in range(len(requests))]

    def _response(self, block: TokenBlock, request: ScoreRequest) -> str:
        ids = block.row(request.row)["input_ids"][request.prompt_tokens :]
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
