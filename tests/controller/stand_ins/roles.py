"""The roles of a run without actors: each answers at once and writes down what it was asked for.

Run, step, RolloutBuffer, Planner, checkpoints, RunRecord   the real ones
policy, reference, critic, reward model, engines            these; tokens are references that nobody reads
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rich.console

from balancing import CostModel, Plan
from controller.actors.launch import WorkerGroups
from controller.algorithm.logprob_check import LARGEST, MEAN
from controller.checkpoints.progress import Progress
from controller.config import Config, load
from controller.data.prompts import Prompt
from controller.engines.engine_pool import Generation, OnResults
from controller.engines.fleet import Fleet, RestartBudget
from controller.engines.router import Router
from controller.lifecycle.session import Session
from controller.observability.console import Console
from controller.observability.live_metrics import LiveMetrics
from controller.observability.run_folder import RunWriter
from controller.observability.run_record import RunRecord
from controller.rollout.buffer import SamplingRound
from controller.run import Run
from controller.step import step
from controller.training_loop import Callback, Outcome, Step, train
from workers.batch.dispatch import PlanResult
from workers.batch.metrics import Metric, Metrics
from workers.batch.remote_batch import RemoteBatch, places
from workers.batch.score import Score
from workers.config.roles import SamplingConfig
from workers.engine.requests import Response, SampleRequest, SampleResult
from workers.errors import CheckpointError
from workers.model.checkpoint.checkpoint_folder import (
    Manifest,
    StoredFile,
    commit,
    unfinished_folder,
)

TOKENS = 4  # of every prompt, and of every response
SETTINGS = (
    "run.name=run",
    "run.steps=3",
    "model.path=model",
    "data.train=train.jsonl",
    "data.max_prompt_tokens=4",
    "rollout.sampling.max_new_tokens=4",
    "rollout.samples_per_prompt=2",
    "batch.prompts_per_step=2",
    "resources.device=cpu",
)


@dataclass
class Method:
    """A dispatched method of a worker group, called with `remote`."""

    call: Callable[..., Any]

    def remote(self, *arguments: Any, **named: Any) -> "Method":
        return Method(partial(self.call, *arguments, **named))

    def result(self, timeout_s: float | None = None) -> Any:
        del timeout_s
        return self.call()


def write(path: Path, step: int, **progress: Any) -> Path:
    unfinished = unfinished_folder(path)
    unfinished.mkdir(parents=True)
    (unfinished / "shard").write_bytes(b"weights")
    files = {"shard": StoredFile.of(unfinished / "shard")}
    commit(
        unfinished,
        path,
        Manifest(step, 1, {}, Progress(step=step, **progress).to_json(), files),
    )
    return path


class Saves:
    """A role whose saves, in the background, fail for the steps in `full`: the next call raises, as the real
    one.
    """

    def __init__(self, *full: int) -> None:
        self.full = full
        self.failed: list[str] = []
        self.trained = {"policy": self}  # roles with this one alone
        self.save_checkpoint = Method(self.save)
        self.wait_for_checkpoint = Method(self.wait)

    def save(self, path: str, step: int, extra: dict[str, Any]) -> None:
        self.wait()
        if step in self.full:
            self.failed.append(f"{path} could not be saved: no space left.")
        else:
            write(Path(path), step)

    def wait(self) -> None:
        if self.failed:
            raise CheckpointError(self.failed.pop())


class Model(Saves):
    """A training role. log: `NAME.METHOD` of every pass. updates: (batch, plan) of every update."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log, self.names = name, log, [f"{name} dp=0"]
        self.updates: list[tuple[RemoteBatch, Plan]] = []
        self.mismatch = 0.0
        self.scores: np.ndarray | None = None
        self.meanwhile: Callable[[], None] | None = None
        self.take_micro_step_times = Method(lambda: [[]])
        self.forward_backward = Method(self._forward_backward)
        self.forward_backward_log_probs = Method(self._forward_backward_log_probs)
        self.optimizer_step = Method(lambda last: {"grad_norm": Metric.mean(1.0, 1)})

    def _pass(
        self, method: str, batch: RemoteBatch, plan: Plan, *columns: str
    ) -> PlanResult:
        self.log.append(f"{self.name}.{method}")
        if self.meanwhile is not None:
            self.meanwhile()
        assert method == "update" or sorted(plan.for_rank(0).rows.tolist()) == list(
            range(len(batch))
        )
        mismatch = {MEAN: Metric.mean(self.mismatch, 1), LARGEST: Metric.max(self.mismatch)}
        return PlanResult(
            {name: column(f"{self.name} {name}", len(batch)) for name in columns}, mismatch
        )

    def log_probs(self, batch: RemoteBatch, plan: Plan) -> PlanResult:
        return self._pass("log_probs", batch, plan, "log_probs")

    def log_probs_and_entropies(self, batch: RemoteBatch, plan: Plan) -> PlanResult:
        return self._pass("log_probs_and_entropies", batch, plan, "log_probs", "entropies")

    def reference_log_probs(self, batch: RemoteBatch, plan: Plan) -> PlanResult:
        return self._pass("reference_log_probs", batch, plan, "log_probs")

    def advantages(
        self, batch: RemoteBatch, plan: Plan, settings: Any, penalty: Any, gamma_per: str
    ) -> PlanResult:
        found = self._pass("advantages", batch, plan, "advantages", "returns", "old_values")
        names = ("values", "returns", "returns_square", "value_error", "value_error_square")
        return PlanResult(found.tokens, {name: Metric.mean(1.0, 1) for name in names})

    def score(self, batch: RemoteBatch, plan: Plan, name: str = "") -> np.ndarray:
        self._pass("score", batch, plan)
        return (
            np.arange(len(batch), dtype=np.float64) if self.scores is None else self.scores
        )

    def _forward_backward(self, batch: RemoteBatch, plan: Plan, loss: Any) -> Metrics:
        """The mini-batches of a batch are one update."""
        if self.updates and self.updates[-1][0] is batch:
            earlier = self.updates.pop()[1].mini_batches
            self.updates.append(
                (batch, replace(plan, mini_batches=(*earlier, *plan.mini_batches)))
            )
            return {"loss": Metric.sum(1.0)}
        self.updates.append((batch, plan))
        return self._pass("update", batch, plan).metrics | {"loss": Metric.sum(1.0)}

    def _forward_backward_log_probs(
        self, batch: RemoteBatch, plan: Plan, loss: Any
    ) -> PlanResult:
        self.updates.append((batch, plan))
        passed = self._pass("update", batch, plan, "log_probs")
        return PlanResult(passed.tokens, passed.metrics | {"loss": Metric.sum(1.0)})

    def export_weights(self) -> tuple[None, Metrics]:
        return None, {}

    def save_pretrained(self, path: str) -> None:
        self.log.append(f"{self.name}.save {Path(path).name}")
        Path(path).mkdir(parents=True, exist_ok=True)

    save_adapters = save_pretrained


def column(name: str, rows: int) -> np.ndarray:
    return places(name, [name] * rows, range(rows))


class Engines:
    """`EnginePool`: every response has TOKENS tokens of the present weights. rounds: (requests, sampling) of
    each.

    A generation without rounds is answered when it is pumped; slow: uids that are answered only when nothing
    else is left to wait for. failing: uids whose requests all fail. parts: what unfinished responses have, by
    seed.
    """

    def __init__(self, log: list[str]) -> None:
        self.log, self.actors, self.asleep, self.fleet = (
            log,
            {0: None},
            False,
            Fleet(1, RestartBudget(0)),
        )
        self._sleep_told = False
        self.rounds: list[tuple[list[SampleRequest], SamplingConfig]] = []
        self.slow: set[str] = set()
        self.failing: set[str] = set()
        self.max_retries = 0
        self.parts: dict[int, Response] = {}
        self._late: list[SampleRequest] = []
        self._generation: Generation | None = None
        self._round: Generation | None = None

    def begin(self, sampling: SamplingConfig, on_results: OnResults) -> Generation:
        begun = Generation(Router(1, 1000, self.max_retries), sampling, on_results)
        if isinstance(getattr(on_results, "__self__", None), SamplingRound):
            assert self._round is None, "two rounds at one time"
            self._round = begun
        else:
            self._generation = begun
        return begun

    def end(self, generation: Generation) -> None:
        assert generation is self._round
        self._round = None

    @property
    def queued(self) -> int:
        waiting = self._generation.router.waiting if self._generation else 0
        return waiting + len(self._late)

    def partial_responses(self) -> dict[int, Response]:
        return self.parts

    def take_idle_seconds(self) -> float:
        return 0.0

    def adjust(self) -> None:
        pass

    def pump(self, timeout_s: float = 0.0) -> bool:
        if self._round is not None:
            return self._answer_round(self._round)
        assert self._generation is not None
        requests = [*self._late, *self._generation.router.assign([0]).get(0, [])]
        self._late = [request for request in requests if request.uid in self.slow]
        if timeout_s and len(self._late) == len(requests):
            self._late = self._late[len(self._late[:1]) :]
        now = [request for request in requests if request not in self._late]
        if now:
            self._generation.receive(
                0, ("block"), [self._answer(r, row) for row, r in enumerate(now)]
            )  # type: ignore[arg-type]
        return bool(now)

    def pump_all(self, timeout_s: float = 0.0) -> None:
        if self.pump(timeout_s):
            while self.pump():
                pass

    def _answer(self, request: SampleRequest, row: int) -> SampleResult:
        if request.uid in self.failing:
            return SampleResult(
                request.uid, request.sample, TOKENS, 0, "error", -1, "no such token"
            )
        version = self.fleet.version
        return SampleResult(
            request.uid, request.sample, TOKENS, TOKENS, "stop", version, "", row, version
        )

    def _answer_round(self, generation: Generation) -> bool:
        self.log.append("generate")
        self._sleep_told = False
        requests = generation.router.assign([0])[0]
        self.rounds.append((requests, generation.sampling))
        answers = [self._answer(request, row) for row, request in enumerate(requests)]
        generation.receive(0, f"round {len(self.rounds)}", answers)  # type: ignore[arg-type]
        return True

    def update_weights(self, weights: None, version: int) -> None:
        self.log.append(f"weights {version}")
        self.fleet.new_version(version)

    def sleep(self) -> None:
        if not self._sleep_told:
            self.log.append("sleep")
        self._sleep_told = True


@dataclass
class Rewards:
    """`RewardPool` and its `Scoring`. reward: of (uid, sample, whether it is greedy); None is a failure.
    texts: whether each round asked for all texts.
    """

    engines: Engines
    reward: Callable[[str, int, bool], float | Score | None] = lambda uid, sample, greedy: (
        float(sample % 2)
    )
    texts: list[bool] = field(default_factory=list)
    _scores: dict[tuple[str, int], Score] = field(default_factory=dict)

    def begin(self, *, texts: bool = True) -> "Rewards":
        self.texts.append(texts)
        return Rewards(self.engines, lambda *sample: self.reward(*sample))

    def read(self, places: Any) -> Any:
        raise AssertionError("no response is long")

    def submit(
        self, results: Sequence[SampleResult], block: Any, prompts: dict[str, Prompt]
    ) -> None:
        greedy = bool(self.engines.rounds) and self.engines.rounds[-1][1].temperature == 0
        for result in results:
            assert result.uid in prompts
            reward = self.reward(result.uid, result.sample, greedy)
            failure = "no reward" if reward is None else ""
            score = (
                reward
                if isinstance(reward, Score)
                else Score(reward or 0.0, "text", failure=failure)
            )
            self._scores[result.key] = score

    def without(self, result: SampleResult) -> None:
        pass

    def collect(self) -> dict[tuple[str, int], Score]:
        scores, self._scores = self._scores, {}
        return scores

    def ready(self, timeout_s: float = 0.0) -> dict[tuple[str, int], Score]:
        del timeout_s
        return self.collect()


class Numbered:
    """`Prompts` without end: the uid of each is its place."""

    def take(self, start: int, count: int) -> list[Prompt]:
        ids = np.ones(TOKENS, np.int32)
        return [
            Prompt(str(i), ids, {"prompt": str(i), "level": i})
            for i in range(start, start + count)
        ]


class LocalRoles(WorkerGroups):
    """`WorkerGroups` of which no engine is an actor that could be asked."""

    def take_weight_loads(self) -> dict[str, Any]:
        return {}


class LocalRun:
    """A run of these roles. log: what they were asked for, in order. said: what the terminal showed."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.config = config = load(
            None, [*SETTINGS, "model.share_prefixes=never", f"run.dir={folder}", *overrides]
        )
        self.folder, self.log = config.run_folder, list[str]()
        self.policy, self.reference = (
            Model("policy", self.log),
            Model("reference", self.log),
        )
        self.critic, self.reward_model = (
            Model("critic", self.log),
            Model("reward_model", self.log),
        )
        self.engines = Engines(self.log)
        self.rewards = Rewards(self.engines)
        self._terminal = io.StringIO()
        self.run = self._run(config)

    def _run(self, config: Config) -> Run:
        held_out: Any = Numbered().take(1000, 2) if config.data.validation else None
        session = self._session(config, self.engines)
        return Run(config, session, Numbered(), held_out, cost_model=CostModel(1.0, 0.0))

    def _session(self, config: Config, engines: Any) -> Session:
        roles: Any = LocalRoles(
            {role: getattr(self, role) for role in config.training_roles},
            engines,
            self.rewards,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writer = RunWriter(self.folder, "", [])
        console = Console(rich.console.Console(file=self._terminal, width=200))
        return Session(roles, Progress(), RunRecord(console, LiveMetrics(), self._writer))

    def fit(self, callbacks: Sequence[Callback] = (), step: Step = step) -> Outcome:
        return train(self.run, step, callbacks)

    def close(self) -> None:
        self._writer.__exit__(None)

    @property
    def said(self) -> str:
        return self._terminal.getvalue()

    def of(self, *names: str) -> list[str]:
        """The entries of the log that begin with one of these."""
        return [entry for entry in self.log if entry.startswith(names)]
