"""A migrated recipe for given sequences passes its command's dry run, with a small model and records of ours.

What depends on a cluster is set back to one process on a CPU. All other settings are the recipe's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import Migration, migrate
from tests.ballast.migrate.test_recipes import RECIPES
from tests.workers.model.tiny import save_tiny_model
from tests.workers.vision_families import byte_tokenizer

COMMANDS = ("controller.sft", "controller.preferences", "controller.reward_model")
OFFLINE = [recipe for recipe in RECIPES if recipe["command"] in COMMANDS]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
PROMPT = "2+3"
RESPONSE = "5"
REJECTED = "6"
LONGEST = 1 << 17


def write_model(folder: Path, family: str) -> str:
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    sizes = {"max_position_embeddings": LONGEST, "vocab_size": len(tokenizer)}
    path = save_tiny_model(folder, family, **sizes)
    tokenizer.save_pretrained(path)
    return path


def say(*texts: str) -> list[dict[str, str]]:
    """Return a user's text and the answer."""
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
    ]


def make_record(migration: Migration) -> dict[str, Any]:
    """Return a record of the columns that the settings read."""
    settings = {key: setting.default for key, setting in migration.command.known.items()}
    settings |= migration.settings
    prompt_key = settings["data.prompt_key"]
    if migration.command.module == "controller.sft":
        return {
            settings["data.messages_key"]: say(PROMPT, RESPONSE),
            prompt_key: PROMPT,
            settings["data.response_key"]: RESPONSE,
        }
    answers = {
        settings["data.chosen_key"]: RESPONSE,
        settings["data.rejected_key"]: REJECTED,
    }
    if prompt_key:
        return {prompt_key: PROMPT, **answers}
    return {key: say(PROMPT, answer) for key, answer in answers.items()}


def local_settings(migration: Migration, model: str, data: str) -> dict[str, Any]:
    """Return what one process on a CPU needs in place of a cluster and of the source's data."""
    local: dict[str, Any] = {
        key: 1
        for key in migration.settings
        if key.startswith("policy.parallel.") or key == "policy.data_parallel"
    }
    local |= {"resources.device": "cpu", "model.path": model, "data.train": data}
    tokens = migration.settings.get("policy.max_tokens_per_micro_batch")
    if tokens:  # of a rank, which has a part of each sequence there
        sharing = migration.settings.get("policy.parallel.context_parallel", 1)
        local["policy.max_tokens_per_micro_batch"] = tokens * sharing
    if migration.settings.get("data.validation"):
        local["data.validation"] = data
    return local


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OFFLINE, ids=lambda recipe: recipe["name"])
def test_a_migrated_recipe_passes_a_dry_run(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only here do settings of recipes meet a model and records in the command that trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    Path(recipe["file"]).write_text(recipe["text"])
    migration = migrate(read_recipe([recipe["file"]]))
    Path("migrated.yaml").write_text(migration.yaml)
    Path("train.jsonl").write_text(f"{json.dumps(make_record(migration))}\n" * 600)
    has_experts = "mixtral" in recipe["name"]
    model = write_model(tmp_path / "model", "mixtral" if has_experts else "qwen2")
    local = local_settings(migration, model, "train.jsonl")
    command = [sys.executable, "-m", migration.command.module, "--config", "migrated.yaml"]
    command += ["--dry-run", "--json", *(f"{key}={value}" for key, value in local.items())]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    plan = json.loads(run.stdout)
    assert (plan["exit_code"], plan["errors"]) == (0, [])
