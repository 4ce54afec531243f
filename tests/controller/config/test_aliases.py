"""Another system's key is answered by its counterpart here, and a guess is never of another section."""

import re
from pathlib import Path

import pytest

from controller.config import Config, TrainingConfig, load_as
from controller.config.aliases import answer, counterparts
from controller.config.file import settings
from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig
from controller.config.suggestions import suggestion
from workers.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
SCHEMAS = (Config, SftConfig, PreferencesConfig, RewardTrainingConfig)
KNOWN = {schema: {found.key for found in settings(schema())} for schema in SCHEMAS}
ROWS = [
    (row, schema)
    for row in counterparts()
    for schema in SCHEMAS
    if row.here and row.is_of(KNOWN[schema])
]


def message(schema: type[TrainingConfig], key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_as(schema, None, [f"{key}=1"])
    return str(caught.value)


def test_every_key_is_answered_by_what_the_table_says() -> None:
    """All keys of all systems, in every command that has the counterpart; keys that are settings here too are
    not refused.
    """
    asked = 0
    for row, schema in ROWS:
        key = row.key.replace("*", "anything").replace("-", "_")
        if key not in KNOWN[schema]:
            asked += 1
            assert f"here it is {' and '.join(row.here)}" in answer(key, KNOWN[schema]), (
                row,
                schema,
            )
    assert asked > 300


def test_the_table_names_settings_and_values_that_load() -> None:
    loads: list[
        tuple[type[TrainingConfig], dict[str, str]]
    ] = []  # few, each with many values
    for row in counterparts():
        schema = next((schema for schema in SCHEMAS if row.is_of(KNOWN[schema])), None)
        assert schema, f"no command has {row}"
        assert row.here or row.note, row
        for key, ours in (
            item for changes in row.values.values() for item in changes.items()
        ):
            given = next(
                (
                    given
                    for of, given in loads
                    if of == schema and given.get(key, ours) == ours
                ),
                None,
            )
            if given is None:
                loads.append((schema, given := {"model.path": "m"}))
            given[key] = ours
    for schema, given in loads:
        load_as(schema, None, [f"{key}={ours}" for key, ours in given.items()])


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        (
            "actor_rollout_ref.ref.fsdp_config.param_offload",
            "here it is reference.cpu_offload",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            "here it is policy.cpu_offload",
        ),
        ("custom_reward_function.name", "here it is reward.function (`path.py:name`)"),
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps",
            "here it is policy.optimizer.warmup_steps",
        ),
        (
            "lr_warmup_steps",
            "policy.optimizer.warmup_steps, or here it is critic.optimizer.warmup_steps",
        ),
        ("val_kwargs.temperature", "here it is validation.sampling.temperature"),
        ("actor_rollout_ref.rollout.max_num_batched_tokens", "here it is rollout.engine"),
        (
            "actor_rollout_ref.actor.optim.betas",
            "here it is policy.optimizer.beta1 and policy.optimizer.beta2",
        ),
        ("policy.optimizer.lr", "policy.optimizer has name, "),
        (
            "ppo_mini_batch_size",
            "here it is batch.mini_batches (a number of mini-batches, ",
        ),
        ("use_dynamic_bsz", "it has no counterpart here (always)"),
        ("trainer.logger", "here it is tracking ("),
        (
            "balance.redeal_groups",
            "it has no counterpart here (dropped in 0.3: mini-batches are a random choice)",
        ),
        ("elsewhere.beta", "the configuration has run, "),
        ("elsewhere.learning_rate", "the configuration has run, "),
        ("critic.temperature", "critic has path, "),
        ("rollout.temprature", "did you mean rollout.sampling.temperature?"),
    ],
)
def test_an_answer_is_of_the_section_that_was_asked_for(key: str, answer: str) -> None:
    assert answer in message(Config, key)


KEYS = ["run.name", "run.steps", "policy.optimizer.learning_rate", "rollout.sampling.top_p"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("run.nam", "did you mean run.name?"),
        ("runn.steps", "did you mean run.steps?"),
        ("policy.learning_rat", "did you mean policy.optimizer.learning_rate?"),
        ("learning_rates", "did you mean policy.optimizer.learning_rate?"),
        # The section counts.
        ("elsewhere.steps", "the configuration has run, policy, rollout."),
        ("run.colour", "run has name, steps."),
        ("policy.optimizer.colour", "policy.optimizer has learning_rate."),
        ("policy.colour", "policy has optimizer."),
    ],
)
def test_a_wrong_key_gets_the_nearest_or_what_its_section_has(key: str, words: str) -> None:
    assert suggestion(key, KEYS) == words


def test_a_counterpart_that_only_another_command_has_is_not_offered() -> None:
    assert "data.max_tokens" not in message(Config, "max_length")


def keys_of_the_page() -> list[tuple[str, str]]:
    """(key, our cell) of the tables of verl, OpenRLHF and TRL in docs/migration.md."""
    found, ours_begins = [], False
    for line in PAGE.splitlines():
        theirs, _, here = line.strip("| ").partition(" | ")
        if here == "here":
            ours_begins = theirs in ("verl", "OpenRLHF", "TRL")
        # Else of parts that are no configuration.
        elif ours_begins and line.startswith("| `"):
            found += [
                (key, here)
                for key in re.findall(
                    r"`(?:--)?(\w+[._][\w.]+)[^`]*`", re.sub(r"\(.*?\)", "", theirs)
                )
            ]
    return found


def test_the_page_of_migration_says_what_the_table_says() -> None:
    """Each key of the page is answered, by a counterpart that its row names; a section is answered key by
    key.
    """
    keys = keys_of_the_page()
    assert len(keys) > 150
    for key, here in keys:
        if any(f".{key}." in f".{row.key}" for row in counterparts()):
            continue
        answers = [answer(key, KNOWN[schema]) for schema in SCHEMAS]
        names = {
            name.rpartition(".")[2]
            for text in answers
            for name in re.findall(r"[a-z_]+\.[a-z_.]+\w", text)
        }
        assert any(answers), key
        assert not names or names & set(re.findall(r"\w+", here)), (key, answers, here)
