"""A reward model alone says the reward: its scores are those of transformers' own forward pass."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.end_to_end.test_whole_loop import run_loop


@pytest.mark.slow
def test_rewards_are_the_models_scores(ray_session, settings: list[str], workspace: Path) -> None:
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(workspace / "model", num_labels=1)
    torch.nn.init.normal_(judge.score.weight, std=0.5)
    judge.save_pretrained(workspace / "judge")
    AutoTokenizer.from_pretrained(workspace / "model").save_pretrained(workspace / "judge")
    overrides = [*settings, "run.name=judged", "run.steps=1", "reward.function=''"]
    overrides += [f"reward.model.path={workspace / 'judge'}", "reward.model.weight=2", "reward.model.max_tokens=64"]
    run = run_loop(overrides)
    (step,) = run.outcome.steps
    assert step["reward/mean"] == pytest.approx(2 * step["reward/model"])
    assert "validation/reward" in step
    for ids, reward in zip(run.proto.batch["input_ids"].unbind(), run.rollout.batch["reward"], strict=True):
        with torch.no_grad():
            hidden = judge.base_model(input_ids=ids.long()[None]).last_hidden_state[0, -1]
            assert reward == pytest.approx(2 * judge.score(hidden).item(), rel=1e-3, abs=1e-4)
    timeline = [json.loads(line) for line in (run.folder / "timeline.jsonl").read_text().splitlines()]
    assert any("scores" in {row[0] for row in line["micro_steps"].get("reward_model dp=1", ())} for line in timeline)
