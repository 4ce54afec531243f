"""A recipe that inherits is read with its parents, and a missing parent is named."""

from pathlib import Path
from typing import Any

import pytest

from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import migrate
from workers.errors import ConfigError

GROUPS = {
    "actor/fsdp.yaml": "defaults: [../optim@optim: adam, base, _self_]\nclip: 2.0\n",
    "actor/base.yaml": "clip: 1.0\nepochs: 3\n",
    "actor/megatron.yaml": "clip: 5.0\n",
    "optim/adam.yaml": "lr: 1.0e-3\nbetas: [0.9, 0.999]\n",
    "shared/loss.yaml": "# @package _global_\nloss: {kl: 0.1, clip: 0.2}\n",
    "envs.yaml": "maze: {turns: 3}\n",
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param(
            "defaults: [actor@policy.actor: fsdp, _self_]\npolicy: {actor: {epochs: 1}}\n",
            {
                "policy.actor.clip": 2.0,
                "policy.actor.epochs": 1,
                "policy.actor.optim.lr": 1e-3,
            },
            id="package, relative path, parent of a parent",
        ),
        pytest.param(
            "defaults: [_self_, actor@a: base]\na: {epochs: 1, more: 2}\n",
            {"a.epochs": 3, "a.more": 2},
            id="parents behind _self_ win",
        ),
        pytest.param(
            "defaults: [actor: base]\nactor: {clip: 7}\n",
            {"actor.clip": 7},
            id="no _self_: last",
        ),
        pytest.param(
            "defaults: [envs@_here_]\nsize: 8\n", {"maze.turns": 3, "size": 8}, id="_here_"
        ),
        pytest.param(
            "defaults: [actor/base@a.b]\nsize: 8\n",
            {"a.b.epochs": 3},
            id="path with a package",
        ),
        pytest.param(
            "defaults: [shared: loss]\nsize: 8\n",
            {"loss.kl": 0.1},
            id="package of the file",
        ),
        pytest.param(
            "defaults: [actor@a: fsdp, override actor@a: megatron]\nsize: 8\n",
            {"a.clip": 5.0},
            id="override",
        ),
        pytest.param(
            "defaults: [optional actor: none]\nsize: 8\n", {"size": 8}, id="optional"
        ),
        pytest.param("defaults: [actor@a: null]\nsize: 8\n", {"size": 8}, id="no choice"),
        pytest.param(
            "defaults: [optim@o: adam]\npeak: ${o.lr}\n",
            {"peak": 1e-3},
            id="a value of the parent is resolved",
        ),
    ],
)
def test_a_recipe_is_read_with_its_parents(
    text: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    _write(tmp_path, GROUPS | {"recipe.yaml": text})
    recipe = read_recipe([str(tmp_path / "recipe.yaml")])
    assert {key: recipe.get(key) for key in wanted} == wanted
    assert not any(key.startswith("defaults") for key in recipe)


@pytest.mark.parametrize("scheme", ["file://verl/config", "pkg://verl.config"])
def test_parents_are_looked_for_in_hydras_search_path(scheme: str, tmp_path: Path) -> None:
    recipe = f"hydra: {{searchpath: ['{scheme}']}}\ndefaults: [base, _self_]\nsize: 8\n"
    _write(tmp_path, {"verl/config/base.yaml": "lr: 3\n", "examples/recipe.yaml": recipe})
    assert read_recipe([str(tmp_path / "examples" / "recipe.yaml")])["lr"] == 3


@pytest.mark.parametrize(
    "text",
    [
        "defaults: parent.yaml\ngrpo: {num_prompts_per_step: 8}\n",
        "defaults: [parent.yaml]\ngrpo: {num_prompts_per_step: 8}\n",
        "defaults: [parent, _self_]\ndata: {train_batch_size: 8}\n",
        "defaults: [actor@a: parent]\ndata: {train_batch_size: 8}\n",
        "defaults: ['../parent@_here_']\nrollout_batch_size: 8\n",
    ],
)
def test_a_missing_parent_is_refused_by_name(text: str, tmp_path: Path) -> None:
    _write(tmp_path, {"recipe.yaml": text})
    with pytest.raises(ConfigError, match="parent"):
        read_recipe([str(tmp_path / "recipe.yaml")])


def test_the_table_stands_for_verls_own_parent(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {"recipe.yaml": "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 8}\n"},
    )
    recipe = read_recipe([str(tmp_path / "recipe.yaml")])
    assert recipe == {"data.train_batch_size": 8}
    assert "ppo_trainer" in recipe.notes[0]


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (
            "python train.py --config configs/base.yaml grpo.steps=7",
            {"grpo.steps": 7, "grpo.size": 8},
        ),
        (
            "python -m pack.age.main --config-path=inner --config-name=deep a.lr=2",
            {"a.lr": 2, "a.epochs": 3},
        ),
        ("python -m pack.age.main --config-name=usual a.lr=2", {"a.lr": 2, "a.epochs": 4}),
        ("python start.py --config_path $FOLDER --config_name near", {"grpo.steps": 5}),
        (
            "python start.py --config_path configs --config_name base",
            {"grpo.steps": 3, "grpo.size": 8},
        ),
        ("uv run rl @ rl.toml --max-steps 9", {"max_steps": 9, "seq_len": 64}),
        (
            "python train.py --config $SOME/base.yaml grpo.steps=7",
            {"grpo.steps": 7, "grpo.size": None},
        ),
    ],
)
def test_words_of_a_command_are_put_over_the_file_that_it_names(
    command: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    files = {
        "configs/base.yaml": "grpo: {steps: 3, size: 8}\n",
        "pack/age/inner/deep.yaml": "a: {lr: 1, epochs: 3}\n",
        "pack/age/config/usual.yaml": "a: {epochs: 4}\n",
        "scripts/near.yaml": "grpo: {steps: 5}\n",
        "rl.toml": "max_steps = 3\nseq_len = 64\n",
        "scripts/run.sh": f"{command}\n",
    }
    _write(tmp_path, files)
    recipe = read_recipe([str(tmp_path / "scripts" / "run.sh")])
    assert {key: recipe.get(key) for key in wanted} == wanted
    assert not any(key.startswith("config") for key in recipe) or "$" in command


def test_a_missing_file_of_a_command_is_refused_by_name(tmp_path: Path) -> None:
    _write(
        tmp_path, {"run.sh": "python train.py --config configs/none.yaml grpo.steps=7\n"}
    )
    with pytest.raises(ConfigError, match="none"):
        read_recipe([str(tmp_path / "run.sh")])


def test_values_of_verls_own_parent_are_defaults(tmp_path: Path) -> None:
    own = (
        "data: {train_batch_size: 1024, image_key: images, return_raw_chat: true}\n"
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: 256, grad_clip: 1.0, clip_ratio_c: 3.0, "
        "freeze_vision_tower: false}}\n"
    )
    changed = (
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {actor: {grad_clip: 0.5}}\n"
    )
    _write(tmp_path, {"ppo_trainer.yaml": own, "recipe.yaml": changed})
    migration = migrate(read_recipe([str(tmp_path / "recipe.yaml")]))
    assert migration.settings["policy.optimizer.max_grad_norm"] == 0.5
    assert migration.settings["batch.mini_batches"] == 4
    assert "algorithm.loss.dual_clip" in migration.defaults
    assert not {"data.image_key", "model.train_vision"} & migration.settings.keys()
    assert not migration.unknown
    assert migration.without[-1].startswith("6 keys of a parent")


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
