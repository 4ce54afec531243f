"""What a lost actor costs a run, decided without starting anything."""

from pathlib import Path

import pytest

from controller.config import Config
from controller.config.sections import RunConfig
from controller.engines.fleet import RestartBudget
from controller.lifecycle.session import recovering, resuming
from workers.errors import LostError, WorkerError
from workers.model.checkpoint.checkpoint_folder import Manifest, commit


class Attempts:
    """Raises what it is told to, one error an attempt, and then returns; keeps what it was called with."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.resumed: list[str] = []

    def __call__(self, config: Config, budget: RestartBudget) -> RestartBudget:
        self.resumed.append(config.run.resume)
        if self.errors:
            raise self.errors.pop(0)
        return budget


def config_for(folder: Path, **run: object) -> Config:
    settings = {"checkpoint_every": 1, "max_restarts": 2} | run
    return Config(run=RunConfig(name="run", dir=str(folder), **settings))


def write_checkpoint(folder: Path, step: int) -> None:
    path = folder / "run" / "checkpoints" / "policy" / f"step-{step}"
    unfinished = path.with_name(".unfinished")
    unfinished.mkdir(parents=True)
    commit(unfinished, path, Manifest(step, 1, {}, {}, {}))


def test_a_loss_is_made_good_by_another_attempt_that_resumes(tmp_path: Path) -> None:
    said: list[str] = []
    attempts = Attempts(LostError("policy dp=1 was lost"), LostError("reference dp=0 was lost"))
    write_checkpoint(tmp_path, 2)
    budget = recovering(attempts, config_for(tmp_path), said.append)
    assert attempts.resumed == ["never", "auto", "auto"]
    assert budget.recoveries == 2
    assert said[0] == "policy dp=1 was lost; starting all roles anew"


def test_before_its_first_checkpoint_a_run_begins_again_as_it_began(tmp_path: Path) -> None:
    for resume in ("never", "auto", "runs/other"):
        assert resuming(config_for(tmp_path, resume=resume)).run.resume == resume
    write_checkpoint(tmp_path, 1)
    assert resuming(config_for(tmp_path, resume="runs/other")).run.resume == "auto"


@pytest.mark.parametrize(
    ("run", "losses", "message"),
    [
        ({"checkpoint_every": 0}, 1, r"^lost 1; a run with run.checkpoint_every above 0 would go on\.$"),
        ({"max_restarts": 2}, 3, r"^lost 3; all of run.max_restarts=2 are used up\.$"),
    ],
)
def test_what_cannot_be_made_good_stops_the_run_with_the_cause_first(
    tmp_path: Path, run: dict[str, object], losses: int, message: str
) -> None:
    attempts = Attempts(*(LostError(f"lost {number}") for number in range(1, losses + 1)))
    with pytest.raises(LostError, match=message):
        recovering(attempts, config_for(tmp_path, **run), lambda text: None)
    assert len(attempts.resumed) == losses


def test_other_errors_are_not_tried_again(tmp_path: Path) -> None:
    attempts = Attempts(WorkerError("a mistake"))
    with pytest.raises(WorkerError, match="a mistake"):
        recovering(attempts, config_for(tmp_path), lambda text: None)
    assert len(attempts.resumed) == 1
