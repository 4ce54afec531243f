"""What Ray's own metrics port says after a step was logged; scraped as Prometheus does it."""

import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from controller.trackers.ray_metrics import RayTracker

Exported = dict[tuple[str, str], float]


def scrape(run: str) -> Exported:
    """{(name, value of the one label beside `run`): value} of the run's samples."""
    import ray

    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.labels.get("run") == run]
    return {(s.name, s.labels.get("part") or s.labels.get("score") or ""): s.value for s in samples}


def scraped_until(run: str, name: tuple[str, str], value: float, seconds: float = 60) -> Exported:
    deadline = time.monotonic() + seconds
    while (found := scrape(run)).get(name) != value and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def test_a_step_is_on_the_metrics_port_under_the_declared_names(ray_session: None) -> None:
    tracker = RayTracker("exported")
    tracker.log(1, {"reward/mean": 0.25, "reward/format": 0.5, "validation/pass@4": 0.75, "rollout/samples": 8.0})
    tracker.log(2, {"reward/mean": 0.5, "rollout/samples": 8.0, "rollout/samples_dropped": 0.0, "undeclared": 1.0})
    found = scraped_until("exported", ("ray_ballast_rollout_samples_total", ""), 16.0)
    assert found == {
        ("ray_ballast_reward_mean", ""): 0.5,
        ("ray_ballast_reward", "format"): 0.5,
        ("ray_ballast_validation", "pass@4"): 0.75,
        ("ray_ballast_rollout_samples_total", ""): 16.0,
    }
