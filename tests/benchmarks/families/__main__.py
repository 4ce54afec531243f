"""Every causal-LM family of the installed transformers, tiny and random, through the training engine and against itself.

    python -m tests.benchmarks.families [--output docs/models.md] [--only qwen2 mamba ...]         minutes on two cores

"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.benchmarks.families.measuring import RUNS, Outcome, build, compare
from tests.workers.model.ranks import RankError, RankPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="markdown file to write, for example docs/models.md")
    parser.add_argument("--only", nargs="+", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), help="model types")
    options = parser.parse_args()
    pool = RankPool(2)
    for model_type in options.only:
        outcomes = measure(pool, model_type)
        for name, outcome in outcomes.items():
            print(model_type, name, outcome.verdict, outcome.difference, outcome.reason, flush=True)
    pool.stop()


def measure(pool: RankPool, model_type: str) -> dict[str, Outcome]:
    """The outcome of every way to compute one family."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            (problem,) = pool.run(build, 1, model_type, folder)
        except RankError as error:
            problem = _last_line(error)
        if problem:
            return {"all": Outcome("not built", reason=problem)}
        return {name: _compare(pool, folder, run) for name, run in RUNS.items()}


def _compare(pool, folder, run) -> Outcome:
    try:
        return pool.run(compare, run.ranks, folder, run)[0]
    except RankError as error:
        return Outcome("crash", reason=_last_line(error))


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


if __name__ == "__main__":
    main()
