"""Recovery: a run that loses an actor it needs resumes from its last checkpoint, in the same process.

    attempt --LostError--> all roles end --> attempt with run.resume=auto --> repeats the steps since that checkpoint

All roles restart, because the surviving ranks cannot use a process group that lost a member. Prompts, samples and
mini-batches follow from the seed, so the repeated steps equal the lost ones.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import TypeVar

from controller.checkpoint import checkpoints_at
from controller.config import TrainingConfig
from controller.generation.fleet import RestartBudget
from workers.errors import LostError, clause

Result = TypeVar("Result")
Settings = TypeVar("Settings", bound=TrainingConfig)


def recovering(
    attempt: Callable[[Settings, RestartBudget], Result], config: Settings, log: Callable[[str], None]
) -> Result:
    """Returns `attempt(config, budget)`; after a LostError it is called again, with a config that resumes.

    Raises LostError, the cause first, where run.checkpoint_every is 0 or run.max_restarts are used up.
    """
    budget = RestartBudget(config.run.max_restarts)
    while True:
        try:
            return attempt(config, budget)
        except LostError as error:
            if not config.run.checkpoint_every:
                raise LostError(f"{clause(error)}; a run with run.checkpoint_every above 0 would go on.") from error
            if budget.left <= 0:
                raise LostError(f"{clause(error)}; all of run.max_restarts={budget.limit} are used up.") from error
            budget.recoveries += 1
            config = resuming(config)
            log(f"{clause(error)}; starting all roles anew")


def resuming(config: Settings) -> Settings:
    """The configuration to resume this run with: from its own last checkpoint or, if it has none, as it started."""
    if not checkpoints_at(config.run_folder):
        return config
    going_on = copy(config)
    going_on.run = replace(config.run, resume="auto")
    return going_on


def what_is_left(config: TrainingConfig) -> str:
    """Describes the last checkpoint and the saved models of a run that stopped."""
    checkpoints = checkpoints_at(config.run_folder)
    models = sorted(path.parent.name for path in config.run_folder.glob("model*/config.json"))
    kept = f"saved are {', '.join(models)}" if models else "no model is saved"
    if not checkpoints:
        return f"there is no checkpoint to go on from, and {kept}"
    return f"run.resume=auto goes on from {checkpoints[0]}, and {kept}"
