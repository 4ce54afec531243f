"""Compare strategies on a batch of sequence lengths and explain the plan:

python -m balancing lengths.jsonl --ranks 8 --max-tokens 32768 --png gantt.png
python -m balancing runs/addition --step 12
python -m balancing --distribution reasoning --count 4096 --ranks 32
python -m balancing --distribution reasoning --count 4096 --ranks 32 --pipeline 4 --virtual-stages 2
"""

import argparse
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from balancing.analysis.comparison import (
    OURS,
    SMALL_ENDS,
    STRATEGIES,
    Batch,
    Outcome,
    compare,
)
from balancing.analysis.distributions import ADVERSARIAL, DEFAULT_CAP, DISTRIBUTIONS, draw
from balancing.analysis.explain import explain
from balancing.analysis.gantt import Chart, chart_of_ranks, chart_of_stages, figure_of
from balancing.analysis.lengths_file import (
    PREFIXES,
    read_column,
    read_json,
    read_lengths,
    recorded_arguments,
    run_step,
)
from balancing.analysis.statistics import time_grids
from balancing.context_degrees import ContextDegrees
from balancing.cost_model import SEVEN_BILLION, CostModel, exchange_share
from balancing.errors import BalancingError, LengthFileError, OptionError
from balancing.pipelines.pipeline import Pipeline
from balancing.plan import plan_batch

RANKS, MINI_BATCHES = 8, 4
MOST_SEQUENCES = 10**6
NOTE = (
    "Over ideal: step time compared with workload of the real tokens / ranks (/ stages). Over cap: "
    "micro-batches above the cap. Padding: share of computed tokens. Idle, bubble: share of a rank's or "
    "the stages' time. Over bound: above a lower bound for as many micro-steps. To plan: median time on "
    "this machine, with warm compiled code. The published systems form other mini-batches."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an empty word: pathlib makes the working directory of it."""
        words = sys.argv[1:] if args is None else list(args)
        if "" in words:
            self.error("an argument is empty: is a variable of the shell not set?")
        return super().parse_args(words, namespace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 2 after a one-line error for bad input."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except BalancingError as problem:
        sys.stderr.write(f"error: {_printable(str(problem))}\n")
        return 2
    except OSError as problem:  # which names no option on a full disk
        file = problem.filename or options.png or options.lengths
        sys.stderr.write(
            f"error: {_printable(f'{file}: {problem.strerror or problem}.')}\n"
        )
        return 2
    return 0


def _printable(text: str) -> str:
    """Escape line ends and characters that steer a terminal, as a file's name may hold them."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def _run(options: argparse.Namespace) -> None:
    console = Console()
    recorded: dict[str, Any] = {}
    if options.lengths is not None and options.lengths.is_dir():
        record = run_step(options.lengths, options.step)
        recorded = recorded_arguments(record)
        how = (
            "as the run planned it"
            if "ranks" in recorded
            else "whose plan was not recorded: defaults are assumed"
        )
        source = f"Step {record.get('step')} of {options.lengths}, {how}. Options given here come first.\n"
        console.print(source, markup=False, highlight=False, soft_wrap=True)
    batch = _batch(options, recorded)
    outcomes = {outcome.name: outcome for outcome in compare(batch)}
    names = [name for name in outcomes if not name.startswith(OURS)]
    baseline = options.before or (SMALL_ENDS if batch.pipeline else names[0])
    if baseline not in names:
        raise OptionError(
            f"--before {baseline}: not compared here. Choose one of {', '.join(names)}."
        )
    console.print(_table(batch, list(outcomes.values())))
    console.print(
        f"\n{explain(batch.plan(**batch.prefixes))}", markup=False, highlight=False
    )
    if options.png:
        figure_of([_chart(batch, outcomes[name]) for name in (baseline, OURS)]).savefig(
            options.png, dpi=160
        )


def _batch(options: argparse.Namespace, recorded: Mapping[str, Any]) -> Batch:
    lengths = _lengths(options)
    arguments = {name: value for name, value in recorded.items() if name not in PREFIXES}
    arguments |= {
        name: getattr(options, name)
        for name in ("ranks", "max_tokens")
        if getattr(options, name)
    }
    if arguments.setdefault("ranks", RANKS) > len(lengths):
        raise OptionError(
            f"--ranks {arguments['ranks']}: more than the {len(lengths)} sequences. Lower it."
        )
    # The adversarial distributions are made for their cap.
    cap = DEFAULT_CAP if options.distribution in ADVERSARIAL else 2 * int(lengths.max())
    arguments.setdefault("max_tokens", cap)
    if options.mini_batches or "mini_batches" not in arguments:
        count = options.mini_batches or MINI_BATCHES
        if count > len(lengths):
            raise OptionError(
                f"--mini-batches {count}: more than the {len(lengths)} sequences. Lower it."
            )
        drawn = np.random.default_rng(options.seed).permutation(len(lengths))
        arguments["mini_batches"] = [np.sort(rows) for rows in np.array_split(drawn, count)]
    if options.model or "cost_model" not in arguments:
        arguments["cost_model"] = CostModel.from_model_config(_config(options.model))
    if options.virtual_stages and not options.pipeline:
        raise OptionError(
            "--virtual-stages cuts the stages of a pipeline. Give --pipeline too."
        )
    if options.pipeline:
        arguments |= {
            "pipeline": Pipeline(options.pipeline, options.virtual_stages or 1),
            "order": None,
        }
    if options.pipeline and options.context_parallel:
        raise OptionError(
            "--context-parallel does not work with --pipeline. Give one of them."
        )
    if options.context_parallel:
        share = exchange_share(_config(options.model))
        arguments["context_degrees"] = ContextDegrees(options.context_parallel, share)
    prefixes = _prefixes(options) or {
        name: recorded[name] for name in PREFIXES if name in recorded
    }
    return Batch(lengths, arguments, prefixes)


def _lengths(options: argparse.Namespace) -> NDArray[np.int64]:
    if (options.lengths is None) == (options.distribution is None):
        raise OptionError("give either a file of lengths or --distribution NAME")
    if options.lengths is not None:
        return read_lengths(options.lengths, column=options.column, step=options.step)
    return draw(
        options.distribution,
        options.count,
        options.seed,
        cap=options.max_tokens or DEFAULT_CAP,
    )


def _prefixes(options: argparse.Namespace) -> dict[str, NDArray[np.int64]]:
    if (options.group_column is None) != (options.prefix_column is None):
        raise OptionError(
            "--group-column and --prefix-column go together. Give both, or neither."
        )
    if options.group_column is None:
        return {}
    if options.lengths is None:
        raise OptionError("--group-column names a column of a file of lengths. Give one.")
    names = [str(name) for name in read_column(options.lengths, options.group_column)]
    tokens = read_lengths(options.lengths, column=options.prefix_column, minimum=0)
    return {
        "prefix_groups": np.unique(names, return_inverse=True)[1],
        "prefix_lengths": tokens,
    }


def _config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return SEVEN_BILLION
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise LengthFileError(f"{file} is not a model config: it holds no object")
    return config


def _table(batch: Batch, outcomes: Sequence[Outcome]) -> Table:
    layout: dict[str, Any] = {
        "box": SIMPLE_HEAD,
        "pad_edge": False,
        "title_justify": "left",
        "caption_justify": "left",
    }
    table = Table(title=_headline(batch), caption=NOTE, **layout)
    columns = ["strategy", *outcomes[0].figures, "to plan"]
    for name in columns:
        justify: Any = "left" if name == "strategy" else "right"
        table.add_column(
            name.replace(" ", "\n").replace("-", "-\n"), justify=justify, no_wrap=True
        )
    for outcome in outcomes:
        cells = [_cell(name, value) for name, value in outcome.figures.items()]
        seconds = (
            f"{outcome.seconds:,.2f} s"
            if outcome.seconds >= 1
            else f"{1e3 * outcome.seconds:.1f} ms"
        )
        table.add_row(
            outcome.name,
            *cells,
            seconds,
            style="bold" if outcome.name.startswith(OURS) else None,
        )
    return table


def _cell(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"[red]{value:,}[/red]" if name == "over cap" and value else f"{value:,}"
    decimals = 2 if value < 0.1 else 1 if value < 1 else 0
    return f"{value:{'+' if name.startswith('over') else ''}.{decimals}%}"


def _headline(batch: Batch) -> str:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(plan_batch).parameters.items()
    }
    shown_arguments = {
        "ranks",
        "mini_batches",
        "max_tokens",
        "cost_model",
        "order",
        "pipeline",
        "images",
    }
    other_arguments = [
        f"{k}={v}"
        for k, v in batch.arguments.items()
        if k not in shown_arguments and v != defaults[k]
    ]
    counts = f"ranks: {batch.arguments['ranks']}, mini-batches: {len(batch.arguments['mini_batches'])}"
    plan = ", ".join(
        [counts, f"max_tokens={batch.arguments['max_tokens']:,}", *other_arguments]
    )
    stages = f", stages: {batch.pipeline.stages}" if batch.pipeline else ""
    if batch.pipeline and batch.pipeline.virtual_stages > 1:
        stages += f" of {batch.pipeline.virtual_stages} virtual stages"
    tokens = f"{batch.lengths.sum():,} tokens (longest {batch.lengths.max():,})"
    return f"{len(batch.lengths):,} sequences, {tokens}, {plan}{stages}"


def _chart(batch: Batch, outcome: Outcome) -> Chart:
    if batch.pipeline is not None:
        return chart_of_stages(outcome.name, outcome.plan, batch.pipeline, batch.ideal)
    return chart_of_ranks(outcome.name, time_grids(outcome.plan), batch.ideal)


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)


def _at_least_zero(text: str) -> int:
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or a whole number above")
    return int(text)


def _sequences(text: str) -> int:
    if not 1 <= int(text) <= MOST_SEQUENCES:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 to {MOST_SEQUENCES:,}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m balancing",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    _add_lengths(parser.add_argument_group("lengths"))
    _add_plan(
        parser.add_argument_group(
            "plan",
            "Defaults in brackets. A run's folder brings the arguments of its plans.",
        )
    )
    _add_picture(parser.add_argument_group("picture"))
    return parser


def _add_lengths(source: argparse._ArgumentGroup) -> None:
    add = source.add_argument
    add(
        "lengths",
        nargs="?",
        type=Path,
        help=".json, .jsonl, .csv, .parquet, or the folder of a run",
    )
    add("--column", help="key or column of the lengths (length, tokens, ...)")
    add("--step", type=int, help="step of a run (the last)")
    add(
        "--distribution",
        choices=tuple(DISTRIBUTIONS),
        metavar="NAME",
        help=", ".join(DISTRIBUTIONS),
    )
    add("--count", type=_sequences, default=2048, help="sequences to draw (2048)")
    add(
        "--seed",
        type=_at_least_zero,
        default=0,
        help="of the draw and of the mini-batches (0)",
    )
    add(
        "--group-column",
        metavar="NAME",
        help="key or column that is equal for sequences with a shared prefix",
    )
    add(
        "--prefix-column", metavar="NAME", help="key or column of the tokens of that prefix"
    )


def _add_plan(how: argparse._ArgumentGroup) -> None:
    add = how.add_argument
    add("--ranks", type=_at_least_one, help=f"data-parallel ranks ({RANKS})")
    add(
        "--mini-batches",
        type=_at_least_one,
        metavar="N",
        help=f"drawn at random ({MINI_BATCHES})",
    )
    add(
        "--max-tokens",
        type=_at_least_one,
        metavar="N",
        help="cap of a micro-batch (twice the longest sequence)",
    )
    add(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="Hugging Face config.json or its folder (a 7B)",
    )
    add(
        "--pipeline",
        type=_at_least_one,
        metavar="P",
        help="pipeline stages on each rank (no pipeline)",
    )
    add(
        "--context-parallel",
        type=_at_least_one,
        metavar="C",
        help="most ranks that share a sequence (1)",
    )
    add(
        "--virtual-stages",
        type=_at_least_one,
        metavar="V",
        help="chunks of layers on each stage (1)",
    )


def _add_picture(picture: argparse._ArgumentGroup) -> None:
    picture.add_argument("--png", type=Path, help="Gantt charts before and after")
    named = [*STRATEGIES[:-1], SMALL_ENDS]
    picture.add_argument(
        "--before",
        choices=named,
        metavar="NAME",
        help=f"the upper chart: {', '.join(named)}",
    )


if __name__ == "__main__":
    sys.exit(main())
