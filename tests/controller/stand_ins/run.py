"""A whole run on stand-ins: the real driver, actors and dispatch, from a configuration to its outcome."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ballast.loop.open_run import OpenRun
from ballast.loop.start import running
from controller.actors.layout import Pool
from controller.config import Config, load
from controller.engines.fleet import RestartBudget
from controller.fit import Inputs, read_inputs, training
from controller.lifecycle.session import recovering
from controller.lifecycle.tokenized_inputs import inputs_without_data
from controller.preflight.checks import check
from controller.step import step_of
from controller.training_loop import Outcome, train
from examples.addition.warm_start import create_model
from tests.controller.stand_ins.gpus import (
    StandInEngine,
    StandInReward,
    StandInSender,
    StandInVllm,
    World,
)
from tests.controller.stand_ins.local_ray import LocalRay
from tests.end_to_end.faults import Listening
from workers.config.roles import ModelConfig
from workers.roles.reward import RewardWorker
from workers.rollout.engine_actor import VllmEngineActor

SETTINGS = (
    "run.name=run",
    "run.steps=2",
    "model.path=model",
    "data.train=prompts.jsonl",
    "data.validation=prompts.jsonl",
    "data.max_prompt_tokens=8",
    "batch.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.sampling.max_new_tokens=8",
    "reward.function=reward.py:reward",
    "policy.data_parallel=2",
    "rollout.replicas=1",
    "policy.max_tokens_per_micro_batch=64",
    "resources.device=cuda",
    "tracking.tensorboard=false",
)


def write_stand_in_workspace(folder: Path) -> None:
    """A model, a reward model, prompts and a reward function, as a configuration names them."""
    create_model(folder / "model", seed=0)
    create_model(folder / "judge", seed=1)
    AutoModelForSequenceClassification.from_pretrained(
        folder / "judge", num_labels=1
    ).save_pretrained(folder / "judge")
    records = [
        json.dumps({"prompt": f"{i}+{i}=", "level": i, "source": f"table {i}"})
        for i in range(1, 9)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(records))
    (folder / "reward.py").write_text("def reward(response):\n    return 0.0\n")


@dataclass
class StandInRun:
    """outcome: of the attempt that came to the end. said: what the run told its user. world: its Ray and its
    GPUs.
    """

    world: World
    config: Config
    outcome: Outcome
    said: list[str] = field(default_factory=list)


class StandIns:
    """Puts the stand-ins in their places, until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # vLLM and transformers look at the devices when they are imported: before there are any.
        import vllm.inputs.engine
        import vllm.sampling_params  # noqa: F401

        import workers.engine.weights.gpu_transfer

        self._monkeypatch = monkeypatch
        self.world = world = World()
        world.ray = LocalRay({RewardWorker: StandInReward})
        world.ray.on_death = world.bury
        world.ray.install(monkeypatch)
        self.free_gpus: list[list[int]] = []  # rooms for further engines
        monkeypatch.setattr("controller.actors.launch.reserve", self._reserve)
        monkeypatch.setattr(
            "controller.actors.launch.request_pool",
            lambda pool: RequestedRoom(self.free_gpus),
        )
        monkeypatch.setattr("controller.observability.ray_metrics.RayMetrics", NoMetrics)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", world.empty_cache)
        self.collective_timeouts: list[timedelta] = []
        monkeypatch.setattr(torch.distributed, "init_process_group", self._join_group)
        monkeypatch.setattr(
            torch.distributed, "broadcast_object_list", lambda objects, src=0: None
        )
        monkeypatch.setattr(
            "workers.roles.model_worker.TrainingEngine",
            lambda model, **settings: StandInEngine(world, settings),
        )
        monkeypatch.setattr(
            workers.engine.weights.gpu_transfer,
            "WeightSender",
            lambda placement, engines, weights, metadata, *, rank, **_: StandInSender(
                world, placement, engines, weights, rank
            ),
        )
        monkeypatch.setattr(VllmEngineActor, "_build", lambda worker: StandInVllm(world))
        # The real one ends all processes below its actor's, which here is the tests'.
        monkeypatch.setattr(
            "workers.rollout.engine_actor.end_engine",
            lambda engine: engine and engine.shutdown(),
        )
        self._first_gpu = 0

    def _join_group(self, backend: str, *, timeout: timedelta) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        self.collective_timeouts.append(timeout)

    def _reserve(self, pool: Pool, timeout_s: float) -> "LocalReservation":
        del timeout_s
        gpus = []
        for bundle in pool.bundles:
            count = int(bundle["GPU"])
            gpus.append(list(range(self._first_gpu, self._first_gpu + count)))
            self._first_gpu += count
        return LocalReservation(gpus)

    def compute(self, dtype: str = "auto") -> None:
        """From now on the training engine is the real one, of one rank, on this process's CPU, in `dtype`."""
        # `torch.distributed` has stand-ins for some of it.
        from torch.distributed import (
            distributed_c10d,
        )

        from workers.model.engine import TrainingEngine

        if not torch.distributed.is_initialized():
            # By a plain "gloo" a mesh, which sees the stand-ins' GPUs, would have groups of its own for each
            # dimension.
            store = torch.distributed.HashStore()
            distributed_c10d.init_process_group(
                "cpu:gloo", store=store, rank=0, world_size=1
            )

        def make(model: ModelConfig, **settings: Any) -> TrainingEngine:
            return TrainingEngine(
                replace(model, dtype=dtype), **settings | {"device": "cpu"}
            )

        broadcast = distributed_c10d.broadcast_object_list
        self._monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
        self._monkeypatch.setattr("workers.roles.model_worker.TrainingEngine", make)
        self.world.tower = ()  # the computed models read text
        # The stand-in of vLLM samples with log-probs of its own, which are no model's.
        self._monkeypatch.setattr(
            "controller.algorithm.logprob_check.LogProbCheck.compare", lambda *_: None
        )

    def begin_anew(self) -> None:
        """All GPUs are free: those who had them have ended."""
        self._first_gpu = 0
        self.world.ledger.forget()

    def run(
        self, overrides: Sequence[str], read: Callable[[Config], Inputs] = read_inputs
    ) -> StandInRun:
        config = load(None, [*SETTINGS, *overrides])
        check(config)
        inputs, console = read(config), Listening()

        def attempt(config: Config, budget: RestartBudget) -> Outcome:
            self.begin_anew()
            with training(config, inputs, console, budget) as started:
                return train(started, step_of(inputs.step))

        return StandInRun(
            self.world, config, recovering(attempt, config, console.log), console.said
        )

    @contextmanager
    def open(
        self, overrides: Sequence[str], read: Callable[[Config], Inputs] = read_inputs
    ) -> Iterator[OpenRun]:
        """A run for a loop of one's own."""
        config = load(None, [*SETTINGS, *overrides])
        check(config, needs_data=False)
        self.begin_anew()
        with running(
            config,
            read(config) if config.has_data else inputs_without_data(config),
            Listening(),
        ) as mine:
            yield mine


@dataclass(frozen=True)
class LocalReservation:
    """`Reservation` whose strategies are the GPUs of a rank's bundle. A node that is lost is not replaced."""

    gpus_of_rank: list[list[int]]
    is_placed = True

    def strategy(self, rank: int) -> list[int]:
        return self.gpus_of_rank[rank]

    def release(self) -> None:
        pass


@dataclass
class RequestedRoom:
    """`Reservation` of one engine, placed once the cluster has a room, which it gets back."""

    free: list[list[int]]
    gpus: list[int] = field(default_factory=list)

    @property
    def is_placed(self) -> bool:
        if not self.gpus and self.free:
            self.gpus = self.free.pop()
        return bool(self.gpus)

    def strategy(self, rank: int) -> list[int]:
        assert rank == 0 and self.gpus
        return self.gpus

    def release(self) -> None:
        if self.gpus:
            self.free.append(self.gpus)


class NoMetrics:
    """`RayMetrics`, which needs a cluster to report to."""

    def __init__(self, run: str) -> None:
        del run

    def export(self, name: str, value: float) -> None:
        pass

    def __enter__(self) -> "NoMetrics":
        return self

    def __exit__(self, *_: object) -> None:
        pass
