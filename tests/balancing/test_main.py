"""`python -m balancing`: what it prints and writes, and how it answers bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from balancing import CostModel, Pipeline, explain, plan_batch
from balancing.__main__ import main
from balancing.analysis.comparison import GIVEN, ON_PIPELINES, OURS, SHARED, STRATEGIES
from balancing.analysis.lengths_file import plan_record, recorded_arguments, run_step

REPOSITORY = Path(__file__).parents[2]
SMALL = [
    "--distribution",
    "lognormal",
    "--count",
    "64",
    "--ranks",
    "4",
    "--mini-batches",
    "2",
]


def write_step(folder: Path, lengths: list[int], **facts: object) -> None:
    """Record the first step of a run in its folder."""
    record = {"step": 1, "lengths": lengths} | facts
    (folder / "lengths.jsonl").write_text(json.dumps(record) + "\n")


def words(text: str) -> str:
    return " ".join(text.split())


def rows(text: str) -> dict[str, list[str]]:
    """The figures of the table by strategy, without the time of planning."""
    lines = [line.strip() for line in text.splitlines()]
    names = sorted({*STRATEGIES, *ON_PIPELINES, SHARED}, key=len)
    found = {name: line for name in names for line in lines if line.startswith(f"{name}  ")}
    return {name: line.removeprefix(name).split()[:-2] for name, line in found.items()}


@pytest.mark.parametrize(
    ("options", "before", "strategies"),
    [
        ([], "verl", STRATEGIES),
        (["--pipeline", "4"], GIVEN, ON_PIPELINES),
        (["--pipeline", "4", "--virtual-stages", "2"], None, ON_PIPELINES),
    ],
)
def test_one_command_prints_the_strategies_and_the_explanation_and_draws(
    tmp_path, capsys, options, before, strategies
):
    picture = tmp_path / "gantt.png"
    chosen = ["--before", before] if before else []
    assert main([*SMALL, *options, "--png", str(picture), *chosen]) == 0
    printed = capsys.readouterr().out
    assert set(rows(printed)) == set(strategies)
    for part in (
        "64 sequences",
        "Why:",
        "What would help",
        *(["stages: 4"] if options else []),
    ):
        assert part in printed
    assert ("On a pipeline of 4 stages" in words(printed)) == bool(options)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_figures(capsys):
    def figures(seed):
        assert main([*SMALL, "--seed", seed]) == 0
        return rows(capsys.readouterr().out)

    assert figures("3") == figures("3")
    assert figures("3") != figures("4")


def test_lengths_come_from_files_and_costs_from_a_model_config(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"n": n}) + "\n" for n in range(10, 74))
    )
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    arguments = f"{tmp_path}/a.jsonl --column n --model {tmp_path} --max-tokens 200".split()
    assert main(arguments) == 0
    printed = words(capsys.readouterr().out)
    assert (
        "64 sequences, 2,656 tokens (longest 73), ranks: 8, mini-batches: 4, max_tokens=200"
        in printed
    )
    (tmp_path / "config.json").write_text("[1]")
    assert main(arguments) == 2
    assert "is not a model config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--distribution"),
        (["none.json", "--distribution", "equal"], "--distribution"),
        (["none.json"], "none.json"),
        (["--distribution", "normal"], "'normal'"),
        ([*SMALL, "--max-tokens", "20"], "max_tokens=20"),
        ([*SMALL, "--max-tokens", "0"], "--max-tokens: 0"),
        ([*SMALL, "--ranks", "-2"], "--ranks: -2"),
        ([*SMALL, "--ranks", "100000000"], "--ranks 100000000"),
        ([*SMALL, "--ranks", "many"], "'many'"),
        ([*SMALL, "--mini-batches", "65"], "--mini-batches 65"),
        ([*SMALL, "--count", "0"], "--count: 0"),
        (["none.jsonl", "--group-column", "uid"], "none.jsonl"),
        ([*SMALL, "--pipeline", "0"], "--pipeline: 0"),
        ([*SMALL, "--virtual-stages", "2"], "--pipeline"),
        (
            [*SMALL, "--pipeline", "1", "--virtual-stages", "2"],
            "virtual_stages=2 with stages=1",
        ),
        ([*SMALL, "--pipeline", "2", "--before", "verl"], "--before verl"),
        ([*SMALL, "--before", "small ends"], "--before small ends"),
        ([*SMALL, "--pipeline", "64", "--virtual-stages", "2"], "64 micro-batches"),
        ([*SMALL, "--group-column", "uid"], "--prefix-column"),
        ([*SMALL, "--group-column", "uid", "--prefix-column", "prompt"], "--group-column"),
        ([*SMALL, "--model", "none.json"], "none.json"),
        ([*SMALL, "--png", "/no/such/folder/a.png"], "/no/such/folder/a.png"),
        ([*SMALL, "--seed", "-3"], "--seed: -3"),
        ([*SMALL, "--model", ""], "an argument is empty"),
        ([*SMALL, "--count", "1" + "0" * 30], "--count"),
        ([*SMALL, "--model", "/dev/zero"], "/dev/zero"),
        ([*SMALL, "--pipeline", "2", "--context-parallel", "2"], "--context-parallel"),
        (["x" * 300], "xxx"),
        (["a\n\x1b[31m"], r"a\n\x1b[31m"),
    ],
)
def test_bad_input_is_one_printable_line_and_exit_code_2(arguments, named, capsys):
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    line = capsys.readouterr().err.removesuffix("\n")
    assert code == 2
    assert line.startswith("error: ")
    assert named in line
    assert line.isprintable()
    assert "Errno" not in line


@pytest.mark.parametrize("of_a_run", [False, True])
def test_prompts_that_groups_share_are_planned_once(tmp_path, capsys, of_a_run):
    """From two columns of a file, or from the record of a run."""
    lengths = [300 + 7 * i for i in range(64)]
    groups = [i // 8 for i in range(64)]
    if of_a_run:
        write_step(tmp_path, lengths, prefix_lengths=[200] * 64, prefix_groups=groups)
        arguments = [str(tmp_path)]
    else:
        file = tmp_path / "lengths.csv"
        rows_of_file = [
            f"{size},prompt {group},200"
            for size, group in zip(lengths, groups, strict=True)
        ]
        file.write_text("\n".join(["length,uid,prompt", *rows_of_file]))
        arguments = [str(file), "--group-column", "uid", "--prefix-column", "prompt"]
    assert main([*arguments, "--ranks", "2", "--mini-batches", "1"]) == 0
    over_ideal = {name: row[0] for name, row in rows(capsys.readouterr().out).items()}
    assert over_ideal[SHARED].startswith("-"), "less than the work of each sequence alone"
    assert over_ideal[OURS].startswith("+")


def test_a_run_is_explained_by_the_arguments_that_it_planned_with(tmp_path, capsys):
    lengths = [100 + 13 * (i % 9) for i in range(24)]
    members = [range(16), range(16, 24)]  # of unequal size, which no draw gives
    plan = plan_batch(
        lengths,
        ranks=2,
        mini_batches=members,
        max_tokens=1024,
        max_sequences=4,
        cost_model=CostModel(3, 0.5),
    )
    write_step(tmp_path, lengths, **plan_record(plan))
    arguments = recorded_arguments(run_step(tmp_path))
    assert arguments["cost_model"] == CostModel(3, 0.5)
    assert [part.tolist() for part in arguments["mini_batches"]] == [
        list(rows) for rows in members
    ]
    again = plan_batch(lengths, **arguments)
    assert plan_record(again) == plan_record(plan)
    assert main([str(tmp_path)]) == 0
    printed = words(capsys.readouterr().out)
    assert f"Step 1 of {tmp_path}, as the run planned it." in printed
    assert "ranks: 2, mini-batches: 2, max_tokens=1,024, max_sequences=4" in printed
    assert words(explain(plan)) in printed


def test_options_come_before_what_a_run_planned_with(tmp_path, capsys):
    plan = plan_batch(
        [300] * 16, ranks=2, max_tokens=1024, pipeline=Pipeline(2, stage_shares=(0.5, 0.5))
    )
    write_step(tmp_path, [300] * 16, **plan_record(plan))
    for options, planned in (
        (
            "--ranks 4 --mini-batches 2",
            "ranks: 4, mini-batches: 2, max_tokens=1,024, stages: 2",
        ),
        ("--pipeline 4", "ranks: 2, mini-batches: 1, max_tokens=1,024, stages: 4"),
    ):
        assert main([str(tmp_path), *options.split()]) == 0
        assert planned in words(capsys.readouterr().out)


def test_a_run_without_recorded_plans_is_planned_by_the_defaults_and_that_is_said(
    tmp_path, capsys
):
    write_step(tmp_path, [300] * 32)
    assert main([str(tmp_path)]) == 0
    printed = words(capsys.readouterr().out)
    assert "whose plan was not recorded: defaults are assumed" in printed
    assert "ranks: 8, mini-batches: 4, max_tokens=600" in printed


@pytest.mark.parametrize(
    "damage",
    [{"plan": 3}, {"plan": {"cost_model": {}}}, {"mini_batch": ["a"]}, {"plan": None}],
)
def test_a_damaged_plan_of_a_run_is_refused(tmp_path, capsys, damage):
    record = plan_record(plan_batch([300] * 16, ranks=2, max_tokens=1024))
    record |= {"mini_batch": [0] * 16} | damage
    write_step(tmp_path, [300] * 16, **record)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "balancing", "no-such-file.csv"]
    ended = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    assert ended.returncode == 2
    assert (
        ended.stderr
        == "error: no-such-file.csv is not there. Give a folder, .json, .jsonl, .csv or .parquet.\n"
    )
