"""Predictions of recorded runs, against runs that are played token by token under the other settings."""

import heapq
import importlib
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from balancing import CostModel, plan_batch
from balancing.analysis.lengths_file import plan_record
from ballast.planning.whatif import main, predict
from controller.config import Config, load, to_yaml
from controller.engines.staleness_schedule import Staleness, StalenessSchedule
from workers.errors import ConfigError, DataError

STEPS, PROMPTS, SAMPLES, PROMPT = 30, 6, 4, 12
STEP_S, SAMPLE_S = 0.02, 0.0015  # of an engine, and of each sample in it
WORK_S, REST_S, WEIGHTS_S, DELAY_S = 4e-9, 0.2, 0.1, 0.03  # of a unit of planned work
COSTS = CostModel(1e5, 10.0)
LENGTHS = np.clip(
    np.random.default_rng(3).lognormal(math.log(40), 0.8, (STEPS * PROMPTS, SAMPLES)), 2, 300
).astype(int)


class Played:
    """A run whose time passes token by token. It writes what a run records."""

    def __init__(self, staleness: int, engines: int) -> None:
        self.now, self.training, self.began = 1000.0, False, 1000.0
        self.schedule = StalenessSchedule(Staleness(PROMPTS, staleness, 0.3), STEPS)
        self.running: list[list[list]] = [[] for _ in range(engines)]  # [group, begun, sample, tokens left]
        self.rows: dict[
            int, list[tuple[int, int, list]]
        ] = {}  # of each group: sample, engine, row of the timeline
        self.timeline, self.lengths, self.seconds = list[dict](), list[dict](), list[float]()
        self.order = itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.begin()
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def begin(self) -> None:
        for group in self.schedule.admit():
            for sample, tokens in enumerate(LENGTHS[group].tolist()):
                least = min(range(len(self.running)), key=lambda engine: len(self.running[engine]))
                if not self.running[least]:
                    self.after(0.0, lambda engine=least: self.decode(engine))
                self.running[least].append([group, self.now, sample, tokens])

    def decode(self, engine: int) -> None:
        if self.running[engine]:
            batch = list(self.running[engine])
            self.after(STEP_S + SAMPLE_S * len(batch), lambda: self.decoded(engine, batch))

    def decoded(self, engine: int, batch: list[list]) -> None:
        for request in batch:
            request[3] -= 1
            if not request[3]:
                self.running[engine].remove(request)
                group, begun, sample, _ = request
                row = [begun, self.now, int(LENGTHS[group, sample]), PROMPT, group, DELAY_S]
                self.rows.setdefault(group, []).append((sample, engine, row))
                self.after(DELAY_S, lambda group=group: self.scored(group))
        self.decode(engine)

    def scored(self, group: int) -> None:
        rows = self.rows[group]
        known = sum(row[1] + DELAY_S <= self.now + 1e-9 for *_, row in rows)
        if known == SAMPLES and self.schedule.state(group).name == "RUNNING":
            self.schedule.finished(group)
            self.train()

    def train(self) -> None:
        if not self.training and (taken := self.schedule.take()):
            self.training = True
            lengths = [PROMPT + tokens for group in taken for tokens in LENGTHS[group].tolist()]
            plan = plan_batch(lengths, ranks=2, max_tokens=512, cost_model=COSTS)
            work = WORK_S * float(plan.predicted_makespans().sum())
            self.after(work + REST_S + WEIGHTS_S, lambda: self.trained(taken, lengths, plan, work))

    def trained(self, taken: list[int], lengths: list[int], plan, work: float) -> None:
        updated = self.now - WEIGHTS_S
        start = updated - work - REST_S
        phases = [["rollout", self.began, start], ["update", start, updated], ["weights", updated, self.now]]
        steps = []
        for seconds in plan.predicted_times()[0]:
            steps.append(["update", start, start + WORK_S * float(seconds), 1, 1, 0, 0])
            start += WORK_S * float(seconds)
        samples: dict[str, list] = {}
        for group in taken:
            for _, engine, row in sorted(self.rows[group]):
                samples.setdefault(f"rollout {engine}", []).append(row)
        number = {"step": len(self.timeline) + 1}
        record = {"phases": phases, "samples": samples, "weights": {}, "cost": list(COSTS.coefficients)}
        self.timeline.append(number | record | {"micro_steps": {"policy dp=0": steps, "policy dp=1": steps}})
        prompts = np.repeat(taken, SAMPLES).tolist()
        self.lengths.append(number | {"lengths": lengths, "prompts": prompts} | plan_record(plan))
        self.seconds.append(self.now - self.began)
        self.training, self.began = False, self.now
        self.schedule.weights_updated()
        self.begin()
        self.train()

    @property
    def steps_per_hour(self) -> float:
        return 3600.0 / float(np.mean(self.seconds[STEPS // 10 :]))

    def write(self, folder: Path, config: Config) -> None:
        metrics = [
            {"step": step, "time/step_s": seconds} for step, seconds in enumerate(self.seconds, start=1)
        ]
        records = {"timeline": self.timeline, "lengths": self.lengths, "metrics": metrics}
        for name, rows in records.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text(to_yaml(config))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synchronous run of one engine, on GPUs that nobody shares."""
    folder = tmp_path_factory.mktemp("recorded")
    settings = {
        "run.name": "recorded",
        "batch.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.replicas": 1,
        "rollout.placement": "apart",
        "resources.device": "cuda",
        "policy.data_parallel": 2,
        "policy.max_tokens_per_micro_batch": 512,
        "model.path": "model",
        "data.train": "data.jsonl",
        "reward.function": "reward:reward",
    }
    Played(staleness=0, engines=1).write(
        folder, load(None, [f"{key}={value}" for key, value in settings.items()])
    )
    return folder


def test_the_recorded_run_is_simulated_as_it_was(recorded: Path) -> None:
    found = predict(recorded, [])
    assert found.recorded == pytest.approx(Played(0, 1).steps_per_hour)
    assert found.simulated == pytest.approx(found.recorded, rel=0.01)
    assert found.steps_per_hour == found.recorded


@pytest.mark.parametrize(("staleness", "engines"), [(1, 1), (2, 1), (0, 2), (0, 4), (1, 2)])
def test_a_prediction_is_what_the_other_settings_take(recorded: Path, staleness: int, engines: int) -> None:
    found = predict(recorded, [f"rollout.max_staleness={staleness}", f"rollout.replicas={engines}"])
    assert found.steps_per_hour == pytest.approx(Played(staleness, engines).steps_per_hour, rel=0.02)


def test_a_smaller_cap_of_tokens_takes_what_its_plan_says(recorded: Path) -> None:
    fewer, more = (predict(recorded, [f"policy.data_parallel={ranks}"]).after for ranks in (1, 4))
    assert np.mean([step.seconds - step.waited for step in fewer]) > 1.2 * np.mean(
        [step.seconds - step.waited for step in more]
    )


def test_settings_that_change_the_recorded_times_are_refused(recorded: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel=2: changes"):
        predict(recorded, ["rollout.tensor_parallel=2"])


def test_a_step_of_more_prompts_than_recorded_is_refused(recorded: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch\.prompts_per_step=1000"):
        predict(recorded, ["batch.prompts_per_step=1000"])


def test_a_timeline_without_prompts_is_refused(recorded: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "lengths.jsonl"):
        (tmp_path / name).write_text((recorded / name).read_text())
    records = [json.loads(line) for line in (recorded / "timeline.jsonl").read_text().splitlines()]
    for record in records:
        record["samples"] = {engine: [row[:3] for row in rows] for engine, rows in record["samples"].items()}
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match="no step with prompts"):
        predict(tmp_path, [])


def test_the_command_prints_a_table_of_eighty_columns(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recorded), "rollout.max_staleness=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:3] == ["steps", "an", "hour"]


@pytest.mark.parametrize("module", ["report", "whatif", "show"])
def test_a_folder_that_is_not_there_is_named_itself(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module(f"controller.{module}").main(["nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere: ")
