"""What somebody does in a notebook: train with a function defined there, in a thread; evaluate the result;
sample from it, and go on where a job was cut.

The run, about 40 seconds, is on real Ray with actors in new interpreters, as users have them: only here does
everything import in a user's order, and a closure of a notebook reach actors from a thread.
Evaluation and generation start three engines more, in this process.
"""

import gc
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ballast
from controller import fit
from controller.config import load
from controller.data.records import read_records
from tests.controller.stand_ins.in_process import put_ray_in_process
from tests.json_lines import read_lines
from tests.workers.model.tiny import files_beside
from workers.errors import ConfigError

pytestmark = pytest.mark.usefixtures("ray_of_new_interpreters")
STEPS = 2
LARGEST = 9.0
USUAL = gc.get_threshold()
# What the model's generation config says; its tokenizer knows the second alone.
ENDS = [5, 1]


def rewarding(largest: float) -> Callable[..., dict[str, float]]:
    """A closure, which no configuration can name."""

    def share_of_digits(response: str, solution: str) -> dict[str, float]:
        digits = sum(letter.isdigit() for letter in response)
        return {
            "reward": digits / max(1, len(response)),
            "digits": min(largest, digits),
            "long": float(digits > 5),
        }

    return share_of_digits


@dataclass
class Trained:
    result: ballast.Result
    called: list[tuple[int, dict[str, float]]]


@pytest.fixture(scope="module")
def records(workspace: Path) -> dict[str, list[dict[str, Any]]]:
    """The data sets, as a notebook has them."""
    return {
        name: read_records(str(workspace / f"{name}.jsonl"))
        for name in ("train", "validation")
    }


@pytest.fixture(scope="module")
def source(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model to begin with."""
    source = tmp_path_factory.mktemp("source") / "model"
    shutil.copytree(workspace / "model", source)
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ENDS, "temperature": 0.5})
    )
    return source


@pytest.fixture(scope="module")
def trained(
    ray_of_new_interpreters: None,
    settings: list[str],
    records: dict[str, list[dict[str, Any]]],
    source: Path,
) -> Trained:
    """Ended by its callback after two of five steps, in a thread that is not the main one."""
    called: list[tuple[int, dict[str, float]]] = []
    settings = [
        setting
        for setting in settings
        if not setting.startswith(("data.train=", "data.validation="))
    ]

    def stop_early(step: int, metrics: Any, run: ballast.RunView) -> None:
        called.append((step, dict(metrics)))
        metrics["notebook/texts"] = len({sample["response"] for sample in run.samples})
        assert (run.model / "model.safetensors").exists()
        assert gc.get_threshold()[0] > USUAL[0]
        if step == STEPS:
            raise ballast.StopTraining

    overrides = [
        *settings,
        "run.name=notebook",
        "run.steps=5",
        "run.checkpoint_every=1",
        "reward.function=''",
    ]
    overrides += ["validation.every=2", "validation.samples=2", "validation.success=long"]
    overrides += [
        "policy.optimizer.learning_rate=1e-3",
        "policy.data_parallel=1",
        f"model.path={source}",
    ]
    with ThreadPoolExecutor(1) as pool:
        given: dict[str, Any] = {
            "reward": rewarding(LARGEST),
            "callbacks": [stop_early],
            **records,
        }
        return Trained(
            pool.submit(ballast.fit, overrides=overrides, **given).result(), called
        )


def test_a_function_given_in_a_thread_trains_and_the_result_is_the_run(
    trained: Trained,
) -> None:
    result = trained.result
    assert (
        [0, *(row["step"] for row in result.metrics)]
        == [step for step, _ in trained.called]
        == [0, 1, STEPS]
    )
    assert [row["step"] for row in result.validations] == [0, STEPS]
    assert result.metrics[-1]["reward/digits"] == trained.called[-1][1]["reward/digits"] > 0
    assert result.metrics[-1]["reward/failures"] == 0
    assert (
        1
        < (result.metrics[-1]["notebook/texts"] or 0)
        <= (result.metrics[-1]["rollout/samples"] or 0)
    )
    assert result.summary["steps"] == STEPS
    assert (
        result.summary["validation"]["after"]["reward"]
        == trained.called[-1][1]["validation/reward"]
    )
    assert (result.model / "config.json").exists() and (
        result.folder / "report.html"
    ).exists()
    assert gc.get_threshold() == USUAL


def test_what_is_recorded_says_that_a_function_was_given_and_a_resume_asks_for_it(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = trained.result.folder / "config.yaml"
    assert load(recorded).reward.function == "callable:share_of_digits"
    assert fit.main(["--config", str(recorded), "run.resume=auto"]) == 2
    assert (
        "stands for a Python function that was given to a call. Give it again"
        in capsys.readouterr().err
    )
    again = ballast.fit(
        recorded, reward=rewarding(1.0), overrides=["run.resume=auto", f"run.steps={STEPS}"]
    )
    assert again == trained.result  # it has ended, and nothing is started


def test_an_evaluation_of_a_checkpoint_is_the_validation_that_training_made_of_it(
    trained: Trained, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_ray_in_process(monkeypatch)
    folder = trained.result.folder
    checkpoint = folder / "checkpoints" / "policy" / f"step-{STEPS}"
    found = ballast.evaluate(model=checkpoint, reward=rewarding(LARGEST))
    assert found.folder == folder / "evaluate" / f"step-{STEPS}"
    assert (
        load(found.folder / "config.yaml").model.path
        == found.facts["model"]
        == str(folder / f"model-{STEPS}")
    )
    validated = trained.result.summary["validation"]["after"]
    assert found.metrics == pytest.approx(validated)
    assert {"reward", "digits", "pass@1", "pass@2"} <= found.metrics.keys()
    for name, interval in found.intervals.items():
        assert interval.low <= found.metrics[name] <= interval.high
    assert "pass@2" in found.intervals
    assert (
        files_beside(folder / "model")
        == files_beside(folder / f"model-{STEPS}")
        == files_beside(source)
    )
    saved, written = (
        AutoModelForCausalLM.from_pretrained(folder / name)
        for name in ("model", f"model-{STEPS}")
    )
    assert all(map(torch.equal, saved.state_dict().values(), written.state_dict().values()))
    # Nothing is left to start anything for.
    monkeypatch.setattr("controller.sampling.sampling_run.ray_session", None)
    assert ballast.evaluate(model=checkpoint, reward=rewarding(LARGEST)) == found


def test_generation_goes_on_where_it_was_cut_and_gives_the_models_log_probs(
    trained: Trained,
    records: dict[str, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    put_ray_in_process(monkeypatch)

    def generate(reward: Any = rewarding(LARGEST)) -> Path:  # noqa: B008 - the same one
        folder, data = tmp_path / "samples", records["train"][:4]
        return ballast.generate(
            model=trained.result.folder, reward=reward, output=folder, data=data
        )

    file = generate()
    whole, content = read_lines(file), file.read_bytes()
    assert {(line["uid"], line["sample"]) for line in whole} == {
        (str(u), s) for u in range(4) for s in range(3)
    }
    kept = b"".join(content.splitlines(keepends=True)[:5])
    # A crash in the middle of a line.
    file.write_bytes(kept + content[len(kept) : len(kept) + 40])
    assert generate() == file
    assert file.read_bytes().startswith(kept)
    by_key = {(line["uid"], line["sample"]): line for line in read_lines(file)}
    for line in whole:
        again = by_key.pop((line["uid"], line["sample"]))
        assert again | {"log_probs": None} == line | {"log_probs": None}
        assert again["log_probs"] == pytest.approx(line["log_probs"], abs=1e-5)
    assert not by_key

    monkeypatch.setattr("controller.sampling.sampling_run.ray_session", None)
    assert read_lines(generate()) == read_lines(file)
    with pytest.raises(ConfigError, match="samples of another job, with other rewards"):
        generate(rewarding(1.0))
    check_log_probs(whole, trained.result.model)


def check_log_probs(lines: list[dict[str, Any]], path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for line in lines:
        ids = torch.tensor([line["prompt_ids"] + line["response_ids"]])
        with torch.no_grad():
            log_probs = (
                model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            )
        response = log_probs[len(line["prompt_ids"]) - 1 :]
        torch.testing.assert_close(
            response, torch.tensor(line["log_probs"]), rtol=0, atol=3e-5
        )
        ended = [id in ENDS for id in line["response_ids"]]
        assert ended == [False] * (len(ended) - 1) + [line["finish_reason"] == "stop"]
        assert len(line["response_ids"]) == line["response_tokens"] and line["reward"] >= 0
