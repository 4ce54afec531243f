"""A recipe is taken for its own system or refused, however few of its keys are there."""

import random
from pathlib import Path
from typing import Any

import pytest

from ballast.migrate.commands import recognise_offline
from ballast.migrate.reading import Recipe, read_recipe
from ballast.migrate.recognition import recognise_system
from ballast.migrate.translation import ROWS
from tests.ballast.migrate.test_recipes import RECIPES
from workers.errors import ConfigError

PARTS_OF_A_RECIPE = 10


def recognise(recipe: Recipe) -> str:
    """Return the system, or "" if the recipe is refused."""
    try:
        offline = recognise_offline(recipe)
        return offline.system if offline else recognise_system(recipe, ROWS)[0]
    except ConfigError:
        return ""


@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: f"{recipe['system']}-{recipe['name']}"
)
def test_a_part_of_a_recipe_is_of_its_system_or_refused(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(recipe["file"]).write_text(recipe["text"])
    source = read_recipe([recipe["file"]])
    draw = random.Random(recipe["name"])
    keys = list(source)
    for program in (source.program, ""):
        for _ in range(PARTS_OF_A_RECIPE):
            part = draw.sample(keys, draw.randint(1, min(4, len(keys))))
            values = {key: source[key] for key in part}
            assert recognise(Recipe(values, program)) in ("", recipe["system"]), values


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (
            "python -m openrlhf.cli.serve_rm --reward.model_name_or_path m --port 5000 --ds.param_dtype bf16",
            "a reward model's server of OpenRLHF",
        ),
        (
            "python -m openrlhf.cli.lora_combiner --model_path m --output_path o",
            "a tool of OpenRLHF",
        ),
        (
            "python -m verl.trainer.main_generation_server trainer.nnodes=1 data.train_files=a.parquet",
            "a generation server of verl",
        ),
    ],
)
def test_a_command_that_trains_nothing_is_refused_by_its_name(
    source: str, kind: str
) -> None:
    with pytest.raises(ConfigError, match=kind):
        recognise_offline(read_recipe([source]))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_steps": 5, "data.fake.batch_size": 2, "model.seq_len": 1024}, "random"),
        ({"model": "m", "eval.source": [{"name": "swe"}]}, "an evaluation"),
        ({"vllm.model": "m", "deployment.type": "disaggregated"}, "an inference server"),
        ({"max_steps": 5}, "it may be .*TRL"),
        ({"model": "m", "port": 5000}, "it may be"),
        ({"tools": [{"class_name": "Search"}]}, "it may be TRL"),
        (
            {"tensor-parallel-size": 8, "dtype": "auto", "seed": 1, "max-model-len": 9},
            "it may be TRL",
        ),
        (
            {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "FSDP",
                "num_processes": 8,
                "use_cpu": False,
            },
            "a launcher's configuration of accelerate",
        ),
        (
            {f"shape_{index}": index for index in range(20)} | {"moe-aux-loss-coeff": 0},
            "it may be slime",
        ),
    ],
)
def test_a_file_without_a_recipe_is_refused(values: dict[str, Any], problem: str) -> None:
    recipe = Recipe(values)
    with pytest.raises(ConfigError, match=problem):
        assert recognise_offline(recipe) is None
        recognise_system(recipe, ROWS)
