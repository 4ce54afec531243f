"""Roles: every actor of a run, started together and ended together.

    layout (pure) -> reserve pools -> engines | policy, reference | reward -> Roles -> one end for all
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from controller.config import Config
from controller.layout import Pool, rollout_pool, training_pool
from controller.resources import reserve
from controller.rewards import RewardPool
from controller.rollouts import Rollouts
from controller.worker_group import Share, WorkerGroup
from workers.policy import PolicyWorker
from workers.reference import ReferenceWorker
from workers.rollout.worker import RolloutWorker


@dataclass(frozen=True)
class Roles:
    """The actors of a run. `reference` is None where the loss has no KL term."""

    policy: WorkerGroup
    reference: WorkerGroup | None
    rollouts: Rollouts
    rewards: RewardPool

    def send_weights(self, version: int) -> None:
        """The policy's weights to every engine, as version `version`, by way of the object store."""
        weights, _ = self.policy.export_weights()
        self.rollouts.update_weights(weights, version)


@contextmanager
def start_roles(
    config: Config, reward_function: Callable[..., Any], reward_columns: tuple[str, ...]
) -> Iterator[Roles]:
    """Start every role, yield them, end every actor and give every bundle back, whatever happens.

    Raises ResourceError if the cluster is too small, WorkerError or RolloutError if an actor cannot start.
    """
    with ExitStack() as stack:
        training = _reserve(stack, training_pool(config), config)
        engines = _reserve(stack, rollout_pool(config), config)
        # Engines take longest to start: they come up while the training roles load.
        rollouts = Rollouts(_engine_actors(config, engines), config.rollout)
        stack.callback(rollouts.stop)
        started = rollouts.start()
        rewards = RewardPool(
            reward_function,
            reward_columns,
            config.model.path,
            workers=config.reward.workers,
            cpus=config.resources.cpus_per_worker,
        )
        stack.callback(rewards.stop)
        policy = _policy(stack, config, training)
        reference = _reference(stack, config, training) if config.uses_reference else None
        rewards.wait_ready()
        started.result()
        yield Roles(policy, reference, rollouts, rewards)


def _reserve(stack: ExitStack, pool: Pool, config: Config) -> PlacementGroup:
    group = reserve(pool, config.resources.placement_timeout_s)
    stack.callback(remove_placement_group, group)
    return group


def _engine_actors(config: Config, bundles: PlacementGroup) -> list[Any]:
    actor_class = ray.remote(RolloutWorker)
    gpus = config.rollout.tensor_parallel if config.rollout_placement == "apart" else 0
    return [
        actor_class.options(
            name=f"rollout {index}",
            num_cpus=config.resources.cpus_per_worker,
            num_gpus=gpus,
            max_concurrency=1000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=index),
        ).remote(
            config.model,
            config.rollout,
            index=index,
            placement=config.rollout_placement,
            max_model_tokens=config.max_model_tokens,
            seed=config.run.seed,
        )
        for index in range(config.rollout.replicas)
    ]


def _policy(stack: ExitStack, config: Config, bundles: PlacementGroup) -> WorkerGroup:
    settings = config.policy
    arguments = {
        "model": config.model,
        "temperature": config.rollout.sampling.temperature,
        "threads": settings.threads,
        "cpu_offload": settings.cpu_offload,
        "reshard_after_forward": settings.reshard_after_forward,
        "optimizer": settings.optimizer,
        "total_steps": config.total_optimizer_steps,
    }
    return _training_group(stack, config, "policy", PolicyWorker, bundles, arguments)


def _reference(stack: ExitStack, config: Config, bundles: PlacementGroup) -> WorkerGroup:
    arguments = {
        "model": config.reference_model,
        "temperature": config.rollout.sampling.temperature,
        "threads": config.policy.threads,
        "cpu_offload": config.reference.cpu_offload,
    }
    return _training_group(stack, config, "reference", ReferenceWorker, bundles, arguments)


def _training_group(
    stack: ExitStack,
    config: Config,
    role: str,
    worker_class: type,
    bundles: PlacementGroup,
    arguments: dict[str, Any],
) -> WorkerGroup:
    gpus = (0.5 if config.uses_reference else 1.0) if config.uses_gpus else 0.0
    group = WorkerGroup(
        role,
        worker_class,
        bundles,
        Share(config.resources.cpus_per_worker, gpus),
        dp=config.policy.ranks,
        arguments=arguments,
        timeout_s=config.resources.start_timeout_s,
    )
    stack.callback(group.stop)
    group.build()
    return group
