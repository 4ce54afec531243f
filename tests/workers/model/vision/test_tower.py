"""Images change nothing of the promise: packed, shared and on several ranks, loss and gradients are those of
one sequence at a time by transformers, in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.refusals import refused
from tests.workers.model.cases import Way, way
from tests.workers.model.cpu_engine import backward, build_engine
from tests.workers.model.exact import whole_gradients
from tests.workers.model.float64 import compute_states_in_float64
from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.tiny import (
    VOCABULARY,
    compute_in_float64,
    relative_error,
    save_tiny_model,
)
from tests.workers.vision_families import EXACT, PLACEHOLDERS, pictures
from workers.batch.dataproto import DataProto, object_column
from workers.batch.metrics import results
from workers.batch.placed_images import Image
from workers.config.roles import LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from workers.errors import UnsupportedModelError
from workers.images.images import digest_of, png_of
from workers.model import compiled_layers as compiling
from workers.model.engine import TrainingEngine
from workers.model.layout import RowLayout
from workers.model.losses import Denominators, sft
from workers.model.model import load_model
from workers.model.rules.model_rules import check_model
from workers.model.sharding.parallel import full_tensor
from workers.model.vision.processor import load_placeholders

TOWERS = (
    "model.visual.",
    "model.vision",
    "model.connector.",
    "model.multi_modal_projector.",
)
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "idefics3")
WITH_STATES = "qwen3_5"
TOLERANCE = 1e-6
# Texts with I for an image, and which images. The first three share a prompt, the fourth has another image of
# its size.
SAMPLES = (
    ("count I dots: one", (0,)),
    ("count I dots: two", (0,)),
    ("count I dots: two and three", (0,)),
    ("count I dots: two", (3,)),
    ("I or I?", (1, 2)),
    ("I and I", (0, 0)),
    ("no image", ()),
)


@cache
def drawn() -> list[PIL.Image.Image]:
    first = pictures()[0]
    return [*pictures(), PIL.Image.fromarray(np.asarray(first)[::-1].copy())]


@cache
def samples(family: str, path: Path) -> DataProto:
    """The batch that engines get, its images placed."""
    placeholders, marker = load_placeholders(str(path)), PLACEHOLDERS[family]
    assert placeholders is not None
    tokenizer = AutoProcessor.from_pretrained(path).tokenizer
    rows, images = [], []
    for text, chosen in SAMPLES:
        ids = np.array(
            tokenizer(text.replace("I", marker), add_special_tokens=False)["input_ids"]
        )
        used = [
            Image(digest_of(drawn()[i]), *drawn()[i].size, png_of(drawn()[i]))
            for i in chosen
        ]
        expanded, placed = placeholders.expand(ids, used, "a test")
        # Images are never predicted.
        first = max((each.first + each.tokens for each in placed), default=1)
        rows.append(
            {
                "input_ids": torch.from_numpy(expanded),
                "loss_mask": torch.arange(len(expanded)) >= first,
            }
        )
        images.append(placed)
    batch = DataProto.from_list(rows)
    batch.objects["images"] = object_column(images)
    return batch


@cache
def reference(family: str, path: Path) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Loss, gradients, and log-probs by transformers' whole model and processor."""
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64)
    keep_float64(family, model)
    batch, found, losses = samples(family, path), [], []
    for index, (text, chosen) in enumerate(SAMPLES):
        text = text.replace("I", PLACEHOLDERS[family])
        own = {"images": [[drawn()[i] for i in chosen]]} if chosen else {}
        inputs = processor(
            text=[text], return_tensors="pt", add_special_tokens=False, **own
        )
        row = batch.row(index)
        assert inputs["input_ids"][0].equal(row["input_ids"])
        inputs = {
            name: each.double() if each.is_floating_point() else each
            for name, each in inputs.items()
        }
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(1, row["input_ids"][1:, None])[:, 0]
        found.append(
            torch.cat([log_probs.new_zeros(1), log_probs.detach()]) * row["loss_mask"]
        )
        losses.append(-log_probs[row["loss_mask"][1:]])
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    return loss.item(), gradients, found


def keep_float64(family: str, model: Any) -> None:
    if family == WITH_STATES:
        compute_states_in_float64(model)
    else:
        compute_in_float64(model)


def rows_of(dp: int, rank: int) -> list[int]:
    return list(range(len(SAMPLES)))[rank::dp][::-1]


def build(path: str, **settings: Any) -> TrainingEngine:
    optimizer = OptimizerConfig(
        learning_rate=1e-2, vision_learning_rate=settings.pop("vision_rate", 0.0)
    )
    fixed = {"compile": "never", "min_shared_tokens": 1}
    engine = build_engine(path, optimizer=optimizer, **fixed, **settings)
    if "dtype" not in settings:
        keep_float64(engine.module.model.config.model_type, engine.module.model)
    return engine


@dataclass
class Learned:
    rank: int  # of the data-parallel ones
    leads: bool
    loss: float
    log_probs: Tensor
    gradients: dict[str, Tensor]


def learn(path: str, batch: DataProto, on: Way, settings: dict[str, Any]) -> Learned:
    """Two micro-batches a rank: one of text alone, while another rank has images, or an empty one."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "BACKEND", "aot_eager")
        engine = build(path, parallel=on.parallel, **settings)
        rank = dp_rank(engine.parallel)
        mine = batch.select_idxs(rows_of(on.dp, rank))
        steps = [(0, len(mine)), (0, 0)] if rank else [(0, 1), (1, len(mine))]
        log_probs, _ = engine.log_probs(mine, steps)
        metrics = engine.forward_backward(mine, steps, sft, Denominators.of(batch))
        loss = results(metrics)["loss"]
        return Learned(
            rank, engine.parallel.leads_dp_group, loss, log_probs, whole_gradients(engine)
        )


TRAINED: dict[str, Any] = {"train_vision": True}
SHARED: dict[str, Any] = {"share_prefixes": "always"}
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": "full", "share_prefixes": "never"}
WAYS = {
    "dp 1": {"share_prefixes": "never"},
    "dp 1, shared": SHARED | TRAINED,
    "dp 1, padded": {"layout": "padded"},
    "dp 2": CHECKPOINTED | TRAINED,
    "ulysses 2": SHARED | TRAINED,
    "ring 2": {"share_prefixes": "never"},
    "ring 2, shared": SHARED | TRAINED,
    "tp 2": SHARED | TRAINED,
    "pp 2": SHARED | TRAINED,
}
OTHERS = sorted(set(EXACT) - set(FAMILIES))
CASES = [
    (family, text)
    for text in WAYS
    for family in FAMILIES
    if (family, text) != ("qwen3_vl", "pp 2")
]
CASES += [(family, "dp 1, shared") for family in OTHERS]
CASES += [(WITH_STATES, text) for text in ("dp 2", "ulysses 2", "ring 2", "tp 2", "pp 2")]


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("family", "text"), CASES)
def test_images_are_learned_as_one_sequence_at_a_time_does(
    ranks: RankPool, vision_model: Callable[[str], Path], family: str, text: str
):
    path, on = vision_model(family), way(text)
    settings = WAYS[text] | ({"share_prefixes": "auto"} if family == WITH_STATES else {})
    loss, gradients, log_probs = reference(family, path)
    if "train_vision" not in settings:
        gradients = {
            name: each for name, each in gradients.items() if not name.startswith(TOWERS)
        }
    parts = ranks.run(learn, on.ranks, str(path), samples(family, path), on, settings)
    assert sum(part.loss for part in parts if part.leads) == pytest.approx(
        loss, rel=TOLERANCE
    )
    for part in parts:
        expected = torch.cat([log_probs[row] for row in rows_of(on.dp, part.rank)])
        torch.testing.assert_close(
            part.log_probs, expected.float(), rtol=TOLERANCE, atol=TOLERANCE
        )
        assert part.gradients.keys() == gradients.keys()
        for (
            name,
            gradient,
        ) in gradients.items():  # a bias of keys has none, and noise instead
            noise = (
                float(gradient.abs().max()) < 1e-12
                and float(part.gradients[name].abs().max()) < 1e-12
            )
            assert noise or relative_error(part.gradients[name], gradient) < TOLERANCE, name


def trained_and_saved(
    path: str, batch: DataProto, folder: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    engine = build(path, **TRAINED, vision_rate=1e-3)
    before = {name: each.detach().clone() for name, each in full_weights(engine).items()}
    backward(engine, batch)
    metrics = results(engine.optimizer_step())
    engine.save_checkpoint(f"{folder}/checkpoint", step=1)
    engine.wait_for_checkpoint()
    engine.save_pretrained(f"{folder}/model")
    after = full_weights(engine)
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    return after, moved | {"learning_rate": metrics["learning_rate"]}


def full_weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {
        name: full_tensor(each.detach()).clone()
        for name, each in engine.module.model.named_parameters()
    }


def test_a_trained_tower_has_its_own_rate_and_is_saved_and_resumed(
    ranks: RankPool, vision_model: Callable[[str], Path], tmp_path: Path
):
    path = vision_model("qwen2_5_vl")
    batch = samples("qwen2_5_vl", path)
    weights, moved = ranks.run(trained_and_saved, 2, str(path), batch, str(tmp_path))[0]
    assert moved["learning_rate"] == pytest.approx(1e-2)
    # AdamW's first step is the rate.
    for part, rate in (("model.visual", 1e-3), ("model.language_model", 1e-2)):
        assert max(
            size for name, size in moved.items() if name.startswith(part)
        ) == pytest.approx(rate, rel=1e-3)
    one = build(str(path), **TRAINED, vision_rate=1e-3)
    one.load_checkpoint(tmp_path / "checkpoint")
    assert_equal(full_weights(one), weights, 0.0)
    with (
        safe_open(tmp_path / "model/model.safetensors", "pt") as saved,
        safe_open(path / "model.safetensors", "pt") as source,
    ):
        assert set(saved.keys()) == set(source.keys())
    loaded = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", dtype=torch.float64
    )
    assert_equal(dict(loaded.named_parameters()), weights, 1e-6)  # saved in float32


def assert_equal(
    found: dict[str, Any], expected: dict[str, Tensor], tolerance: float
) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(
            found[name].detach(), each, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("trained", [False, True])
def test_a_tower_computes_in_half_precision_and_a_frozen_one_is_kept_in_it(
    vision_model: Callable[[str], Path], trained: bool
):
    path = vision_model("idefics3")
    batch = samples("idefics3", path)
    engine = build(str(path), dtype="bfloat16", train_vision=trained)
    metrics = backward(engine, batch)
    assert results(metrics)["loss"] == pytest.approx(
        reference("idefics3", path)[0], rel=2e-2
    )
    for parameter in engine.module.tower:
        assert isinstance(parameter, DTensor) == trained
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16)


def test_adapters_are_of_the_text_alone(vision_model: Callable[[str], Path]):
    path = str(vision_model("llava"))  # whose tower has modules of the same names
    engine = build(path, lora=LoraConfig(rank=2))
    adapted = [
        name for name, each in engine.module.model.named_parameters() if each.requires_grad
    ]
    assert adapted and all(
        ".language_model." in name and ".lora_" in name for name in adapted
    )
    with refused("model.lora.target_modules=fc1"):
        build(path, lora=LoraConfig(rank=2, target_modules="fc1"))


def test_settings_that_do_not_suit_a_model_of_images_are_refused(
    vision_model: Callable[[str], Path],
):
    path = str(vision_model("qwen3_vl"))
    packed = load_model(ModelConfig(path=path), torch.float32, skeleton=True)
    pipeline = ParallelConfig(pipeline_parallel=2)
    with refused("policy.parallel.pipeline_parallel=2", UnsupportedModelError):
        check_model(
            packed, ModelConfig(path=path), pipeline, head="lm", cuda=False, half=False
        )


def test_text_models_are_refused_images_and_a_trained_tower(
    vision_model: Callable[[str], Path], tmp_path: Path
):
    save_tiny_model(tmp_path)
    with refused("model.train_vision=true"):
        build(str(tmp_path), **TRAINED)
    batch = samples("llava", vision_model("llava")).slice(0, 1)
    # A copy: the samples are those of all tests.
    tokens = batch.tokens | {"input_ids": batch.tokens["input_ids"] % VOCABULARY}
    with refused("takes no images", UnsupportedModelError):
        build(str(tmp_path)).log_probs(replace(batch, tokens=tokens), [(0, 1)])


def test_a_placeholder_that_was_sampled_is_a_token(vision_model: Callable[[str], Path]):
    path = vision_model("qwen2_5_vl")
    packed = load_model(ModelConfig(path=str(path)), torch.float32)
    assert packed.vision is not None
    batch = samples("qwen2_5_vl", path).slice(0, 1)
    (placed,) = batch.objects["images"][0]
    ids = batch.tokens["input_ids"].clone()
    ids[-1] = packed.vision.image_token
    layout = RowLayout(
        ModelConfig(path=str(path)), None, packed, torch.device("cpu"), torch.float32
    )
    rows = layout.lay_out(replace(batch, tokens=batch.tokens | {"input_ids": ids}))
    assert rows.image_cells is not None
    assert rows.image_cells.tolist() == list(
        range(placed.first, placed.first + placed.tokens)
    )
    # Text, after a grid of which some sides are shorter.
    assert rows.position_ids[:, 0, -1].unique().numel() == 1
    assert int(rows.position_ids[0, 0, -1]) < len(ids) - 1
