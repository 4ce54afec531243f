"""Every causal-LM family of the installed transformers, tiny and random, in the training engine and vLLM.

python -m tests.benchmarks.families [--only qwen2 mamba ...] [--output docs/models.md]   takes minutes
python -m tests.benchmarks.families --images [--output docs/models.md]                   families with images
python -m tests.benchmarks.families --published [--only Qwen3.5 ...] [--output docs/models.md]
                                                       models in the form of their published checkpoints

--results FILE keeps what was measured. The next call measures only what the file lacks, for example
`--columns cp tp` of all models, and the page is made of everything in the file.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.families import vision
from tests.benchmarks.families.measuring import RUNS, Outcome, build, compare
from tests.benchmarks.families.page import IMAGES, Outcomes, images_markdown, markdown
from tests.benchmarks.families.published import Published, published, published_types
from tests.benchmarks.families.published_page import (
    PUBLISHED,
    published_section,
    replace_section,
)
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
    parser.add_argument(
        "--output", type=Path, help="markdown file to write, for example docs/models.md"
    )
    parser.add_argument("--only", nargs="+", help="model types; all unless given")
    parser.add_argument(
        "--images", action="store_true", help="families that see images, with images"
    )
    parser.add_argument(
        "--published", action="store_true", help="models with all fields of a config.json"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        help="columns of --published to measure anew; all unless given",
    )
    parser.add_argument("--results", type=Path, help="JSON file of outcomes to go on with")
    options = parser.parse_args()
    os.environ.update(QUIET | ENGINE)
    ranks, engine = RankPool(2), RankPool(1)
    if options.published:
        families = published()
        measured = read_outcomes(options.results)
        for name in options.only or families:
            outcomes = measured.get(name, {})
            measured[name] = measure_published(
                ranks, engine, families[name], outcomes, options.columns
            )
            report_outcomes(name, measured[name])
            write_outcomes(options.results, measured)
        section = published_section(
            families, {name: measured[name] for name in families if name in measured}
        )
        write_page(
            options.output,
            lambda page: replace_section(page, PUBLISHED, section, before=IMAGES),
        )
    else:
        measured = read_outcomes(options.results)
        for family in options.only or (
            vision.VISION_FAMILIES if options.images else causal_families()
        ):
            if family in measured and not options.only:
                continue
            measured[family] = (
                measure_images(ranks, family)
                if options.images
                else measure(ranks, engine, family)
            )
            report_outcomes(family, measured[family])
            write_outcomes(options.results, measured)
        write_page(
            options.output,
            lambda page: page_with_families(page, measured, images=options.images),
        )
    ranks.stop()
    engine.stop()


def page_with_families(page: str, measured: dict[str, Outcomes], *, images: bool) -> str:
    """Return docs/models.md with other tables of families."""
    if images:
        return replace_section(page, IMAGES, images_markdown(measured), before=IMAGES)
    sections = page[page.find("\n## ") :]
    return markdown(measured).rstrip() + "\n" + sections


def report_outcomes(name: str, outcomes: Outcomes) -> None:
    """Print a line for each column."""
    for column, outcome in outcomes.items():
        print(f"{name} {column}: {outcome}", flush=True)


def write_page(output: Path | None, change: Callable[[str], str]) -> None:
    """Write the changed page, or print what was measured where no page is asked for."""
    if output is None:
        print(change(""))
        return
    output.write_text(change(output.read_text(encoding="utf-8")), encoding="utf-8")


def read_outcomes(file: Path | None) -> dict[str, Outcomes]:
    """Return what an earlier call measured, by name and column."""
    if file is None or not file.exists():
        return {}
    records = json.loads(file.read_text(encoding="utf-8"))
    return {
        name: {column: Outcome(**outcome) for column, outcome in columns.items()}
        for name, columns in records.items()
    }


def write_outcomes(file: Path | None, measured: dict[str, Outcomes]) -> None:
    """Keep what was measured so far: a long measurement may end early."""
    if file is None:
        return
    records = {
        name: {column: asdict(outcome) for column, outcome in columns.items()}
        for name, columns in measured.items()
    }
    file.write_text(json.dumps(records, indent=1), encoding="utf-8")


def measure_published(
    ranks: RankPool,
    engine: RankPool,
    family: Published,
    outcomes: Outcomes,
    columns: list[str] | None,
) -> Outcomes:
    """Return the outcome of every column. engine: a process for vLLM. outcomes: what is measured already.

    columns: those to measure anew.
    """
    # With vLLM, for which the environment is set by now.
    from tests.benchmarks.families import (
        whole,
    )

    order = [*whole.STAGES, "images", "engine"]
    if "all" in outcomes:  # it could not be built then
        outcomes = {}
    missing = [column for column in columns or order if columns or column not in outcomes]
    if not missing:
        return outcomes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem = _guarded(
            lambda: Outcome(
                "exact", reason=ranks.run(whole.build_published, 1, family, folder)[0]
            )
        ).reason
        if problem:
            return {"all": Outcome("not built", reason=problem)}
        outcomes = dict(outcomes)
        for column in missing:
            if column == "images":
                outcomes[column] = measure_published_images(ranks, family)
            elif column == "engine":
                dtype = "bfloat16" if family.needs_bfloat16 else "float32"
                outcomes[column] = _guarded(
                    lambda dtype=dtype: engine.run(
                        whole.sample_published, 1, folder, dtype
                    )[0]
                )
                if outcomes[column].verdict not in ("exact", "close"):
                    engine.stop()  # vLLM leaves process groups behind, on which the next engine would stumble
            else:
                outcomes[column] = _guarded(
                    lambda column=column: ranks.run(
                        whole.train_published, 1, folder, column
                    )[0]
                )
        return {column: outcomes[column] for column in order if column in outcomes}


def measure_published_images(ranks: RankPool, family: Published) -> Outcome:
    """Return the outcome of the packed layout with images, as in the section on models that see images."""
    if not family.has_tower:
        return Outcome("not there", reason="it sees no images")
    outcomes = measure_images(ranks, family.model_type, ["packed"])
    return outcomes.get("packed") or outcomes["all"]


def causal_families() -> list[str]:
    """The model types of every causal language model that transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def measure(ranks: RankPool, engine: RankPool, family: str) -> Outcomes:
    """The outcome of each way for one family, or `all` of them if it cannot be built. engine: a process for
    vLLM.

    Engines read fields that a class's own defaults lack, so a family with a published config.json has its
    engine measured in that form (`--published`), not here.
    """
    # With vLLM, for which the environment is set by now.
    from tests.benchmarks.families.engines import (
        send,
    )

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem = _guarded(
            lambda: Outcome("exact", reason=ranks.run(build, 1, family, folder)[0])
        ).reason
        if problem:
            return {"all": Outcome("not built", reason=problem)}
        outcomes = {
            way: _guarded(lambda run=run: ranks.run(compare, run.ranks, folder, run)[0])
            for way, run in RUNS.items()
        }
        if family in published_types():
            outcomes["vLLM"] = Outcome("below")
            return outcomes
        outcomes["vLLM"] = _guarded(lambda: engine.run(send, 1, folder)[0])
        if outcomes["vLLM"].verdict not in ("exact", "not there"):
            engine.stop()  # vLLM leaves process groups behind, on which the next engine would stumble
        return outcomes


def measure_images(ranks: RankPool, family: str, ways: Iterable[str] = RUNS) -> Outcomes:
    """The same for a family that sees images, with images, by the trainer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = _guarded(lambda: ranks.run(vision.build, 1, family, folder)[0])
        if built.verdict != "exact":
            return (
                dict.fromkeys(ways, built) if built.verdict == "refused" else {"all": built}
            )
        return {
            way: _guarded(
                lambda run=RUNS[way]: ranks.run(compare, run.ranks, folder, run)[0]
            )
            for way in ways
        }


def _guarded(run: Callable[[], Outcome]) -> Outcome:
    """A process that dies or hangs is an outcome too; the pool starts another."""
    try:
        return run()
    except RankError as error:
        return Outcome("crash", reason=str(error).strip().splitlines()[-1])


if __name__ == "__main__":
    main()
