"""A saved model has a card with what it was trained from, on and with; a card of its source stays."""

import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from ballast.doctor.cluster_checks import PACKAGES, requirements
from controller.config import Config, TrainingConfig, load_as
from controller.config.offline import PreferencesConfig, SftConfig
from controller.lifecycle.model_card import write_card


@pytest.mark.parametrize("schema", [Config, SftConfig, PreferencesConfig])
def test_a_card_names_base_model_data_and_settings(
    schema: type[TrainingConfig], tmp_path: Path
) -> None:
    settings = [
        "run.name=mine",
        "model.path=Qwen/Qwen3-0.6B",
        "data.train=data/math.jsonl",
        "run.seed=3",
    ]
    # The card of an earlier stage, copied with the model's files, is replaced.
    for name in ("earlier", "mine"):
        write_card(load_as(schema, None, [*settings, f"run.name={name}"]), tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.pipeline_tag) == (
        "Qwen/Qwen3-0.6B",
        "text-generation",
    )
    assert (
        "# mine\n" in card.text
        and "data/math.jsonl" in card.text
        and "transformers 5." in card.text
    )
    (block,) = re.findall(r"```yaml\n(.*?)```", card.text, re.S)
    changed = yaml.safe_load(block)
    assert (changed["run"], changed["data"]) == (
        {"name": "mine", "seed": 3},
        {"train": "data/math.jsonl"},
    )


@pytest.mark.parametrize(
    ("base_dtype", "rounded"), [("nf4", True), ("int8", True), ("bfloat16", False)]
)
def test_a_card_names_the_base_model_that_adapters_fit(
    base_dtype: str, rounded: bool, tmp_path: Path
) -> None:
    settings = ["model.path=Qwen/Qwen3-0.6B", "run.name=mine", "model.lora.rank=8"]
    write_card(
        load_as(Config, None, [*settings, f"model.base_dtype={base_dtype}"]), tmp_path
    )
    text = ModelCard.load(tmp_path / "README.md").text
    assert (f"rounded to {base_dtype}" in text) == rounded
    assert ("not Qwen/Qwen3-0.6B" in text) == rounded


def test_packages_that_are_on_the_path_alone_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the working_dir of `ray job submit`."""
    for module in ("controller.lifecycle.model_card", "ballast.doctor.cluster_checks"):
        monkeypatch.setattr(f"{module}.distribution", str)
    write_card(
        load_as(Config, None, ["model.path=Qwen/Qwen3-0.6B", "run.name=mine"]), tmp_path
    )
    text = ModelCard.load(tmp_path / "README.md").text
    assert "transformers 5." in text and "ballast-rl" not in text
    assert [line.split(">")[0].split("=")[0] for line in requirements(on_gpus=True)] == [
        *PACKAGES,
        "vllm",
    ]


def test_a_card_of_the_source_stays_and_a_folder_is_no_base_model(tmp_path: Path) -> None:
    config = load_as(Config, None, [f"model.path={tmp_path}", "run.name=mine"])
    write_card(config, tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.base_model is None
    (tmp_path / "README.md").write_bytes(b"# The source\xff\n")
    write_card(config, tmp_path)
    assert (tmp_path / "README.md").read_bytes() == b"# The source\xff\n"
