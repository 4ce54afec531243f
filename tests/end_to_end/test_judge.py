"""A run whose reward is a judge's, on real vLLM: the judge has an engine of its own."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.addition.warm_start import create_model
from tests.end_to_end.test_whole_loop import run_loop
from tests.json_lines import read_lines

PARSER = """
def grade(response, source):
    if source == "unclear":
        raise ValueError("no grade")
    return {"reward": float(response), "length": len(response)}
"""


@pytest.mark.slow
def test_a_judge_grades_256_samples_and_counts_the_answers_that_cannot_be_parsed(
    ray_session: None, settings: list[str], workspace: Path, tmp_path: Path
) -> None:
    """The 8 samples of one prompt have unclear answers. All others are the judge's likeliest digit."""
    create_model(tmp_path / "judge", seed=3, deviation=0.2)
    records = read_lines(workspace / "train.jsonl")[:32]
    for number, record in enumerate(records):
        record["source"] = "unclear" if number == 5 else "clear"
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "grades.py").write_text(PARSER)
    overrides = [
        *settings,
        "run.name=judged",
        "run.steps=1",
        "data.validation=",
        "validation.prompts=0",
    ]
    overrides += [
        f"data.train={tmp_path / 'train.jsonl'}",
        "batch.prompts_per_step=32",
        "rollout.samples_per_prompt=8",
    ]
    overrides += [
        "policy.data_parallel=1",
        "policy.max_tokens_per_micro_batch=4096",
        "data.shuffle=false",
    ]
    overrides += [
        "reward.function=",
        f"reward.judge.model={tmp_path / 'judge'}",
        "reward.judge.weight=0.5",
    ]
    overrides += [
        "reward.judge.prompt='{{ prompt }}{{ response }}'",
        f"reward.judge.parser={tmp_path}/grades.py:grade",
    ]
    overrides += [
        "reward.judge.sampling.structured_outputs={regex: '[1-9]'}",
        "reward.judge.sampling.max_new_tokens=8",
    ]
    overrides += [
        "reward.judge.max_prompt_tokens=96",
        "reward.judge.min_grade=0",
        "reward.judge.max_grade=9",
    ]
    run = run_loop(overrides)
    (step,) = run.outcome.steps
    assert (step["judge/answers"], step["judge/unparsed"], step["reward/failures"]) == (
        256,
        8,
        8,
    )
    assert step["reward/judge/length"] == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "judge")
    characters = AutoTokenizer.from_pretrained(tmp_path / "judge")
    digits = characters.convert_tokens_to_ids(list("123456789"))
    for (uid, _), score in run.rollout.by_sample.items():
        prompt = records[int(uid) % 32]["prompt"]
        question = f"<prompt>\n{prompt}\n</prompt><response>\n{score.response}\n</response>"
        with torch.no_grad():
            likely = (
                model(**characters(question, return_tensors="pt"))
                .logits[0, -1, digits]
                .argmax()
                .item()
                + 1
            )
        assert score.parts["judge"] == pytest.approx(likely / 9)
        assert score.reward == pytest.approx(likely / 18)
