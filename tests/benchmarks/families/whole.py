"""A family in the form of its published checkpoint through what a run does with a model, on one CPU.

folder --train--> exact against transformers' own pass? --save--> same fields, names and values?
    |               '-> checkpoint --> another engine goes on with the same weights?
    |--adapters--> trained, merged under the base model's names?
    '--changed weights, saved--> vLLM loads them: same log-probs? --update--> again?
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from controller.algorithm.logprob_check import AtEqualWeights, beyond
from tests.benchmarks.families.engines import is_known
from tests.benchmarks.families.measuring import (
    EXPECTED,
    RUNS,
    Outcome,
    compare,
    own_answers,
    sequences,
)
from tests.benchmarks.families.published import Published, save_published, tiny_description
from tests.workers.rollout.stand_ins import Communicator
from tests.workers.rollout.test_transfers import (
    LOG_PROB_TOLERANCE,
    build_policy,
    change_all,
    differences,
    sending,
    start_replica,
)
from workers.config.roles import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from workers.errors import BallastError
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators
from workers.model.losses.supervised import sft
from workers.model.rules.model_rules import check_model
from workers.model.skeleton import build_skeleton, check_kind

PLACEMENT = "shared_memory"  # of a run on CPUs
WRITTEN = ("transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Fields of config.json that every writer sets anew."""


def build_published(family: Published, folder: Path) -> str:
    """Save the model and transformers' own answers in `folder`. Returns why it could not, or nothing.

    Where transformers does not read the configuration, the reason is what a run says.
    """
    try:
        save_published(family, folder)
        architecture = tiny_description(family)["architectures"][0]
        model_class = getattr(transformers, architecture)
        model = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        torch.save((sequences(), *own_answers(model)), folder / EXPECTED)
    except Exception as error:
        try:
            check_kind(folder, ("lm",))
        except BallastError as refusal:
            return str(refusal)
        return first_line(error)
    return ""


def train_published(folder: Path, stage: str) -> Outcome:
    """Return the outcome of one of `STAGES`, all without an engine of vLLM."""
    return STAGES[stage](folder)


def _engine(folder: Path, rank: int = 0) -> TrainingEngine:
    model = ModelConfig(path=str(folder), dtype="float32", lora=LoraConfig(rank=rank))
    return TrainingEngine(
        model, optimizer=OptimizerConfig(learning_rate=1e-2), total_steps=4, device="cpu"
    )


def _step(engine: TrainingEngine) -> None:
    batch = sequences()
    engine.forward_backward(batch, [(0, len(batch))], sft, Denominators.of(batch))
    engine.optimizer_step()


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return the weights of all files of a model."""
    return {
        name: weight
        for file in folder.glob("*.safetensors")
        for name, weight in load_file(file).items()
    }


def _saved(folder: Path) -> str:
    saved = folder / "saved"
    _engine(folder).save_pretrained(saved)
    before = json.loads((folder / "config.json").read_text())
    after = json.loads((saved / "config.json").read_text())
    lost = [
        name for name in before if name not in WRITTEN and after.get(name) != before[name]
    ]
    if lost:
        return f"config.json has another {', '.join(lost)}"
    expected = weights_in(folder)
    stored = weights_in(saved)
    if expected.keys() != stored.keys():
        return f"other names of weights, such as {min(expected.keys() ^ stored.keys())}"
    different = [
        name for name, weight in expected.items() if not torch.equal(weight, stored[name])
    ]
    return f"other values of {different[0]}" if different else ""


def _resumed(folder: Path) -> str:
    first = _engine(folder)
    _step(first)
    first.save_checkpoint(folder / "step-1", step=1)
    first.wait_for_checkpoint()
    _step(first)
    second = _engine(folder)
    second.load_checkpoint(folder / "step-1")
    _step(second)
    expected = dict(first.named_weights())
    different = [
        name
        for name, weight in second.named_weights()
        if not torch.equal(weight, expected[name])
    ]
    return f"other values of {different[0]}" if different else ""


def _adapted(folder: Path) -> str:
    names = {name for name, _ in _engine(folder).named_weights()}
    engine = _engine(folder, rank=2)
    _step(engine)
    merged = dict(engine.named_weights())
    if merged.keys() != names:
        return f"other names of weights, such as {min(merged.keys() ^ names)}"
    finite = all(bool(weight.isfinite().all()) for weight in merged.values())
    return "" if finite else "weights that are not finite"


def _allowed(folder: Path, parallel: ParallelConfig) -> str:
    settings = ModelConfig(
        path=str(folder), dtype="float32", layout="packed", forward_layout="same"
    )
    packed = build_skeleton(settings, folder, "lm", trained=True, weights=True)
    check_model(packed, settings, parallel, head="lm", cuda=False, half=False)
    return ""


def outcome_of(check: Callable[[], str]) -> Outcome:
    """Return `exact`, `wrong` for what a check says, `refused` for our errors or `crash` for others."""
    try:
        problem = check()
    except BallastError as error:
        return Outcome("refused", reason=str(error))
    except Exception as error:
        return Outcome("crash", reason=first_line(error))
    return Outcome("wrong", reason=problem) if problem else Outcome("exact", 0.0)


STAGES: dict[str, Callable[[Path], Outcome]] = {
    "trains": lambda folder: compare(folder, RUNS["packed"]),
    "saves": lambda folder: outcome_of(lambda: _saved(folder)),
    "resumes": lambda folder: outcome_of(lambda: _resumed(folder)),
    "LoRA": lambda folder: outcome_of(lambda: _adapted(folder)),
    "cp": lambda folder: outcome_of(
        lambda: _allowed(folder, ParallelConfig(context_parallel=2))
    ),
    "tp": lambda folder: outcome_of(
        lambda: _allowed(folder, ParallelConfig(tensor_parallel=2))
    ),
    "pp": lambda folder: outcome_of(
        lambda: _allowed(folder, ParallelConfig(pipeline_parallel=2))
    ),
    "ep": lambda folder: outcome_of(
        lambda: _allowed(folder, ParallelConfig(expert_parallel=2))
    ),
}
"""What a family goes through, by column of the page."""


def sample_published(folder: Path, dtype: str) -> Outcome:
    """Return what became of saved, changed weights in vLLM, and of an update. dtype: of both sides."""
    if not is_known(folder):
        return Outcome("not there", reason="vLLM has no such architecture")
    # Where vLLM runs transformers' classes, it changes how they are called, those of the trainer too.
    nn.Module.do_not_compile = True  # type: ignore[assignment]
    try:
        policy = build_policy(str(folder), dtype=dtype)
        change_all(policy)
        policy.save_pretrained(folder / "changed")
        # As the files' type rounds it.
        policy = build_policy(str(folder / "changed"), dtype=dtype)
        replica = start_replica(str(folder / "changed"), PLACEMENT, dtype)
        before = differences(policy, replica)
        change_all(policy)
        weights_dtype = getattr(torch, dtype)
        with sending(
            policy, [replica], PLACEMENT, Communicator(1), dtype=weights_dtype
        ) as send:
            send(1)
        after = differences(policy, replica)
        replica.stop()
    except BallastError as error:
        return Outcome("refused", reason=str(error))
    except Exception as error:
        return Outcome("crash", reason=first_line(error))
    return _judged(before, after, dtype)


def _judged(before: Tensor, after: Tensor, dtype: str) -> Outcome:
    largest = float(max(before.max(), after.max()))
    if largest < LOG_PROB_TOLERANCE:
        return Outcome("exact", largest)
    for equal_weights, differing in (
        (AtEqualWeights.FIRST, before),
        (AtEqualWeights.CHANGED, after),
    ):
        limit = PolicyConfig.max_mismatch
        problem = beyond(
            float(differing.mean()), float(differing.max()), limit, dtype, equal_weights
        )
        if problem:
            return Outcome("refused", float(differing.mean()), problem)
    return Outcome(
        "close", float(max(before.mean(), after.mean())), f"{dtype}, mean of all tokens"
    )


def first_line(error: Any) -> str:
    """Return a library's error as it says it: its type, and the first line with a reason.

    pydantic's first line counts errors, and its last one names a page.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    reasons = [
        line
        for line in lines
        if "pydantic.dev" not in line and "validation error" not in line
    ]
    reason = next((line for line in reasons if ":" in line or " " in line), lines[0])
    return f"{type(error).__name__}: {reason}"
