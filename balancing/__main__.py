"""Compares strategies on a batch of sequence lengths and explains the plan:

python -m balancing lengths.jsonl --ranks 8 --max-tokens 32768 --png gantt.png --html page.html
python -m balancing runs/addition --step 12
python -m balancing --distribution reasoning --count 4096 --ranks 32
python -m balancing --distribution reasoning --count 4096 --ranks 32 --pipeline 4 --virtual-stages 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from balancing.analysis.distributions import ADVERSARIAL, DEFAULT_CAP, DISTRIBUTIONS, draw
from balancing.analysis.explain import explain
from balancing.analysis.lengths_file import read_column, read_json, read_lengths
from balancing.analysis.pipeline_comparison import compare_on_pipeline
from balancing.analysis.pipeline_gantt import save_pipeline_png
from balancing.analysis.report import pipeline_table, terminal_table, write_html, write_pipeline_html, write_png
from balancing.analysis.run_plan import RunPlan, read_run
from balancing.analysis.strategies import GIVEN, OURS, STRATEGIES, Batch, compare
from balancing.errors import BalancingError, LengthFileError, OptionError
from balancing.model_config import SEVEN_BILLION
from balancing.pipeline import Pipeline
from balancing.workload import CostModel

RANKS, MINI_BATCHES = 8, 4


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 2 after a one-line error for bad input."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (BalancingError, OSError) as problem:
        sys.stderr.write(f"error: {problem}\n")
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    run = read_run(options.lengths, options.step) if options.lengths is not None and options.lengths.is_dir() else None
    batch, pipeline = _batch(options, run or RunPlan("")), _pipeline(options, run)
    console = Console()
    if run is not None:
        console.print(f"{_sentence(run.source)}{_changed(options)}\n", markup=False, highlight=False, soft_wrap=True)
    if pipeline is not None:
        _run_on_pipeline(options, batch, pipeline, console)
        return
    outcomes, plan = compare(batch)
    by_name = {outcome.name: outcome for outcome in outcomes}
    explanation = explain(plan)
    console.print(terminal_table(batch, outcomes))
    console.print(f"\n{explanation}", markup=False, highlight=False)
    if options.png:
        write_png(batch, by_name[options.before or GIVEN], by_name[OURS], options.png)
    if options.html:
        write_html(batch, outcomes, explanation, options.html)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _changed(options: argparse.Namespace) -> str:
    """The settings in which the command line differs from the run; empty if it does not."""
    names = ("ranks", "mini_batches", "max_tokens", "model", "pipeline", "virtual_stages")
    given = [f"--{name.replace('_', '-')} {getattr(options, name)}" for name in names if getattr(options, name)]
    return f" Otherwise than in the run: {', '.join(given)}." if given else ""


def _run_on_pipeline(options: argparse.Namespace, batch: Batch, pipeline: Pipeline, console: Console) -> None:
    if options.before is not None:
        raise OptionError("--before names a strategy without a pipeline; with --pipeline the picture has small ends")
    outcomes = compare_on_pipeline(batch, pipeline)
    explanation = explain(outcomes[-1].plan)
    console.print(pipeline_table(batch, pipeline, outcomes))
    console.print(f"\n{explanation}", markup=False, highlight=False)
    if options.png:
        save_pipeline_png(outcomes[1:], pipeline, options.png)
    if options.html:
        write_pipeline_html(batch, pipeline, outcomes, explanation, options.html)


def _pipeline(options: argparse.Namespace, run: RunPlan | None) -> Pipeline | None:
    recorded = None if run is None else run.arguments.get("pipeline")
    if options.pipeline is not None:
        return Pipeline(options.pipeline, options.virtual_stages or 1)
    if options.virtual_stages is None:
        return recorded
    if recorded is None:
        raise OptionError("--virtual-stages cuts the stages of a pipeline; give --pipeline too")
    return Pipeline(recorded.stages, options.virtual_stages, recorded.backward)


def _batch(options: argparse.Namespace, run: RunPlan) -> Batch:
    """The batch to plan: what the command line asks for, else what the run had, else the command's defaults."""
    _check_counts(options)
    lengths = _lengths(options)
    if (options.ranks or 0) > len(lengths):
        raise OptionError(f"--ranks {options.ranks} is more than the {len(lengths)} sequences; lower it")
    arguments = dict(run.arguments)
    recorded = {name: arguments.pop(name, None) for name in ("ranks", "max_tokens", "cost_model", "pipeline")}
    return Batch(
        lengths=lengths,
        mini_batches=_mini_batches(options, len(lengths), run),
        ranks=options.ranks or recorded["ranks"] or RANKS,
        max_tokens=options.max_tokens or recorded["max_tokens"] or _default_cap(options, lengths),
        cost_model=(recorded["cost_model"] if options.model is None else None) or _cost_model(options.model),
        arguments=arguments,
        prefixes=_prefixes(options, len(lengths), run),
    )


def _mini_batches(options: argparse.Namespace, sequences: int, run: RunPlan) -> tuple[NDArray[np.int64], ...]:
    """Those of the run, or as many as are asked for, drawn at random; OptionError for more than there are groups."""
    if run.mini_batches is not None and options.mini_batches is None:
        return run.mini_batches
    groups = run.groups if run.by_group and run.groups is not None else np.arange(sequences)
    names, count = np.unique(groups), options.mini_batches or run.mini_batch_count or MINI_BATCHES
    if count > len(names):
        raise OptionError(f"--mini-batches {count} is more than the {len(names)} sequences or groups; lower it")
    parts = np.array_split(np.random.default_rng(options.seed).permutation(names), count)
    return tuple(np.flatnonzero(np.isin(groups, part)) for part in parts)


def _lengths(options: argparse.Namespace) -> NDArray[np.int64]:
    if (options.lengths is None) == (options.distribution is None):
        raise OptionError("give either a file of lengths or --distribution NAME")
    if options.lengths is not None:
        return read_lengths(options.lengths, column=options.column, step=options.step)
    return draw(options.distribution, options.count, options.seed, cap=options.max_tokens or DEFAULT_CAP)


def _prefixes(options: argparse.Namespace, sequences: int, run: RunPlan) -> dict[str, NDArray[np.int64]]:
    """The arguments of `plan_batch` about what sequences begin with; empty without them."""
    if (options.group_column is None) != (options.prefix_column is None):
        raise OptionError("--group-column and --prefix-column go together; give both, or neither")
    if options.group_column is None:
        return dict(run.prefixes)
    if options.lengths is None:
        raise OptionError("--group-column names a column of a file of lengths; give one")
    names = [str(name) for name in read_column(options.lengths, options.group_column)]
    tokens = read_lengths(options.lengths, column=options.prefix_column, minimum=0)
    return {"prefix_groups": np.unique(names, return_inverse=True)[1], "prefix_lengths": tokens}


def _default_cap(options: argparse.Namespace, lengths: NDArray[np.int64]) -> int:
    """Twice the longest sequence, or the cap that adversarial lengths are made for."""
    return DEFAULT_CAP if options.distribution in ADVERSARIAL else 2 * int(lengths.max())


def _check_counts(options: argparse.Namespace) -> None:
    for name in ("ranks", "mini_batches", "max_tokens", "pipeline", "virtual_stages"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} {value} must be at least 1")


def _cost_model(path: Path | None) -> CostModel:
    if path is None:
        return CostModel.from_model_config(SEVEN_BILLION)
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise LengthFileError(f"{file} is not a model config: it holds no object")
    return CostModel.from_model_config(config)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m balancing", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    source = parser.add_argument_group("lengths")
    source.add_argument("lengths", nargs="?", type=Path, help=".json, .jsonl, .csv, .parquet, or the folder of a run")
    source.add_argument("--column", help="key or column of the lengths (length, tokens, ...)")
    source.add_argument("--step", type=int, help="step of a run (the last)")
    source.add_argument("--distribution", choices=tuple(DISTRIBUTIONS), metavar="NAME", help=", ".join(DISTRIBUTIONS))
    source.add_argument("--count", type=int, default=2048, help="sequences to draw (2048)")
    source.add_argument("--seed", type=int, default=0, help="of the draw and of the mini-batches (0)")
    source.add_argument(
        "--group-column",
        metavar="NAME",
        help="key or column that is equal for sequences that begin with the same tokens",
    )
    source.add_argument("--prefix-column", metavar="NAME", help="key or column of how many tokens these are")
    how = parser.add_argument_group("plan", "Defaults in brackets; for the folder of a run, what the run planned with.")
    how.add_argument("--ranks", type=int, help=f"data-parallel ranks ({RANKS})")
    how.add_argument(
        "--mini-batches", type=int, metavar="N", help=f"number of mini-batches, drawn at random ({MINI_BATCHES})"
    )
    how.add_argument("--max-tokens", type=int, metavar="N", help="cap of a micro-batch (twice the longest sequence)")
    how.add_argument("--model", type=Path, metavar="CONFIG", help="Hugging Face config.json or its folder (a 7B)")
    how.add_argument("--pipeline", type=int, metavar="P", help="stages of a pipeline; each rank is one (no pipeline)")
    how.add_argument("--virtual-stages", type=int, metavar="V", help="chunks of layers on each stage (1)")
    pictures = parser.add_argument_group("pictures")
    pictures.add_argument("--png", type=Path, help="Gantt charts before and after")
    pictures.add_argument("--html", type=Path, help="a page with the table, all charts and the explanation")
    pictures.add_argument(
        "--before",
        choices=STRATEGIES,
        metavar="NAME",
        help=f"strategy in the upper chart: {', '.join(STRATEGIES[:-1])}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
