"""What users write by mistake: a dry run refuses it as a run would, with code 2 and one line."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from controller.config import load
from controller.config import training as machine
from controller.config.training import visible_gpus
from controller.preflight.cluster import check_machine
from controller.preflight.describe import warnings
from tests.controller.bad_inputs import BadInput, check_refused, rows
from tests.refusals import refused

LONG = f'{{"prompt": "{"1+" * 3_000_000}", "solution": "2"}}'


def deep(levels: int) -> str:
    return '{"prompt": "x", "solution": ' + "[" * levels + "]" * levels + "}"


def second_line(
    name: str, text: str, *words: str, overrides: Sequence[str] = ()
) -> BadInput:
    """`text` behind the one record of train.jsonl."""

    def write(folder: Path) -> None:
        with (folder / "train.jsonl").open("a") as opened:
            opened.write(text)

    return BadInput(name, words, overrides, write)


def written(name: str, file: str, text: str, *words: str) -> BadInput:
    return BadInput(name, words, (), lambda folder: (folder / file).write_text(text))


OVERLONG = "data.overlong_prompts"
DATA = (
    second_line("truncated line", '{"prompt": "1+', "train.jsonl:2"),
    second_line("record without prompt", '{"x": 1}', "train.jsonl:2", "'prompt'"),
    second_line(
        "prompt of another type", '{"prompt": 7, "solution": "2"}', "train.jsonl:2", "int"
    ),
    second_line(
        "column missing later",
        '{"prompt": "1+1="}',
        "train.jsonl",
        "record 2",
        "'solution'",
    ),
    second_line("nested thousands deep", deep(5000), "train.jsonl:2"),
    second_line("nested hundreds deep", deep(400), "train.jsonl:2"),
    second_line(
        "megabytes in a line",
        LONG,
        "train.jsonl record 2",
        "data.overlong_prompts",
        overrides=["data.overlong_prompts=error"],
    ),
    written("torn validation data", "validation.jsonl", "{", "validation.jsonl:1"),
    BadInput(
        "megabytes",
        ["train.jsonl", "data.overlong_prompts"],
        (),
        lambda folder: (folder / "train.jsonl").write_text(LONG),
    ),
    BadInput(
        "file name of 300 characters", ["data.train"], [f"data.train={'x' * 300}.jsonl"]
    ),
)
SETTINGS = (
    BadInput("run name of 300 characters", ["run.name", "300"], [f"run.name={'x' * 300}"]),
    BadInput(
        "number beyond all memory",
        ["policy.max_tokens_per_micro_batch", "23 digits"],
        [f"policy.max_tokens_per_micro_batch={'9' * 23}"],
    ),
    BadInput("seed beyond 64 bits", ["run.seed", "20 digits"], [f"run.seed={2**64}"]),
    BadInput(
        "override nested thousands deep",
        ["rollout.engine"],
        [f"rollout.engine={'[' * 5000}{']' * 5000}"],
    ),
    written(
        "file nested thousands deep",
        "config.yaml",
        f"run: {'[' * 5000}{']' * 5000}",
        "config.yaml",
    ),
)
MACHINE = (
    BadInput(
        "engines above cores",
        ["rollout.replicas=5000", "CPU cores"],
        ["rollout.replicas=5000"],
    ),
    BadInput(
        "caches above memory",
        ["rollout.cpu_kv_cache_gib"],
        ["rollout.cpu_kv_cache_gib=99999"],
    ),
)


@rows(*SETTINGS, *DATA, *MACHINE)
def test_a_dry_run_refuses_it_in_one_line(
    case: BadInput,
    workspace: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_refused(case, workspace, capfd, monkeypatch, "--dry-run")


@pytest.mark.parametrize(
    "where",
    [["resources.ray_address=head:6379"], ["resources.device=cuda"]],
    ids=["address", "gpus"],
)
def test_a_dry_run_for_other_machines_is_not_held_against_this_one(
    workspace: Path, where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    check_machine(
        load("config.yaml", ["rollout.replicas=2", "policy.data_parallel=5000", *where]),
        dry_run=True,
    )


@pytest.mark.parametrize(("gpus", "dry_run"), [(0, False), (2, True)])
def test_gpus_that_a_local_ray_has_not_are_refused(
    workspace: Path, gpus: int, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    config = load("config.yaml", ["resources.device=cuda", "policy.data_parallel=4"])
    with refused("4 GPUs"):
        check_machine(config, dry_run=dry_run)


def test_amd_gpus_are_refused_by_name(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    for device in (tmp_path / "none", tmp_path):
        has_device = device.exists()
        monkeypatch.setattr(machine, "AMD_DEVICE", device)
        with refused("ROCm is not supported" if has_device else "this machine has 0"):
            check_machine(load("config.yaml", ["resources.device=cuda"]), dry_run=False)
        lines = warnings(load("config.yaml", ["resources.device=auto"]))
        assert any("ROCm" in line for line in lines) == has_device
        assert not any(
            "ROCm" in line
            for line in warnings(load("config.yaml", ["resources.device=cpu"]))
        )


def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Path, "glob", lambda path, pattern: [Path(f"/dev/nvidia{i}") for i in range(4)]
    )
    for chosen, left in (
        ("", 0),
        ("-1", 0),
        ("0,3", 2),
        ("GPU-8f2a", 1),
        ("0,1,2,3,4,5", 4),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_gpus() == left
