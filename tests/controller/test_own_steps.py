"""Steps of a user's own: those of docs/your-own.md, from a configuration to what they update, and what is
refused.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from controller.config import load
from controller.config.python_rewards import give_step
from controller.lifecycle.user_functions import find_step
from controller.preflight.checks import check
from controller.run import Run
from controller.step import collect, learn
from tests.controller.config_workspace import refusal
from tests.controller.stand_ins.roles import LocalRun
from tests.controller.stand_ins.run import StandIns
from tests.documentation.blocks import ROOT, blocks_of
from workers.errors import ConfigError

PAGE = [
    block.body
    for block in blocks_of(ROOT / "docs" / "your-own.md")
    if "controller.step" in block.body
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["two_updates", "imitate_the_best", "critic_first"])
def test_the_steps_of_the_documentation_train(
    stand_ins: StandIns, tmp_path: Path, name: str
) -> None:
    """On the real driver and actors, in the order that the page says; run.step is read as a user's run reads
    it.
    """
    (code,) = (body for body in PAGE if f"def {name}(" in body)
    assert code.count("\n") <= 25
    (tmp_path / "loops.py").write_text(code.replace("run.number > 10", "run.number > 1"))
    more = ["algorithm.advantage=gae"] if name == "critic_first" else []
    settings = [
        f"run.dir={tmp_path}",
        "data.validation=''",
        f"run.step={tmp_path / 'loops.py'}:{name}",
        *more,
    ]
    finished = stand_ins.run([*settings, "run.steps=2", "policy.data_parallel=1"])
    first, second = finished.outcome.steps
    policy = [
        what for actor, what in finished.world.ledger.events if actor.startswith("policy")
    ]
    made = [what for what in policy if what in ("log_probs", "update")]
    if name == "two_updates":
        assert made == ["log_probs", "update"] * 4
    elif name == "imitate_the_best":
        assert made.count("update") == 4
        assert {"imitation/grad_norm", "policy/grad_norm"} <= second.keys()
    else:
        assert made.count("update") == 1
        assert [step["rollout/weight_version"] for step in (first, second)] == [0.0, 1.0]
        critic = [
            what
            for actor, what in finished.world.ledger.events
            if actor.startswith("critic")
        ]
        assert critic.count("update") == 2


def test_a_step_that_is_given_replaces_the_usual_one(
    local_run: Callable[..., LocalRun],
) -> None:
    """Its metrics are recorded with the step's; the loop around it stays."""

    def twice(run: Run) -> None:
        batch = collect(run)
        learn(run, batch)
        learn(run, batch)
        run.record.add({"mine/samples": float(len(batch))})

    found = local_run("run.steps=2", "run.checkpoint_every=1")
    outcome = found.fit(step=twice)
    assert [row["mine/samples"] for row in outcome.steps] == [4.0, 4.0]
    assert len(found.policy.updates) == 4
    assert (
        outcome.steps[-1]["rollout/weight_version"]
        == found.run.progress.weight_version
        == 4
    )
    assert len((found.folder / "lengths.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "function", ["def step():\n    pass\n", "def step(run, more):\n    pass\n"]
)
def test_a_step_of_other_parameters_is_refused(workspace: Path, function: str) -> None:
    (workspace / "loops.py").write_text(function)
    with pytest.raises(ConfigError, match=r"run\.step="):
        find_step(load("config.yaml", ["run.step=loops.py:step"]))


def test_a_step_that_is_not_there_is_refused_before_anything_is_read(
    workspace: Path,
) -> None:
    assert refusal("run.step=gone.py:step").startswith("run.step='gone.py:step'")
    assert refusal("run.step=callable:mine").startswith("run.step=callable:mine stands for")


def test_a_function_that_is_given_stands_for_itself(workspace: Path) -> None:
    config = load("config.yaml", [])
    given = give_step(config.run, lambda run: None)
    assert config.run.step == "callable:lambda"
    check(config, given)
    assert find_step(config, functions=given) == b""
