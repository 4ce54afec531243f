"""The tiny models see: transformers loads what is written, and an image changes what the model says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.workers.vision_families import BUILDERS, PLACEHOLDERS, pictures


@pytest.mark.parametrize("family", BUILDERS)
def test_models_see_images(vision_model: Callable[[str], Path], family: str) -> None:
    path = vision_model(family)
    processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    model = AutoModelForImageTextToText.from_pretrained(path, local_files_only=True).eval()
    parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True
    )
    assert PLACEHOLDERS[family] in prompt
    found = []
    for picture in (pictures()[2], pictures()[2].rotate(90)):
        inputs = processor(text=[prompt], images=[[picture]], return_tensors="pt")
        with torch.no_grad():
            found.append(model(**inputs).logits[0, -1].log_softmax(-1))
    assert len(processor.tokenizer) < 320 and inputs["input_ids"].shape[1] > len(
        "How many?"
    )
    assert 0.05 < float((found[0] - found[1]).abs().max()) < 100
