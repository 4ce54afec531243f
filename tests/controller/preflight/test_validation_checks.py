"""validation.keep_best names a metric that validation gives, or the command says so before
anything starts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from controller.config import load
from controller.preflight.algorithm_checks import check_keep_best, check_validation
from workers.errors import ConfigError

PARTS = "def reward(response, solution):\n    return {'reward': 0, 'exact': 1}\n"


@pytest.mark.parametrize(
    ("overrides", "offered"),
    [
        (["validation.keep_best=rewards"], "reward"),
        (["validation.keep_best=pass@4"], "reward"),
        (
            ["validation.keep_best=pass@3", "validation.samples=6"],
            "reward, pass@1, pass@2, pass@4, pass@6, maj@6",
        ),
        (["validation.keep_best=exat", "reward.function=parts.py:reward"], "reward, exact"),
    ],
)
def test_a_metric_that_validation_does_not_give_is_refused_with_those_that_it_gives(
    workspace: Path, dry_run: Callable[..., str], overrides: list[str], offered: str
) -> None:
    (workspace / "parts.py").write_text(PARTS)
    (line,) = dry_run(*overrides, code=2).splitlines()
    assert overrides[0] in line and f"give {offered}." in line.replace("gives", "give")


@pytest.mark.parametrize(
    "name", ["reward", "exact", "sums/exact", "pass@1", "pass@4", "sums/pass@6", "maj@6"]
)
def test_a_metric_that_it_may_give_is_accepted(workspace: Path, name: str) -> None:
    config = load("config.yaml", [f"validation.keep_best={name}", "validation.samples=6"])
    check_validation(config)
    check_keep_best(config, ["exact"])


def test_what_others_add_to_the_reward_is_left_to_the_run(workspace: Path) -> None:
    for adding in (
        "rollout.environment=guess.py:Guess",
        "reward.model.path=judge",
        "reward.overlong_tokens=8",
    ):
        check_keep_best(load("config.yaml", ["validation.keep_best=turns", adding]), [])
    with pytest.raises(ConfigError):
        check_keep_best(load("config.yaml", ["validation.keep_best=turns"]), [])
