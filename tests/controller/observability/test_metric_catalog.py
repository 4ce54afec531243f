"""What is declared of metrics: one meaning a name, names that Prometheus takes, a page that is current."""

import re
from pathlib import Path

import pytest

from controller.observability.declaration import Kind
from controller.observability.live_catalog import LIVE
from controller.observability.metric_catalog import EXPORTED, SECTIONS, declaration_of
from controller.observability.metric_page import page

REPOSITORY = Path(__file__).parents[3]


def test_the_page_in_the_docs_is_that_of_the_declarations() -> None:
    assert (REPOSITORY / "docs" / "metrics.md").read_text() == page(), (
        "run python -m controller.observability.metric_page"
    )


def test_every_name_is_declared_once_and_exported_under_a_name_of_its_own() -> None:
    declarations = [*(declaration for section in SECTIONS.values() for declaration in section), *LIVE]
    assert len(EXPORTED) == len(declarations)
    exported = [(declaration.exported_name, declaration.labels) for declaration in declarations]
    assert len(set(exported)) == len(exported)
    assert all(re.fullmatch(r"ballast(_[A-Za-z0-9]+)+", name) for name, _ in exported)


@pytest.mark.parametrize(
    ("name", "declared", "labels"),
    [
        ("reward/mean", "reward/mean", {}),
        ("reward/format", "reward/{part}", {"part": "format"}),
        ("time/log_probs_s", "time/{phase}_s", {"phase": "log_probs"}),
        ("throughput/tokens_per_s", "throughput/tokens_per_s", {}),
        ("validation/gsm8k/pass@4", "validation/{score}", {"score": "gsm8k/pass@4"}),
    ],
)
def test_a_whole_name_goes_before_a_family_and_a_family_gives_labels(
    name: str, declared: str, labels: dict[str, str]
) -> None:
    found = declaration_of(name)
    assert found is not None
    assert (found[0].name, found[1]) == (declared, labels)


@pytest.mark.parametrize("name", ["rewards/mean", "time/step", "balance/imbalance", "", "step"])
def test_what_nobody_declared_is_not_found(name: str) -> None:
    assert declaration_of(name) is None


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("time/{phase}_s", "ray_ballast_time_seconds"),
        ("throughput/tokens_per_s", "ray_ballast_throughput_tokens_per_second"),
        ("balance/cap_fill", "ray_ballast_balance_cap_fill_ratio"),
        ("balance/idle_share_before", "ray_ballast_balance_idle_share_before"),
        ("restarts/engines", "ray_ballast_restarts_engines_total"),
        ("micro_step/{role}/{rank}/{phase}_s", "ray_ballast_micro_step_seconds"),
    ],
)
def test_prometheus_has_units_written_out(name: str, series: str) -> None:
    assert EXPORTED[name].series == series


def test_histograms_have_rising_boundaries_above_0_and_nothing_else_has_any() -> None:
    for declaration in EXPORTED.values():
        assert (declaration.kind is Kind.HISTOGRAM) == bool(declaration.boundaries)
        assert list(declaration.boundaries) == sorted({bound for bound in declaration.boundaries if bound > 0})
