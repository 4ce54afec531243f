"""Launch a run's worker groups, engines and reward workers, which start and end together.

layout -> reserve pools -> engines | policy, reference, critic, reward model | rewards
       -> WorkerGroups -> end all
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import ray
from ray.exceptions import RayError

from controller.actors.engine_actors import (
    engine_maker,
    engine_pool,
    session_front,
    shared_devices,
)
from controller.actors.engine_rooms import EngineRooms
from controller.actors.judge import Judge, JudgedScoring
from controller.actors.layout import (
    Pool,
    pools,
    role_requests,
    training_pool,
)
from controller.actors.resources import Reservation, request_pool, reserve
from controller.actors.rewards import RewardPool, Scoring
from controller.actors.weight_transfer import WeightTransfer
from controller.actors.worker_arguments import worker_arguments
from controller.actors.worker_group import GroupMethod, Share, WorkerGroup
from controller.config import Config, TrainingConfig
from controller.config.file import value_of
from controller.config.role_table import LEARNING_ROLES
from controller.config.sections import RewardConfig
from controller.config.training import count_noun
from controller.data.questions import Questions
from controller.engines.engine_pool import EnginePool
from controller.engines.fleet import RestartBudget
from controller.observability.console import Console
from controller.observability.live_metrics import LiveMetrics
from workers.batch.metrics import results
from workers.config.model import ONLY_POLICY, LoraConfig, checkpointing_words
from workers.config.roles import HTTP, RolloutConfig
from workers.engine.requests import WeightLoad
from workers.model.timing import MicroStepTime
from workers.rendering import Renderer
from workers.user_code.rewards import RewardFunction

ANSWER_SECONDS = 5.0  # wait for facts that are only recorded


@dataclass(frozen=True)
class WorkerGroups:
    """All actors of a run. groups: actors that hold a model, by role. rollouts, rewards: empty without
    sampling.
    """

    groups: dict[str, WorkerGroup]
    rollouts: EnginePool
    rewards: RewardPool
    transfer: WeightTransfer | None = None
    weight_deltas: bool = False
    judge: Judge | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def policy(self) -> WorkerGroup:
        return self.groups["policy"]

    @property
    def reference(self) -> WorkerGroup | None:
        return self.groups.get("reference")

    @property
    def teacher(self) -> WorkerGroup | None:
        return self.groups.get("teacher")

    @property
    def critic(self) -> WorkerGroup | None:
        return self.groups.get("critic")

    @property
    def reward_model(self) -> WorkerGroup | None:
        return self.groups.get("reward_model")

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        return {
            role: group for role, group in self.groups.items() if role in LEARNING_ROLES
        }

    def scoring(self, samples: int, *, texts: bool = True) -> Scoring:
        """Begin to score groups of `samples`, by the reward functions and then the judge, if there is one.

        texts: see `ScoreRequest`. A judge reads all.
        """
        return (
            JudgedScoring(self.rewards, self.judge, samples)
            if self.judge
            else self.rewards.begin(texts=texts)
        )

    def reference_method(self, method: str) -> GroupMethod:
        """Return a method of the reference, or else of the policy without adapters."""
        group_method: GroupMethod = getattr(
            self.reference or self.policy,
            method if self.reference else f"reference_{method}",
        )
        return group_method

    def send_weights(self, version: int, adapter: str = "") -> dict[str, float]:
        """Send the policy's weights to every engine as `version`: through the object store, or between GPUs.

        adapter: one of several LoRA policies, whose adapters alone are sent, or empty for none. Wakes
        sleeping engines. Returns metrics. Raises LostError if a rank is lost meanwhile.
        """
        if not self.rollouts.fleet.size:
            return {}
        if self.lora.sends_adapters:
            self._send_adapters(version, adapter)
            return {}
        if self.transfer is not None:
            self.transfer.send(version)
            return {}
        if not self.weight_deltas:
            weights, _ = self.policy.export_weights()
            self.rollouts.update_weights(weights, version)
            return {}
        weights, metrics = self.policy.export_changed_weights(
            self.rollouts.take_restarted()
        )
        numbers = results(metrics)
        self.rollouts.update_weights(
            weights, version, whole_weights=bool(numbers["weights_whole"])
        )
        return numbers

    def _send_adapters(self, version: int, adapter: str) -> None:
        if adapter:
            self.policy.use_adapters(adapter)
        is_base = self.lora.policies > 1 and not adapter
        adapters = (
            {} if is_base else {adapter or ONLY_POLICY: self.policy.export_adapters()[0]}
        )
        self.rollouts.update_adapters(adapters, version)

    def sleep_engines(self) -> None:
        """Free the weights and KV caches of engines that share GPUs. Call before a training pass."""
        self.rollouts.sleep()

    def catch_up(self) -> None:
        """Bring the current weights to replacements of lost engines, if weights travel between GPUs."""
        self.send_weights(self.rollouts.fleet.version)

    def wake_engines(self) -> None:
        """Wake sleeping engines with the weights of their version. Call before generation."""
        if self.rollouts.asleep:
            self.send_weights(self.rollouts.fleet.version)

    def take_micro_step_times(self) -> dict[str, list[MicroStepTime]]:
        """Return every micro-step's time since the last call, by the rank's actor."""
        group_futures = [
            (group, group.take_micro_step_times.remote()) for group in self.groups.values()
        ]
        return {
            name: times
            for group, future in group_futures
            for name, times in zip(group.names, future.result(), strict=True)
        }

    def take_weight_loads(self) -> dict[str, list[WeightLoad]]:
        """Return weight updates since the last call, by actor. Engines that do not answer in time are
        skipped.
        """
        names = {
            actor.take_weight_loads.remote(): f"rollout {i}"
            for i, actor in self.rollouts.actors.items()
        }
        answered, _ = ray.wait(list(names), num_returns=len(names), timeout=ANSWER_SECONDS)
        loads = {}
        for ref in answered:
            with suppress(RayError):  # the next call that needs the engine reports it
                loads[names[ref]] = ray.get(ref)
        return loads


@contextmanager
def launch(
    config: TrainingConfig,
    console: Console,
    *,
    only: Sequence[str] = (),
    total_steps: int = 1,
    rewards: Sequence[RewardFunction] = (),
    environment: bytes = b"",
    parser: RewardFunction | None = None,
    budget: RestartBudget | None = None,
    live: LiveMetrics | None = None,
    fit: Callable[[TrainingConfig, float], TrainingConfig] | None = None,
) -> Iterator[WorkerGroups]:
    """Start all actors of a run and yield them. Afterwards end them and release all bundles.

    only: training roles to start, without engines and rewards, empty for everything. total_steps: optimiser
    steps of the policy. environment: see `EnvironmentPool`, empty for one turn. parser: of a judge's answers,
    None without a judge. budget: for engines, None allows run.max_restarts. live: receives engines' states
    and queues. fit: decides model.gradient_checkpointing=auto, given the GiB of a GPU (0 on CPUs).

    Raises ResourceError if the cluster is too small, WorkerError or RolloutError if an actor cannot start.
    """
    with ExitStack() as stack:
        start = _Launch(stack, config, console, only, total_steps, fit)
        if only or not isinstance(config, Config):
            no_engines = EnginePool(
                lambda replica, attempt: None, RolloutConfig(replicas=0)
            )
            no_rewards = RewardPool([], "", RewardConfig(workers=0), cpus=0.0)
            yield WorkerGroups(start.load_models(), no_engines, no_rewards)
            return
        deltas = config.rollout.weight_sync == "delta"
        lora = config.model.lora
        sends_weights = (
            "policy" in config.training_roles and not deltas and not lora.sends_adapters
        )
        between_gpus = config.uses_gpus and sends_weights
        # Engines take longest to start: unless they share GPUs, they start while the training roles load.
        engines = start.start_engines(environment, budget, live, by_transfer=between_gpus)
        judge_engines = start.start_judge_engines() or engines
        reward_pool = start.make_reward_pool(rewards)
        judge = start.make_judge(judge_engines, parser) if parser else None
        if config.rollout_placement == "colocated":
            # An engine sizes its cache by the free memory: on a shared GPU it must start before models are
            # loaded. It sleeps until the policy sends its weights for the first round of generation.
            start.wait_for(engines)
            engines.sleep()
        groups = start.load_models()
        if (
            config.starts_teacher
            and config.algorithm.loss.distillation.over == "vocabulary"
        ):
            groups["policy"].take_teacher_layer(groups["teacher"].output_layer()[0])
        with start.waiting("reward workers"):
            reward_pool.wait_ready(config.resources.start_timeout_s)
        start.wait_for(engines, judge_engines)
        transfer = start.connect(groups["policy"], engines) if between_gpus else None
        worker_groups = WorkerGroups(
            groups, engines, reward_pool, transfer, deltas, judge, lora
        )
        engines.catch_up = worker_groups.catch_up
        engines.adjust()  # not earlier: models and reward workers need their room first
        yield worker_groups


class _Launch:
    def __init__(
        self,
        stack: ExitStack,
        config: TrainingConfig,
        console: Console,
        only: Sequence[str],
        total_steps: int,
        fit: Callable[[TrainingConfig, float], TrainingConfig] | None,
    ) -> None:
        self.fit = fit if config.model.gradient_checkpointing == "auto" else None
        self.stack = stack
        self.config = config
        self.console = console
        self.roles = only or config.training_roles
        self.total_steps = total_steps
        self.groups: dict[str, WorkerGroup] = {}
        self.rooms: EngineRooms | None = None
        self.bundles: dict[str, Reservation] = {}
        for pool in [training_pool(config)] if only else pools(config):
            if pool.name == "rollout" and config.engine_range.is_elastic:
                self.rooms = self._reserve_rooms(pool)
            else:
                self.bundles[pool.name] = self._reserve(pool)
        self.requests = {request.role: request for request in role_requests(config)}
        if only:
            self.requests = {role: self.requests[role] for role in only}
        actors = ", ".join(f"{r.actors} {r.role}" for r in self.requests.values())
        engines = f" ({config.engine_range.words_at_start})" if self.rooms else ""
        console.log(f"starting actors: {actors}{engines}")

    def _reserve(self, pool: Pool) -> Reservation:
        with self.waiting(f"room for pool {pool.name}", "resources.placement_timeout_s"):
            bundles = reserve(pool, self.config.resources.placement_timeout_s)
        self.stack.callback(bundles.release)
        return bundles

    def _reserve_rooms(self, pool: Pool) -> EngineRooms:
        """Reserve the rooms of the first engines, each alone."""
        rooms = EngineRooms(pool, request_pool)
        self.stack.callback(rooms.release_all)
        for replica in range(len(pool.bundles)):
            rooms.add(replica, self._reserve(rooms.pool_of(replica)))
        return rooms

    def waiting(
        self, subject: str, setting: str = "resources.start_timeout_s"
    ) -> AbstractContextManager[None]:
        return self.console.waiting(
            f"{subject} (at most {setting}={value_of(self.config, setting):g} s)"
        )

    def group(self, role: str) -> WorkerGroup:
        config = self.config
        request = self.requests[role]
        spec = config.spec(role)
        schedule_steps = config.schedule_steps(role, self.total_steps)
        with self.waiting(f"the processes of {role}"):
            group = WorkerGroup(
                role,
                resolve_name(spec.worker),
                self.bundles[request.pool],
                Share(request.cpus, request.gpus),
                dp=config.policy.data_parallel,
                cp=config.policy.parallel.context_parallel,
                tp=config.policy.parallel.tensor_parallel,
                pp=config.policy.parallel.pipeline_parallel,
                arguments=worker_arguments(config, role, schedule_steps),
                timeout_s=config.resources.start_timeout_s,
                collective_timeout_s=config.resources.collective_timeout_s,
            )
        self.stack.callback(group.stop)
        self.groups[role] = group
        return group

    def start_engines(
        self,
        environment: bytes,
        budget: RestartBudget | None,
        live: LiveMetrics | None,
        *,
        by_transfer: bool,
    ) -> EnginePool:
        """Begin to start the policy's engines. by_transfer: whether weights travel between GPUs."""
        assert isinstance(self.config, Config)
        config = self.config
        colocated = config.rollout_placement == "colocated"
        devices = []
        if colocated:
            devices = shared_devices(
                self.group("policy").facts(), *config.colocated_engines
            )
        front = None
        if config.rollout.agent == HTTP:
            front = session_front(config, self.console, self.stack)
        request = self.requests["rollout"]
        rooms = self.rooms or self.bundles[request.pool]
        engines = engine_pool(
            config,
            engine_maker(config, rooms, request, devices, environment, front),
            self.rooms,
            budget=budget or RestartBudget(config.run.max_restarts),
            live=live,
            front=front,
            by_transfer=by_transfer,
            colocated=colocated,
            log=self.console.log,
        )
        self.stack.callback(engines.stop)
        engines.start()
        return engines

    def connect(self, policy: WorkerGroup, engines: EnginePool) -> WeightTransfer:
        assert isinstance(self.config, Config)
        config = self.config
        transfer = WeightTransfer(
            policy,
            engines,
            config.rollout_placement,
            config.rollout.tensor_parallel,
            config.resources.collective_timeout_s,
            self.console.log,
        )
        with self.waiting("ranks and engines that meet", "resources.collective_timeout_s"):
            transfer.connect()
        return transfer

    def wait_for(self, *pools: EnginePool) -> None:
        with self.waiting("engines, which load the model"):
            for engines in pools:
                engines.wait_started(self.config.resources.start_timeout_s)

    def make_reward_pool(self, rewards: Sequence[RewardFunction]) -> RewardPool:
        assert isinstance(self.config, Config)
        config = self.config
        pool = RewardPool(
            rewards,
            config.model.path,
            config.reward,
            self.requests["reward"].cpus,
            with_environment=bool(
                config.rollout.environment and not config.rollout.runs_agent
            ),
            image_key=config.data.image_key,
        )
        self.stack.callback(pool.stop)
        return pool

    def start_judge_engines(self) -> EnginePool | None:
        """Start the engines of a judge that has its own."""
        assert isinstance(self.config, Config)
        judge_config = self.config.other_engines.get("judge")
        resources = self.config.resources
        if judge_config is None:
            return None
        make = engine_maker(
            judge_config, self.bundles["judge"], self.requests["judge"], [], b""
        )
        budget = RestartBudget(self.config.run.max_restarts)
        log = self.console.log
        timeout_s = resources.start_timeout_s
        engines = EnginePool(
            make,
            judge_config.rollout,
            budget,
            start_timeout_s=timeout_s,
            name="judge",
            log=log,
        )
        self.stack.callback(engines.stop)
        engines.start()
        return engines

    def make_judge(self, engines: EnginePool, parser: RewardFunction) -> Judge:
        from workers.model.pretrained import load_tokenizer

        assert isinstance(self.config, Config)
        config = self.config
        settings = self.config.reward.judge
        model = self.config.judge_model
        timeout_s = config.resources.user_code_timeout_s
        renderer = Renderer.with_template(
            load_tokenizer(model.path), model.chat_template, 0, timeout_s
        )
        # A sample fails if all its answers do: reward.on_failure is of samples.
        rewards = replace(config.reward, workers=1, on_failure="zero")
        answers = RewardPool(
            [parser],
            model.path,
            rewards,
            self.requests["reward"].cpus,
            name="judge answers",
        )
        self.stack.callback(answers.stop)
        questions = Questions(settings, config.data.prompt_key, renderer.tokenizer)
        return Judge(settings, engines, answers, questions, renderer, config.run.seed)

    def load_models(self) -> dict[str, WorkerGroup]:
        """Start the remaining roles, and load every model."""
        checkpointing: dict[str, Any] = {}
        for role in self.roles:
            group = self.groups.get(role) or self.group(role)
            if self.fit and not checkpointing:
                model = self.fit(self.config, min(group.gpu_gib())).model
                checkpointing = {
                    "gradient_checkpointing": model.gradient_checkpointing,
                    "recompute_num_layers": model.recompute_num_layers,
                }
                self.console.log(checkpointing_words(model))
            with self.waiting(f"{role}, which loads its model"):
                parameters = group.build.remote(checkpointing).result(
                    self.config.resources.start_timeout_s
                )[0]
            if role == "policy":
                ranks = count_noun(self.config.policy.data_parallel, "rank")
                self.console.log(
                    f"policy: {parameters:,} parameters over {ranks} on {self.config.device}"
                )
        return self.groups
