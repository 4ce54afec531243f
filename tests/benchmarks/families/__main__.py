"""Every causal-LM family of the installed transformers, tiny and random, through the training engine.

    python -m tests.benchmarks.families [--only qwen2 mamba ...] [--output docs/models.md]         minutes on two cores
    python -m tests.benchmarks.families --engines [...]              weights to vLLM instead: seconds a family

Each call adds its measurements to those that --kept holds, and the page shows them all.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.families.measuring import RUNS, Outcome, build, compare
from tests.benchmarks.families.page import Kept, Outcomes, markdown
from tests.workers.model.ranks import RankError, RankPool

QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "ERROR"}
ENGINE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="markdown file to write, for example docs/models.md")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "families.json", help="JSON file")
    parser.add_argument("--only", nargs="+", help="model types; all unless given")
    parser.add_argument("--engines", action="store_true", help="weights to vLLM, in place of log-probs and gradients")
    options = parser.parse_args()
    os.environ.update(QUIET | ENGINE)
    kept = Kept(options.kept)
    pool = RankPool(1 if options.engines else 2)
    ways = {"vLLM": _send} if options.engines else {name: _comparison(name) for name in RUNS}
    for family in options.only or causal_families():
        outcomes = measure(pool, family, ways)
        kept.add(family, outcomes)
        sys.stdout.writelines(f"{family} {name}: {outcome}\n" for name, outcome in outcomes.items())
        sys.stdout.flush()
    pool.stop()
    if options.output:
        options.output.write_text(markdown(kept.found), encoding="utf-8")


def causal_families() -> list[str]:
    """The model types of every causal language model that transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


Way = Callable[[RankPool, Path], Outcome]


def measure(pool: RankPool, family: str, ways: dict[str, Way]) -> Outcomes:
    """The outcome of each of `ways` for one family, or `all` of them if it cannot be built."""
    with tempfile.TemporaryDirectory() as name:
        problem = _guarded(lambda: Outcome("exact", reason=pool.run(build, 1, family, Path(name))[0])).reason
        if problem:
            return {"all": Outcome("not built", reason=problem)}
        return {way: _guarded(lambda way=way: ways[way](pool, Path(name))) for way in ways}


def _comparison(name: str) -> Way:
    return lambda pool, folder: pool.run(compare, RUNS[name].ranks, folder, RUNS[name])[0]


def _send(pool: RankPool, folder: Path) -> Outcome:
    from tests.benchmarks.families.engines import send

    found = pool.run(send, 1, folder)[0]
    if found.verdict not in ("exact", "not there"):
        pool.stop()  # vLLM leaves process groups behind, on which the next engine would stumble
    return found


def _guarded(run: Callable[[], Outcome]) -> Outcome:
    """A process that dies or hangs is an outcome too; the pool starts another."""
    try:
        return run()
    except RankError as error:
        return Outcome("crash", reason=str(error).strip().splitlines()[-1])


if __name__ == "__main__":
    main()
