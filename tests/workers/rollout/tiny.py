"""A Qwen2 of 240 thousand parameters with tied embeddings and a tokenizer, and its log-probs by
transformers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from workers.environment import Observation

VOCABULARY = 512
EOS = 1
MAX_MODEL_TOKENS = 256
REWRITES = (  # a turn begins otherwise once it is an earlier one
    "{% for m in messages %}#{{ m['role'][:1] }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}#A{% endif %}"
)
ID = {chr(i + 31): i for i in range(2, 96)}  # a token a character, '!' to '~'


def save_model(folder: Path, seed: int = 0) -> Path:
    """Write random weights and the tokenizer as a Hugging Face folder."""
    random_model(seed).save_pretrained(folder)
    # The words are never encoded.
    characters = ID | {f"word{i}": i for i in range(96, VOCABULARY)}
    tokenizer = Tokenizer(models.BPE({"<pad>": 0, "<eos>": EOS} | characters, merges=[]))
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    )
    found.chat_template = REWRITES
    found.save_pretrained(folder)
    return folder


def random_model(seed: int) -> Qwen2ForCausalLM:
    """Weights large enough that two seeds disagree about every token."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).eval()


def log_probs(
    model: Qwen2ForCausalLM, input_ids: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """log p(token t | tokens before it), float32 [tokens]; 0 for the first."""
    ids = torch.from_numpy(input_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1] / temperature
    picked = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()]).astype(np.float32)


def largest_difference(
    row: dict[str, np.ndarray], model: Qwen2ForCausalLM, temperature: float = 1.0
) -> float:
    """Between log-probs of a row's trained tokens and the model's, in one forward pass."""
    expected = log_probs(model, row["input_ids"], temperature)
    differences = np.abs(row["rollout_log_probs"] - expected)
    return float(differences[row["loss_mask"]].max(initial=0.0))


def log_probs_behind(
    kept: Qwen2ForCausalLM,
    model: Qwen2ForCausalLM,
    input_ids: np.ndarray,
    sampled: np.ndarray,
) -> np.ndarray:
    """log p of the tokens at `sampled`, one after another, behind keys and values of another model."""
    ids, begin = torch.from_numpy(input_ids.astype(np.int64))[None], int(sampled[0])
    with torch.no_grad():
        cache = kept(ids[:, : begin - 1], use_cache=True).past_key_values
        logits = model(ids[:, begin - 1 : int(sampled[-1])], past_key_values=cache).logits[
            0
        ]
    picked = logits.log_softmax(-1).gather(1, ids[0, sampled, None])[:, 0]
    return picked.numpy().astype(np.float32)


class Echo:
    """An environment of two turns: says the first character of the first turn again, between brackets."""

    def reset(self, record: dict[str, Any]) -> str:
        if record["opening"] == "raise":
            raise KeyError("no such record")
        self.turns = 0
        return str(record["opening"])

    def step(self, response: str) -> Observation:
        self.turns += 1
        return Observation(
            f"<{response[:1]}>",
            reward=0.5,
            done=self.turns == 2,
            parts={"turn": self.turns},
        )


class Zoom:
    """An environment that answers each turn with another image, and with two at last."""

    def reset(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        self.shown, self.turns = record["shown"], 0
        if record["images"][0].size != self.shown[0].size:
            raise ValueError("the record lacks its prompt's image")
        return [
            {"role": "user", "content": [{"type": "text", "text": "and "}, self.part(0)]}
        ]

    def part(self, number: int) -> dict[str, Any]:
        return {"type": "image", "image": self.shown[number]}

    def step(self, response: str) -> Observation:
        parts = (
            [{"type": "text", "text": "closer:"}, self.part(1)],
            [self.part(2), self.part(0)],
        )
        self.turns += 1
        return Observation([{"role": "user", "content": parts[self.turns % 2]}], reward=1.0)
