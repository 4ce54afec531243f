"""Resume from a checkpoint with other training data, by run.on_data_change. Whole runs, on stand-ins."""

import json
from pathlib import Path

import pytest

from controller.checkpoints.progress import checkpoint_path
from controller.config import load
from controller.data.identity import DataIdentity, differences
from controller.lifecycle.inputs import try_inputs
from controller.lifecycle.tokenized_inputs import read_inputs
from tests.controller.stand_ins.run import SETTINGS, StandIns, write_stand_in_workspace
from workers.errors import ConfigError
from workers.model.checkpoint.checkpoint_folder import read_manifest

OWN = (
    "data.validation=''",
    "rollout.placement=apart",
    "run.checkpoint_every=1",
    "data.train=mine.jsonl",
)
TRAINED = range(5, 13)  # of which three make prompts of six tokens, and five of four


def records(*numbers: int) -> str:
    return "\n".join(json.dumps({"prompt": f"{i}+{i}="}) for i in numbers)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a run of two steps, of two prompts each, and its checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    write_stand_in_workspace(folder)
    (folder / "mine.jsonl").write_text(records(*TRAINED))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        StandIns(patch).run(OWN)
    return folder


@pytest.fixture
def workspace(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    (trained / "mine.jsonl").write_text(records(*TRAINED))
    return trained


def try_again(*overrides: str) -> DataIdentity:
    """The identity of the data of a run that goes on from the two steps, by what its dry run tries."""
    return try_inputs(
        load(None, [*SETTINGS, *OWN, "run.resume=runs/run", "run.name=again", *overrides])
    ).identity


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (
            "run.steps=9",
            "policy.optimizer.learning_rate=1e-3",
            "batch.prompts_per_step=4",
            "algorithm.advantage=rloo",
        ),
        ("data.train=moved.jsonl",),
    ],
)
def test_what_leaves_the_prompts_as_they_were_goes_on(
    workspace: Path, overrides: tuple[str, ...]
) -> None:
    """From the place of the checkpoint, in data of the same identity."""
    (workspace / "moved.jsonl").write_text(records(*TRAINED))
    checkpoint = read_manifest(checkpoint_path(workspace / "runs" / "run", 2)).extra
    assert checkpoint["position"] == 4, "two steps of two prompts"
    assert try_again(*overrides) == {
        key: part for key, part in checkpoint["data"].items() if key != "prompts"
    }


def test_another_order_goes_on_where_that_is_allowed(workspace: Path) -> None:
    data = read_manifest(checkpoint_path(workspace / "runs" / "run", 2)).extra["data"]
    identity = try_again("run.seed=1", "data.shuffle=false", "run.on_data_change=restart")
    assert differences(identity, data) == ["data.shuffle=False was True"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.train=longer.jsonl",), "has 9 records of other content than the 8 then"),
        (("data.train=edited.jsonl",), "has 8 records of other content than the 8 then"),
        (("run.seed=1",), "run.seed=1 was 0"),
        (("data.shuffle=false",), "data.shuffle=False was True"),
        (("model.path=judge",), "the tokenizer or chat template is another"),
        (
            ("model.chat_template=judge/chat_template.jinja",),
            "the tokenizer or chat template is another",
        ),
        (
            ("data.chat_template_arguments={x: 1}",),
            "data.chat_template_arguments={'x': 1} was {}",
        ),
        (
            ("data.sources={mine.jsonl: 1, longer.jsonl: 1}", "data.train=''"),
            r"has 8 \+ 9 records",
        ),
    ],
)
def test_other_prompts_or_another_order_are_refused_before_anything_starts(
    workspace: Path, overrides: tuple[str, ...], words: str
) -> None:
    (workspace / "longer.jsonl").write_text(records(*TRAINED, 13))
    (workspace / "edited.jsonl").write_text(records(*TRAINED[:-1], 70))
    (workspace / "judge" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=words) as caught:
        try_again(*overrides)
    assert "step-2 was trained on other data" in str(caught.value)
    assert "run.on_data_change=restart" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("other_data", "position"), [("restart", 2), ("keep_place", 6)])
def test_a_run_that_may_go_on_with_other_data_takes_them_from_where_it_is_told(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, other_data: str, position: int
) -> None:
    (workspace / "mine.jsonl").write_text(records(*TRAINED, 13))
    name = f"run.name={other_data}"
    going_on = [
        *OWN,
        name,
        "run.resume=runs/run",
        "run.steps=3",
        f"run.on_data_change={other_data}",
    ]
    finished = StandIns(monkeypatch).run(going_on)
    assert finished.outcome.last_step == 3 and len(finished.outcome.steps) == 1
    progress = read_manifest(checkpoint_path(workspace / "runs" / other_data, 3)).extra
    assert (
        progress["position"],
        progress["data"]["sources"][0][0],
        progress["data"]["prompts"],
    ) == (
        position,
        9,
        [9],
    )
    # From there on these are the data of the run.
    try_inputs(load(None, [*SETTINGS, *OWN, name, "run.resume=auto"]))


def test_a_limit_that_leaves_out_other_prompts_is_refused_once_they_are_counted(
    workspace: Path,
) -> None:
    resumed = ["run.resume=runs/run", "run.name=shorter", "data.max_prompt_tokens=5"]
    with pytest.raises(
        ConfigError, match=r"keeps \[5\] prompts of each source, and kept \[8\]"
    ):
        read_inputs(load(None, [*SETTINGS, *OWN, *resumed]))
