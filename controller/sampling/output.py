"""samples.jsonl: a line per sample, written as soon as it is scored, so that a crash loses only samples in
flight.

job.json: identity of the samples --the same--> keep the lines, and remove one that was cut short
                                  --another--> ConfigError
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from controller.algorithm.validation_metrics import ScoredResponse
from controller.config.file import value_of
from controller.config.functions import source_file
from controller.config.model_files import TOKENIZERS, WEIGHTS, read_model_files
from controller.config.python_rewards import GivenFunctions
from controller.config.role_table import path_setting
from controller.config.sampler import SamplerConfig
from controller.data.identity import DataIdentity
from controller.data.prompts import Prompt
from controller.observability.recorded_values import finite
from controller.observability.run_folder import writing
from controller.sampling.models import Model
from workers.batch.score import Score
from workers.engine.requests import SampleResult
from workers.errors import ConfigError, DataError

Key = tuple[str, int]
Line = dict[str, Any]
SAMPLES, JOB = "samples.jsonl", "job.json"

NAME_OF_0_2 = '"data.over_long"', '"data.overlong_prompts"'
OF_DATA = ("data.max_prompt_tokens", "data.overlong_prompts", "data.source_key")
OF_ENGINES = ("model.dtype", "rollout.engine", "rollout.max_model_tokens")
OF_EPISODES = tuple(
    f"rollout.{name}"
    for name in (
        *("max_turns", "max_episode_tokens", "max_tool_calls", "max_tool_characters"),
        *("tool_parser", "reasoning_parser"),
    )
)


class SamplesFile:
    """Hold one job's samples by (uid, sample), and their file. Writing raises OutputError."""

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        """job: see `job_identity`. Raises as `check_same_job`, and DataError for another kind of file."""
        self.path = folder / SAMPLES
        check_same_job(folder, job)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / JOB).write_text(
                json.dumps(job, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            self.lines = {
                (line["uid"], line["sample"]): line for line in _whole_lines(self.path)
            }
            self._file = self.path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        with writing(self.path):
            self._file.write(json.dumps(line, ensure_ascii=False, default=repr) + "\n")
            self._file.flush()
        self.lines[line["uid"], line["sample"]] = line

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def _whole_lines(path: Path) -> list[Line]:
    if not path.exists():
        return []
    with path.open("rb+") as file:
        size = 0
        lines = []
        for number, text in enumerate(file, start=1):
            if text.endswith(b"\n"):
                lines.append(_parse_line(text, f"{path}:{number}"))
                size += len(text)
        file.truncate(size)
    return lines


def _parse_line(text: bytes, place: str) -> Line:
    try:
        line = json.loads(text)
        return line | {"uid": str(line["uid"]), "sample": int(line["sample"])}
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise DataError(
            f"{place} is not a sample. Give another --output, or remove that file."
        ) from None


def as_line(
    result: SampleResult, score: Score, prompt: Prompt, prompt_key: str, *, rewarded: bool
) -> Line:
    line = {
        "uid": result.uid,
        "sample": result.sample,
        "source": prompt.source,
        "prompt": prompt.columns[prompt_key],
        "response": score.response,
        "record": {
            name: value for name, value in prompt.columns.items() if name != prompt_key
        },
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "response_tokens": result.response_tokens,
    }
    line |= {"cut_thoughts": result.cut_thoughts} if result.cut_thoughts else {}
    if rewarded:
        line |= {
            "reward": score.reward,
            "parts": {name: finite(value) for name, value in score.parts.items()},
        }
        line |= {"answer": score.answer} if score.answer else {}
        line |= {"failure": score.failure} if score.failure else {}
    return line


def token_columns(result: SampleResult, rows: Sequence[Mapping[str, np.ndarray]]) -> Line:
    """Return token ids and log-probs of everything after the prompt, R numbers each. Digits restore the
    float32.

    With several turns also `sampled`, R of 0 or 1: an environment's tokens have log-prob 0. `rows`, these
    columns of each row to train on, if the chat template changed what came before a turn.
    """
    first, *branches = rows
    line = _tokens_after(first, result.prompt_tokens)
    return line | (
        {"rows": [_tokens_after(row, result.prompt_tokens) for row in branches]}
        if branches
        else {}
    )


def _tokens_after(row: Mapping[str, np.ndarray], start: int) -> Line:
    mask = row["loss_mask"][start:]
    line = {
        "prompt_ids": row["input_ids"][:start].tolist(),
        "response_ids": row["input_ids"][start:].tolist(),
        "log_probs": [float(str(value)) for value in row["rollout_log_probs"][start:]],
    }
    return line if mask.all() else line | {"sampled": mask.astype(int).tolist()}


def scored_response(line: Line) -> ScoredResponse:
    parts = {name: value for name, value in line["parts"].items() if value is not None}
    return ScoredResponse(
        line["uid"],
        line["source"],
        {"reward": line["reward"]} | parts,
        line.get("answer", ""),
    )


def check_same_job(folder: Path, job: Mapping[str, Any]) -> None:
    path = folder / JOB
    if not path.exists():
        return
    try:
        then = json.loads(path.read_text(encoding="utf-8").replace(*NAME_OF_0_2))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}). Give another --output, or remove that folder."
        ) from None
    now = json.loads(json.dumps(job))
    if parts := [name for name in now if now[name] != then.get(name)]:
        raise ConfigError(
            f"{folder} has samples of another job, with other {' and '.join(parts)}. Give another "
            "--output, or remove that folder."
        )


def job_identity(
    model: Model, config: SamplerConfig, data: DataIdentity, functions: GivenFunctions
) -> dict[str, Any]:
    """Return what affects each sample or score, as JSON by part, without the numbers of prompts
    and samples.
    """
    played = "".join(config.rollout.code)
    values = _values(config, OF_EPISODES) | {"history": config.history}
    episodes = [played, _content(played), values] if played else None
    rewards = {
        name: [weight, functions[name].version if name in functions else _content(name)]
        for name, weight in config.reward.weights.items()
    }
    if config.uses_reward_model:
        paths = {
            name: model.path for name, model in config.models_of("reward_model").items()
        }
        for name, weight in config.reward.model.named_weights.items():
            key = path_setting("reward_model", name)
            rewards[key.removesuffix(".path")] = [weight, _files(paths[name], key)]
    checkpoint = model.checkpoint and str(model.checkpoint.resolve())
    # These settings follow from the rest.
    records = {name: identity for name, identity in data.items() if name != "prompts"}
    if config.uses_judge:
        judge = config.reward.judge
        files = _files(judge.model, "reward.judge.model") if judge.has_engines else None
        rewards["reward.judge"] = [
            asdict(judge),
            _content(judge.function) if judge.function else "",
            files,
        ]
    return {
        "command": config.command,
        "model": checkpoint or _files(config.model.path, "model.path"),
        "data": records | {"settings": data["settings"] | _values(config, OF_DATA)},
        "sampling": asdict(config.rollout.sampling),
        "seed": config.run.seed,
        "engines": _values(config, OF_ENGINES),
        "rewards": rewards,
        "environment": episodes,
    }


def _values(config: SamplerConfig, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value_of(config, key) for key in keys}


def _files(path: str, key: str) -> dict[str, Any]:
    """List a model's files with sizes and times, because reading all weights would take minutes."""
    folder = read_model_files(path, key).folder
    files = sorted(
        {
            file
            for pattern in ("config.json", *WEIGHTS, *TOKENIZERS)
            for file in folder.glob(pattern)
        }
    )
    stamps = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"folder": str(folder.resolve()), "files": stamps}


def _content(function: str) -> str:
    """Return the SHA-256 of a user's code file, because pickles of the same code may differ."""
    file = source_file(function)
    return (
        hashlib.sha256(file.read_bytes()).hexdigest()
        if file is not None and file.is_file()
        else ""
    )
