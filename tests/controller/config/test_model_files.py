"""Facts about a model that its files say, without transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.config.model_files import (
    check_whole,
    positions,
    read_model_files,
    special_tokens,
)
from tests.refusals import refused


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({}, 100),
        ({"rope_scaling": None}, 100),
        ({"rope_scaling": {"factor": 4.0}}, 400),
        ({"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 30}}, 120),
        ({"rope_parameters": {"factor": 2.0, "original_max_position_embeddings": 30}}, 100),
        ({"rope_parameters": {"rope_type": "default", "factor": None}}, 100),
        ({"max_position_embeddings": 1}, 1),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": "100"}, None),
    ],
)
def test_the_longest_sequence_counts_the_scaling_of_positions(
    scaling: dict[str, Any], longest: int | None
) -> None:
    assert positions({"max_position_embeddings": 100} | scaling) == longest


def write_model(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "ends", "has_end"),
    [
        ({"config": {}}, (), False),
        ({"config": {"eos_token_id": 0}}, (0,), True),
        (
            {"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [4, 5]}},
            (3, 4, 5),
            True,
        ),
        ({"config": {"eos_token_id": 3, "text_config": {"eos_token_id": 7}}}, (7,), True),
        ({"config": {"eos_token_id": 3, "text_config": None}}, (3,), True),
        ({"config": {}, "tokenizer_config": {"eos_token": "<e>"}}, (), True),
        ({"config": {}, "special_tokens_map": {"eos_token": "<e>"}}, (), True),
        ({"config": {}, "tokenizer_config": {"eos_token": None}}, (), False),
    ],
)
def test_end_tokens_are_those_of_all_files(
    files: dict[str, Any], ends: tuple[int, ...], has_end: bool, tmp_path: Path
) -> None:
    model = read_model_files(str(write_model(tmp_path, **files)), "model.path")
    assert (model.ends, model.end_of_sequence) == (ends, has_end)


def test_weights_tokenizer_and_chat_template_are_seen_one_by_one(tmp_path: Path) -> None:
    path = str(write_model(tmp_path, config={}))
    model = read_model_files(path, "policy.path")
    assert (model.weights, model.tokenizer, model.chat_template) == (False, False, False)
    with refused("policy.path"):
        check_whole(model, path, "policy.path")
    (tmp_path / "pytorch_model.bin").touch()
    with refused("pytorch_model.bin is a pickle"):
        check_whole(model, path, "policy.path")
    (tmp_path / "model.safetensors").touch()
    model = read_model_files(path, "policy.path")
    assert (model.weights, model.tokenizer, model.chat_template) == (True, False, False)
    with refused("no tokenizer"):
        check_whole(model, path, "policy.path")
    (tmp_path / "vocab.txt").touch()
    write_model(tmp_path, tokenizer_config={"chat_template": "{{ messages }}"})
    model = read_model_files(path, "policy.path")
    assert (model.weights, model.tokenizer, model.chat_template) == (True, True, True)
    check_whole(model, path, "policy.path")


def test_special_tokens_come_from_either_file_of_the_tokenizer(tmp_path: Path) -> None:
    assert special_tokens(tmp_path) == {}
    decoder = {
        "5": {"content": "<e>", "special": True},
        "6": {"content": "<plain>", "special": False},
    }
    write_model(tmp_path, tokenizer_config={"added_tokens_decoder": decoder})
    assert special_tokens(tmp_path) == {"<e>": 5}
    write_model(
        tmp_path, tokenizer={"added_tokens": [{"id": 9, "content": "<f>", "special": True}]}
    )
    assert special_tokens(tmp_path) == {"<f>": 9}
