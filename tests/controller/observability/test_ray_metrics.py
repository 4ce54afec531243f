"""What Ray's own metrics port says after a step was logged; scraped as Prometheus does it."""

import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.observability.ray_metrics import RayMetrics, growth
from controller.observability.trackers import RayTracker

Exported = dict[tuple[str, str], float]


def scrape(run: str) -> Exported:
    """{(name, value of the one label beside `run`): value} of the run's samples."""
    import ray

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [
        sample
        for family in families
        for sample in family.samples
        if sample.labels.get("run") == run
    ]
    labels = ("part", "score", "le")
    return {
        (
            s.name,
            next((s.labels[label] for label in labels if label in s.labels), ""),
        ): s.value
        for s in samples
    }


def scraped_until(
    run: str, name: tuple[str, str], value: float, seconds: float = 60
) -> Exported:
    deadline = time.monotonic() + seconds
    while (found := scrape(run)).get(name) != value and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def test_a_sum_grows_by_what_is_new_and_begins_again_with_all_of_it() -> None:
    assert [
        growth(before, now)
        for before, now in ((0.0, 2.0), (2.0, 2.0), (2.0, 5.0), (5.0, 1.0))
    ] == [
        2,
        0,
        3,
        1,
    ]


def test_a_step_is_on_the_metrics_port_under_the_declared_names(ray_session: None) -> None:
    metrics = RayMetrics("exported")
    tracker = RayTracker(metrics)
    for tokens in (9.0, 16.0, 17.0, float("nan")):
        metrics.export("sample/response_tokens", tokens)
    tracker.log(
        1,
        {
            "reward/mean": 0.25,
            "reward/format": 0.5,
            "validation/pass@4": 0.75,
            "rollout/samples": 8.0,
        },
    )
    tracker.log(1, {"restarts/engines": 2.0})
    # As of a run that recovers.
    RayTracker(RayMetrics("exported")).log(1, {"restarts/engines": 3.0})
    tracker.log(
        2,
        {
            "reward/mean": 0.5,
            "rollout/samples": 8.0,
            "rollout/samples_dropped": 0.0,
            "undeclared": 1.0,
        },
    )
    found = scraped_until("exported", ("ray_ballast_rollout_samples_total", ""), 16.0)
    buckets = {
        le: value
        for (name, le), value in found.items()
        if name == "ray_ballast_sample_response_tokens_bucket"
    }
    assert (buckets["8.0"], buckets["16.0"], buckets["32.0"], buckets["+Inf"]) == (
        0,
        2,
        3,
        3,
    )
    found = {key: value for key, value in found.items() if "sample_response" not in key[0]}
    assert found == {
        ("ray_ballast_reward_mean", ""): 0.5,
        ("ray_ballast_reward", "format"): 0.5,
        ("ray_ballast_validation", "pass@4"): 0.75,
        ("ray_ballast_rollout_samples_total", ""): 16.0,
        ("ray_ballast_restarts_engines_total", ""): 3.0,
        ("ray_ballast_run_step", ""): 2.0,
        ("ray_ballast_run_steps_total", ""): 4.0,
    }


@pytest.mark.slow
def test_the_gauges_of_a_run_outlast_its_longest_step(ray_session: None) -> None:
    """Ray's own ends after two of its reports, 20 s."""
    with RayMetrics("long") as metrics:
        metrics.export("run/step", 1.0)
        RayMetrics("short").export("run/step", 1.0)
        name = ("ray_ballast_run_step", "")
        assert scraped_until("short", name, 1.0) == {name: 1.0}
        deadline = time.monotonic() + 60
        while scrape("short") and time.monotonic() < deadline:
            time.sleep(0.5)
        assert (scrape("short"), scrape("long")) == ({}, {name: 1.0})
