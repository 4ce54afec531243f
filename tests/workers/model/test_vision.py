"""Images change nothing of the promise: packed, shared and on several ranks, loss and gradients are those of one
sequence at a time by transformers, in float64.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.workers.model.cases import way
from tests.workers.model.exact import whole_gradients
from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.tiny import compute_in_float64, relative_error
from tests.workers.vision_families import PLACEHOLDERS, pictures
from workers.config import ModelConfig, OptimizerConfig, ParallelConfig
from workers.dataproto import DataProto, object_column
from workers.images import Image, digest_of, png_of
from workers.metrics import results
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, sft
from workers.model.processor import load_placeholders

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "idefics3")
TOLERANCE = 1e-6
# Texts with I for an image, and which images. The first three share a prompt, the fourth has another image of its size.
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
        ids = np.array(tokenizer(text.replace("I", marker), add_special_tokens=False)["input_ids"])
        used = [Image(digest_of(drawn()[i]), *drawn()[i].size, png_of(drawn()[i])) for i in chosen]
        expanded, placed = placeholders.expand(ids, used, "a test")
        first = max((each.first + each.tokens for each in placed), default=1)  # images are never predicted
        rows.append({"input_ids": torch.from_numpy(expanded), "loss_mask": torch.arange(len(expanded)) >= first})
        images.append(placed)
    batch = DataProto.from_list(rows)
    batch.objects["images"] = object_column(images)
    return batch


@cache
def reference(family: str, path: Path) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Loss, gradients, and log-probs by transformers' whole model and processor."""
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64)
    compute_in_float64(model)
    batch, found, losses = samples(family, path), [], []
    for index, (text, chosen) in enumerate(SAMPLES):
        text = text.replace("I", PLACEHOLDERS[family])
        own = {"images": [[drawn()[i] for i in chosen]]} if chosen else {}
        inputs = processor(text=[text], return_tensors="pt", add_special_tokens=False, **own)
        row = batch.row(index)
        assert inputs["input_ids"][0].equal(row["input_ids"])
        inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(1, row["input_ids"][1:, None])[:, 0]
        found.append(torch.cat([log_probs.new_zeros(1), log_probs.detach()]) * row["loss_mask"])
        losses.append(-log_probs[row["loss_mask"][1:]])
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), gradients, found


def rows_of(dp: int, rank: int) -> list[int]:
    return list(range(len(SAMPLES)))[rank::dp][::-1]


def learn(path: str, batch: DataProto, parallel: ParallelConfig, dp: int, settings: dict[str, Any]) -> Any:
    """Two micro-batches a rank, the last one empty on the first, and with two ranks only text on the second."""
    model = ModelConfig(path=path, dtype="float64", min_shared_tokens=1, compile="never", **settings)
    engine = TrainingEngine(model, optimizer=OptimizerConfig(), total_steps=9, device="cpu", parallel=parallel)
    compute_in_float64(engine.module.model)
    rank = dp_rank(engine.parallel)
    mine = batch.select_idxs(rows_of(dp, rank))
    steps = [(0, len(mine)), (0, 0)] if rank else [(1, len(mine)), (0, 1)]
    log_probs, _ = engine.log_probs(mine, steps[:1] if rank and dp == 1 else steps)
    metrics = engine.forward_backward(mine, steps, sft, Denominators.of(batch))
    names = [name for name, _ in engine.named_weights()]
    return results(metrics)["loss"], whole_gradients(engine), log_probs, engine.parallel.leads_dp_group, rank, names


TRAINED: dict[str, Any] = {"train_vision": True}
WAYS = [
    ("dp 1", {"share_prefixes": "never"}),
    ("dp 1", {"share_prefixes": "always", **TRAINED}),
    ("dp 2", {"share_prefixes": "never", "gradient_checkpointing": "full", **TRAINED}),
    ("ulysses 2", {"share_prefixes": "always", **TRAINED}),
    ("ring 2", {"share_prefixes": "never"}),
    ("tp 2", {"share_prefixes": "always", **TRAINED}),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("text", "settings"), WAYS, ids=lambda value: value if isinstance(value, str) else "")
def test_images_are_learned_as_one_sequence_at_a_time_does(
    ranks: RankPool, vision_model: Callable[[str], Path], family: str, text: str, settings: dict[str, Any]
):
    path, on = vision_model(family), way(text)
    loss, gradients, log_probs = reference(family, path)
    if "train_vision" not in settings:
        gradients = {name: each for name, each in gradients.items() if "language_model" in name or "text_model" in name}
        gradients |= {name: each for name, each in reference(family, path)[1].items() if name == "lm_head.weight"}
    parts = ranks.run(learn, on.ranks, str(path), samples(family, path), on.parallel, on.dp, settings)
    assert sum(part[0] for part in parts if part[3]) == pytest.approx(loss, rel=TOLERANCE)
    for _, found, values, _, rank, _ in parts:
        expected = torch.cat([log_probs[row] for row in rows_of(on.dp, rank)])
        torch.testing.assert_close(values, expected.float(), rtol=TOLERANCE, atol=TOLERANCE)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert relative_error(found[name], gradient) < TOLERANCE, name
