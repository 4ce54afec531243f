"""Identity of a job's samples: another model, data, sampling or reward makes others, which are not put beside them.

How many samples are made of how many prompts is no part of it: more of both are added to those that are there.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from controller.config.file import value_of
from controller.config.function_files import source_file
from controller.config.given import GivenFunctions
from controller.config.model_files import TOKENIZERS, WEIGHTS, read_model_files
from controller.config.sampler import SamplerConfig
from controller.inputs import Inputs, Tried
from controller.sampling.models import Model

OF_DATA = ("data.max_prompt_tokens", "data.over_long", "data.source_key")
OF_ENGINES = ("model.dtype", "rollout.engine", "rollout.max_model_tokens")
OF_EPISODES = ("rollout.max_turns", "rollout.max_episode_tokens")


def job_identity(
    command: str, model: Model, config: SamplerConfig, inputs: Tried | Inputs, given: GivenFunctions
) -> dict[str, Any]:
    """JSON by part: `command`, `model`, `data`, `sampling`, `seed`, `engines`, `rewards`, `environment`."""
    environment = config.rollout.environment
    episodes = [environment, _content(source_file(environment)), _values(config, OF_EPISODES)] if environment else None
    rewards = {
        name: [weight, given[name].version if name in given else _content(source_file(name))]
        for name, weight in config.reward.weights.items()
    }
    if config.uses_reward_model:
        rewards["reward.model"] = [config.reward.model.weight, _files(config.reward.model.path, "reward.model.path")]
    checkpoint = model.checkpoint and str(model.checkpoint.resolve())
    data = {name: found for name, found in inputs.identity.items() if name != "prompts"}  # which follow from the rest
    return {
        "command": command,
        "model": checkpoint or _files(config.model.path, "model.path"),
        "data": data | {"settings": data["settings"] | _values(config, OF_DATA)},
        "sampling": asdict(config.rollout.sampling),
        "seed": config.run.seed,
        "engines": _values(config, OF_ENGINES),
        "rewards": rewards,
        "environment": episodes,
    }


def _values(config: SamplerConfig, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value_of(config, key) for key in keys}


def _files(path: str, key: str) -> dict[str, Any]:
    """The files of a model, with their sizes and times: reading all weights would take minutes."""
    folder = read_model_files(path, key).folder
    files = sorted({file for pattern in ("config.json", *WEIGHTS, *TOKENIZERS) for file in folder.glob(pattern)})
    found = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"folder": str(folder.resolve()), "files": found}


def _content(file: Path | None) -> str:
    """SHA-256 of the file that a user's code is in; a pickle of the code may differ from time to time."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else ""
