"""Numbers and facts that follow from several settings, all of different values."""

from pathlib import Path

import pytest

from controller.config import Config
from controller.config.offline import PreferencesConfig
from controller.config.schema import load_as

BASE = ["model.path=model", "data.train=data"]


def load_settings(*overrides: str) -> Config:
    return load_as(Config, None, [*BASE, *overrides])


def test_workers_are_the_product_of_all_kinds_of_ranks() -> None:
    config = load_settings(
        "policy.data_parallel=2",
        "policy.parallel.context_parallel=3",
        "policy.parallel.tensor_parallel=5",
        "policy.parallel.pipeline_parallel=7",
        "run.dir=results",
        "run.name=third",
    )
    assert config.training_workers == 2 * 3 * 5 * 7
    assert config.run_folder == Path("results/third")


RESPONSES = ("data.max_prompt_tokens=100", "rollout.sampling.max_new_tokens=30")
VALIDATION = ("data.validation=held_out", "validation.sampling.max_new_tokens=50")
JUDGE = ("reward.judge.max_prompt_tokens=900", "reward.judge.sampling.max_new_tokens=7")


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (RESPONSES, 130),
        ((*RESPONSES, *VALIDATION), 150),
        ((*RESPONSES, VALIDATION[1]), 130),
        ((*RESPONSES, "data.validation=held_out"), 130),
        ((*RESPONSES, *JUDGE, "reward.judge.model=policy"), 907),
        ((*RESPONSES, *JUDGE, "reward.judge.model=other"), 130),
        ((*RESPONSES, "rollout.tools=tools.py", "rollout.max_turns=4"), 220),
        (
            (*RESPONSES, "rollout.tools=tools.py", "rollout.max_episode_tokens=70"),
            170,
        ),
    ],
)
def test_engines_hold_a_prompt_and_the_longest_response_or_what_a_judge_reads(
    overrides: tuple[str, ...], needed: int
) -> None:
    assert load_settings(*overrides).needed_model_tokens == needed
    limited = load_settings(*overrides, "rollout.max_model_tokens=77")
    assert (limited.needed_model_tokens, limited.max_model_tokens) == (needed, 77)


def test_the_schedule_counts_updates_after_the_critics_warm_up_unless_it_is_set() -> None:
    overrides = (
        "run.steps=10",
        "critic.warmup_steps=3",
        "batch.mini_batches=2",
        "batch.epochs=5",
    )
    assert load_settings(*overrides).total_optimizer_steps == 70
    total = "policy.optimizer.total_steps=33"
    assert load_settings(*overrides, total).total_optimizer_steps == 33


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        ((), False),
        (("algorithm.credit=turn",), True),
        (("algorithm.gamma_per=turn",), True),
        (("algorithm.advantage=gigpo",), True),
        (("algorithm.advantage=gae", "algorithm.credit=episode"), False),
    ],
)
def test_estimators_read_turns_if_one_of_three_settings_says_so(
    overrides: tuple[str, ...], reads: bool
) -> None:
    assert load_settings(*overrides).algorithm.reads_turns == reads


@pytest.mark.parametrize(
    ("name", "log_probs", "averages"),
    [
        ("dpo", "auto", False),
        ("simpo", "auto", True),
        ("dpo", "mean", True),
        ("simpo", "sum", False),
    ],
)
def test_log_probs_are_averaged_as_the_paper_does_unless_set(
    name: str, log_probs: str, averages: bool
) -> None:
    overrides = [*BASE, f"loss.name={name}", f"loss.log_probs={log_probs}"]
    assert load_as(PreferencesConfig, None, overrides).loss.averages == averages
