"""What users write by mistake: a dry run refuses it as a run would, with code 2 and one line."""

from pathlib import Path

import pytest

from controller.config import load
from controller.config import training as machine
from controller.config.training import visible_gpus
from controller.preflight.cluster import check_machine
from tests.controller.bad_inputs import BadInput, check_refused, rows
from workers.errors import ConfigError

MEGABYTES = f'{{"prompt": "{"1+" * 3_000_000}", "solution": "2"}}'


def append(file: str, text: str) -> object:
    """Writes `text` behind what the workspace's file holds."""

    def write(folder: Path) -> None:
        with (folder / file).open("a") as opened:
            opened.write(text)

    return write


DATA = (
    BadInput("truncated line", ["train.jsonl:2 is not JSON"], write=append("train.jsonl", '{"prompt": "1+')),
    BadInput("record without prompt", ["train.jsonl:2 has no 'prompt'"], write=append("train.jsonl", '{"x": 1}')),
    BadInput(
        "prompt of another type",
        ["train.jsonl:2", "int"],
        write=append("train.jsonl", '{"prompt": 7, "solution": "2"}'),
    ),
    BadInput(
        "column missing later",
        ["train.jsonl", "record 2 lacks ['solution']"],
        write=append("train.jsonl", '{"prompt": "1+1="}'),
    ),
    BadInput(
        "nested thousands deep",
        ["train.jsonl:2", "nested more than 100 deep"],
        write=append("train.jsonl", '{"prompt": "x", "solution": ' + "[" * 5000 + "]" * 5000 + "}"),
    ),
    BadInput(
        "nested hundreds deep",
        ["train.jsonl:2", "nested more than 100 deep"],
        write=append("train.jsonl", '{"prompt": "x", "solution": ' + "[" * 400 + "]" * 400 + "}"),
    ),
    BadInput(
        "megabytes in every line",
        ["train.jsonl: all prompts, 1, have many more characters", "data.over_long=truncate"],
        write=lambda folder: (folder / "train.jsonl").write_text(
            f'{{"prompt": "{"1+" * 3_000_000}", "solution": "2"}}'
        ),
    ),
    BadInput(
        "megabytes in a line",
        ["train.jsonl record 2 has 6,000,000 characters", "data.over_long=drop"],
        ["data.over_long=error"],
        append("train.jsonl", MEGABYTES),
    ),
    BadInput(
        "torn validation data",
        ["validation.jsonl:2 is not JSON"],
        write=append("validation.jsonl", "{"),
    ),
    BadInput("file name of 300 characters", ["data.train", "File name too long"], [f"data.train={'x' * 300}.jsonl"]),
)

SETTINGS = (
    BadInput("run name of 300 characters", ["run.name", "300", "255"], [f"run.name={'x' * 300}"]),
    BadInput("number beyond all memory", ["policy.max_tokens", "23 digits"], [f"policy.max_tokens={'9' * 23}"]),
    BadInput("seed beyond 64 bits", ["run.seed", "20 digits"], [f"run.seed={2**64}"]),
    BadInput("override nested thousands deep", ["rollout.engine"], [f"rollout.engine={'[' * 5000}{']' * 5000}"]),
    BadInput(
        "file nested thousands deep",
        ["config.yaml", "nested"],
        write=lambda folder: (folder / "config.yaml").write_text(f"run: {'[' * 5000}{']' * 5000}"),
    ),
)


MACHINE = (
    BadInput(
        "engines above cores",
        ["rollout.replicas=5000", "CPU cores of this machine", "resources.ray_address"],
        ["rollout.replicas=5000"],
    ),
    BadInput(
        "caches above memory",
        ["rollout.cpu_kv_cache_gib = 99999 GiB", "of this machine"],
        ["rollout.cpu_kv_cache_gib=99999"],
    ),
)


@rows(*SETTINGS, *DATA, *MACHINE)
def test_a_dry_run_refuses_it_in_one_line(
    case: BadInput, workspace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_refused(case, workspace, capfd, monkeypatch, "--dry-run")


@rows(DATA[0], MACHINE[0])
def test_a_run_refuses_what_a_dry_run_refuses(
    case: BadInput, workspace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_refused(case, workspace, capfd, monkeypatch)


@pytest.mark.parametrize(
    "where", [["resources.ray_address=head:6379"], ["resources.device=cuda"]], ids=["address", "gpus"]
)
def test_a_dry_run_for_other_machines_is_not_held_against_this_one(
    workspace: Path, where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    check_machine(load("config.yaml", ["rollout.replicas=2", "policy.ranks=5000", *where]), dry_run=True)


@pytest.mark.parametrize(("gpus", "dry_run"), [(0, False), (2, True)])
def test_gpus_that_a_local_ray_has_not_are_refused(
    workspace: Path, gpus: int, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    config = load("config.yaml", ["resources.device=cuda", "policy.ranks=4"])
    with pytest.raises(ConfigError, match=f"asks for 4 GPUs and this machine has {gpus}"):
        check_machine(config, dry_run=dry_run)


def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [Path(f"/dev/nvidia{i}") for i in range(4)])
    for chosen, left in (("", 0), ("-1", 0), ("0,3", 2), ("GPU-8f2a", 1), ("0,1,2,3,4,5", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_gpus() == left
