"""Actors of commands that sample without training, or hold the policy alone."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from controller.actors.rewards import RewardPool
from controller.actors.roles import Starter, new_policy, new_reward_model, new_rollouts
from controller.actors.worker_group import WorkerGroup
from controller.config.sampler import SamplerConfig
from controller.config.training import TrainingConfig
from controller.engines.engine_pool import EnginePool
from controller.engines.fleet import RestartBudget
from controller.observability.console import Console
from controller.observability.live_metrics import LiveMetrics
from workers.user_code.rewards import RewardFunction


@dataclass(frozen=True)
class SamplingRoles:
    """`reward_model` is None without reward.model.path."""

    rollouts: EnginePool
    rewards: RewardPool
    reward_model: WorkerGroup | None


@contextmanager
def start_sampling_roles(
    config: SamplerConfig, reward_functions: Sequence[RewardFunction], console: Console, *, environment: bytes = b""
) -> Iterator[SamplingRoles]:
    """Start the roles and yield them; always end all actors and release all bundles.

    Engines serve the weights of model.path and lost engines are replaced. environment, errors: see `start_roles`.
    """
    with ExitStack() as stack:
        starter, timeout_s = Starter(stack, config, console), config.resources.start_timeout_s
        budget = RestartBudget(config.run.max_restarts)
        rollouts = new_rollouts(starter, config, budget, LiveMetrics(), environment=environment, replaceable=True)
        rollouts.start()
        rewards = RewardPool(reward_functions, config.model.path, config.reward, starter.requests["reward"].cpus)
        stack.callback(rewards.stop)
        reward_model = new_reward_model(starter, config) if config.uses_reward_model else None
        with starter.waiting("reward workers"):
            rewards.wait_ready(timeout_s)
        with starter.waiting("engines, which load the model"):
            rollouts.wait_started(timeout_s)
        yield SamplingRoles(rollouts, rewards, reward_model)


@contextmanager
def start_policy(config: TrainingConfig, console: Console) -> Iterator[WorkerGroup]:
    """Start the policy's ranks with model.path and yield them; as `start_roles`."""
    with ExitStack() as stack:
        starter = Starter(stack, config, console, only=("policy",))
        yield starter.built_policy(new_policy(starter, config, total_steps=1))
