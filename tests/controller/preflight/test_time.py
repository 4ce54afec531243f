"""The section "time" of a dry run: inputs from configurations, runs and distributions, and its numbers."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from balancing.time_model.machine import ATTENTION_OF_FLASH4, Efficiency
from controller.config import Config, load
from controller.preflight.cluster import Cluster, parse_cluster
from controller.preflight.describe_time import TimeOptions, changes, read_problem
from controller.preflight.time_inputs import (
    drawn_lengths,
    layout_of,
    machine_of,
    recorded_lengths,
    shape_of,
    workload_of,
)
from tests.json_lines import write_lines
from tests.refusals import refused

LAUNCH = Path("examples/launch/sixty_four_gpus.yaml").resolve()
H100S = "nodes=8,gpus=8,gpu=H100"


def described() -> tuple[Config, Cluster]:
    config, cluster = load(LAUNCH), parse_cluster(H100S)
    config.is_described, config.described_gpus, config.resources.device = True, 64, "cuda"
    return config, cluster


def test_a_card_has_its_figures_unless_others_are_given() -> None:
    assert parse_cluster(H100S) == Cluster(nodes=8, gpus=8, cpus=96, gpu_gib=80, gpu="H100")
    assert machine_of(parse_cluster(H100S)).tflops == 989.4
    own = machine_of(
        parse_cluster("nodes=1,gpus=8,gpu=custom,gpu_gib=96,tflops=400,bandwidth=2000")
    )
    assert (own.gib, own.tflops, own.bandwidth) == (96, 400, 2000)
    with refused("--cluster: gpu=T4: unknown. Use H100"):
        parse_cluster("nodes=1,gpus=8,gpu=T4")


def test_a_layout_is_that_of_the_configuration() -> None:
    layout = layout_of(*described())
    assert (layout.dp, layout.cp, layout.ranks, layout.engines, layout.engine_tp) == (
        16,
        2,
        32,
        8,
        4,
    )
    assert (layout.gpus, layout.placement, layout.recomputed) == (64, "apart", 1.0)
    assert layout.engine_gib == pytest.approx(0.85 * 80)
    assert shape_of(described()[0]).parameters == pytest.approx(32.8e9, rel=0.01)


def test_a_workload_has_the_steps_samples_and_passes() -> None:
    config, _ = described()
    found = workload_of(
        config, drawn_lengths("fixed:700", config.longest_response), [100, 300]
    )
    assert (found.samples, found.samples_per_prompt, found.updates) == (4096, 16, 4)
    assert set(found.responses) == {700}
    assert found.prompts.mean() == pytest.approx(200, abs=1)
    assert (found.prompts.reshape(-1, 16) == found.prompts.reshape(-1, 16)[:, :1]).all()
    assert found.forward_passes == 1  # four updates need old log-probs


def test_attention_has_the_rate_of_the_kernel_that_is_named() -> None:
    config, cluster = described()
    config.model.attention = "flash4"
    problem, _ = read_problem(config, cluster, TimeOptions())
    assert problem.efficiency == replace(Efficiency(), attention=ATTENTION_OF_FLASH4)
    config.model.attention = "varlen"
    assert read_problem(config, cluster, TimeOptions())[0].efficiency == Efficiency()


def test_the_rate_of_flash_attention_4_is_the_fitted_one_times_the_ratio_measured() -> None:
    """TFLOP/s at 65,536 tokens, forward, and forward with backward as 3.5 forwards, with one recomputation."""
    slow, fast = (1 / forward + 3.5 / both for forward, both in ((358, 331), (669, 648)))
    assert (
        pytest.approx(Efficiency().attention * slow / fast, abs=0.01) == ATTENTION_OF_FLASH4
    )


def test_distributions_have_their_medians_and_limits() -> None:
    drawn = drawn_lengths("lognormal:1500,0.9", 16384)
    assert np.median(drawn) == pytest.approx(1500, rel=0.01)
    assert np.std(np.log(drawn)) == pytest.approx(0.9, rel=0.02)
    assert max(drawn_lengths("lognormal:1500,0.9", 2000)) == 2000
    assert np.mean(drawn_lengths("uniform:100,2000", 16384)) == pytest.approx(
        1050, rel=0.01
    )
    assert np.median(drawn_lengths("", 4000)) == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "normal:3,4",
            "fixed",
            "lognormal:a,b",
            "fixed:",
            "fixed:3,4",
            "lognormal:3",
            "uniform:3",
        ),
        *(
            "uniform:2000,100",
            "uniform:0,10",
            "fixed:0",
            f"fixed:1{'0' * 400}",
            "uniform:-3,4",
            "lognormal:nan,1",
        ),
    ],
)
def test_other_distributions_are_refused(text: str) -> None:
    with refused(f"--response-tokens {text}: "):
        drawn_lengths(text, 100)


def test_lengths_of_a_run_are_its_sequences_less_its_mean_prompt(tmp_path: Path) -> None:
    (tmp_path / "lengths.jsonl").write_text(
        '{"step": 1, "lengths": [110, 130]}\n{"step": 2, "lengths": [150, 210]}\n'
    )
    rows = [{"step": step, "rollout/response_tokens_mean": 50.0} for step in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert recorded_lengths(tmp_path) == ([10, 30, 50, 110], [100])
    (tmp_path / "lengths.jsonl").unlink()
    with refused(f"--lengths {tmp_path}: "):
        recorded_lengths(tmp_path)


@pytest.mark.parametrize("price", ["nan", "inf", "-3", "0", "1e400", "much"])
def test_a_price_is_a_positive_number(price: str, dry_run: Callable[..., str]) -> None:
    cluster = ("--cluster", "nodes=1,cpus=2")
    assert "--price" in dry_run(*cluster, f"--price={price}", code=2)


def test_every_change_keeps_the_gpus() -> None:
    layout = layout_of(*described())
    tried = changes(layout)
    assert {each.gpus for each in tried.values()} == {64}
    assert layout not in tried.values()


def test_the_page_says_hours_cost_and_what_would_help(
    dry_run: Callable[..., str],
) -> None:
    on_gpus = ("resources.device=auto", "run.steps=1000", "--no-measure")
    timed = [
        "--cluster",
        "nodes=1,gpus=2,gpu=H100",
        "--price",
        "2.5",
        "--response-tokens",
        "fixed:8",
    ]
    page = dry_run(*on_gpus, *timed).partition("== time, predicted ==\n")[2]
    step = float(re.search(r"^step +([\d.]+)", page, re.MULTILINE)[1])  # type: ignore[index]
    hours, gpu_hours, price = re.search(
        r"in ([\d.]+) hours .*, (\d+) GPU-hours, (\d+) at 2.5", page
    ).groups()  # type: ignore[union-attr]
    assert float(hours) == pytest.approx(1000 * step / 3600, abs=0.06)
    assert float(gpu_hours) == pytest.approx(2 * 1000 * step / 3600, abs=0.6)
    assert float(price) == pytest.approx(2.5 * 2 * 1000 * step / 3600, abs=3)
    assert all(len(line) <= 80 for line in page.splitlines())
    page = dry_run(*on_gpus, "--cluster", "nodes=1,gpus=2,gpu_gib=80,cpus=8")
    assert "not predicted: name the card" in page
    assert "Add --dry-run --cluster" in dry_run(*on_gpus[:-1], "--price", "2", code=2)
