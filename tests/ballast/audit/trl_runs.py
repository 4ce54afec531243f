"""Tiny runs of TRL's GRPOTrainer that are recorded as bundles."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 40
PROMPT_LENGTHS = (3, 5, 2, 4)
END = 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": END} | {
        f"w{number}": number for number in range(2, VOCABULARY)
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


def make_model(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config)


def reward_even_tokens(completion_ids: list[list[int]], **others: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / 8 for ids in completion_ids]


def make_prompts() -> Dataset:
    prompts = []
    for number, length in enumerate(PROMPT_LENGTHS * 4):
        prompts.append(
            {
                "prompt": " ".join(
                    f"w{2 + (number * 7 + place) % 38}" for place in range(length)
                )
            }
        )
    return Dataset.from_list(prompts)


@torch.no_grad()
def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Sample from the trainer's model and report log-probs, as a rollout_func of TRL."""
    model = trainer.sampler_model
    was_training = model.training
    model.eval()
    prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
    completions = []
    logprobs = []
    for ids in prompt_ids:
        tokens = list(ids)
        scores: list[float] = []
        while len(scores) < trainer.max_completion_length and tokens[-1] != END:
            logits = (
                model(torch.tensor([tokens])).logits[0, -1].float() / trainer.temperature
            )
            distribution = torch.log_softmax(logits, 0)
            token = int(torch.multinomial(distribution.exp(), 1))
            tokens.append(token)
            scores.append(float(distribution[token]))
        completions.append(tokens[len(ids) :])
        logprobs.append(scores)
    model.train(was_training)
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}


def make_trainer(
    folder: Path, prepare: Callable[[Any], None] | None = None, **settings: Any
) -> Any:
    """Return a trainer that records nothing yet. prepare: breaks the trainer."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl import GRPOConfig, GRPOTrainer

    defaults = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
    }
    model_path = folder / "model"
    make_model().save_pretrained(model_path)
    trainer = GRPOTrainer(
        model=str(model_path),
        reward_funcs=reward_even_tokens,
        args=GRPOConfig(**(defaults | settings)),
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
        rollout_func=sample,
    )
    trainer.sampler_model = trainer.model
    if prepare is not None:
        prepare(trainer)
    return trainer


def record_run(
    folder: Path, prepare: Callable[[Any], None] | None = None, **settings: Any
) -> list[Path]:
    """Train for some steps and return the bundles that were recorded."""
    from ballast.audit import bundles_of
    from ballast.audit.recorders.trl import record_steps

    trainer = make_trainer(folder, prepare, **settings)
    record_steps(trainer, folder / "audit")
    trainer.train()
    return bundles_of(folder / "audit")
