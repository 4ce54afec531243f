"""A file of samples continues after a crash and never mixes two jobs, whose identity is what makes other
samples.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.config.sampler import GenerateConfig
from controller.data.prompts import Prompt
from controller.lifecycle.inputs import try_inputs
from controller.packages import ROOT
from controller.sampling.jobs import JobRequest, checked_settings
from controller.sampling.output import (
    JOB,
    SAMPLES,
    SamplesFile,
    as_line,
    job_identity,
    scored_response,
    token_columns,
)
from workers.batch.score import Score
from workers.engine.requests import SampleResult
from workers.errors import ConfigError, DataError

ENVIRONMENT = """\
from workers.environment import Observation


class Guess:
    def reset(self, record):
        return None

    def step(self, response):
        return Observation("", reward=0.0, done=True)
"""
PRINT = """\
import json
from tests.controller.sampling.test_output import identity
print(json.dumps(identity()))
"""
PLACE = {"model": {"folder": "a"}, "seed": 0}


def line(uid: str, sample: int, text: str = "x") -> dict[str, Any]:
    return {"uid": uid, "sample": sample, "response": text}


def written(
    folder: Path, *lines: dict[str, Any], job: dict[str, Any] = PLACE
) -> SamplesFile:
    file = SamplesFile(folder, job)
    for one in lines:
        file.append(one)
    file.close()
    return file


@settings(max_examples=40)
@given(texts=st.lists(st.text(max_size=5), min_size=1, max_size=5), data=st.data())
def test_after_a_cut_at_any_byte_whole_lines_are_kept_and_the_rest_can_be_added(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    lines = [line(str(number), 0, text) for number, text in enumerate(texts)]
    content = written(folder, *lines).path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    (folder / SAMPLES).write_bytes(content[:cut])
    there = SamplesFile(folder, PLACE)
    assert list(there.lines.values()) == lines[: content[:cut].count(b"\n")]
    there.close()
    written(folder, *lines[len(there.lines) :])
    assert (folder / SAMPLES).read_bytes() == content


@pytest.mark.parametrize("other", [PLACE | {"seed": 1}, PLACE | {"model": {"folder": "b"}}])
def test_samples_of_another_job_are_not_added_to(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    before = written(tmp_path, line("0", 0)).path.read_bytes()
    with pytest.raises(ConfigError, match=r"with other (seed|model)\."):
        SamplesFile(tmp_path, other)
    assert (tmp_path / SAMPLES).read_bytes() == before


@pytest.mark.parametrize(
    "text", ["{}\n", "[1]\n", "no json\n", '{"uid": "0", "sample": null}\n']
)
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / SAMPLES).write_text(text)
    with pytest.raises(DataError, match=r"samples\.jsonl:1 "):
        SamplesFile(tmp_path, PLACE)
    assert (tmp_path / SAMPLES).read_text() == text


def test_a_broken_job_file_is_told(tmp_path: Path) -> None:
    (tmp_path / JOB).write_text("{")
    with pytest.raises(ConfigError, match=r"job\.json"):
        SamplesFile(tmp_path, PLACE)


PROMPT = Prompt(
    "3",
    np.array([1, 2], np.int32),
    {"prompt": [{"role": "user", "content": "?"}], "answer": "4"},
    "sums",
)
RESULT = SampleResult(
    "3",
    1,
    prompt_tokens=2,
    response_tokens=2,
    finish_reason="stop",
    weight_version=0,
    row=0,
)


def test_a_line_has_what_was_asked_and_what_was_answered() -> None:
    score = Score(0.5, "four", {"exact": 1.0}, answer="4")
    found = as_line(RESULT, score, PROMPT, "prompt", rewarded=True)
    assert (found["prompt"], found["record"], found["response"]) == (
        PROMPT.columns["prompt"],
        {"answer": "4"},
        "four",
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    again = scored_response(found)
    assert (again.uid, again.source, again.scores, again.answer) == (
        "3",
        "sums",
        {"reward": 0.5, "exact": 1.0},
        "4",
    )


def test_a_line_of_a_sample_that_nothing_scores_has_no_reward_and_a_failed_reward_says_why() -> (
    None
):
    assert "reward" not in as_line(
        RESULT, Score(0.0, "four"), PROMPT, "prompt", rewarded=False
    )
    assert (
        as_line(RESULT, Score(0.0, "x", failure="raised"), PROMPT, "prompt", rewarded=True)[
            "failure"
        ]
        == "raised"
    )


@given(st.lists(st.floats(-100, 0, width=32), min_size=1, max_size=6))
def test_log_probs_keep_every_bit(values: list[float]) -> None:
    count = len(values)
    row = {
        "input_ids": np.arange(2 + count, dtype=np.int32),
        "loss_mask": np.array([False, False, *[True] * count]),
        "rollout_log_probs": np.array([0, 0, *values], np.float32),
    }
    found = json.loads(json.dumps(token_columns(RESULT, [row])))
    assert np.array_equal(
        np.array(found["log_probs"], np.float32), row["rollout_log_probs"][2:]
    )
    assert (found["prompt_ids"], found["response_ids"]) == (
        [0, 1],
        list(range(2, 2 + count)),
    )
    assert "sampled" not in found


def test_of_several_turns_a_line_says_which_tokens_were_sampled() -> None:
    mask = np.array([False, False, True, False, True])
    row = {
        "input_ids": np.arange(5),
        "loss_mask": mask,
        "rollout_log_probs": np.zeros(5, np.float32),
    }
    found = token_columns(RESULT, [row])
    assert (found["sampled"], "rows" in found) == ([1, 0, 1], False)


def test_a_line_of_a_rewritten_conversation_has_the_rows_in_which_turns_were_sampled() -> (
    None
):
    row = {
        "input_ids": np.arange(5),
        "loss_mask": np.arange(5) > 3,
        "rollout_log_probs": np.zeros(5, np.float32),
    }
    first, last = token_columns(RESULT, [row, row, row | {"input_ids": np.arange(9, 14)}])[
        "rows"
    ]
    assert (first["response_ids"], last["response_ids"]) == ([2, 3, 4], [11, 12, 13])
    assert (last["prompt_ids"], last["sampled"]) == ([9, 10], [0, 0, 1])


def identity(*overrides: str) -> dict[str, object]:
    request = JobRequest(
        Path("config.yaml"),
        overrides=("rollout.environment=play.py:Guess", "rollout.max_turns=1", *overrides),
    )
    config, model, given = checked_settings(GenerateConfig, request)
    return job_identity(
        model, config, try_inputs(config, call_functions=given).identity, given
    )


@pytest.fixture
def there(workspace: Path) -> Path:
    (workspace / "play.py").write_text(ENVIRONMENT)
    return workspace


def changed(before: dict[str, object], *overrides: str) -> set[str]:
    after = identity(*overrides)
    return {name for name in before if before[name] != after[name]}


def test_it_changes_with_what_makes_other_samples_and_with_nothing_else(
    there: Path,
) -> None:
    before = identity()
    assert changed(before) == set()
    assert (
        changed(
            before,
            "rollout.samples_per_prompt=2",
            "rollout.replicas=2",
            "reward.timeout_s=3",
        )
        == set()
    )
    assert changed(before, "rollout.sampling.temperature=0.5") == {"sampling"}
    assert changed(before, "run.seed=3") == {"seed"}
    assert changed(before, "rollout.engine={quantization: fp8}") == {"engines"}
    assert changed(before, "data.max_prompt_tokens=31") == {"data"}
    assert changed(
        before, "reward.function=''", "reward.functions={'reward.py:reward': 2.0}"
    ) == {"rewards"}
    for file, part in (
        ("play.py", "environment"),
        ("reward.py", "rewards"),
        ("train.jsonl", "data"),
    ):
        with (there / file).open("a") as open_file:
            open_file.write(
                "# more\n"
                if file.endswith(".py")
                else '{"prompt": "2+2=", "solution": "4"}\n'
            )
        assert changed(before) == {part}
        before = identity()
    (there / "model" / "model.safetensors").touch()
    assert changed(before) == {"model"}


def test_it_is_the_same_in_another_process(there: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINT],
        env={"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    *_, last = done.stdout.splitlines()  # on a loaded machine lines say what is waited for
    assert json.loads(last) == json.loads(json.dumps(identity())), done.stderr
