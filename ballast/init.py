"""`ballast init FOLDER [--recipe grpo]`: write a starting configuration, data and reward.

configs/RECIPE.yaml, examples/gsm8k of the package
    --> FOLDER/config.yaml, reward.py, data/train.jsonl, data/test.jsonl
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

RECIPES = sorted(
    path.name.removesuffix(".yaml") for path in (files("ballast") / "configs").iterdir()
)
MODEL = "Qwen/Qwen3-0.6B"
HELD_OUT = 2  # among the eight sample problems


def starter(recipe: str) -> dict[str, str]:
    """Return the files by name: a recipe, GSM8K's reward, and similar problems."""
    package = files("ballast")
    config = (package / "configs" / f"{recipe}.yaml").read_text(encoding="utf-8")
    example = package / "examples" / "gsm8k"
    problems = (
        (example / "sample.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    )
    return {
        "config.yaml": config.replace("models/policy", MODEL).replace(
            f"configs/{recipe}.yaml", "config.yaml"
        ),
        "reward.py": (example / "reward.py").read_text(encoding="utf-8"),
        "data/train.jsonl": "".join(problems[:-HELD_OUT]),
        "data/test.jsonl": "".join(problems[-HELD_OUT:]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files. Return 0, or 2 with one line if a file exists or cannot be written."""
    parser = argparse.ArgumentParser(
        prog="ballast init", description="A configuration, data and a reward to start from."
    )
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.add_argument(
        "--recipe", choices=RECIPES, default="grpo", help="the algorithm (grpo)"
    )
    options = parser.parse_args(None if arguments is None else list(arguments))
    content = starter(options.recipe)
    folder = str(options.folder)[:80]
    try:
        for name in content:
            if (options.folder / name).exists():
                raise FileExistsError(
                    f"{options.folder / name} is there. Name another folder."
                )
        for name, text in content.items():
            (options.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (options.folder / name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        is_there = isinstance(error, FileExistsError) and not error.errno
        text = str(error) if is_there else f"{folder!r}: {reason}. Name another folder."
        print(f"error: {text}", file=sys.stderr)
        return 2
    print(
        f"{options.folder}: {', '.join(content)}. Next:\n"
        f"  cd {shlex.quote(str(options.folder))}\n"
        "  ballast fit --config config.yaml --dry-run --cluster nodes=1,gpus=1,gpu_gib=80,cpus=8\n"
        f"  hf download {MODEL}\n"
        "  ballast fit --config config.yaml\n"
        "Eight problems show the form of the data. Replace them with yours."
    )
    return 0
