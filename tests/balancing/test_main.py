"""`python -m balancing`: what it prints and writes, and how it answers bad input."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from balancing import CostModel, Pipeline, explain, plan_batch
from balancing.__main__ import main
from balancing.analysis.pipeline_comparison import ON_PIPELINES
from balancing.analysis.run_plan import plan_record, read_run
from balancing.analysis.strategies import STRATEGIES
from tests.browser import CONTRASTS, TELEPHONE, WIDER, browser, needs_chromium

REPOSITORY = Path(__file__).parents[2]
SMALL = ["--distribution", "lognormal", "--count", "64", "--ranks", "4", "--mini-batches", "2"]


class Page(HTMLParser):
    """Collects tags, what they load, and table rows."""

    def __init__(self):
        super().__init__()
        self.tags, self.loads, self.rows = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value[0] != "#"]
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.rows and "td" in self.tags[-2:]:
            self.rows[-1].append(data)


@needs_chromium
@pytest.mark.parametrize("arguments", [(), ("--pipeline", "4")])
def test_the_page_is_readable_on_a_telephone_in_light_and_dark(tmp_path, arguments):
    page = tmp_path / "page.html"
    assert main([*SMALL, *arguments, "--html", str(page)]) == 0
    with browser(tmp_path / "profile") as reader:
        for dark in (False, True):
            reader.open(page.as_uri(), width=TELEPHONE, dark=dark)
            assert reader.value(WIDER) == 0
            contrasts = reader.value(CONTRASTS)
            assert len(contrasts) > 10
            assert [text for text in contrasts if text[1] < 4.5] == []


def test_one_command_prints_the_strategies_and_the_explanation(capsys):
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "64 sequences" in printed
    assert all(name in printed for name in STRATEGIES)
    assert "Why:" in printed
    assert "What would help" in printed


def test_the_page_needs_no_network_and_holds_table_charts_and_explanation(tmp_path, capsys):
    page, picture = tmp_path / "page.html", tmp_path / "gantt.png"
    assert main([*SMALL, "--html", str(page), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    parsed = Page()
    parsed.feed(text)
    assert parsed.loads == []
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert "@import" not in text
    assert "svg" in parsed.tags
    assert {row[0] for row in parsed.rows if row} == set(STRATEGIES)
    assert "What would help, planned and compared:" in text


@pytest.mark.parametrize("virtual", [[], ["--virtual-stages", "2"]])
def test_a_pipeline_has_a_table_a_picture_and_a_page_of_its_stages(tmp_path, capsys, virtual):
    page, picture = tmp_path / "page.html", tmp_path / "stages.png"
    assert main([*SMALL, "--pipeline", "4", *virtual, "--html", str(page), "--png", str(picture)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "stages: 4" in printed
    assert "On a pipeline of 4 stages" in printed
    parsed = Page()
    parsed.feed(page.read_text())
    assert [row[0] for row in parsed.rows if row] == list(ON_PIPELINES)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_figures(capsys):
    def figures(seed):
        assert main([*SMALL, "--seed", seed]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.split()[:-2] for line in lines if "%" in line]  # the last column is a time

    assert figures("3") == figures("3")
    assert figures("3") != figures("4")


def test_lengths_come_from_files_and_costs_from_a_model_config(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(10, 74)))
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 10}))
    arguments = [str(tmp_path / "a.jsonl"), "--column", "n", "--model", str(tmp_path), "--max-tokens", "200"]
    assert main(arguments) == 0
    assert "64 sequences, 2,656 tokens (longest 73); ranks: 8, mini-batches: 4, max_tokens=200" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either a file of lengths or --distribution"),
        (["none.json", "--distribution", "equal"], "give either"),
        (["none.json"], "none.json cannot be read: No such file"),
        (["--distribution", "normal"], "invalid choice: 'normal'"),
        ([*SMALL, "--max-tokens", "20"], "above max_tokens=20; raise max_tokens to at least"),
        ([*SMALL, "--max-tokens", "0"], "--max-tokens 0 must be at least 1"),
        ([*SMALL, "--ranks", "-2"], "--ranks -2 must be at least 1"),
        ([*SMALL, "--ranks", "100000000"], "--ranks 100000000 is more than the 64 sequences"),
        ([*SMALL, "--ranks", "many"], "invalid int value: 'many'"),
        ([*SMALL, "--mini-batches", "65"], "--mini-batches 65 is more than the 64 sequences or groups"),
        ([*SMALL, "--count", "0"], "count=0"),
        (["none.jsonl", "--group-column", "uid"], "none.jsonl cannot be read"),
        ([*SMALL, "--pipeline", "0"], "--pipeline 0 must be at least 1"),
        ([*SMALL, "--virtual-stages", "2"], "give --pipeline too"),
        ([*SMALL, "--pipeline", "1", "--virtual-stages", "2"], "virtual_stages=2 with stages=1 changes nothing"),
        ([*SMALL, "--pipeline", "2", "--before", "verl"], "--before names a strategy without a pipeline"),
        ([*SMALL, "--pipeline", "64", "--virtual-stages", "2"], "32 sequences cannot fill 64 micro-batches"),
        ([*SMALL, "--group-column", "uid"], "--group-column and --prefix-column go together"),
        ([*SMALL, "--group-column", "uid", "--prefix-column", "prompt"], "names a column of a file of lengths"),
        ([*SMALL, "--model", "none.json"], "none.json cannot be read"),
        ([*SMALL, "--png", "/no/such/folder/a.png"], "No such file or directory: '/no/such/folder/a.png'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, capsys):
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert words in lines[0]


def test_a_model_config_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text("[1]")
    assert main([*SMALL, "--model", str(tmp_path)]) == 2
    assert "is not a model config" in capsys.readouterr().err


@pytest.mark.parametrize("of_a_run", [False, True])
def test_prompts_that_groups_share_are_planned_once(tmp_path, capsys, of_a_run):
    """From two columns of a file, or from the record of a run."""
    rows = [{"length": 300 + 7 * i, "uid": f"prompt {i // 8}", "prompt": 200} for i in range(64)]
    if of_a_run:
        record = {
            "lengths": [row["length"] for row in rows],
            "prefix_groups": [i // 8 for i in range(64)],
            "prefix_lengths": [200] * 64,
        }
        (tmp_path / "lengths.jsonl").write_text(json.dumps({"step": 1} | record) + "\n")
        arguments = [str(tmp_path)]
    else:
        file = tmp_path / "lengths.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = [str(file), "--group-column", "uid", "--prefix-column", "prompt"]
    assert main([*arguments, "--ranks", "2", "--mini-batches", "1"]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if "Ballast, shared" in line)
    assert " -" in line  # less than the work of each sequence alone


def recorded(folder: Path, lengths: list[int], step: int = 1, **arguments: Any) -> dict[str, Any]:
    """The line of lengths.jsonl that a run writes for a step planned with `arguments`, written to `folder`."""
    plan = plan_batch(lengths, **arguments)
    line = {"step": step, "lengths": lengths} | plan_record(plan)
    (folder / "lengths.jsonl").write_text(json.dumps(line) + "\n")
    return line


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_run_is_explained_by_the_arguments_that_it_planned_with(tmp_path, capsys):
    lengths = [100 + 13 * (i % 9) for i in range(24)]
    members = [range(16), range(16, 24)]  # of unequal size, which no draw gives
    found = recorded(
        tmp_path, lengths, ranks=2, mini_batches=members, max_tokens=1024, max_sequences=4, cost_model=CostModel(3, 0.5)
    )
    assert read_run(tmp_path).arguments["cost_model"] == CostModel(3, 0.5)
    assert [part.tolist() for part in read_run(tmp_path).mini_batches] == [list(rows) for rows in members]
    assert main([str(tmp_path)]) == 0
    printed = words(capsys.readouterr().out)
    assert f"Step 1 of {tmp_path}, as the run planned it." in printed
    assert "ranks: 2, mini-batches: 2, max_tokens=1,024, max_sequences=4" in printed
    plan = plan_batch(lengths, **read_run(tmp_path).arguments, mini_batches=read_run(tmp_path).mini_batches)
    assert plan_record(plan) == {"mini_batch": found["mini_batch"], "plan": found["plan"]}
    assert words(explain(plan)) in printed


def test_what_the_command_line_changes_of_a_run_is_said(tmp_path, capsys):
    recorded(tmp_path, [300] * 16, ranks=2, max_tokens=1024, pipeline=Pipeline(2))
    assert main([str(tmp_path), "--ranks", "4", "--mini-batches", "2"]) == 0
    printed = words(capsys.readouterr().out)
    assert "Otherwise than in the run: --ranks 4, --mini-batches 2." in printed
    assert "ranks: 4, mini-batches: 2, max_tokens=1,024; stages: 2" in printed


def test_an_older_run_is_planned_by_its_config_file_and_that_is_said(tmp_path, capsys):
    (tmp_path / "lengths.jsonl").write_text(json.dumps({"step": 1, "lengths": [300] * 32}) + "\n")
    settings = {"batch": {"mini_batches": 2}, "policy": {"ranks": 4, "max_tokens": 512}}
    settings["policy"]["parallel"] = {"context_parallel": 2}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    assert main([str(tmp_path)]) == 0
    printed = words(capsys.readouterr().out)
    assert "recorded lengths without a plan; this is one by its config.yaml, its mini-batches drawn again" in printed
    assert "ranks: 4, mini-batches: 2, max_tokens=1,024, length_multiple=4" in printed
    (tmp_path / "config.yaml").write_text("- 1")
    assert main([str(tmp_path)]) == 2
    assert "config.yaml holds no settings" in capsys.readouterr().err
    (tmp_path / "config.yaml").unlink()
    assert main([str(tmp_path)]) == 0
    assert "holds neither a plan nor config.yaml; what follows is assumed" in words(capsys.readouterr().out)


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "balancing", "no-such-file.csv"]
    ended = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    assert ended.returncode == 2
    assert ended.stderr == "error: no-such-file.csv cannot be read: No such file or directory\n"
