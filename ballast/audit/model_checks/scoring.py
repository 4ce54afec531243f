"""A model whose logits are computed in float32, one sequence at a time, with transformers alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.errors import ConfigError, one_line

ADAPTER_FILE = "adapter_config.json"


class ScoringModel:
    """A causal language model, or an adapter with its base model."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self.path = str(path)
        self.has_adapter = (Path(path) / ADAPTER_FILE).is_file()
        try:
            self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype).eval()
        except (
            OSError,
            ValueError,
            RuntimeError,
            ImportError,
            json.JSONDecodeError,
        ) as error:
            raise ConfigError(
                f"--model={path}: it cannot be loaded: {one_line(error)}. Name a folder with a model."
            ) from None
        if torch.cuda.is_available():
            self.model.cuda()

    @torch.no_grad()
    def logits(
        self, token_ids: np.ndarray, places: np.ndarray, first_position: int = 0
    ) -> torch.Tensor:
        """Return the logits that predict the tokens at `places`, float32 [places, vocabulary]."""
        device = self.model.device
        ids = torch.as_tensor(token_ids, dtype=torch.long, device=device)[None]
        positions = torch.arange(
            first_position, first_position + len(token_ids), device=device
        )[None]
        logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits[
            0
        ]
        predicting = torch.as_tensor(places - 1, device=device)
        return logits[predicting].float().cpu()

    def check_ids(self, largest: int) -> None:
        """Raise ConfigError if an id is outside the model's vocabulary."""
        size = self.model.get_input_embeddings().num_embeddings
        if largest >= size:
            raise ConfigError(
                f"--model={self.path}: its vocabulary has {size} tokens, but the step has token {largest}. "
                "Name the model of this step."
            )

    @property
    def image_token(self) -> int | None:
        return getattr(self.model.config, "image_token_id", None)

    def end_tokens(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            return set()
        return set(ends) if isinstance(ends, list) else {ends}

    def thought_tokens(self) -> tuple[int, int] | None:
        """Return the ids that begin and end a thought, if the tokenizer has them."""
        try:
            vocabulary = AutoTokenizer.from_pretrained(self.path).get_vocab()
        except (OSError, ValueError, KeyError, ImportError):
            return None
        if "<think>" in vocabulary and "</think>" in vocabulary:
            return vocabulary["<think>"], vocabulary["</think>"]
        return None

    @contextmanager
    def adapter_scaled(self, factor: float) -> Iterator[None]:
        """Multiply the adapter's part in the model, 0 to leave it out."""
        layers = [
            layer
            for layer in self.model.modules()
            if isinstance(getattr(layer, "scaling", None), dict)
        ]
        usual = [dict(layer.scaling) for layer in layers]
        for layer in layers:
            layer.scaling = {name: scale * factor for name, scale in layer.scaling.items()}
        try:
            yield
        finally:
            for layer, scaling in zip(layers, usual, strict=True):
                layer.scaling = scaling


def log_probs(
    logits: torch.Tensor, targets: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Return the log-probs of targets, float64 [P]."""
    scores = torch.log_softmax(logits / temperature, dim=-1)
    chosen = scores.gather(1, torch.as_tensor(targets, dtype=torch.long)[:, None])[:, 0]
    return chosen.double().numpy()
