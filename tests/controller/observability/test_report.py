"""The report of a run: complete, without a way in for what a model wrote, and shown by a browser without a
network.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from balancing import CostModel, explain, plan_batch, plan_statistics
from balancing.analysis.lengths_file import plan_record
from ballast.pages.report import main
from controller.observability.report import (
    Section,
    learning,
    policy,
    who_computes_when,
    write_report,
)
from controller.observability.report_tables import sample_tables
from controller.observability.run_folder import RunFolder, RunWriter
from tests.browser import (
    CONTRASTS,
    DESKTOP,
    TELEPHONE,
    WIDER,
    Browser,
    browser,
    needs_chromium,
)
from tests.controller.observability.recorded_run import ATTACKS, STEPS, write_run
from tests.json_lines import read_lines, write_lines

SECTIONS = [
    "Reward and validation",
    "Lengths",
    "Balance and time",
    "Who computes when",
    "Policy",
]
SECTIONS += [
    "Slowest samples",
    "Longest samples",
    "Held-out responses",
    "Sessions",
    "Configuration",
]
SMALLEST = """Math.min(...[...document.querySelectorAll('svg')].flatMap(svg => {
  const scale = svg.clientWidth / svg.viewBox.baseVal.width;
  return [...svg.querySelectorAll('text')].map(text => scale * parseFloat(getComputedStyle(text).fontSize));
}))"""
"""Pixels of the smallest letters in a chart."""


class Elements(HTMLParser):
    """Every element of a page with its attributes, the texts of some, and the section that each stands in."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.sections: dict[str, list[str]] = {}
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.sections.setdefault(tag, []).append(self.texts.get("h2", [""])[-1])
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag in ("h1", "h2", "td", "title"):
            self._inside.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside[-1]][-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with its report."""
    folder = tmp_path_factory.mktemp("runs") / "example"
    write_run(folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def elements(run: Path) -> Elements:
    return Elements((run / "report.html").read_text(encoding="utf-8"))


def test_every_part_of_the_report_is_there(elements: Elements) -> None:
    assert elements.texts["h2"] == SECTIONS
    assert list(dict.fromkeys(elements.sections["svg"])) == SECTIONS[:5]
    assert elements.sections["table"] == SECTIONS[5:8]
    assert elements.sections["pre"] == SECTIONS[9:]
    assert elements.sections["details"] == SECTIONS[8:]


def test_what_a_model_wrote_is_text_and_nothing_else(run: Path, elements: Elements) -> None:
    """Every attack stands in a cell, letter by letter, and has made no element and no attribute."""
    cells = "\n".join(elements.texts["td"])
    for attack in ATTACKS:
        assert attack.replace("\u0000", "\ufffd") in cells.replace("\u0000", "\ufffd")
    assert not {"script", "img", "iframe", "object", "embed", "link", "form"} & set(
        elements.tags
    )
    assert elements.tags.count("h1") == 1
    assert not [name for name, _ in elements.attributes if name.startswith("on")]
    assert "default-src 'none'" in (run / "report.html").read_text()


def test_the_report_asks_for_nothing_from_a_network(elements: Elements) -> None:
    """References are to parts of the page itself; the rest are names of XML vocabularies, which nobody
    fetches.
    """
    references = [
        value
        for name, value in elements.attributes
        if name in ("src", "href", "xlink:href", "action")
    ]
    assert all(value.startswith("#") for value in references)


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef-secret")
    folder = tmp_path / "run"
    config = write_run(folder, steps=1)
    config.data.train = "https://me:pass-word@example.org/0123456789abcdef-secret/hf_abcdefghijklmnopqrstuvw"
    text = (folder / "config.yaml").read_text().replace("train.jsonl", config.data.train)
    (folder / "config.yaml").write_text(text)
    with (folder / "samples.jsonl").open("a") as lines:
        row = {
            "step": 1,
            "uid": "u",
            "sample": 0,
            "response_tokens": 10**6,
            "seconds": 1e6,
            "reward": 1.0,
        }
        lines.write(json.dumps(row | {"response": "I saw 0123456789abcdef-secret"}) + "\n")
    page = write_report(folder).read_text()
    assert "I saw [hidden]" in page
    for secret in ("0123456789abcdef-secret", "pass-word", "hf_abcdefghijklmnopqrstuvw"):
        assert secret not in page


@pytest.mark.filterwarnings(  # not those of objects that other tests left to be collected
    "error", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_run_that_ended_in_its_first_step_has_a_report_without_a_warning(
    tmp_path: Path,
) -> None:
    """Its lengths are there and its times are not, so that the chart of phases has nothing to name."""
    write_run(tmp_path / "begun", steps=1)
    metrics = tmp_path / "begun" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0])
    assert main([str(tmp_path / "begun")]) == 0


def test_a_run_that_has_only_begun_has_a_report_too(tmp_path: Path) -> None:
    """One step, one rank, no validation, and lines that a crash has cut short."""
    folder = tmp_path / "short"
    write_run(folder, steps=1, ranks=1)
    shutil.rmtree(folder / "validation")
    metrics = read_lines(folder / "metrics.jsonl")
    kept = (
        {name: value for name, value in row.items() if "validation" not in name}
        for row in metrics
        if row["step"]
    )
    write_lines(folder / "metrics.jsonl", kept)
    for name in ("samples.jsonl", "timeline.jsonl", "metrics.jsonl"):
        with (folder / name).open("a") as lines:
            lines.write('{"step": 2, "up')
    assert main([str(folder)]) == 0
    found = Elements((folder / "report.html").read_text())
    assert "Who computes when" not in found.texts["h2"]
    assert "Held-out responses" not in found.texts["h2"]
    assert "Samples by reward" in found.texts["h2"]
    assert found.texts["h2"][:4] == ["Reward", "Lengths", "Time", "Policy"], (
        "no validation, nobody to wait for"
    )
    page = (folder / "report.html").read_text()
    assert "1 policy rank, 1 engine" in page
    assert "since the first" not in page


@pytest.mark.parametrize("name", ["answer", "solution", "ground_truth", "label"])
def test_samples_by_reward_stand_in_for_a_validation_with_expected_answers(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "plain"
    write_run(folder, steps=2)
    shutil.rmtree(folder / "validation")
    file = folder / "samples.jsonl"
    rows = read_lines(file)
    for number, row in enumerate(rows):
        row |= {"reward": float(number), "record": f"level: 3\n{name}: WANTED{number}"}
    write_lines(file, rows)
    (table,) = [
        table
        for table in sample_tables(RunFolder(folder))
        if table.title == "Samples by reward"
    ]
    last = [
        number
        for number, row in enumerate(rows)
        if row["step"] == max(row["step"] for row in rows)
    ]
    assert [row["expected"] for row in table.rows] == [f"WANTED{number}" for number in last]
    assert list(table.columns) == ["prompt", "response", "expected", "reward"]


def times_of(section: Section) -> list[float]:
    return [float(time) for time in re.findall(r"([0-9.]+) × ideal", section.charts[0])]


def test_no_order_takes_less_than_the_time_in_which_nobody_waits_where_prompts_are_shared(
    tmp_path: Path,
) -> None:
    """In the given order a prompt's samples lie apart and their prompt is computed several times; as planned,
    once.
    """
    lengths, groups = np.array([96, 128] * 16), np.array([0, 1] * 16)
    prefixes = {"prefix_groups": groups, "prefix_lengths": np.full(32, 64)}
    plan = plan_batch(lengths, ranks=4, max_tokens=4096, **prefixes)
    with RunWriter(tmp_path, "", []) as writer:
        writer.lengths(1, plan_record(plan), lengths=lengths, **prefixes)
    (section,) = who_computes_when(RunFolder(tmp_path))
    given, planned = times_of(section)
    assert given > planned >= 1.0


def test_the_last_update_is_drawn_and_explained_with_what_the_run_planned_with(
    tmp_path: Path,
) -> None:
    lengths = np.random.default_rng(0).integers(8, 400, 48)
    how = {
        "ranks": 4,
        "max_tokens": 1600,
        "max_sequences": 5,
        "length_multiple": 4,
        "algorithm": "verl",
    }
    plan = plan_batch(
        lengths,
        mini_batches=[range(20), range(20, 48)],
        cost_model=CostModel(3.0, 0.5),
        **how,
    )
    with RunWriter(tmp_path, "", []) as writer:
        writer.lengths(7, plan_record(plan), lengths=lengths)
    (section,) = who_computes_when(RunFolder(tmp_path))
    assert section.note == f"Update of step 7. {explain(plan)}"
    assert times_of(section)[1] == pytest.approx(
        1 + plan_statistics(plan)["imbalance/micro_steps"], abs=1e-3
    )


@pytest.mark.parametrize(
    ("files", "message"), [((), "config"), (("config.yaml",), "holds no step")]
)
def test_a_folder_without_a_run_is_refused_in_one_line(
    files: tuple, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / name).write_text("model: {path: models/small}\n")
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@needs_chromium
def test_a_browser_shows_the_report_as_it_was_written(
    run: Path, reader: Browser, tmp_path: Path
) -> None:
    """The title is ours, no script has run, all sections are there, and the picture is not empty."""
    reader.open((run / "report.html").as_uri(), width=1250)
    found = Elements(reader.value("document.documentElement.outerHTML"))
    assert found.texts["title"][0] == reader.value("document.title") == "example: report"
    assert found.texts["h2"] == SECTIONS
    assert found.tags.count("script") == found.tags.count("img") == 0
    assert found.tags.count("tr") > STEPS
    picture = tmp_path / "page.png"
    reader.picture(picture, height=2400)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1250, 2400)
    assert picture.stat().st_size > 50_000  # an empty page of this size has about 10 kB


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [DESKTOP, TELEPHONE])
def test_the_report_is_readable_at_a_desk_and_on_a_telephone(
    run: Path, reader: Browser, width: int, dark: bool
) -> None:
    """Within the screen's width, in letters that contrast with what they stand on and are of 8 pixels or
    more.
    """
    reader.open((run / "report.html").as_uri(), width=width, dark=dark)
    assert reader.value(WIDER) == 0
    contrasts = reader.value(CONTRASTS)
    assert len(contrasts) > 100
    assert [text for text in contrasts if text[1] < 4.5] == []
    assert reader.value(SMALLEST) >= 8
    widths = reader.value(
        "[...document.querySelectorAll('.charts:not(.wide) svg')].map(svg => svg.clientWidth)"
    )
    assert len(widths) > 5
    assert max(widths) - min(widths) <= 1, "letters of one size"


def test_a_run_that_does_not_learn_says_so_at_the_top_of_its_report(tmp_path: Path) -> None:
    folder = tmp_path / "stuck"
    write_run(folder, steps=3)
    lines = read_lines(folder / "metrics.jsonl")
    stuck = [line | {"rollout/groups_without_signal": 1.0} for line in lines]
    write_lines(folder / "metrics.jsonl", stuck)
    page = write_report(folder).read_text()
    assert page.index("all rewards were equal in 100% of the groups") < page.index("<h2>")


def test_no_two_lines_of_a_panel_share_a_colour(tmp_path: Path) -> None:
    row: dict[str, float] = {"step": 1, "reward/mean": 1.0}
    row |= {
        f"{kind}/part_{number}": 1.0
        for kind in ("reward", "validation")
        for number in range(9)
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    panels = learning(RunFolder(tmp_path))
    assert len(panels) == 2
    for _, draw in panels:
        axes = Figure().subplots()
        draw(axes)
        colours = [line.get_color() for line in axes.get_lines()]
        assert len(colours) == len(set(colours)) > 5


def test_the_age_of_samples_is_drawn_if_some_are_older_than_the_weights(
    tmp_path: Path,
) -> None:
    for oldest, panels in ((0.0, 2), (2.0, 3)):
        (tmp_path / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "rollout/staleness_max": oldest})
        )
        assert len(policy(RunFolder(tmp_path))) == panels


@pytest.mark.parametrize(
    "module", ["controller.observability.report", "balancing.analysis.gantt"]
)
def test_drawing_says_nothing_about_a_home_that_cannot_be_written(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    names = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")
    }
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import {module}, matplotlib; print(matplotlib.get_configdir())",
        ],
        env=names | {"HOME": str(tmp_path / "file")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == "" and str(tmp_path) not in ended.stdout
