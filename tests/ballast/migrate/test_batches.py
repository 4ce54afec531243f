"""Migrated recipes have the batch of their source, counted without the code that migrates."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import migrate
from tests.ballast.migrate.test_recipes import RECIPES
from tests.benchmarks.migrations import DIFFERENT, EQUAL, compare_batch
from tests.benchmarks.source_batches import Batch, of_mini_batch, of_trl

TRAINING = [recipe for recipe in RECIPES if recipe["command"] != "refused"]


@pytest.mark.drawn(20)
@pytest.mark.parametrize(
    "recipe", TRAINING, ids=lambda recipe: f"{recipe['system']}-{recipe['name']}"
)
def test_a_migrated_recipe_keeps_its_batch(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(recipe["file"]).write_text(recipe["text"])
    source = read_recipe([recipe["file"]])
    assert not compare_batch(source, migrate(source)).startswith(DIFFERENT)


def test_another_batch_is_seen() -> None:
    source = {
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "data.train_batch_size": 64,
    }
    migration = migrate(source)
    assert compare_batch(source, migration) == EQUAL
    migration.settings["batch.mini_batches"] = 2
    assert compare_batch(source, migration).startswith(DIFFERENT)


def test_a_mini_batch_is_part_of_a_step() -> None:
    assert of_mini_batch(32, 8, 64, epochs=2) == Batch(32, 8, Fraction(64), 8)
    trl = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_processes": 2,
    }
    assert of_trl(trl) == Batch(16, 4, Fraction(32), 2)


def test_ranks_of_a_sequence_are_not_ranks_of_the_batch_in_roll() -> None:
    source = {
        "rollout_batch_size": 16,
        "num_return_sequences_in_group": 8,
        "actor_train.training_args.per_device_train_batch_size": 1,
        "actor_train.training_args.gradient_accumulation_steps": 4,
        "actor_train.model_args.ulysses_size": 4,
        "actor_train.device_mapping": "list(range(0,32))",
    }
    migration = migrate(source)
    assert migration.settings["policy.parallel.context_parallel"] == 4
    assert migration.settings["batch.mini_batches"] == 4
    assert compare_batch(source, migration) == EQUAL
