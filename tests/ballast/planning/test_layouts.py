"""The layouts of a run: allowed, in memory, fastest first, and written as a configuration."""

import json
from itertools import islice
from pathlib import Path

import pytest

from ballast.planning.layouts import COMMAND, LayoutSearch, main
from controller.config import Config, load
from controller.preflight.arguments import parse_arguments
from controller.preflight.checks import check_layout
from controller.preflight.cluster import parse_cluster, place, run_on
from tests.examples.test_launch import LAUNCH

ROOT = Path(__file__).parents[3]
NODES = ["--cluster", "nodes=1,gpus=8,gpu=H100"]
EIGHT = ["--config", str(LAUNCH / "eight_gpus.yaml"), *NODES]


def search(*overrides: str) -> LayoutSearch:
    return LayoutSearch(parse_arguments([*EIGHT, "--dry-run", *overrides], COMMAND))


def test_layouts_are_allowed_fit_and_come_fastest_first() -> None:
    searched = search("model.gradient_checkpointing=auto")
    found = list(islice(searched.best(), 20))
    seconds = [step.seconds for step, _, _ in found]
    assert seconds == sorted(seconds)
    for _, layout, config in found:
        assert layout.gpus == 8
        assert searched.gib(layout) <= 0.9 * 80
        check_layout(config)
        place(config, parse_cluster(NODES[1]))
        assert config.policy.data_parallel == layout.dp
        assert config.engines == layout.engines


def test_a_given_setting_keeps_its_value() -> None:
    given = (
        "policy.parallel.tensor_parallel=2",
        "rollout.max_staleness=0",
        "rollout.tensor_parallel=2",
    )
    for _, layout, config in islice(search(*given).best(), 10):
        assert (layout.tp, layout.staleness, layout.engine_tp) == (2, 0, 2)
        assert config.policy.parallel.tensor_parallel == 2


def test_numbers_in_a_given_range_of_engines_are_tried() -> None:
    engines = set()
    best = search("rollout.replicas=2..3", "rollout.placement=apart").best()
    for _, layout, config in islice(best, 10):
        assert config.rollout.replicas == layout.engines
        engines.add(layout.engines)
    assert engines <= {2, 3} and engines


def test_a_search_over_staleness_finds_the_best_of_each() -> None:
    """With staleness, the sampler's log-probs replace a forward pass."""
    best = [
        next(search(*given).best())[0].seconds
        for given in ((), *((f"rollout.max_staleness={n}",) for n in range(3)))
    ]
    assert best[0] == min(best[1:])


def test_the_taken_layout_is_written_as_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "layout.yaml"
    assert (
        main([*EIGHT, "rollout.max_staleness=0", "--write", str(file), "--take", "2"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert len(lines) == 2 + 2 * 10
    written: Config = load(file)
    run_on(written, parse_cluster(NODES[1]))
    expected = list(islice(search("rollout.max_staleness=0").best(), 2))[1][2]
    assert written.policy == expected.policy
    assert written.rollout == expected.rollout


@pytest.mark.parametrize("number", ["99", "11", "0", "-1", "1.5", ""])
def test_a_layout_that_is_not_in_the_list_is_not_written(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*EIGHT, "--write", str(tmp_path / "layout.yaml"), f"--take={number}"]) == 2
    assert "--take" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_short_list_has_no_last_layout_under_other_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ballast.planning.layouts.SHOWN", 2)
    monkeypatch.setattr(
        LayoutSearch, "best", lambda self, best=LayoutSearch.best: islice(best(self), 1)
    )
    assert main([*EIGHT, "--write", str(tmp_path / "layout.yaml"), "--take=2"]) == 2
    assert "--take 2" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text("mine")
    assert main([*EIGHT, "--write", str(file)]) == 2
    assert f"--write {file}" in capsys.readouterr().err and file.read_text() == "mine"


def test_json_is_one_object_with_the_settings_of_each_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*EIGHT, "rollout.max_staleness=0", "--json"]) == 0
    output, lines = capsys.readouterr()
    layouts = json.loads(output)["layouts"]
    assert [layout["number"] for layout in layouts] == list(range(1, len(layouts) + 1))
    assert {layout["settings"]["rollout.max_staleness"] for layout in layouts} == {0}
    page = (ROOT / "docs" / "json.md").read_text("utf-8")
    assert all(f"`{key}`" in page for key in layouts[0])
    seconds = [layout["seconds"] for layout in layouts]
    assert seconds == sorted(seconds)
    assert f"{seconds[0]:,.2f} s" in lines
    assert main([*EIGHT[:2], "--json"]) == 2
    output, error = capsys.readouterr()
    assert not output
    assert error.startswith("error: --cluster: ")


def test_nodes_without_a_named_gpu_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EIGHT[:2], "--cluster", "nodes=1,gpus=8,gpu_gib=80,cpus=64"]) == 2
    assert "--cluster:" in capsys.readouterr().err
    assert main(EIGHT[:2]) == 2
    assert (
        main(
            [
                *EIGHT,
                "policy.max_tokens_per_micro_batch=400000",
                "model.gradient_checkpointing=none",
            ]
        )
        == 2
    )
