"""A small random policy with its data and settings: what a run needs, in one folder."""

from pathlib import Path

import pytest

from examples.addition import data
from examples.addition.warm_start import create_model

SETTINGS = (
    "run.steps=3",
    "batch.prompts_per_step=5",
    "rollout.samples_per_prompt=3",
    "rollout.sampling.max_new_tokens=16",
    "rollout.cpu_kv_cache_gib=0.25",
    "validation.prompts=4",
    "policy.data_parallel=2",
    "policy.max_tokens_per_micro_batch=128",
    "resources.dashboard=false",
    "reward.function=examples.addition.reward:reward",
    "data.max_prompt_tokens=26",
)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `train.jsonl`, `validation.jsonl`; runs go to its `runs`."""
    folder = tmp_path_factory.mktemp("workspace")
    create_model(folder / "model", seed=0)
    data.write(folder / "train.jsonl", 64, seed=1, held_out=False)
    data.write(folder / "validation.jsonl", 8, seed=2, held_out=True)
    return folder


@pytest.fixture(scope="session")
def settings(workspace: Path) -> list[str]:
    """Overrides that make a whole configuration for the workspace."""
    return [
        *SETTINGS,
        f"run.dir={workspace / 'runs'}",
        f"model.path={workspace / 'model'}",
        f"data.train={workspace / 'train.jsonl'}",
        f"data.validation={workspace / 'validation.jsonl'}",
    ]
