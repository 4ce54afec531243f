"""`ballast show --atif`: samples of a recorded step as Harbor's trajectories, to the last token and bit."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from ballast.audit.readers import read_dump
from ballast.commands import main
from controller.config import Config, to_yaml
from controller.observability.run_folder import step_file
from controller.rollout.sample_files import write_step
from controller.rollout.samples import RolloutBatch
from examples.addition.warm_start import tokenizer
from workers.batch.dataproto import DataProto, object_column
from workers.batch.remote_batch import RemoteBatch, places
from workers.batch.score import Score
from workers.engine.branches import branches_of
from workers.engine.prefix_hashes import prefix_hashes

SCHEMA = Path(__file__).with_name("atif.schema.json")
CASES = {
    "a response": ["..ooo"],
    "nothing but sampled tokens": ["ooo"],
    "an episode": ["..oo...o.o"],
    "an episode that ends with an observation": ["..oo.."],
    "nothing sampled": ["...."],
    # The first row of a sample with branches is all of it in order.
    "a session of two branches": ["..oo.oo.", "..oo.", "..x.oo."],
}
"""Rows of a sample: a dot for a token that was read, o for a sampled one, x for another read one."""


class Block(DataProto):
    """Stands for its own reference."""

    __hash__ = object.__hash__


def token_row(pattern: str, number: int) -> dict[str, np.ndarray]:
    ids = np.arange(len(pattern), dtype=np.int32) % 7 + 3
    ids[[place for place, letter in enumerate(pattern) if letter == "x"]] = 11
    mask = np.array([letter == "o" for letter in pattern])
    log_probs = np.where(mask, -np.arange(len(pattern)) / 3 - number, 0).astype(np.float32)
    return {"input_ids": ids, "loss_mask": mask, "rollout_log_probs": log_probs}


def rollout_of(cases: list[list[str]]) -> RolloutBatch:
    rows = [[token_row(row, number) for row in case] for number, case in enumerate(cases)]
    prompts = [int(np.argmax(first["loss_mask"])) for first, *_ in rows]
    block = DataProto.from_rows([row for sample_rows in rows for row in sample_rows])
    starts = np.cumsum([0, *map(len, cases)])[:-1].tolist()
    columns = {
        "uid": np.array([f"{number // 2}" for number in range(len(cases))]),
        "sample": np.arange(len(cases)) % 2,
        "seconds": np.ones(len(cases)),
        "truncated": np.arange(len(cases)) % 3 == 0,
        "length": np.array([len(first["input_ids"]) for first, *_ in rows]),
        "prompt_tokens": np.array(prompts),
        "branches": object_column([branches_of(sample_rows, 2) for sample_rows in rows]),
    }
    columns["prefix_hashes"] = object_column(
        [
            prefix_hashes(first["input_ids"], prompt)
            for (first, *_), prompt in zip(rows, prompts, strict=True)
        ]
    )
    reference = Block(block.lengths, block.tokens)
    tokens = {name: places(name, [reference] * len(cases), starts) for name in block.tokens}
    scores = {}
    for number in range(len(cases)):
        key = (columns["uid"][number].item(), number % 2)
        scores[key] = Score(number / 3, "text", {"exact": 1.0})
    rollout = RolloutBatch(RemoteBatch(columns, tokens), scores, dropped=0, retried=0)
    return replace(rollout, trained=rollout.rows)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("atif")
    tokenizer().save_pretrained(root / "model")
    folder = root / "runs" / "agent"
    folder.mkdir(parents=True)
    config = Config()
    config.model.path = str(root / "model")
    (folder / "config.yaml").write_text(to_yaml(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("controller.rollout.sample_files.ray.get", lambda refs: refs)
        for step in (2, 3):
            write_step(step_file(folder, step), rollout_of(list(CASES.values())))
    return folder


@pytest.fixture(scope="module")
def exported(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    assert main(["show", str(run_folder), "--atif", str(folder)]) == 0
    return folder / "step-3"


def trajectories(folder: Path) -> list[dict]:
    return [
        json.loads(path.read_text()) for path in sorted(folder.glob("**/trajectory.json"))
    ]


def test_every_sample_is_a_file_of_harbors_schema(exported: Path) -> None:
    """The schema is the one that harbor's own models give."""
    records = trajectories(exported)
    assert len(records) == len(CASES)
    schema = json.loads(SCHEMA.read_text())
    for record in records:
        jsonschema.validate(record, schema)
        assert [step["step_id"] for step in record["steps"]] == list(
            range(1, len(record["steps"]) + 1)
        )
    assert len({record["trajectory_id"] for record in records}) == len(CASES)


@pytest.mark.skipif(find_spec("harbor") is None, reason="harbor needs Python 3.12")
def test_harbors_models_take_every_file(exported: Path) -> None:
    from harbor.models.trajectories import Trajectory

    for record in trajectories(exported):
        assert Trajectory.model_validate(record).to_json_dict() == record


def test_the_audit_reads_back_what_was_sampled(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / exported.name
    shutil.copytree(exported, folder)
    sampled = {name: case for name, case in CASES.items() if name != "nothing sampled"}
    for path in folder.glob("**/trajectory.json"):
        if "completion_token_ids" not in path.read_text():
            path.unlink()  # the audit asks for token ids
    bundle = read_dump(folder)
    expected = []
    for number, case in enumerate(CASES.values()):
        branches = case[1:] or case
        if case in sampled.values():
            # Nothing reads what stands behind the last sampled token.
            expected += [(number, token_row(row.rstrip(".x"), number)) for row in branches]
    rows = [row for _, row in expected]
    numbers = np.array([number for number, _ in expected])
    assert bundle.offsets.tolist() == [
        0,
        *np.cumsum([len(row["input_ids"]) for row in rows]),
    ]
    for column, name in {
        "token_ids": "input_ids",
        "loss_mask": "loss_mask",
        "sampler_logprobs": "rollout_log_probs",
    }.items():
        np.testing.assert_array_equal(
            bundle.token_column(column), np.concatenate([row[name] for row in rows])
        )
    np.testing.assert_array_equal(bundle.row_column("rewards"), numbers / 3)
    np.testing.assert_array_equal(bundle.row_column("truncated"), numbers % 3 == 0)
    groups = [number // 2 for number in numbers]
    assert bundle.row_column("group").tolist() == [
        list(dict.fromkeys(groups)).index(g) for g in groups
    ]


def test_steps_tell_a_sample_in_words(exported: Path) -> None:
    episode = trajectories(exported)[list(CASES).index("an episode")]
    sources = [(step["source"], "observation" in step) for step in episode["steps"]]
    assert sources == [("user", False), ("agent", True), ("agent", True), ("agent", False)]
    assert episode["steps"][1]["message"] == tokenizer().decode([5, 6])
    assert episode["final_metrics"]["extra"] == {"reward": 2 / 3, "parts": {"exact": 1.0}}
    assert episode["final_metrics"]["total_completion_tokens"] == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--step", "1"), "--step=1"),
        (("--validation",), "--validation"),
        (("--session", "1"), "--session=1"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    run_folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    text: str,
) -> None:
    assert main(["show", str(run_folder), "--atif", "out", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert text in error


def test_a_run_without_token_ids_names_its_setting(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    assert main(["show", str(tmp_path / "run"), "--atif", str(tmp_path / "out")]) == 2
    assert "run.record_samples" in capsys.readouterr().err


def test_a_run_whose_model_is_gone_names_it(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    (copy / "samples").mkdir(parents=True)
    step_file(copy, 3).write_bytes(step_file(run_folder, 3).read_bytes())
    config = Config()
    config.model.path = str(tmp_path / "gone")
    (copy / "config.yaml").write_text(to_yaml(config))
    assert main(["show", str(copy), "--atif", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "model.path=" in error
