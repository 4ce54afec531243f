"""Every causal-LM family of the installed transformers, tiny and random, in the training engine and vLLM.

python -m tests.benchmarks.families [--only qwen2 mamba ...] [--output docs/models.md]   takes minutes
python -m tests.benchmarks.families --images [--output docs/models.md]                   families with images
python -m tests.benchmarks.families --published [--only Qwen3.5 ...] [--output docs/models.md]
                                                       models in the form of their published checkpoints
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.families import vision
from tests.benchmarks.families.measuring import RUNS, Outcome, build, compare
from tests.benchmarks.families.page import IMAGES, Outcomes, images_markdown, markdown
from tests.benchmarks.families.published import Published, published
from tests.benchmarks.families.published_page import PUBLISHED, published_section, replace_section
from tests.workers.model.ranks import RankError, RankPool

QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ENGINE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="markdown file to write, for example docs/models.md")
    parser.add_argument("--only", nargs="+", help="model types; all unless given")
    parser.add_argument("--images", action="store_true", help="families that see images, with images")
    parser.add_argument("--published", action="store_true", help="models with all fields of a config.json")
    options = parser.parse_args()
    os.environ.update(QUIET | ENGINE)
    ranks, engine = RankPool(2), RankPool(1)
    if options.published:
        write_published(ranks, engine, options.only, options.output)
        return
    found: dict[str, Outcomes] = {}
    for family in options.only or (vision.VISION_FAMILIES if options.images else causal_families()):
        found[family] = measure_images(ranks, family) if options.images else measure(ranks, engine, family)
        for name, outcome in found[family].items():
            print(f"{family} {name}: {outcome}", flush=True)
    ranks.stop()
    engine.stop()
    if options.output:
        page = options.output.read_text(encoding="utf-8")
        if options.images:
            page = replace_section(page, IMAGES, images_markdown(found), before=IMAGES)
        else:
            sections = page[page.find("\n## ") :]
            page = markdown(found).rstrip() + "\n" + sections
        options.output.write_text(page, encoding="utf-8")


def write_published(ranks: RankPool, engine: RankPool, only: list[str] | None, output: Path | None) -> None:
    """Measure models in the form of their checkpoints, and write their section of the page."""
    families = published()
    found = {}
    for name in only or families:
        found[name] = measure_published(ranks, engine, families[name])
        for column, outcome in found[name].items():
            print(f"{name} {column}: {outcome}", flush=True)
    ranks.stop()
    engine.stop()
    section = published_section(families, found)
    if output is None:
        print(section)
        return
    page = output.read_text(encoding="utf-8")
    output.write_text(replace_section(page, PUBLISHED, section, before=IMAGES), encoding="utf-8")


def measure_published(ranks: RankPool, engine: RankPool, family: Published) -> Outcomes:
    """Return the outcome of every column. engine: a process for vLLM."""
    from tests.benchmarks.families import whole  # with vLLM, for which the environment is set by now

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem = _guarded(
            lambda: Outcome("exact", reason=ranks.run(whole.build_published, 1, family, folder)[0])
        ).reason
        if problem:
            return {"all": Outcome("not built", reason=problem)}
        found: Outcomes = {}
        for column in whole.STAGES:
            found[column] = _guarded(
                lambda column=column: ranks.run(whole.train_published, 1, folder, column)[0]
            )
        dtype = "bfloat16" if family.needs_bfloat16 else "float32"
        found["engine"] = _guarded(lambda: engine.run(whole.sample_published, 1, folder, dtype)[0])
        if found["engine"].verdict not in ("exact", "close"):
            engine.stop()  # vLLM leaves process groups behind, on which the next engine would stumble
        return found


def causal_families() -> list[str]:
    """The model types of every causal language model that transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def measure(ranks: RankPool, engine: RankPool, family: str) -> Outcomes:
    """The outcome of each way for one family, or `all` of them if it cannot be built. engine: a process for
    vLLM.
    """
    from tests.benchmarks.families.engines import send  # with vLLM, for which the environment is set by now

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem = _guarded(lambda: Outcome("exact", reason=ranks.run(build, 1, family, folder)[0])).reason
        if problem:
            return {"all": Outcome("not built", reason=problem)}
        found = {
            way: _guarded(lambda run=run: ranks.run(compare, run.ranks, folder, run)[0])
            for way, run in RUNS.items()
        }
        found["vLLM"] = _guarded(lambda: engine.run(send, 1, folder)[0])
        if found["vLLM"].verdict not in ("exact", "not there"):
            engine.stop()  # vLLM leaves process groups behind, on which the next engine would stumble
        return found


def measure_images(ranks: RankPool, family: str) -> Outcomes:
    """The same for a family that sees images, with images, by the trainer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = _guarded(lambda: ranks.run(vision.build, 1, family, folder)[0])
        if built.verdict != "exact":
            return dict.fromkeys(RUNS, built) if built.verdict == "refused" else {"all": built}
        return {
            way: _guarded(lambda run=run: ranks.run(compare, run.ranks, folder, run)[0])
            for way, run in RUNS.items()
        }


def _guarded(run: Callable[[], Outcome]) -> Outcome:
    """A process that dies or hangs is an outcome too; the pool starts another."""
    try:
        return run()
    except RankError as error:
        return Outcome("crash", reason=str(error).strip().splitlines()[-1])


if __name__ == "__main__":
    main()
