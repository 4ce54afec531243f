"""A folder in which the documentation's commands can be dry-run: all files that they name, small."""

import json
import shutil
from pathlib import Path

from tests.controller.config_workspace import write_model, write_workspace
from tests.controller.qwen import write_hub
from tests.documentation.blocks import ROOT, blocks_of

LOSS = """\
from workers.model.losses import per_sequence_loss, policy_loss


@policy_loss("mine", aggregation="token_mean")
def mine(predictions, config):
    return -predictions["advantages"] * predictions.log_probs, {}


@policy_loss("small_states", aggregation="token_mean")
def small_states(predictions, config):
    return -predictions["advantages"] * predictions.log_probs + predictions.hidden.mean(-1), {}


@policy_loss("by_source", aggregation="token_mean")
@per_sequence_loss
def by_source(sequence, config):
    return -sequence["advantages"] * sequence.log_probs, {}
"""
RECORD = {"prompt": "1+1=", "answer": "2", "solution": "2", "source": "easy"}
GIVEN = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}


def write_documentation_workspace(folder: Path) -> None:
    """The repository's examples and recipes, small models, data, `mine.yaml`, and the
    quickstart's own files.
    """
    write_workspace(folder)
    (folder / "train.jsonl").write_text(json.dumps(RECORD) + "\n")
    write_hub(folder / "hub")
    shutil.copytree(
        ROOT / "examples",
        folder / "examples",
        ignore=shutil.ignore_patterns("cache", "__pycache__"),
    )
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copy(ROOT / "configs" / "grpo.yaml", folder / "mine.yaml")
    for model in (
        "model",
        "models/policy",
        "models/teacher",
        "models/judge",
        "examples/addition/cache/model",
        "examples/addition/cache/random",
    ):
        (folder / model).mkdir(parents=True, exist_ok=True)
        write_model(folder / model, max_position_embeddings=32_768)
    cache = folder / "examples" / "addition" / "cache"
    for name in ("responses", "pairs", "held_out_pairs"):
        (cache / f"{name}.jsonl").write_text(json.dumps(GIVEN) + "\n")
    for place in (folder / "data", cache):
        place.mkdir(exist_ok=True)
        for split in ("train", "test", "validation"):
            (place / f"{split}.jsonl").write_text(json.dumps(RECORD) + "\n")
    _write_gsm8k(folder / "data" / "gsm8k")
    _write_lengths(folder)
    (folder / "shared").mkdir()
    shutil.copy(
        ROOT / "examples" / "launch" / "eight_gpus.yaml", folder / "shared" / "run.yaml"
    )
    (folder / "losses.py").write_text(LOSS)
    (folder / "loops.py").write_text("def two_updates(run):\n    pass\n")
    (folder / "parts.py").write_text(own_parts())
    _write_quickstart(folder / "mine")
    _write_environment(folder / "my")
    _write_optimizers(folder)


def own_parts() -> str:
    """Return the functions of docs/your-own.md that take samples or records."""
    code = [
        block.body
        for block in blocks_of(ROOT / "docs" / "your-own.md")
        if block.language == "python"
    ]
    return "\n".join(
        body for body in code if "np.ndarray" in body or "records: list" in body
    )


def _write_gsm8k(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "test"):
        shutil.copy(ROOT / "examples" / "gsm8k" / "sample.jsonl", folder / f"{split}.jsonl")


def _write_lengths(folder: Path) -> None:
    lengths = [100 + 37 * (number % 11) for number in range(64)]
    (folder / "lengths.jsonl").write_text(
        "".join(json.dumps({"length": length}) + "\n" for length in lengths)
    )
    for name in ("addition", "NAME"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "lengths.jsonl").write_text(
            json.dumps({"step": 1, "lengths": lengths}) + "\n"
        )


def _write_quickstart(folder: Path) -> None:
    """The files of docs/index.md, as a reader would write them from it."""
    folder.mkdir()
    names = {"json": "train.jsonl", "python": "reward.py", "yaml": "config.yaml"}
    for block in blocks_of(ROOT / "docs" / "index.md"):
        if block.language in names:
            (folder / names[block.language]).write_text(block.body)


def _write_environment(folder: Path) -> None:
    """The class of docs/environments.md."""
    page = ROOT / "docs" / "environments.md"
    if page.is_file():
        folder.mkdir()
        (code,) = [block.body for block in blocks_of(page) if block.language == "python"]
        (folder / "guess.py").write_text(code)


def _write_optimizers(folder: Path) -> None:
    """The functions of docs/optimizers.md."""
    page = ROOT / "docs" / "optimizers.md"
    if page.is_file():
        code = [block.body for block in blocks_of(page) if block.language == "python"]
        (folder / "optimizers.py").write_text("\n".join(code))
