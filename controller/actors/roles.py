"""Roles: all actors of a run, which start and end together.

layout -> reserve pools -> engines | policy, reference, critic, reward model | reward -> Roles -> end all
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from balancing import Plan
from controller.actors.layout import Pool, pools, role_requests, training_pool
from controller.actors.resources import Reservation, reserve
from controller.actors.rewards import RewardPool
from controller.actors.worker_group import Share, WorkerGroup
from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.training import counted
from controller.engines.engine_calls import MakeActor
from controller.engines.engine_pool import EnginePool
from controller.engines.fleet import RestartBudget
from controller.observability.console import Console
from controller.observability.live_metrics import LiveMetrics
from workers.config import (
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
)
from workers.errors import LostError, RolloutError, WorkerError
from workers.model.timing import MicroStepTime
from workers.remote_batch import RemoteBatch
from workers.roles.base import Worker
from workers.roles.critic import CriticWorker
from workers.roles.model_worker import ReferenceWorker, RewardModelWorker
from workers.roles.policy import PolicyWorker
from workers.rollout.engine_actor import VllmEngineActor
from workers.rollout.placement import ranks_of_engine
from workers.rollout.requests import WeightLoad
from workers.user_code.rewards import RewardFunction

ANSWER_SECONDS = 5.0  # for facts that are only recorded


@dataclass(frozen=True)
class TrainingRoles:
    """Roles that hold a model. `reference` is None if nothing needs one."""

    policy: WorkerGroup
    reference: WorkerGroup | None

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        return {"policy": self.policy}

    @property
    def groups(self) -> list[WorkerGroup]:
        return [self.policy, *([self.reference] if self.reference else [])]

    def reference_sequence_log_probs(self, batch: RemoteBatch, plan: Plan) -> np.ndarray:
        """Log-prob of each sequence by the reference, or else by the policy without adapters; float64 [B]."""
        if self.reference is not None:
            return self.reference.sequence_log_probs(batch, plan)
        return self.policy.reference_sequence_log_probs(batch, plan)

    def take_micro_step_times(self) -> dict[str, list[MicroStepTime]]:
        """Times of every micro-step since the last call, in order, by the rank's actor."""
        taken = [(group, group.take_micro_step_times.remote()) for group in self.groups]
        return {
            name: times for group, future in taken for name, times in zip(group.names, future.result(), strict=True)
        }


@dataclass(frozen=True)
class Roles(TrainingRoles):
    """Actors of a reinforcement-learning run. `critic` is None unless the advantage is gae."""

    rollouts: EnginePool
    rewards: RewardPool
    critic: WorkerGroup | None = None
    reward_model: WorkerGroup | None = None
    device_to_device: bool = False
    transfer_timeout_s: float = math.inf

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        return super().trained | ({"critic": self.critic} if self.critic else {})

    @property
    def groups(self) -> list[WorkerGroup]:
        """Roles that compute under plans."""
        others = (self.critic, self.reward_model)
        return super().groups + [group for group in others if group is not None]

    def send_weights(self, version: int) -> None:
        """Send the policy's weights to every engine as `version`: through the object store, or between GPUs.

        Wakes sleeping engines. Raises LostError if an engine or a rank is lost meanwhile.
        """
        if self.device_to_device:
            self.rollouts.receive_weights(lambda: self._beside_engines("send_weights", version), version)
            return
        weights, _ = self.policy.export_weights()
        self.rollouts.update_weights(weights, version)

    def sleep_engines(self) -> None:
        """Free the weights and KV caches of engines that share GPUs; call before a training pass."""
        self.rollouts.sleep()

    def wake_engines(self) -> None:
        """Wake sleeping engines with the weights of their version; call before generation."""
        if self.rollouts.asleep:
            self.send_weights(self.rollouts.fleet.version)

    def connect_engines(self, placement: str, tensor_parallel: int) -> None:
        """Connect the policy's ranks to the engines for transfers between GPUs. Raises LostError as `send_weights`."""
        self._beside_engines("connect_engines", list(self.rollouts.actors.values()), placement, tensor_parallel)

    def _beside_engines(self, method: str, *args: Any) -> None:
        """Call a method of the policy in which ranks and engines wait for each other.

        The transfer has no watchdog: a rank would wait for a dead engine for ever. So engines are polled meanwhile.
        """
        deadline = time.monotonic() + self.transfer_timeout_s

        def poll() -> None:
            self.rollouts.check_alive()
            if time.monotonic() > deadline:
                raise LostError(
                    f"policy.{method} did not finish within resources.collective_timeout_s={self.transfer_timeout_s:g} "
                    "s, and no engine says why."
                )

        try:
            getattr(self.policy, method).remote(*args).result(meanwhile=poll)
        except WorkerError:
            self.rollouts.check_alive()  # a dead engine is the cause, the error of a rank its consequence
            raise

    def reference_log_probs(self, batch: RemoteBatch, plan: Plan) -> np.ndarray:
        """Log-probs of the reference, or else of the policy without adapters."""
        passed = self.reference.log_probs if self.reference is not None else self.policy.reference_log_probs
        return passed(batch, plan).tokens["log_probs"]

    def take_weight_loads(self) -> dict[str, list[WeightLoad]]:
        """Weight updates since the last call, by actor; skips engines that do not answer in time."""
        asked = {actor.take_weight_loads.remote(): f"rollout {i}" for i, actor in self.rollouts.actors.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        loads = {}
        for ref in answered:
            with suppress(RayError):  # the next call that needs the engine reports it
                loads[asked[ref]] = ray.get(ref)
        return loads


class RolesWithoutEngines(Roles):
    """Roles without sampling: `rollouts` has no engine and `rewards` no actor."""

    def send_weights(self, version: int) -> None:
        """Do nothing: there are no engines."""


@contextmanager
def start_roles(
    config: Config,
    reward_functions: Sequence[RewardFunction],
    console: Console,
    budget: RestartBudget,
    *,
    live: LiveMetrics,
    environment: bytes = b"",
) -> Iterator[Roles]:
    """Start every role and yield them; always end all actors and release all bundles.

    live: receives engines' states and queues. environment: see `EnvironmentPool`; empty for one turn. Raises
    ResourceError if the cluster is too small, WorkerError or RolloutError if an actor cannot start.
    """
    with ExitStack() as stack:
        starter = Starter(stack, config, console)
        colocated, timeout_s = config.rollout_placement == "colocated", config.resources.start_timeout_s
        policy = new_policy(starter, config, config.total_optimizer_steps) if colocated else None
        # Engines take longest to start: unless they share GPUs, they start while the training roles load.
        devices = _shared_devices(policy.facts(), *config.colocated_engines) if policy else []
        # Between GPUs, sender and engines have met once and for all.
        replaceable = not config.uses_gpus
        rollouts = new_rollouts(
            starter, config, budget, live, devices=devices, environment=environment, replaceable=replaceable
        )
        rollouts.start()
        rewards = RewardPool(reward_functions, config.model.path, config.reward, starter.requests["reward"].cpus)
        stack.callback(rewards.stop)
        if colocated:
            # An engine sizes its cache by the free memory: on a shared GPU it must start before models are loaded.
            # It sleeps until the policy sends its weights for the first round of generation.
            with starter.waiting("engines, which load the model"):
                rollouts.wait_started(timeout_s)
            rollouts.sleep()
        policy = starter.built_policy(policy or new_policy(starter, config, config.total_optimizer_steps))
        reference = _reference(starter, config) if config.starts_reference else None
        critic = _critic(starter, config) if config.uses_critic else None
        reward_model = new_reward_model(starter, config) if config.uses_reward_model else None
        with starter.waiting("reward workers"):
            rewards.wait_ready(timeout_s)
        with starter.waiting("engines, which load the model"):
            rollouts.wait_started(timeout_s)
        roles = Roles(
            policy,
            reference,
            rollouts,
            rewards,
            critic,
            reward_model,
            device_to_device=config.uses_gpus,
            transfer_timeout_s=config.resources.collective_timeout_s,
        )
        if config.uses_gpus:
            with starter.waiting("ranks and engines that meet", "resources.collective_timeout_s"):
                roles.connect_engines(config.rollout_placement, config.rollout.tensor_parallel)
        yield roles


class Starter:
    """Starts the training roles of one run, each in its bundles; `stack` ends them."""

    def __init__(self, stack: ExitStack, config: TrainingConfig, console: Console, *, only: Sequence[str] = ()) -> None:
        """Reserve all bundles, or only the training pool for the roles `only`. Raises ResourceError."""
        self.stack, self.config, self.console = stack, config, console
        reserved = [training_pool(config)] if only else pools(config)
        self.bundles = {pool.name: self._reserve(pool) for pool in reserved}
        self.requests = {request.role: request for request in role_requests(config)}
        if only:
            self.requests = {role: self.requests[role] for role in only}
        console.log("starting actors: " + ", ".join(f"{r.actors} {r.role}" for r in self.requests.values()))

    def _reserve(self, pool: Pool) -> Reservation:
        with self.waiting(f"room for pool {pool.name}", "resources.placement_timeout_s"):
            bundles = reserve(pool, self.config.resources.placement_timeout_s)
        self.stack.callback(bundles.release)
        return bundles

    def waiting(self, what: str, setting: str = "resources.start_timeout_s") -> AbstractContextManager[None]:
        """Log a slow wait, with the setting of its time limit."""
        limit = f"at most {setting}={value_of(self.config, setting):g} s"
        return self.console.waiting(f"{what} ({limit})")

    def group(self, role: str, worker_class: type[Worker], arguments: dict[str, Any]) -> WorkerGroup:
        """Start actors and process group; the caller loads the model by `build`."""
        config, request = self.config, self.requests[role]
        with self.waiting(f"the processes of {role}"):
            group = WorkerGroup(
                role,
                worker_class,
                self.bundles[request.pool],
                Share(request.cpus, request.gpus),
                dp=config.policy.data_parallel,
                cp=config.policy.parallel.context_parallel,
                tp=config.policy.parallel.tensor_parallel,
                pp=config.policy.parallel.pipeline_parallel,
                arguments=arguments,
                timeout_s=config.resources.start_timeout_s,
                collective_timeout_s=config.resources.collective_timeout_s,
            )
        self.stack.callback(group.stop)
        return group

    def built(self, role: str, worker_class: type[Worker], arguments: dict[str, Any]) -> WorkerGroup:
        """`group` with its model loaded."""
        group = self.group(role, worker_class, arguments)
        with self.waiting(f"{role}, which loads its model"):
            group.build.remote().result(self.config.resources.start_timeout_s)
        return group

    def built_policy(self, policy: WorkerGroup) -> WorkerGroup:
        """Load the policy's model and log its size."""
        with self.waiting("policy, which loads its model"):
            parameters = policy.build.remote().result(self.config.resources.start_timeout_s)[0]
        ranks = counted(self.config.policy.data_parallel, "rank")
        self.console.log(f"policy: {parameters:,} parameters over {ranks} on {self.config.device}")
        return policy


def _shared_devices(ranks: list[dict[str, Any]], engines: int, each: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each colocated engine: the GPUs, on one node, of its policy ranks.

    ranks: `Worker.facts` of every policy rank. each: GPUs of an engine.
    """
    shared = [ranks_of_engine(replica, each) for replica in range(engines)]
    return [",".join(ranks[rank]["gpus"] for rank in of_engine) for of_engine in shared]


def new_rollouts(
    starter: Starter,
    config: Config,
    budget: RestartBudget,
    live: LiveMetrics,
    *,
    devices: list[str] | None = None,
    environment: bytes = b"",
    replaceable: bool,
) -> EnginePool:
    """Create engines that end with the starter's stack; `start` builds them.

    devices: of each colocated engine. replaceable: whether a lost engine can be replaced alone.
    """
    rollouts = EnginePool(
        _engine_maker(config, starter, devices or [], environment),
        replace(config.rollout, replicas=config.engines),
        budget,
        live,
        replaceable=replaceable,
        colocated=config.rollout_placement == "colocated",
        start_timeout_s=config.resources.start_timeout_s,
        log=starter.console.log,
    )
    starter.stack.callback(rollouts.stop)
    return rollouts


def _engine_maker(config: Config, starter: Starter, devices: list[str], environment: bytes) -> MakeActor:
    """Return a function that makes a replica's actor; see `RolloutEngines`.

    `devices`: of each colocated engine; otherwise empty.
    """
    actor_class, request = ray.remote(VllmEngineActor), starter.requests["rollout"]

    def make(replica: int, attempt: int) -> Any:
        rank = ranks_of_engine(replica, config.rollout.tensor_parallel)[0] if devices else replica
        # Ray hides all GPUs from an actor that reserves none, unless this variable is set.
        variables = {
            "CUDA_VISIBLE_DEVICES": devices[replica] if devices else "",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        options = {
            "name": f"rollout {replica}" + (f" restart {attempt}" if attempt else ""),
            "num_cpus": request.cpus,
            "num_gpus": request.gpus,
            "max_concurrency": 1000,
            "scheduling_strategy": starter.bundles[request.pool].strategy(rank),
        } | ({"runtime_env": {"env_vars": variables}} if devices else {})
        return actor_class.options(**options).remote(
            config.model,
            config.rollout,
            index=replica,
            placement=config.rollout_placement,
            max_model_tokens=config.max_model_tokens,
            seed=config.run.seed,
            environment=environment,
            environment_timeout_s=config.reward.timeout_s,
        )

    return make


@contextmanager
def start_training_roles(
    config: TrainingConfig, worker_class: type[Worker], console: Console, *, total_steps: int
) -> Iterator[TrainingRoles]:
    """Start the roles of a run on given sequences and yield them; as `start_roles`.

    worker_class: the policy's. total_steps: optimiser steps of the run.
    """
    with ExitStack() as stack:
        starter = Starter(stack, config, console)
        arguments = _model_arguments(config, config.model, config.policy)
        arguments |= _learning(config, config.policy.optimizer, total_steps)
        policy = starter.built_policy(starter.group("policy", worker_class, arguments))
        reference = _reference(starter, config) if config.starts_reference else None
        yield TrainingRoles(policy, reference)


@contextmanager
def start_roles_without_engines(config: Config, console: Console) -> Iterator[Roles]:
    """Start the roles that train on recorded samples, and their reference; as `start_roles`."""
    with ExitStack() as stack:
        starter = Starter(stack, config, console, only=config.training_roles)
        policy = starter.built_policy(new_policy(starter, config, config.total_optimizer_steps))
        reference = _reference(starter, config) if config.starts_reference else None
        critic = _critic(starter, config) if config.uses_critic else None
        rollouts = EnginePool(_no_engine, replace(config.rollout, replicas=0))
        rewards = RewardPool([], config.model.path, replace(config.reward, workers=0), cpus=0.0)
        yield RolesWithoutEngines(policy, reference, rollouts, rewards, critic)


def _no_engine(replica: int, attempt: int) -> Any:
    raise RolloutError(f"rollout replica {replica} is none of these roles (attempt {attempt}).")


def new_policy(starter: Starter, config: TrainingConfig, total_steps: int) -> WorkerGroup:
    """Create the policy's actors; `Starter.built_policy` loads the model. total_steps: optimiser steps of the run."""
    arguments = _model_arguments(config, config.model, config.policy)
    arguments |= _learning(config, config.policy.optimizer, total_steps)
    return starter.group("policy", PolicyWorker, arguments)


def _reference(starter: Starter, config: TrainingConfig) -> WorkerGroup:
    arguments = _model_arguments(config, config.reference_model, config.reference)
    return starter.built("reference", ReferenceWorker, arguments)


def _critic(starter: Starter, config: Config) -> WorkerGroup:
    arguments = _model_arguments(config, config.critic_model, config.critic)
    arguments |= _learning(config, config.critic.optimizer, config.critic_optimizer_steps)
    return starter.built("critic", CriticWorker, arguments)


def new_reward_model(starter: Starter, config: Config) -> WorkerGroup:
    """Create the reward model's actors and load the model."""
    arguments = _model_arguments(config, config.reward_model, config.reward.model)
    return starter.built("reward_model", RewardModelWorker, arguments)


def _model_arguments(
    config: TrainingConfig,
    model: ModelConfig,
    settings: PolicyConfig | ReferenceConfig | CriticConfig | RewardModelConfig,
) -> dict[str, Any]:
    """Arguments of every `ModelWorker`; all roles share the policy's ranks, parallelism and threads."""
    return {
        "model": config.decided(model),
        "device": config.device,
        "temperature": config.temperature,
        "threads": config.policy.threads,
        "parallel": config.policy.parallel,
        "cpu_offload": settings.cpu_offload,
    }


def _learning(config: TrainingConfig, optimizer: OptimizerConfig, total_steps: int) -> dict[str, Any]:
    """Further arguments of a `TrainedWorker`."""
    reshard = config.policy.reshard_after_forward
    return {"optimizer": optimizer, "total_steps": total_steps, "reshard_after_forward": reshard}
