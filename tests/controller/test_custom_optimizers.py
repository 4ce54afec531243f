"""Optimisers and schedules of one's own are tried before a run, as a rank would use them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.controller.config_workspace import check_everything, refusal
from tests.refusals import refused
from workers.config.roles import OptimizerConfig
from workers.trials import try_optimizer

PAGE = """
import torch
def adagrad(named_parameters, config):
    return torch.optim.Adagrad([parameter for _, parameter in named_parameters], lr=config.learning_rate)
def halves(step, total_steps):
    return 0.5 if step < total_steps // 2 else -0.5
"""


def test_a_configurations_functions_are_tried(workspace: Path) -> None:
    (workspace / "own.py").write_text(PAGE)
    own = ("policy.optimizer.name=custom", "policy.optimizer.function=own.py:adagrad")
    check_everything(*own)
    halves = "policy.optimizer.schedule_function=own.py:halves"
    assert refusal(*own, "policy.optimizer.schedule=custom", halves).startswith(
        "policy.optimizer.schedule_function="
    )


class Signs(torch.optim.Optimizer):
    """Update by the sign of the gradient, and break one rule."""

    broken = ""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * each.grad.sign())
                self._break(each, self.state[each])

    def _break(self, parameter: Any, state: dict[str, Any]) -> None:
        if self.broken == "mixes":
            parameter.add_(torch.zeros(parameter.shape))
        elif self.broken == "counts":
            state["step"] = state.get("step", 0) + 1
        elif self.broken == "parts":
            state["average"] = torch.zeros_like(parameter.to_local())


def optimizer(broken: str) -> Callable[..., Any]:
    def make(named: list[tuple[str, torch.nn.Parameter]], config: OptimizerConfig) -> Any:
        found = Signs([each for _, each in named], {"lr": config.learning_rate})
        found.broken = broken
        return "no optimiser" if broken == "returns" else found

    return make


BROKEN = ("returns", "mixes", "counts", "parts")
sound = optimizer("")
returns, mixes, counts, parts = map(optimizer, BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_an_optimizer_that_breaks_a_rule_is_refused(name: str) -> None:
    key, place, like_it = (
        "critic.optimizer.function",
        f"{__name__}:{name}",
        f"{__name__}:sound",
    )
    try_optimizer(key, like_it, OptimizerConfig(name="custom", function=like_it), 3)
    with refused(key):
        try_optimizer(key, place, OptimizerConfig(name="custom", function=place), 3)
