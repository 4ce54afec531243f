"""slime and miles: `--save-debug-rollout-data` and `--save-debug-train-data`, files of torch.save.

Rollout data: {"rollout_id", "samples": [Sample.to_dict()]}. Train data: {"format_version": 2, "samples"}.
Files are read with `weights_only=True`, which refuses pickled objects. It takes tensors, numbers and
NumPy arrays.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ballast.audit.bundle import Bundle
from ballast.audit.readers.json_lines import Record
from ballast.audit.readers.rows import Rows
from workers.errors import DataError, clause

TRUNCATED = "truncated"
ROLLOUT_MISSING = dict.fromkeys(
    ("old_logprobs", "new_logprobs", "reference_logprobs", "advantages"),
    "debug rollout data is of before training, see --save-debug-train-data",
)
TRAIN_MISSING = {
    "new_logprobs": "debug train data has the log-probs from before the update alone",
    "group": "debug train data has no groups, see --save-debug-rollout-data",
    "truncated": "debug train data has no statuses, see --save-debug-rollout-data",
}
TRAIN_COLUMNS = {
    "old_logprobs": "log_probs",
    "sampler_logprobs": "rollout_log_probs",
    "reference_logprobs": "ref_log_probs",
    "advantages": "advantages",
}


def read(paths: list[Path]) -> Bundle:
    """Read the samples of a rollout, or of its training."""
    path = paths[0]
    dump = Record(str(path), _load(path))
    step = dump.whole("rollout_id")
    rows = Rows(path)
    samples = dump.records("samples")
    if dump.has("format_version"):
        for sample in samples:
            _add_train_sample(rows, sample)
        return rows.bundle("slime debug train data", TRAIN_MISSING, step=step)
    missing = dict(ROLLOUT_MISSING)
    for sample in samples:
        _add_rollout_sample(rows, sample)
        if isinstance(sample.values.get("reward"), dict):
            missing["rewards"] = "a reward is a mapping, of which --reward-key chose one"
    return rows.bundle("slime debug rollout data", missing, step=step)


def _load(path: Path) -> Any:
    import torch  # here, because the other readers do without it

    data_types = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"}
    reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    try:
        with torch.serialization.safe_globals(
            [reconstruct, np.ndarray, np.dtype, *data_types]
        ):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise DataError(
            f"{path}: it holds objects that only code of its system can load, and loading them runs code. "
            "Load it there, keep numbers, lists and tensors of its samples, and save it again."
        ) from None
    except Exception as error:  # bytes of another format raise anything from the unpickler
        raise DataError(
            f"{path}: it is not a whole file of torch.save: {clause(error)}."
        ) from None


def _add_rollout_sample(rows: Rows, sample: Record) -> None:
    token_ids = sample.whole_numbers("tokens")
    length = sample.whole("response_length")
    before = [0] * (len(token_ids) - length)
    mask = (
        sample.whole_numbers("loss_mask", length)
        if sample.has("loss_mask")
        else [1] * length
    )
    is_removed = bool(sample.values.get("remove_sample"))
    reward = sample.values.get("reward")
    logprobs = None
    if sample.has("rollout_log_probs"):
        logprobs = [*before, *sample.numbers("rollout_log_probs", length)]
    index = sample.values.get("rollout_id")
    if index is None:
        index = sample.values.get("index")
    rows.add(
        token_ids=token_ids,
        loss_mask=[0] * len(token_ids) if is_removed else [*before, *mask],
        sampler_logprobs=logprobs,
        prompt_length=len(before),
        rewards=sample.number("reward") if isinstance(reward, int | float) else None,
        group=sample.whole("group_index") if sample.has("group_index") else None,
        sample=None if index is None else rows.number("sample", str(index)),
        truncated=int(sample.values.get("status") == TRUNCATED),
        trained=int(not is_removed),
        weight_versions=_weight_versions(sample, len(token_ids)),
    )


def _weight_versions(sample: Record, length: int) -> list[int] | None:
    """Return the version for each token, or None if turns have several: the dump lacks their lengths."""
    versions = {str(version) for version in sample.items("weight_versions")}
    if len(versions) != 1:
        return None
    version = versions.pop()
    return [int(version)] * length if version.isdecimal() else None


def _add_train_sample(rows: Rows, sample: Record) -> None:
    token_ids = sample.whole_numbers("tokens")
    length = sample.whole("response_lengths")
    before = [0] * (len(token_ids) - length)
    values = {}
    for column, name in TRAIN_COLUMNS.items():
        if sample.has(name):
            values[column] = [*before, *sample.numbers(name, length)]
    rows.add(
        token_ids=token_ids,
        loss_mask=[*before, *sample.whole_numbers("loss_masks", length)],
        prompt_length=len(before),
        rewards=sample.number("rewards") if sample.has("rewards") else None,
        **values,
    )
