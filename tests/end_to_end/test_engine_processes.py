"""A run whose engine is a process of its own, as it is on GPUs; else an engine on a CPU is a thread of its actor."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.config import load
from tests.end_to_end.processes import ROOT, living, marked_environment, settings_file
from workers.model.checkpoint_folder import complete
from workers.rollout.engine import engine_arguments

STEPS = 2


@dataclass(frozen=True)
class Finished:
    """parents: by pid, the parent of every process of the run that was seen. titles: all that `ps` showed of each, as
    they change. lines: of metrics.jsonl."""

    folder: Path
    parents: dict[int, int]
    titles: dict[int, set[str]]
    lines: list[dict[str, float]]


@pytest.fixture(scope="module")
def finished(settings: list[str], workspace: Path) -> Iterator[Finished]:
    """By the command, because the variable must be set where Ray starts its workers."""
    command = [sys.executable, "-m", "controller.fit", *settings_file(workspace), *settings, "run.name=processes"]
    command += [f"run.steps={STEPS}", "run.checkpoint_every=1", "policy.ranks=1", "policy.optimizer.learning_rate=1e-3"]
    environment = marked_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    parents: dict[int, int] = {}
    titles: dict[int, set[str]] = defaultdict(set)
    while run.poll() is None:
        for process in psutil.Process(run.pid).children(recursive=True):
            with suppress(psutil.Error):
                parents.setdefault(process.pid, process.ppid())
                titles[process.pid].add(" ".join(process.cmdline()))
        time.sleep(0.5)
    assert run.returncode == 0, run.stderr and run.stderr.read().decode()
    folder = workspace / "runs" / "processes"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    yield Finished(folder, parents, titles, lines)


def test_the_engine_is_a_process_below_its_actor_and_gone_afterwards(finished: Finished) -> None:
    """By how it was started: whether vLLM can change its title depends on the environment's first variable."""
    spawned = {pid for pid, titles in finished.titles.items() if any("spawn_main" in title for title in titles)}
    cores = [pid for pid in spawned if finished.parents[pid] not in spawned]  # a core starts workers of its own
    assert len(cores) == 1, finished.titles
    raylet = finished.parents[finished.parents[cores[0]]]
    assert any("raylet" in title for title in finished.titles[raylet]), finished.titles
    assert living(finished.titles) == []


def test_new_weights_reach_the_process(finished: Finished, workspace: Path) -> None:
    """The second step is sampled with the weights of the first update, which are far from those before it."""
    steps = finished.lines[1:]
    assert [step["rollout/oldest_weight_version"] for step in steps] == [0, 1]
    for step in steps:
        assert step["policy/rollout_mismatch_max"] <= 3e-5
    assert difference(workspace / "model", finished.folder / "model") > 1e-2


def difference(first: Path, second: Path) -> float:
    """Mean difference of two models' log-probs of the same text."""
    ids = torch.arange(3, 15)[None]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (first, second)]
    with torch.no_grad():
        ours, others = (model(ids).logits.log_softmax(-1) for model in models)
    return float((ours - others).abs().mean())


def test_it_validates_and_leaves_checkpoints(finished: Finished) -> None:
    assert ["validation/reward" in line for line in finished.lines] == [True, False, True]
    found = complete(finished.folder / "checkpoints" / "policy")
    assert [path.name for path, _ in found] == ["step-1", "step-2"]


def test_the_newer_model_runner_of_vllm_wants_triton_also_on_a_cpu(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs take that runner by themselves. With Triton at hand this fails: then `finished` can be run with it."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = load(None, settings)
    arguments = engine_arguments(
        config.model, config.rollout, placement="shared_memory", max_model_tokens=config.max_model_tokens, seed=0
    )
    with pytest.raises(ValueError, match=r"Model Runner V2 requires Triton\."):
        arguments.create_engine_config()
