"""PPO with a critic, real engines: warm-up, going on from a checkpoint, a step again.

`tests/controller/test_runs_that_compute.py` has the rest, and these rules without engines.
"""

import math
from pathlib import Path

import pytest

from controller.observability.console import Console
from controller.replay import Request, Start, prepared, start_before
from controller.replay import settings as settings_of
from controller.replayer import replay
from tests.end_to_end.test_whole_loop import Run, run_loop

pytestmark = pytest.mark.slow
SETTINGS = (
    "policy.ranks=1",  # two ranks are those of `tests/workers/test_critic.py`
    "batch.mini_batches=2",
    "algorithm.advantage=gae",
    "critic.warmup_steps=1",
    "critic.optimizer.learning_rate=1e-3",
    "policy.optimizer.learning_rate=1e-3",
    "algorithm.kl_in_reward.coefficient=0.1",
    "algorithm.kl_in_reward.target=1",
    "algorithm.kl_in_reward.horizon=100",
    "run.checkpoint_every=1",
    "run.record_samples=true",
    "data.validation=''",
    "validation.prompts=0",
)


@pytest.fixture(scope="module")
def finished(ray_session, settings: list[str]) -> Run:
    return run_loop([*settings, *SETTINGS, "run.name=ppo", "run.steps=2"])


def test_only_the_critic_learns_in_its_warmup(finished: Run) -> None:
    first, second = finished.outcome.steps
    assert "policy/loss" not in first
    assert math.isfinite(second["policy/loss"])
    assert [first["rollout/weight_version"], second["rollout/weight_version"]] == [0.0, 1.0]
    assert first["critic/grad_norm"] > 0


def test_a_recorded_step_trained_again_comes_out_the_same_and_leaves_the_run_as_it_is(finished: Run) -> None:
    """Step 2, with the adapted weight of the KL and the optimiser's state of the checkpoint of step 1."""
    request, files = Request(finished.folder, 2), states(finished.folder)
    config = settings_of(request)
    start = start_before(request, config.run.resume)
    assert start == Start(finished.folder / "checkpoints" / "policy" / "step-1", range(2, 3))
    replayed = replay(prepared(config, start), finished.folder, start.steps, Console())
    for name in ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm", "reward/kl_coefficient"):
        assert replayed[name] == pytest.approx(finished.outcome.steps[1][name], abs=1e-6), name
    assert states(finished.folder) == files


def states(folder: Path) -> dict[Path, int]:
    """The time of the last change of every file and folder, in ns."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_resumed_run_has_the_same_critic(finished: Run, settings: list[str]) -> None:
    """Step 2 again, from the checkpoint after step 1, and a torn critic is passed over together with its policy."""
    critic = finished.folder / "checkpoints" / "critic" / "step-2"
    next(critic.glob("*.safetensors")).write_bytes(b"torn")
    again = run_loop([*settings, *SETTINGS, "run.name=ppo", "run.steps=2", "run.resume=auto"])
    (step,) = again.outcome.steps
    for name in ("reward/mean", "rollout/response_tokens_mean", "rollout/weight_version"):
        assert step[name] == finished.outcome.steps[1][name]
    for name in ("critic/loss", "critic/values", "critic/explained_variance", "policy/loss", "reward/kl_coefficient"):
        assert step[name] == pytest.approx(finished.outcome.steps[1][name], abs=1e-5)
    assert Path(critic / "manifest.json").is_file()
