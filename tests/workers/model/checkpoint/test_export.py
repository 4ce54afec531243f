"""A model is written as it was read: names, types and values, whatever ranks and files share the work."""

import json
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from tests.refusals import refused
from tests.workers.model.cpu_engine import assert_same, build_engine
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import files_beside, save_tiny_model
from workers.config.roles import LoraConfig
from workers.errors import OutputError
from workers.model.checkpoint.export import INDEX, _describe_as_plain, stored_dtype


def save_as(path: Path, family: str, dtype: torch.dtype, **overrides: object) -> str:
    save_tiny_model(path, family, **overrides)
    AutoModelForCausalLM.from_pretrained(path, dtype=dtype).save_pretrained(path)
    return str(path)


build = partial(build_engine, dtype="float32")


def export(model: str, path: str, file_bytes: int, parallel: dict[str, int]) -> None:
    build(model, **parallel).save_pretrained(path, file_bytes)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for file in folder.glob("*.safetensors")
        for name, weight in load_file(file).items()
    }


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("family", "dtype", "tied", "ranks_and_parallel", "file_bytes"),
    [
        ("qwen2", torch.bfloat16, True, (1, {}), 10**9),
        ("mixtral", torch.bfloat16, False, (2, {}), 10_000),
        ("gpt_oss", torch.float32, True, (2, {}), 20_000),
        (
            "qwen3",
            torch.bfloat16,
            False,
            (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
            10_000,
        ),
        (
            "llama",
            torch.bfloat16,
            False,
            (4, {"context_parallel": 2, "replicate": 2}),
            4_000,
        ),
        ("olmoe", torch.bfloat16, False, (4, {"expert_parallel": 2}), 10_000),
        (
            "qwen3_moe",
            torch.bfloat16,
            False,
            (4, {"expert_parallel": 2, "tensor_parallel": 2}),
            10_000,
        ),
    ],
    ids=[
        "one file",
        "experts",
        "tied",
        "stages",
        "copies",
        "shared experts",
        "shared experts and layers",
    ],
)
def test_what_is_written_is_what_was_read(
    tmp_path, ranks: RankPool, family, dtype, tied, ranks_and_parallel, file_bytes
):
    source, target = tmp_path / "source", tmp_path / "target"
    model = save_as(source, family, dtype, tie_word_embeddings=tied)
    count, parallel = ranks_and_parallel
    ranks.run(export, count, model, str(target), file_bytes, parallel)
    expected, found = tensors_of(source), tensors_of(target)
    assert_same(found, expected)
    files = sorted(file.name for file in target.glob("*.safetensors"))
    if count == 1:
        assert files == ["model.safetensors"]
        assert not (target / INDEX).exists()
    else:
        assert len(files) > count, "some ranks have nothing to write"
        index = json.loads((target / INDEX).read_text())
        assert set(index["weight_map"].values()) == set(files)
        assert index["metadata"]["total_size"] == sum(
            weight.nbytes for weight in found.values()
        )
    assert len({file.stat().st_mode for file in target.iterdir()}) == 1, (
        "others can read weights as they can config.json"
    )
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (source, target)
    )
    assert after.dtype == dtype
    assert type(after) is type(before)
    assert_same(after.state_dict(), before.state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


def left_of_each(model: str) -> list[int]:
    """How many whole weights given out earlier are still there whenever another is."""
    left, seen = [], []
    for _, weight in build(model).named_weights(torch.float32, keeper=0):
        left.append(sum(earlier() is not None for earlier in seen))
        seen.append(weakref.ref(weight))
    return left


def test_weights_given_out_are_freed_one_conversion_at_a_time(tmp_path, ranks: RankPool):
    left, elsewhere = ranks.run(left_of_each, 2, save_as(tmp_path, "llama", torch.float32))
    assert len(left) > 5 and max(left) <= 1, "the one that the caller has in its hand"
    assert elsewhere == []


def test_an_export_in_two_files_has_an_index_and_is_replaced_by_the_next(tmp_path):
    model = save_as(tmp_path / "source", "llama", torch.float32)
    engine = build(model)
    target = tmp_path / "target"
    total = sum(weight.nbytes for weight in tensors_of(tmp_path / "source").values())
    engine.save_pretrained(target, file_bytes=int(total * 0.7))
    assert len(list(target.glob("*.safetensors"))) == 2
    index = json.loads((target / INDEX).read_text())
    assert set(index["weight_map"]) == set(tensors_of(target))
    with torch.no_grad():
        next(iter(engine.module.parameters())).mul_(2)
    engine.save_pretrained(target)
    assert [file.name for file in target.glob("*.safetensors*")] == ["model.safetensors"]
    assert (target / "tokenizer.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}
    (tmp_path / "file").write_text("in the way")
    with refused("file/target", OutputError):
        engine.save_pretrained(tmp_path / "file" / "target")


def export_with_a_full_disk(model: str, path: str) -> str:
    """Rank 1 cannot write its file."""
    full = Mock(side_effect=SafetensorError("No space left on device"))
    writer = "workers.model.checkpoint.export.write_weights"
    engine = build(model)
    failing = patch(writer, full) if torch.distributed.get_rank() == 1 else nullcontext()
    with failing, pytest.raises(OutputError) as raised:
        engine.save_pretrained(path, file_bytes=10_000)
    return str(raised.value)


def test_a_rank_that_cannot_write_stops_all_and_the_export_before_stays(
    tmp_path, ranks: RankPool
):
    model = save_as(tmp_path / "source", "llama", torch.float32)
    ranks.run(export, 1, model, str(tmp_path / "target"), 10**9, {})
    before = tensors_of(tmp_path / "target")
    for said in ranks.run(export_with_a_full_disk, 2, model, str(tmp_path / "target")):
        assert "rank 1: No space left on device" in said
    assert_same(tensors_of(tmp_path / "target"), before)
    assert not list(tmp_path.glob("*.unfinished")), "a half-written folder was left"


LEFT_OUT = (".env", "training_args.bin", "model.gguf", "pytorch_model.bin.index.json")


def source_with_files_beside(folder: Path, head: str) -> str:
    """A model whose generation config transformers reads and refuses to write, with files that nobody here
    knows.
    """
    save_as(folder, "qwen2", torch.float32)
    if head == "reward model":
        AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1
        ).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text()) | {"a_key_of_theirs": [1, 2]}
    (folder / "config.json").write_text(json.dumps(content, indent=4))
    generation = {
        "eos_token_id": [4, 2],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "_from_model_config": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=4))
    (folder / "additional_chat_templates").mkdir()
    for name in (
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "LICENSE",
        "vocab.json",
        "notes",
    ):
        (folder / name).write_bytes(f"{name} \u20ac".encode())
    for name in LEFT_OUT:
        (folder / name).write_text("neither a hidden file nor weights of another format")
    return str(folder)


def save_beside(
    model: str, path: str, head: str, lora: int, parallel: dict[str, int], checkpoint: str
) -> None:
    """As a run does: train, save, and from a checkpoint in another process."""
    engine = build(
        model,
        lora=LoraConfig(rank=lora),
        head="lm" if head == "lm" else "value",
        **parallel,
    )
    if Path(checkpoint).exists():
        engine.load_checkpoint(checkpoint)
    else:
        engine.save_checkpoint(checkpoint, step=1)
        engine.wait_for_checkpoint()
    engine.save_pretrained(path)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("head", "lora", "count", "parallel"),
    [
        ("lm", 0, 1, {}),
        ("lm", 0, 2, {"tensor_parallel": 2}),
        ("lm", 0, 2, {"pipeline_parallel": 2}),
        ("lm", 2, 2, {}),
        ("critic", 0, 2, {}),
        ("reward model", 0, 1, {}),
    ],
    ids=["1 rank", "tp", "pp", "adapters", "critic", "reward model"],
)
def test_files_beside_the_weights_are_the_sources(
    tmp_path, ranks: RankPool, head, lora, count, parallel
):
    source = Path(source_with_files_beside(tmp_path / "source", head))
    for name in ("target", "resumed"):
        folder = tmp_path / name
        ranks.run(
            save_beside,
            count,
            str(source),
            str(folder),
            head,
            lora,
            parallel,
            str(tmp_path / "step-1"),
        )
        expected, found = files_beside(source), files_beside(folder)
        if head == "critic":
            before, after = (
                json.loads(files.pop("config.json")) for files in (expected, found)
            )
            labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
            assert after == before | labels | {
                "architectures": ["Qwen2ForSequenceClassification"]
            }
        assert found == expected
        assert not [path for path in folder.rglob("*") if path.name in LEFT_OUT]
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [4, 2]


def test_the_template_that_replaced_the_sources_is_saved_instead(tmp_path, ranks: RankPool):
    source, template = (
        source_with_files_beside(tmp_path / "source", "lm"),
        tmp_path / "mine.jinja",
    )
    template.write_text("{{ messages }}")
    settings = {"chat_template": str(template)}
    ranks.run(
        save_beside,
        1,
        source,
        str(tmp_path / "target"),
        "lm",
        0,
        settings,
        str(tmp_path / "step-1"),
    )
    expected = files_beside(Path(source)) | {"chat_template.jinja": b"{{ messages }}"}
    del expected["additional_chat_templates/tools.jinja"]
    assert files_beside(tmp_path / "target") == expected


@pytest.mark.parametrize(
    ("whole", "text", "expected"),
    [
        ("bfloat16", None, torch.bfloat16),
        (None, "float16", torch.float16),
        ("bfloat16", "float16", torch.bfloat16),
        (None, None, torch.float64),
    ],
)
def test_the_dtype_of_a_model_is_its_own_or_its_decoders(tmp_path, whole, text, expected):
    description = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    if whole:
        description["dtype"] = whole
    if text:
        description["text_config"]["dtype"] = text
    (tmp_path / "config.json").write_text(json.dumps(description))
    assert stored_dtype(str(tmp_path), torch.float64) == expected


@pytest.mark.parametrize("places", [(), ("whole",), ("text",), ("whole", "text")])
def test_a_config_of_plain_weights_describes_no_quantization(tmp_path, places):
    file = tmp_path / "config.json"
    plain = {"model_type": "gemma3", "text_config": {"hidden_size": 8}}
    description = json.loads(json.dumps(plain))
    if "whole" in places:
        description["quantization_config"] = {"quant_method": "fp8"}
    if "text" in places:
        description["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    file.write_text(json.dumps(description))
    before = file.read_bytes()
    _describe_as_plain(file)
    assert json.loads(file.read_text()) == plain
    assert places or file.read_bytes() == before
