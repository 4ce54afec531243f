"""Another system's key is answered by its name here, as docs/migration.md has it."""

import re
from pathlib import Path

import pytest

from controller.config import Config, load
from controller.config.file import settings
from controller.config.names_elsewhere import NAMES_ELSEWHERE, name_here
from controller.config.offline import PreferencesConfig, SftConfig
from workers.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
KNOWN = [[found.key for found in settings(schema())] for schema in (Config, SftConfig, PreferencesConfig)]
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
    """Each setting is that of a command, and a row of the page has both names, whole or by their last part."""
    given = {name_here(f"elsewhere.{name}", known) for known in KNOWN} - {""}
    assert given == set(NAMES_ELSEWHERE[name].split())
    for here in given:
        last, last_here = rf"\b{name.rpartition('.')[2]}\b", rf"\b{here.rpartition('.')[2]}\b"
        assert any(re.search(last, there) and re.search(last_here, ours) for there, ours in ROWS), (name, here)


def test_a_name_that_only_another_command_has_is_not_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ["max_length=9"])
    assert "data.max_tokens" not in str(caught.value)
