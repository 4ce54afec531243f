"""Checks with the model: what was planted in log-probs is named, clean ones pass."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import ballast.audit
from ballast.audit.__main__ import main
from ballast.audit.finding import Finding, Verdict
from ballast.audit.model_checks import check_with_models
from workers.errors import ConfigError

VOCABULARY = 48
END = 1
OTHER_END = 2
THINK = 3
THINK_END = 4
ROWS = 5


def make_model(folder: Path, kind: str = "qwen", seed: int = 0) -> Path:
    torch.manual_seed(seed)
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=2,
                n_positions=128,
                eos_token_id=END,
                bos_token_id=None,
                initializer_range=0.3,
            )
        )
    else:
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                bos_token_id=None,
                eos_token_id=[END, OTHER_END],
                initializer_range=0.3,
            )
        )
    path = folder / f"{kind}-{seed}"
    model.save_pretrained(path)
    words = {"<think>": THINK, "</think>": THINK_END}
    words |= {
        f"w{number}": number for number in range(VOCABULARY) if number not in words.values()
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def make_adapter(folder: Path, base: Path) -> Path:
    torch.manual_seed(9)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    path = folder / "adapter"
    model.save_pretrained(path)
    return path


@dataclass
class Step:
    """Rows of ids, and masks. score: log-probs of the tokens of a row, given another context or other settings."""

    ids: list[list[int]]
    masks: list[list[int]]
    model: Any

    def logits(self, ids: list[int], first: int = 0) -> torch.Tensor:
        positions = torch.arange(first, first + len(ids))[None]
        with torch.no_grad():
            return (
                self.model(input_ids=torch.tensor([ids]), position_ids=positions)
                .logits[0]
                .float()
            )

    def score(
        self, ids: list[int], temperature: float = 1.0, first: int = 0
    ) -> list[float]:
        """Return a log-prob for each token, 0 for the first."""
        scores = torch.log_softmax(self.logits(ids, first) / temperature, -1)
        return [
            0.0,
            *(float(scores[place - 1, ids[place]]) for place in range(1, len(ids))),
        ]


def make_step(model_path: Path) -> Step:
    """Make rows of three turns, with thoughts and end tokens."""
    generator = np.random.default_rng(4)
    ids = []
    masks = []
    for number in range(ROWS):
        words = [generator.integers(5, VOCABULARY, 4 + number).tolist() for _ in range(4)]
        first_turn = [THINK, *words[1], THINK_END, *words[2], END]
        ids.append(
            [
                *words[0],
                *first_turn,
                *words[3][:3],
                THINK,
                7,
                8,
                THINK_END,
                *words[2][::-1],
                END,
            ]
        )
        mask = [0] * len(words[0]) + [1] * len(first_turn) + [0] * 3
        masks.append(mask + [1] * (len(ids[-1]) - len(mask)))
    return Step(
        ids,
        masks,
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval(),
    )


def score_turns(step: Step, change: Callable[[list[int]], list[int]]) -> list[list[float]]:
    """Score each token in its turn, after a changed context."""
    rows = []
    for ids, mask in zip(step.ids, step.masks, strict=True):
        values = [0.0] * len(ids)
        start = None
        for place in range(1, len(ids) + 1):
            is_trained = place < len(ids) and mask[place]
            if is_trained and start is None:
                start = place
            if not is_trained and start is not None:
                context = change(ids[:start])
                scores = step.score(context + ids[start:place])
                values[start:place] = scores[len(context) :]
                start = None
        rows.append(values)
    return rows


def without_thoughts(ids: list[int]) -> list[int]:
    kept = []
    is_thought = False
    for token in ids:
        is_thought = is_thought or token == THINK
        if not is_thought:
            kept.append(token)
        is_thought = is_thought and token != THINK_END
    return kept


def score_all(step: Step, **settings: Any) -> list[list[float]]:
    return [step.score(ids, **settings) for ids in step.ids]


def shift(rows: list[list[float]], offset: int) -> list[list[float]]:
    return [np.roll(row, offset).tolist() for row in rows]


def cut(step: Step, top_p: float = 1.0, top_k: int = VOCABULARY) -> list[list[float]]:
    """Renormalise over the tokens that top_p and top_k keep. Others are not sampled, and stay."""
    rows = []
    for ids in step.ids:
        scores = torch.log_softmax(step.logits(ids), -1).numpy()
        values = [0.0]
        for place in range(1, len(ids)):
            order = np.argsort(-scores[place - 1])[:top_k]
            probabilities = np.exp(scores[place - 1][order].astype(np.float64))
            order = order[: int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1]
            total = np.log(np.exp(scores[place - 1][order].astype(np.float64)).sum())
            value = scores[place - 1][ids[place]]
            values.append(float(value - total if ids[place] in order else value))
        rows.append(values)
    return rows


def other_end(step: Step) -> list[list[float]]:
    rows = score_all(step)
    for ids, values in zip(step.ids, rows, strict=True):
        scores = torch.log_softmax(step.logits(ids), -1)
        for place in range(1, len(ids)):
            if ids[place] == END:
                values[place] = float(scores[place - 1, OTHER_END])
    return rows


def after_row_before(step: Step) -> list[list[float]]:
    rows = []
    for number, ids in enumerate(step.ids):
        before = step.ids[number - 1] if number else []
        rows.append([0.0, *step.score(before + ids)[len(before) + 1 :]])
    return rows


def after_positions(step: Step) -> list[list[float]]:
    offsets = [len(step.ids[number - 1]) if number else 0 for number in range(ROWS)]
    return [
        step.score(ids, first=offset) for ids, offset in zip(step.ids, offsets, strict=True)
    ]


def after_padding(step: Step) -> list[list[float]]:
    lengths = [mask.index(1) for mask in step.masks]
    offsets = [max(lengths) - length for length in lengths]
    return [
        step.score(ids, first=offset) for ids, offset in zip(step.ids, offsets, strict=True)
    ]


def in_bfloat16(step: Step) -> list[list[float]]:
    step.model = step.model.to(torch.bfloat16)
    return score_all(step)


def with_noise(step: Step) -> list[list[float]]:
    generator = np.random.default_rng(0)
    return [
        (np.array(row) - generator.random(len(row))).tolist() for row in score_all(step)
    ]


def without_ends(ids: list[int]) -> list[int]:
    return [token for token in ids if token != END]


PLANTED: dict[str, tuple[str, Callable[[Step], list[list[float]]], dict[str, Any]]] = {
    "temperature left out": ("temperature_left_out", score_all, {"temperature": 0.7}),
    "temperature twice": (
        "temperature_twice",
        lambda step: score_all(step, temperature=0.49),
        {"temperature": 0.7},
    ),
    "temperature inverted": (
        "temperature_inverted",
        lambda step: score_all(step, temperature=1 / 0.7),
        {"temperature": 0.7},
    ),
    "another temperature": (
        "temperature",
        lambda step: score_all(step, temperature=0.83),
        {},
    ),
    "shifted right": ("shifted_right", lambda step: shift(score_all(step), 1), {}),
    "shifted left": ("shifted_left", lambda step: shift(score_all(step), -1), {}),
    "top_p": ("top_p:0.9", lambda step: cut(step, top_p=0.9), {}),
    "a top_p that the step names": (
        "top_p:0.83",
        lambda step: cut(step, top_p=0.83),
        {"top_p": 0.83},
    ),
    "top_k": ("top_k:20", lambda step: cut(step, top_k=20), {}),
    "another end token": ("end_token", other_end, {}),
    "end tokens left out": (
        "end_token_left_out",
        lambda step: score_turns(step, without_ends),
        {},
    ),
    "thoughts left out": (
        "thoughts_left_out",
        lambda step: score_turns(step, without_thoughts),
        {},
    ),
    "row before": ("attends_to_row_before", after_row_before, {}),
    "bfloat16": ("bfloat16", in_bfloat16, {}),
    "noise": ("unexplained", with_noise, {}),
}
GPT2 = {
    "positions of the pack": ("positions_not_restarted", after_positions),
    "positions with padding": ("positions_count_padding", after_padding),
}


def write_step(
    folder: Path,
    step: Step,
    values: list[list[float]],
    precision: str = "float32",
    **algorithm: Any,
) -> Path:
    return ballast.audit.record(
        folder / "step-1",
        step=1,
        token_ids=step.ids,
        loss_mask=step.masks,
        sampler_logprobs=values,
        prompt_length=[mask.index(1) for mask in step.masks],
        algorithm=algorithm,
        end_tokens=[END],
        precision=precision,
    )


def check(path: Path, *models: Path) -> Finding:
    findings = check_with_models(ballast.audit.read_bundle(path), models)
    assert findings[1].verdict is Verdict.UNKNOWN
    assert findings[1].missing == "old_logprobs"
    return findings[0]


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named(name: str, tmp_path: Path) -> None:
    cause, plant, algorithm = PLANTED[name]
    model = make_model(tmp_path)
    step = make_step(model)
    finding = check(write_step(tmp_path, step, plant(step), **algorithm), model)
    assert finding.verdict is Verdict.FAILED
    assert finding.cause == cause, finding.text
    assert finding.row_total >= ROWS - 1


@pytest.mark.parametrize("name", GPT2)
def test_positions_are_named_where_they_matter(name: str, tmp_path: Path) -> None:
    cause, plant = GPT2[name]
    model = make_model(tmp_path, "gpt2")
    step = make_step(model)
    assert check(write_step(tmp_path, step, plant(step)), model).cause == cause


def test_weights_of_another_step_are_named(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    others = [make_model(tmp_path, seed=seed) for seed in (1, 2)]
    step = make_step(others[1])
    finding = check(write_step(tmp_path, step, score_all(step)), model, *others)
    assert finding.cause == "other_weights"
    assert str(others[1]) in finding.text
    assert check(write_step(tmp_path, step, score_all(step)), model).cause == "unexplained"


@pytest.mark.parametrize(
    ("factor", "cause"),
    [(0.0, "adapter_not_applied"), (2.0, "adapter_scaled_twice"), (1.0, "")],
)
def test_adapters_are_named(factor: float, cause: str, tmp_path: Path) -> None:
    base = make_model(tmp_path)
    adapter = make_adapter(tmp_path, base)
    step = make_step(base)
    step.model = peft.PeftModel.from_pretrained(step.model, adapter).eval()
    for layer in step.model.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling = {name: scale * factor for name, scale in layer.scaling.items()}
    finding = check(write_step(tmp_path, step, score_all(step)), adapter)
    assert finding.cause == cause, finding.text
    assert finding.verdict is (Verdict.FAILED if cause else Verdict.PASSED)


@pytest.mark.parametrize("kind", ["qwen", "gpt2"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", ""])
def test_clean_steps_pass(kind: str, precision: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, kind)
    step = make_step(model)
    values = score_all(step) if precision == "float32" else in_bfloat16(step)
    finding = check(write_step(tmp_path, step, values, precision=precision), model)
    assert finding.verdict is Verdict.PASSED, finding.text
    assert finding.count == sum(map(sum, step.masks))


def test_faults_are_named_in_bfloat16(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    step = make_step(model)
    values = shift(in_bfloat16(step), 1)
    assert (
        check(write_step(tmp_path, step, values, precision="bfloat16"), model).cause
        == "shifted_right"
    )


def test_one_row_that_differs_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    step = make_step(model)
    values = score_all(step)
    values[2] = step.score(step.ids[2], temperature=0.8)
    finding = check(write_step(tmp_path, step, values), model)
    assert (finding.cause, finding.rows) == ("temperature", (2,))


def test_the_command_takes_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path)
    step = make_step(model)
    path = write_step(tmp_path, step, score_all(step))
    assert main([str(path), "--model", str(model)]) == 0
    assert "model.sampler_logprobs" in capsys.readouterr().out
    shifted = write_step(tmp_path / "shifted", step, shift(score_all(step), 1))
    assert main([str(shifted), "--model", str(model)]) == 1
    assert main([str(path), "--model", str(tmp_path / "none")]) == 2
    assert main([str(path), str(path), "--model", str(model)]) == 2
    errors = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")
    ]
    assert [error.startswith("error: --model") for error in errors] == [True, True]


def test_a_model_of_another_vocabulary_is_an_error(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    step = make_step(model)
    step.ids[0][0] = VOCABULARY
    path = write_step(tmp_path, step, [[0.0] * len(ids) for ids in step.ids])
    with pytest.raises(ConfigError, match="vocabulary"):
        check_with_models(ballast.audit.read_bundle(path), [model])
