"""Write recorded samples as ATIF trajectories, the format of Harbor's agents.

runs/NAME/samples/step-3.npz --write_trajectories--> FOLDER/step-3/prompt-7-sample-0/trajectory.json

A run of sampled tokens is a step of the agent. It names its prompt, its tokens and their log-probs. The
tokens before it are a step of the user, or the observation of the agent's step before it. A sample of
several rows, such as an agent's session with branches, has the steps of one row after those of another:
`extra.row` of a step numbers them.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ballast import __version__
from controller.config.recorded import load_recorded
from controller.observability.run_folder import recorded_steps, step_file, writing
from controller.rollout.array_files import open_arrays
from controller.rollout.samples import TOKEN_COLUMNS
from workers.batch.remote_batch import IMAGES
from workers.errors import ConfigError, DataError, clause

SCHEMA = "ATIF-v1.7"
"""The first version with all that is written here. Version 1.8 adds audio."""
Decode = Callable[[Sequence[int], bool], str]
"""Token ids as text. The second argument leaves special tokens out."""


@dataclass(frozen=True)
class Sample:
    """A recorded sample. rows: its rows of tokens, by column. score: `Score` as a mapping."""

    uid: str
    number: int
    truncated: bool
    rows: list[dict[str, np.ndarray]]
    score: Mapping[str, Any]


def write_trajectories(run_folder: Path, step: int | None, output: Path) -> list[Path]:
    """Write every sample of a step, by default the last recorded one, each in its own file.

    Raises ConfigError for a step that was not recorded, DataError for a file or tokenizer that cannot be
    read, and OutputError.
    """
    steps = recorded_steps(run_folder)
    if not steps:
        raise ConfigError(
            f"{run_folder}: it has no token ids, because run.record_samples=false. Set it and run again."
        )
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise ConfigError(
            f"--step={step}: no samples of it. Recorded are {steps[0]} to {steps[-1]}."
        )
    config = load_recorded(run_folder / "config.yaml")
    decode = _load_decoder(config.model.path)
    samples, has_images = _read_samples(step_file(run_folder, step))
    paths = []
    for sample in samples:
        session = f"step-{step}/prompt-{sample.uid}-sample-{sample.number}"
        trajectory: dict[str, Any] = {
            "schema_version": SCHEMA,
            "session_id": f"{run_folder.name}/{session}",
            "trajectory_id": f"{run_folder.name}/{session}",
            "agent": {
                "name": "ballast",
                "version": __version__,
                "model_name": config.model.path,
            },
            **_describe(sample, decode),
        }
        trajectory["extra"]["training_step"] = step
        if has_images:
            trajectory["notes"] = (
                "Images are left out. Their places in prompts are the model's placeholders."
            )
        path = output / session / "trajectory.json"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps(trajectory, ensure_ascii=False, indent=1), encoding="utf-8"
            )
        paths.append(path)
    return paths


def _read_samples(path: Path) -> tuple[list[Sample], bool]:
    with open_arrays(path) as arrays:
        offsets = arrays["tokens.offsets"]
        tokens = {name: arrays[f"tokens.{name}"] for name in TOKEN_COLUMNS}
        scores = json.loads(arrays["scores"].tobytes())
        uids = arrays["columns.uid"].tolist()
        numbers = arrays["columns.sample"].tolist()
        truncated = arrays["columns.truncated"].tolist()
        branches = arrays.get("columns.branches", np.zeros(len(uids), np.int64)).tolist()
        has_images = IMAGES in arrays
    rows = []
    for start, end in itertools.pairwise(offsets):
        rows.append({name: column[start:end] for name, column in tokens.items()})
    samples = []
    first = 0
    for sample, count in enumerate(branches):
        # The first row of a sample with branches is all of it in order. The branches are what a model read.
        sample_rows = rows[first + 1 : first + 1 + count] or [rows[first]]
        samples.append(
            Sample(
                uids[sample],
                numbers[sample],
                truncated[sample],
                sample_rows,
                scores[sample],
            )
        )
        first += 1 + count
    return samples, has_images


def _describe(sample: Sample, decode: Decode) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for number, row in enumerate(sample.rows):
        steps += _steps_of(row, number, decode)
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(
                step_metrics["prompt_tokens"] for step_metrics in metrics
            ),
            "total_completion_tokens": sum(
                step_metrics["completion_tokens"] for step_metrics in metrics
            ),
            "total_steps": len(steps),
            "extra": {"reward": sample.score["reward"], "parts": sample.score["parts"]},
        },
        "extra": {
            "prompt": sample.uid,
            "sample": sample.number,
            "truncated": sample.truncated,
            "failure": sample.score["failure"],
        },
    }


def _steps_of(
    row: Mapping[str, np.ndarray], number: int, decode: Decode
) -> Iterator[dict[str, Any]]:
    """Yield the steps of a row, an observation with the agent's step that it follows."""
    ids = row["input_ids"].tolist()
    log_probs = row["rollout_log_probs"].astype(np.float64).tolist()
    starts, ends = _sampled_spans(row["loss_mask"])
    observed_until = [*starts, len(ids)]
    extra = {"row": number}
    if observed_until[0]:
        yield {
            "source": "user",
            "message": decode(ids[: observed_until[0]], False),
            "extra": extra,
        }
    for start, end, until in zip(starts, ends, observed_until[1:], strict=True):
        step: dict[str, Any] = {
            "source": "agent",
            "message": decode(ids[start:end], True),
            "llm_call_count": 1,
            "metrics": {
                "prompt_tokens": start,
                "completion_tokens": end - start,
                "prompt_token_ids": ids[:start],
                "completion_token_ids": ids[start:end],
                "logprobs": log_probs[start:end],
            },
            "extra": extra,
        }
        if end < until:
            step["observation"] = {"results": [{"content": decode(ids[end:until], False)}]}
        yield step


def _sampled_spans(mask: np.ndarray) -> tuple[list[int], list[int]]:
    """Return where runs of sampled tokens start and end."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return edges[::2], edges[1::2]


def _load_decoder(model: str) -> Decode:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # damaged files raise anything
        raise DataError(
            f"model.path={model}: its tokenizer cannot be read, which makes the text of steps: "
            f"{clause(error)}. Put the model back where the run read it."
        ) from None
    return lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip)
