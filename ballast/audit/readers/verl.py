"""verl: `trainer.rollout_data_dir` writes `{step}.jsonl`, one line a sample.

`RayPPOTrainer._write_generations` writes it. The dump holds decoded text without special tokens, so that code
points stand for token ids: checks of groups and duplicates compare texts, and checks of log-probs lack their
columns.
"""

from pathlib import Path

from ballast.audit.bundle import Bundle
from ballast.audit.readers.json_lines import Record, read_records
from ballast.audit.readers.rows import Rows

KEYS = {"input", "output", "score", "step"}
NOT_DUMPED = "verl dumps text and scores alone, see the recorder for verl"
LACKING = (
    "sampler_logprobs",
    "old_logprobs",
    "new_logprobs",
    "reference_logprobs",
    "advantages",
    "truncated",
)
MISSING = dict.fromkeys(LACKING, NOT_DUMPED)


def read(paths: list[Path]) -> Bundle:
    """Read the samples of a step. Samples with equal prompts are a group."""
    rows = Rows(paths[0])
    step = 0
    for path in paths:
        for place, values in read_records(path):
            record = Record(place, values)
            prompt = record.text("input")
            response = record.text("output")
            step = record.whole("step")
            rows.add(
                token_ids=[ord(character) for character in prompt + response],
                loss_mask=[0] * len(prompt) + [1] * len(response),
                prompt_length=len(prompt),
                rewards=record.number("score"),
                group=rows.number("group", prompt),
            )
    return rows.bundle(
        "verl rollout dump (code points of texts stand for token ids)", MISSING, step=step
    )
