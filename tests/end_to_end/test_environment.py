"""A run whose samples are episodes: real vLLM, two policy ranks, an environment that sometimes fails."""

from pathlib import Path

import pytest

from tests.end_to_end.test_whole_loop import Run, run_loop

ENVIRONMENT = '''
import os

from workers.environment import Observation


class Halves:
    """Wants two turns; the second is rewarded for its length. Dies on one problem in four."""

    def reset(self, record):
        self.turns = 0
        self.fatal = len(record["prompt"]) % 4 == 0

    def step(self, response):
        self.turns += 1
        if response and self.fatal:
            os._exit(1)
        return Observation("+1=", reward=len(response) / 16, done=self.turns == 2, parts={"turns": self.turns})
'''


@pytest.fixture(scope="module")
def finished(ray_session, settings: list[str], workspace: Path) -> Run:
    file = workspace / "halves.py"
    file.write_text(ENVIRONMENT)
    overrides = [*settings, "run.name=episodes", "run.steps=2", "rollout.max_turns=2", "rollout.max_episode_tokens=24"]
    overrides += ["reward.function=''", f"rollout.environment={file}:Halves", "policy.optimizer.learning_rate=1e-3"]
    return run_loop(overrides)


@pytest.mark.slow
def test_a_run_of_episodes_trains_on_what_was_sampled(finished: Run) -> None:
    for step in finished.outcome.steps:
        assert step["policy/rollout_mismatch_max"] < 1e-4
        assert step["rollout/samples"] == 15
        assert 1 < step["rollout/turns_mean"] <= 2
        assert step["rollout/observation_tokens_mean"] > 0
        assert "reward/turns" in step
    assert sum(step["reward/failures"] for step in finished.outcome.steps) > 0


@pytest.mark.slow
def test_the_environments_tokens_are_masked_and_recorded(finished: Run) -> None:
    batch = finished.proto.batch
    for ids, mask, sampled in zip(
        *(batch[name].unbind() for name in ("input_ids", "loss_mask", "rollout_log_probs")), strict=True
    ):
        assert (sampled[~mask] == 0).all() and (sampled[mask] < 0).all()
        assert len(ids) <= 26 + 24
    assert batch["response_tokens"].tolist() == [int(mask.sum()) for mask in batch["loss_mask"].unbind()]
    turns = finished.rollout.batch["turns"].tolist()
    of_two = [s.response for s, count in zip(finished.rollout.by_sample.values(), turns, strict=True) if count == 2]
    assert of_two and all("+1=" in response for response in of_two)
    told = [score.turns for score, count in zip(finished.rollout.by_sample.values(), turns, strict=True) if count == 2]
    assert all([list(turn) for turn in each] == [["policy"], ["environment"], ["policy"]] for each in told)
    assert all(each[1] == {"environment": "+1="} for each in told)
