"""Recovery: a run that lost an actor which it cannot do without goes on from its last checkpoint, in the same process.

    attempt --LostError--> all roles end --> attempt with run.resume=auto --> the steps since that checkpoint come again

Everything is started anew, because ranks that shared a process group with the lost one cannot use it any more. Prompts,
samples and mini-batches follow from the seed, so that the repeated steps are those that were lost.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import TypeVar

from controller.checkpoint import checkpoints_at
from controller.config import TrainingConfig
from controller.rollout.fleet import RestartBudget
from workers.errors import LostError, clause

Result = TypeVar("Result")
Settings = TypeVar("Settings", bound=TrainingConfig)


def recovering(
    attempt: Callable[[Settings, RestartBudget], Result], config: Settings, log: Callable[[str], None]
) -> Result:
    """What `attempt(config, budget)` returns; it is made again after a LostError, with a config that resumes.

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
    """The configuration that goes on with this run: from its own last checkpoint or, while it has none, as it began."""
    if not checkpoints_at(config.run_folder):
        return config
    going_on = copy(config)
    going_on.run = replace(config.run, resume="auto")
    return going_on


def what_is_left(config: TrainingConfig) -> str:
    """What a run that could not go on leaves behind, in words: its last checkpoint and its saved models."""
    checkpoints = checkpoints_at(config.run_folder)
    models = sorted(path.parent.name for path in config.run_folder.glob("model*/config.json"))
    kept = f"saved are {', '.join(models)}" if models else "no model is saved"
    if not checkpoints:
        return f"there is no checkpoint to go on from, and {kept}"
    return f"run.resume=auto goes on from {checkpoints[0]}, and {kept}"
