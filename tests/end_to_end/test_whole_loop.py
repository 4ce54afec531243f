"""Three steps with real vLLM, two policy ranks over gloo and a reference. Nothing stands in for anything.

One run, about 40 seconds, for all tests of this file. Only here do weights go from two ranks into vLLM, a
Prometheus scrapes Ray, and a timeline comes from processes with clocks of their own.
"""

import json
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller import step as parts
from controller.config import Config, load
from controller.engines.fleet import State
from controller.fit import read_inputs, training
from controller.observability.console import Console
from controller.observability.metric_table import LIVE, METRICS, SECTIONS, Kind, spec_of
from controller.observability.timeline import read_timeline, trace_events, write_trace
from controller.preflight.checks import check
from controller.rollout.samples import RolloutBatch
from controller.training_loop import Outcome, train
from tests.controller.observability import trace_format
from tests.controller.observability.test_metric_table import DASHBOARD, drawn
from tests.end_to_end.prometheus import Prometheus, scraping_ray
from tests.json_lines import read_lines
from workers.batch.dataproto import DataProto


@dataclass
class Run:
    config: Config
    outcome: Outcome
    rollout: RolloutBatch
    proto: DataProto
    versions: list[int]

    @property
    def folder(self) -> Path:
        return self.config.run_folder


def run_loop(overrides: list[str], look: Callable[[], object] = lambda: None) -> Run:
    """A whole run in this process, and one more round sampled with the weights that it ended with.

    look: called between them, while the run's actors live.
    """
    config = load(None, overrides)
    check(config)
    inputs = read_inputs(config)
    with training(config, inputs, Console()) as run:
        outcome = train(run, parts.step)
        look()
        rollout = run.buffer.roll_out(
            inputs.prompts.take(54, 6), 2, config.rollout.sampling, step=10
        )
        return Run(
            config,
            outcome,
            rollout,
            rollout.batch.gather(),
            rollout.batch["weight_version"].tolist(),
        )


@pytest.fixture(scope="module")
def scraping(
    ray_session, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus | None]:
    with scraping_ray(tmp_path_factory.mktemp("prometheus")) as server:
        yield server


@pytest.fixture(scope="module")
def finished(scraping: Prometheus | None, settings: list[str]) -> Run:
    """Two mini-batches a step and a KL to a reference; `scraping` keeps its answers from the end of the last
    phase.
    """
    last = 'ray_ballast_run_step{run="loop"} == 3 unless on (run) ray_ballast_phase == 1'
    overrides = [
        *settings,
        "run.name=loop",
        "batch.mini_batches=2",
        "algorithm.loss.kl_coefficient=0.1",
    ]
    overrides += ["policy.optimizer.learning_rate=1e-3"]
    return run_loop(overrides, lambda: scraping and scraping.hold(last))


@pytest.fixture
def prometheus(finished: Run, scraping: Prometheus | None) -> Prometheus:
    if scraping is None:
        pytest.skip(
            "there is no prometheus on the PATH; `apt-get install prometheus` brings it"
        )
    return scraping


def test_every_step_is_recorded(finished: Run) -> None:
    lines = read_lines(finished.folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert ["validation/reward" in line for line in lines] == [True, False, False, True]
    assert [line["rollout/weight_version"] for line in lines[1:4]] == [1, 2, 3]
    assert [line["rollout/oldest_weight_version"] for line in lines[1:4]] == [0, 1, 2]
    assert list((finished.folder / "tensorboard").iterdir())
    lengths = read_lines(finished.folder / "lengths.jsonl")
    assert [(line["step"], len(line["lengths"])) for line in lengths] == [
        (1, 15),
        (2, 15),
        (3, 15),
    ]
    responses = read_lines(finished.folder / "validation" / "step-3.jsonl")
    assert {"prompt", "record", "response", "reward", "source"} <= set(responses[0])
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert set(summary["validation"]) == {"before", "after"}
    assert summary["seconds_per_step"] > 0
    assert summary["tokens_per_second"] > 0


def test_the_timeline_holds_every_sample_micro_step_and_weight_transfer(
    finished: Run, tmp_path: Path
) -> None:
    write_trace(tmp_path / "trace.json", trace_events(read_timeline(finished.folder)))
    trace = json.loads((tmp_path / "trace.json").read_text())
    trace_format.check(trace)
    phases = [event["name"] for event in trace_format.slices_of(trace, "driver", "phases")]
    assert [
        phases.count(name) for name in ("step", "update", "weights", "validation", "save")
    ] == [
        3,
        3,
        3,
        2,
        1,
    ]
    generated = trace_format.slices_of(trace, "rollout 0", "generate")
    assert (
        sum(event["args"]["samples"] for event in generated if event["args"]["step"])
        == 3 * 15 + 4
    )
    loads = trace_format.slices_of(trace, "rollout 0", "weights")
    assert [event["args"]["version"] for event in loads] == [0, 1, 2, 3]
    micro_steps = sum(int(step["balance/micro_batches"]) for step in finished.outcome.steps)
    for rank in ("policy dp=0", "policy dp=1"):
        measured = trace_format.slices_of(trace, rank, "measured")
        assert sum(event["name"].startswith("update") for event in measured) == micro_steps
        assert {event["name"].split()[0] for event in measured} == {"update", "log_probs"}
    tokens = sum(
        event["args"]["tokens"]
        for rank in ("reference dp=0", "reference dp=1")
        for event in trace_format.slices_of(trace, rank, "measured")
    )
    steps = read_lines(finished.folder / "lengths.jsonl")
    total, prompts = (
        sum(sum(step[name]) for step in steps) for name in ("lengths", "prefix_lengths")
    )
    assert total - prompts < tokens < total, "groups share their prompts"
    for step in steps:
        assert sorted(step["tree_order"]) == list(range(len(step["lengths"])))
        assert all(map(operator.ge, step["tree_depths"], step["prefix_lengths"]))


def test_what_is_recorded_is_what_is_declared(finished: Run) -> None:
    """Every name of the file has its declaration, and what has no condition is in every step that trains."""
    lines = read_lines(finished.folder / "metrics.jsonl")
    declared = {name: spec_of(name) for line in lines for name in line if name != "step"}
    assert [name for name, found in declared.items() if found is None] == []
    families = {name: found[0] for name, found in declared.items()}
    assert [
        name for name, found in families.items() if found is METRICS["policy/{statistic}"]
    ] == []
    always = {name for name, spec in METRICS.items() if not spec.when}
    for line in lines[1:]:
        assert always - {families[name].name for name in line if name != "step"} == set()


def test_prometheus_scrapes_the_run_and_answers_the_dashboard(
    finished: Run, prometheus: Prometheus
) -> None:
    (reward,) = prometheus.query('ray_ballast_reward_mean{run="loop"}')
    assert float(reward["value"][1]) == pytest.approx(
        finished.outcome.steps[-1]["reward/mean"]
    )
    samples = prometheus.query('ray_ballast_rollout_samples_total{run="loop"}')
    assert [float(sample["value"][1]) for sample in samples] == [45.0]
    for query in (
        target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
    ):
        spec, found = (
            drawn(query),
            prometheus.query(
                query.replace("$run", "loop").replace("$__rate_interval", "1m")
            ),
        )
        always = spec.kind is Kind.GAUGE and (spec in SECTIONS[LIVE] or not spec.when)
        # At the end no phase is on.
        assert found or not always or spec.name == "phase/{phase}", query


def told(prometheus: Prometheus, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """{values of the labels: value} of the run."""
    found = prometheus.query(f'ray_ballast_{name}{{run="loop"}}')
    return {
        tuple(sample["metric"][label] for label in labels): float(sample["value"][1])
        for sample in found
    }


def test_prometheus_is_told_of_phases_and_engines(
    finished: Run, prometheus: Prometheus
) -> None:
    """At the end no phase is on, and the engine has the current weights and no request."""
    assert told(prometheus, "run_steps_total") == {(): 3}
    phases = told(prometheus, "phase", "phase")
    assert {
        (name,) for name in ("start", "step", "rollout", "update", "weights", "save")
    } <= phases.keys()
    assert set(phases.values()) == {0}
    states = {("0", state.name.lower()): 0.0 for state in State}
    assert told(prometheus, "engine_state", "replica", "state") == states | {
        ("0", "current"): 1
    }
    assert told(prometheus, "engine_requests_in_flight", "replica") == {("0",): 0}
    assert told(prometheus, "rollout_requests_waiting") == {(): 0}


def test_prometheus_is_told_of_samples_and_ranks(
    finished: Run, prometheus: Prometheus
) -> None:
    steps = finished.outcome.steps
    tokens = told(prometheus, "tokens_total", "phase")
    assert tokens["rollout",] == sum(step["tokens/rollout"] for step in steps)
    # All are at most max_new_tokens.
    assert told(prometheus, "sample_response_tokens_bucket", "le")["16.0",] == 45
    assert told(prometheus, "sample_generation_seconds_count") == {(): 45}
    rewards = told(prometheus, "sample_reward", "quantile")
    assert rewards["0",] <= steps[-1]["reward/mean"] <= rewards["1",]
    counts = told(prometheus, "micro_step_seconds_count", "role", "rank", "phase")
    micro_steps = sum(step["balance/micro_batches"] for step in steps)
    assert 0 < counts["policy", "dp=0", "update"] <= micro_steps
    measured = told(prometheus, "rank_seconds", "role", "rank", "phase")
    passes = (("policy", "update"), ("policy", "log_probs"), ("reference", "log_probs"))
    assert measured.keys() == {
        (role, f"dp={dp}", name) for role, name in passes for dp in (0, 1)
    }
    predicted = told(prometheus, "rank_predicted_seconds", "role", "rank", "phase")
    assert sum(predicted.values()) == pytest.approx(sum(measured.values()))


def test_every_step_trains_on_all_that_was_sampled(finished: Run, workspace: Path) -> None:
    """Sampler and trainer agree, and the policy moves away from its reference."""
    for step in finished.outcome.steps:
        assert step["policy/rollout_mismatch_max"] <= 3e-5
        assert (step["rollout/samples"], step["rollout/samples_dropped"]) == (15, 0)
        assert (step["balance/cap_fill"] <= 1, step["balance/padding_share"]) == (True, 0)
        assert math.isfinite(step["policy/loss"]) and step["policy/grad_norm"] > 0
    assert finished.outcome.steps[-1]["policy/reference_kl"] > 1e-6
    first = AutoModelForCausalLM.from_pretrained(workspace / "model").state_dict()
    last = AutoModelForCausalLM.from_pretrained(finished.folder / "model").state_dict()
    assert set(first) == set(last)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert AutoTokenizer.from_pretrained(finished.folder / "model").decode([3, 4]) == "01"


def test_weights_in_vllm_equal_the_trainers(finished: Run) -> None:
    assert set(finished.versions) == {3}
    assert_engine_equals_saved_model(finished)


def assert_engine_equals_saved_model(run: Run) -> None:
    """The engine's log-probs of its own last samples are those of the model that the trainer saved."""
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    for row in range(len(run.proto)):
        ids, mask, sampled = (
            run.proto.row(row)[name]
            for name in ("input_ids", "loss_mask", "rollout_log_probs")
        )
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(log_probs[mask[1:]], sampled[mask], rtol=0, atol=3e-5)
        assert not mask[0]
        assert (sampled[~mask] == 0).all()
