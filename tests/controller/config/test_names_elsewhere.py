"""Another system's key is answered by its name here, as docs/migration.md has it."""

import re
from pathlib import Path

import pytest

from controller.config import Config, load
from controller.config.file import settings
from controller.config.names_elsewhere import NAMES_ELSEWHERE, name_here
from workers.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
ROWS = [line.split(" | ", 1) for line in PAGE.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        (
            "trainer.total_epochs=1",
            "trainer.total_epochs is not a setting; here it is run.steps (see docs/",
        ),
        ("actor_rollout_ref.rollout.n=8", "here it is rollout.samples_per_prompt (see"),
        ("actor_rollout_ref.actor.optim.lr=1", "here it is policy.optimizer.learning_rate (see"),
        ("critic.optim.lr=1", "here it is critic.optimizer.learning_rate (see"),
        ("trainer.logger=1", "here it is tracking (see"),
    ],
)
def test_a_key_of_another_system_is_answered_by_its_name_here(override: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        load(None, [override])


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_the_names_are_those_of_the_migration_page(name: str) -> None:
    """The setting exists, and a row of the page has both names, whole or by their last part."""
    here = NAMES_ELSEWHERE[name]
    assert any(found.key == here or found.key.startswith(f"{here}.") for found in settings(Config()))
    last, last_here = name.rpartition(".")[2], here.rpartition(".")[2]
    assert any(re.search(rf"\b{last}\b", there) and re.search(rf"\b{last_here}\b", ours) for there, ours in ROWS), name
    assert name_here(f"elsewhere.{name}") == here
