"""NeMo-RL: `train_data_step{step}.jsonl` of GRPO (Logger.log_batched_dict_as_jsonl).

A line is a micro-batch of one sample, so that every value is a list of length 1. Sequences are padded.
"""

import re
from pathlib import Path
from typing import Any

from ballast.audit.bundle import Bundle
from ballast.audit.readers.json_lines import Record, read_records
from ballast.audit.readers.rows import Rows

KEYS = {"token_ids", "token_loss_mask", "sample_loss_mask", "input_lengths"}
LOGPROB_COLUMNS = {
    "sampler_logprobs": "generation_logprobs",
    "old_logprobs": "prev_logprobs",
    "advantages": "advantages",
}
MISSING = {
    "new_logprobs": "NeMo-RL dumps the log-probs from before the update alone",
    "reference_logprobs": "NeMo-RL does not dump it",
    "truncated": "NeMo-RL does not dump it",
}


def read(paths: list[Path]) -> Bundle:
    """Read the samples of a step. Samples with equal prompts are a group."""
    path = paths[0]
    rows = Rows(path)
    for place, values in read_records(path):
        record = Record(place, values)
        length = record.whole_numbers("input_lengths", 1)[0]
        token_ids = _first_tokens(record, "token_ids", length)
        mask = _first_tokens(record, "token_loss_mask", length)
        prompt_length = mask.index(1) if 1 in mask else length
        is_trained = bool(record.numbers("sample_loss_mask", 1)[0])
        columns = {}
        for column, name in LOGPROB_COLUMNS.items():
            if record.has(name):
                columns[column] = _first_tokens(record, name, length)
        rows.add(
            token_ids=token_ids,
            loss_mask=mask if is_trained else [0] * length,
            prompt_length=prompt_length,
            rewards=record.numbers("rewards", 1)[0] if record.has("rewards") else None,
            group=rows.number("group", tuple(token_ids[:prompt_length])),
            trained=int(is_trained),
            **columns,
        )
    digits = re.findall(r"step(\d{1,18})", path.name)
    return rows.bundle("NeMo-RL train data", MISSING, step=int(digits[-1]) if digits else 0)


def _first_tokens(record: Record, name: str, length: int) -> list[Any]:
    """Return a sample's values without its padding."""
    values = record.items(name)
    if len(values) != 1:
        raise record.error(name, f"a list of {len(values)} samples, not of one")
    sequence = Record(record.place, {name: values[0]})
    is_whole = name.startswith("token")
    numbers = sequence.whole_numbers(name) if is_whole else sequence.numbers(name)
    if len(numbers) < length:
        raise record.error(
            name, f"a list of {len(numbers)} values, below input_lengths={length}"
        )
    return numbers[:length]
