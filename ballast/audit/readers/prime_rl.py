"""prime-rl: `enable_token_export` writes `token_exports/step_{step}/rank_{rank}.jsonl` (TokenExporter).

The loss takes ratios to the sampler's log-probs, which are therefore the old ones too.
"""

from pathlib import Path

from ballast.audit.bundle import Bundle
from ballast.audit.readers.json_lines import Record, read_records
from ballast.audit.readers.rows import Rows

KEYS = {"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}
NOT_EXPORTED = "token exports do not have it"
MISSING = dict.fromkeys(
    ("rewards", "group", "reference_logprobs", "truncated"), NOT_EXPORTED
)


def read(paths: list[Path]) -> Bundle:
    """Read the sequences of a step, of all ranks."""
    rows = Rows(paths[0])
    step = 0
    for rank, path in enumerate(paths):
        for place, values in read_records(path):
            record = Record(place, values)
            step = record.whole("step")
            token_ids = record.whole_numbers("token_ids")
            length = len(token_ids)
            sampler = record.numbers("inference_logprobs", length)
            mask = record.whole_numbers("loss_mask", length)
            rows.add(
                token_ids=token_ids,
                loss_mask=mask,
                sampler_logprobs=sampler,
                old_logprobs=sampler,
                # Nothing predicts the first token. prime-rl fills in log(1 / vocabulary).
                new_logprobs=[0.0, *record.numbers("trainer_logprobs", length)[1:]],
                advantages=record.numbers("advantages", length),
                micro_batch=rows.number("micro_batch", (rank, record.whole("micro_step"))),
                prompt_length=mask.index(1) if 1 in mask else length,
            )
    return rows.bundle("prime-rl token export", MISSING, step=step)
