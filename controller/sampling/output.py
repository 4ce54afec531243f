"""samples.jsonl: a line a sample, written when the sample is scored, so that a crash loses what was on its way alone.

job.json: whose samples these are --the same?--> lines that are there, of which one that was cut short is removed
                                  --another?--> ConfigError
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from controller.data.prompts import Prompt
from controller.observability.trackers.files import finite, writing
from controller.validation_metrics import ScoredResponse
from workers.errors import ConfigError, DataError
from workers.rollout.requests import SampleResult
from workers.score import Score

Key = tuple[str, int]
Line = dict[str, Any]
SAMPLES, JOB = "samples.jsonl", "job.json"


class SamplesFile:
    """The samples of one job, by (uid, sample), and the file that they are appended to."""

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        """job: identity of the samples, see `controller.sampling.identity`. Raises as `check_same_job`, DataError for a
        file that is none of ours, OutputError if it cannot be written."""
        self.path = folder / SAMPLES
        check_same_job(folder, job)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / JOB).write_text(json.dumps(job, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            self.lines = {(line["uid"], line["sample"]): line for line in _whole_lines(self.path)}
            self._file = self.path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        """Write one more sample. Raises OutputError."""
        with writing(self.path):
            self._file.write(json.dumps(line, ensure_ascii=False, default=repr) + "\n")
            self._file.flush()
        self.lines[line["uid"], line["sample"]] = line

    def close(self) -> None:
        """Close the file. Raises OutputError."""
        with writing(self.path):
            self._file.close()


def check_same_job(folder: Path, job: Mapping[str, Any]) -> None:
    """Raise ConfigError if the samples in `folder` are of another job. job: its identity."""
    path = folder / JOB
    if not path.exists():
        return
    try:
        then = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give another --output, or remove that folder.") from None
    now = json.loads(json.dumps(job))
    if others := [name for name in now if now[name] != then.get(name)]:
        raise ConfigError(
            f"{folder} has samples of another job, with other {' and '.join(others)}; give another --output, or remove "
            "that folder."
        )


def _whole_lines(path: Path) -> list[Line]:
    """The lines of the file, from which one that a crash cut short is removed."""
    if not path.exists():
        return []
    with path.open("rb+") as file:
        whole, lines = 0, []
        for number, text in enumerate(file, start=1):
            if text.endswith(b"\n"):
                lines.append(_parsed(text, f"{path}:{number}"))
                whole += len(text)
        file.truncate(whole)
    return lines


def _parsed(text: bytes, where: str) -> Line:
    try:
        line = json.loads(text)
        return line | {"uid": str(line["uid"]), "sample": int(line["sample"])}
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{where} is no sample of ours; give another --output, or remove that file.") from None


def as_line(result: SampleResult, score: Score, prompt: Prompt, prompt_key: str, *, rewarded: bool) -> Line:
    """A sample as a line holds it, without its tokens. rewarded: whether anything scores it."""
    line = {
        "uid": result.uid,
        "sample": result.sample,
        "source": prompt.source,
        "prompt": prompt.columns[prompt_key],
        "response": score.response,
        "record": {name: value for name, value in prompt.columns.items() if name != prompt_key},
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "response_tokens": result.response_tokens,
    }
    if rewarded:
        line |= {"reward": score.reward, "parts": {name: finite(value) for name, value in score.parts.items()}}
        line |= {"answer": score.answer} if score.answer else {}
        line |= {"failure": score.failure} if score.failure else {}
    return line


def token_columns(result: SampleResult, row: Mapping[str, np.ndarray]) -> Line:
    """Token ids and log-probs of a sample, from its row of a TokenBlock.

    response_ids, log_probs: of everything after the prompt, R numbers each. With several turns also `sampled`, R of 0
    or 1: an environment's tokens were not sampled, and their log-probs are 0. Numbers have the digits that give the
    same float32 again.
    """
    start = result.prompt_tokens
    mask = row["loss_mask"][start:]
    line = {
        "prompt_ids": row["input_ids"][:start].tolist(),
        "response_ids": row["input_ids"][start:].tolist(),
        "log_probs": [float(str(value)) for value in row["rollout_log_probs"][start:]],
    }
    return line if mask.all() else line | {"sampled": mask.astype(int).tolist()}


def scored_response(line: Line) -> ScoredResponse:
    """A line for `controller.validation_metrics`."""
    parts = {name: value for name, value in line["parts"].items() if value is not None}
    return ScoredResponse(line["uid"], line["source"], {"reward": line["reward"]} | parts, line.get("answer", ""))
