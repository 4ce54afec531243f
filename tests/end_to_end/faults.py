"""Whole runs in this process in which something is done to them at a chosen step."""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import ray

from controller import step as parts
from controller.config import Config, load
from controller.engines.fleet import RestartBudget
from controller.fit import read_inputs, training
from controller.lifecycle.session import recovering
from controller.observability.console import Console
from controller.preflight.checks import check
from controller.run import Run
from controller.training_loop import Outcome, train

Fault = Callable[[Run], None]
SAME = (
    "reward/mean",
    "rollout/response_tokens_mean",
    "rollout/samples",
    "rollout/weight_version",
)
CLOSE = ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm")


@dataclass
class RunWithFaults:
    """`outcome`: of the attempt that came to the end. said: what the run said. failures: checkpoints that
    failed.
    """

    config: Config
    outcome: Outcome
    said: list[str] = field(default_factory=list)

    @property
    def last(self) -> dict[str, float]:
        """Metrics of the last step."""
        return self.outcome.steps[-1]


class Listening(Console):
    """A console that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)
        super().log(text)


def without_validation(settings: list[str]) -> list[str]:
    """The overrides but those that validate."""
    return [
        override
        for override in settings
        if not override.startswith(("data.validation", "validation."))
    ]


def run_with(
    overrides: list[str], faults: dict[int, Fault], *, before: str = "step"
) -> RunWithFaults:
    """A whole run; before the part `before` of step s begins, `faults[s]` happens, once."""
    config = load(None, overrides)
    check(config)
    inputs, console, left = read_inputs(config), Listening(), dict(faults)

    def attempt(config: Config, budget: RestartBudget) -> Outcome:
        with (
            training(config, inputs, console, budget) as run,
            pytest.MonkeyPatch.context() as patch,
        ):
            usual = getattr(parts, before)

            def with_fault(*arguments: object) -> object:
                left.pop(run.number, lambda _: None)(run)
                return usual(*arguments)

            patch.setattr(parts, before, with_fault)
            return train(run, parts.step)

    return RunWithFaults(config, recovering(attempt, config, console.log), console.said)


def send(number: signal.Signals, pids: Iterable[int], after_s: float = 0.0) -> None:
    """Send a signal to processes, in a while."""
    threading.Timer(after_s, lambda: [os.kill(pid, number) for pid in pids]).start()


def engine_pids(run: Run, replica: int = 0) -> list[int]:
    """The actor of a replica, and the processes of its engine."""
    return list(ray.get(run.roles.rollouts.actors[replica].pids.remote()))


def below_the_actor(run: Run) -> list[int]:
    """The processes of engine 0."""
    pids = engine_pids(run)[1:]
    assert pids, "the engine is a thread of its actor"
    return pids


def kill_actor(run: Run) -> None:
    """SIGKILL of rollout actor 0 while it generates."""
    send(signal.SIGKILL, engine_pids(run)[:1], after_s=0.3)


def kill_engine(run: Run) -> None:
    """SIGKILL of the processes of engine 0, which must have some, as it begins to generate."""
    send(signal.SIGKILL, below_the_actor(run))


def hang_engine(run: Run) -> None:
    """The processes of engine 0, which must have some, stop to answer as it begins to generate.

    Later its actor, which lives, would give a snapshot of what it had, and the other engine would draw the
    rest anew.
    """
    send(signal.SIGSTOP, below_the_actor(run))


def hang_actor(run: Run) -> None:
    """Rollout actor 0 stops to answer."""
    send(signal.SIGSTOP, engine_pids(run)[:1])


def kill_rank(role: str) -> Fault:
    """SIGKILL of the role's last rank."""
    return lambda run: send(signal.SIGKILL, [run.roles.groups[role].facts()[-1]["pid"]])


def differences(run: RunWithFaults, undisturbed: RunWithFaults) -> list[str]:
    """What a step of the run has other than the undisturbed run's: rewards exactly, losses up to rounding."""
    found = []
    steps = undisturbed.outcome.steps[-len(run.outcome.steps) :]
    first = undisturbed.outcome.last_step - len(steps) + 1
    for number, (step, usual) in enumerate(
        zip(run.outcome.steps, steps, strict=True), first
    ):
        found += [
            f"{number} {n}: {step[n]} != {usual[n]}" for n in SAME if step[n] != usual[n]
        ]
        found += [
            f"{number} {n}: {step[n]} != {usual[n]}"
            for n in CLOSE
            if n in usual and abs(step[n] - usual[n]) > 1e-5
        ]
    return found
