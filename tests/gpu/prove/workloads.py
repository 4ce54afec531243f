"""Models of random weights, data and settings of whole runs, made on the spot.

name --> Workload.make(folder) --> folder/model, folder/train.jsonl --> settings of controller.fit
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from examples.addition import data as addition
from examples.addition import warm_start as addition_start
from examples.addition.data import write_records
from examples.agent import agent as agent_example
from examples.agent import data as agent_data
from examples.agent import warm_start as agent_start
from examples.tools import data as tools_data
from examples.tools import warm_start as tools_start
from examples.vision import data as vision_data
from examples.vision import warm_start as vision_start

EXAMPLES = Path("examples")
VOCABULARY = 151_936
SMALL = ("rollout.gpu_memory_utilization=0.2", "policy.optimizer.learning_rate=1e-3")
TEXTS = ("reward.function=examples/addition/reward.py:reward", "data.max_prompt_tokens=26")
TEXTS += ("rollout.sampling.max_new_tokens=48", "policy.max_tokens_per_micro_batch=2048")
TURNS = (
    "reward.function=examples/tools/reward.py:exact_match",
    "data.max_prompt_tokens=64",
)
TURNS += (
    "rollout.max_turns=3",
    "rollout.sampling.max_new_tokens=40",
    "policy.max_tokens_per_micro_batch=4096",
)
IMAGES = ("reward.function=examples/vision/reward.py:reward", "data.max_prompt_tokens=32")
IMAGES += ("rollout.sampling.max_new_tokens=24", "policy.max_tokens_per_micro_batch=2048")
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 32,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "head_dim": 128,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "head_dim": 128,
    },
}
HEADS = {"tiny": (4, 2), "0.6B": (16, 8), "4B": (32, 8)}


@dataclass(frozen=True)
class Workload:
    """make: writes model and data. most_mismatch: mean nats between engine and trainer. steps: on a card.

    predicted: whether the dry run's seconds are compared with the measured ones.
    """

    make: Callable[[Path, str], None]
    settings: tuple[str, ...]
    most_mismatch: float = 0.01
    steps: int = 6
    predicted: bool = False


def make_addition(folder: Path, device: str) -> None:
    """Write the quickstart's model, warm-started if the quickstart has run here, and its data."""
    trained = EXAMPLES / "addition" / "cache" / "model"
    if (trained / "config.json").exists():
        (folder / "model").symlink_to(trained.resolve())
    else:
        addition_start.create_model(folder / "model", seed=0)
    addition.write(folder / "train.jsonl", 512, seed=1, held_out=False)


def make_hybrid(folder: Path, device: str) -> None:
    """Write a Qwen3.5 with heads as vLLM's kernels take them on CPUs too."""
    tokens = addition_start.tokenizer()
    config = Qwen3_5TextConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    save(config, folder, "cpu", tokens)
    addition.write(folder / "train.jsonl", 512, seed=1, held_out=False)


def make_images(folder: Path, device: str) -> None:
    vision_start.create_model(folder / "model", seed=0)
    vision_data.write(folder / "train.jsonl", 256, seed=1)


def make_tools(folder: Path, device: str) -> None:
    tools_start.create(folder / "model", tools_start.conversation)
    tools_data.write(folder / "train.jsonl", 512, seed=1, held_out=False)


def make_agent(folder: Path, device: str) -> None:
    agent_example.DATABASE.parent.mkdir(exist_ok=True)
    agent_data.create_database(agent_example.DATABASE)
    tools_start.create(folder / "model", agent_start.conversation)
    agent_data.write(folder / "train.jsonl", 512, seed=1, held_out=False)


def make_qwen3(folder: Path, size: str, device: str) -> None:
    """Write a Qwen3 of random weights, whose prompts are words of its tokenizer, one token each."""
    vocabulary = 512 if size == "tiny" else VOCABULARY
    heads, key_value_heads = HEADS[size]
    config = Qwen3Config(
        **SIZES[size],
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    words = ["<eos>", "<pad>", "<unk>", *(f"t{number}" for number in range(3, vocabulary))]
    vocabulary_ids = {word: number for number, word in enumerate(words)}
    tokens = Tokenizer(models.WordLevel(vocabulary_ids, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    save(config, folder, device, PreTrainedTokenizerFast(tokenizer_object=tokens, **names))
    generator = random.Random(0)
    prompts = [
        " ".join(f"t{generator.randrange(3, vocabulary)}" for _ in range(120))
        for _ in range(128)
    ]
    write_records(folder / "train.jsonl", ({"prompt": prompt} for prompt in prompts))
    (folder / "reward.py").write_text(
        "def reward(response):\n    return float(sum(map(ord, response)) % 7)\n"
    )


def save(config: Any, folder: Path, device: str, tokens: PreTrainedTokenizerFast) -> None:
    """Draw weights on `device`: four billion take minutes on a CPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(
            folder / "model"
        )
    tokens.save_pretrained(folder / "model")


def measured_model(size: str, prompts: int, utilization: float) -> Workload:
    """Return a run whose phases are compared with the dry run's: 8 responses a prompt, all of 1,024 tokens.

    Random weights hardly ever end a response.
    """
    settings = (
        f"batch.prompts_per_step={prompts}",
        "rollout.samples_per_prompt=8",
        "rollout.sampling.max_new_tokens=1024",
        "data.max_prompt_tokens=128",
        "policy.max_tokens_per_micro_batch=16384",
        "model.gradient_checkpointing=full",
        f"rollout.gpu_memory_utilization={utilization}",
        "policy.optimizer.learning_rate=1e-6",
    )

    def make(folder: Path, device: str) -> None:
        make_qwen3(folder, size if device == "cuda" else "tiny", device)

    return Workload(make, settings, most_mismatch=0.05, steps=5, predicted=True)


BF16 = ("model.dtype=bfloat16",)  # as vLLM's kernels of gated delta nets on CPUs
LORA = ("model.lora.rank=8",)
TOOLS = ("rollout.tools=examples/tools/tools.py", "rollout.max_episode_tokens=80")
AGENT = (
    "rollout.agent=examples/agent/agent.py:run",
    "rollout.agent_timeout_s=60",
    "rollout.max_episode_tokens=128",
)
APART = "rollout.placement=apart"  # engines that sleep would lose the model below adapters
AHEAD = (APART, "rollout.max_staleness=1")
WORKLOADS = {
    "quickstart": Workload(make_addition, (*SMALL, *TEXTS), steps=8),
    "lora": Workload(make_addition, (*SMALL, *TEXTS, *LORA)),
    "adapters": Workload(
        make_addition, (*SMALL, *TEXTS, *LORA, "model.lora.sync=adapters", APART)
    ),
    "frozen_tower": Workload(make_images, (*SMALL, *IMAGES), most_mismatch=0.05),
    "trained_tower": Workload(
        make_images, (*SMALL, *IMAGES, "model.train_vision=true"), most_mismatch=0.05
    ),
    "hybrid": Workload(make_hybrid, (*SMALL, *TEXTS, *BF16), most_mismatch=0.05),
    "tools": Workload(make_tools, (*SMALL, *TURNS, *TOOLS), most_mismatch=0.02),
    "agent": Workload(make_agent, (*SMALL, *TURNS, *AGENT), most_mismatch=0.02),
    "apart": Workload(make_addition, (*SMALL, *TEXTS, *AHEAD)),
    "qwen3_0_6b": measured_model("0.6B", prompts=16, utilization=0.4),
    "qwen3_4b": measured_model("4B", prompts=8, utilization=0.35),
}
