"""Make the actors of engines, and the front from which agents elsewhere get their sessions.

Config, rooms --engine_maker--> make(replica, attempt) --> VllmEngineActor in its room
Config, make --engine_pool--> EnginePool, or ElasticEnginePool with rooms that come and go
Config --session_front--> SessionFront on the driver's node
"""

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from controller.actors.engine_rooms import EngineRooms
from controller.actors.layout import RoleRequest
from controller.actors.resources import Reservation
from controller.config import Config
from controller.engines.elastic_pool import ElasticEnginePool
from controller.engines.engine_calls import MakeActor
from controller.engines.engine_pool import EnginePool
from controller.observability.console import Console
from workers.agents.front import SessionFront
from workers.config.roles import GATEWAY_KEY
from workers.engine.placement import ranks_of_engine
from workers.errors import BallastError, WorkerError
from workers.rollout.engine_actor import VllmEngineActor

STOP_SECONDS = 5.0  # wait for a front that frees its port


def engine_maker(
    config: Config,
    rooms: Reservation | EngineRooms,
    request: RoleRequest,
    devices: list[str],
    environment: bytes,
    front: Any = None,
) -> MakeActor:
    """Return a function that makes a replica's actor. rooms: of all replicas. devices: of each colocated
    engine, otherwise empty. front: actor of `SessionFront`.
    """
    actor_class = ray.remote(VllmEngineActor)

    def make(replica: int, attempt: int) -> Any:
        rank = (
            ranks_of_engine(replica, config.rollout.tensor_parallel)[0]
            if devices
            else replica
        )
        # Ray 2.60 leaves the GPUs of an actor that reserves none as they are. A cluster that was started with
        # the second variable at 1 would hide them.
        variables = {
            "CUDA_VISIBLE_DEVICES": devices[replica] if devices else "",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        options = {
            "name": f"{request.role} {replica}"
            + (f" restart {attempt}" if attempt else ""),
            "num_cpus": request.cpus,
            "num_gpus": request.gpus,
            "max_concurrency": 1000,
            "scheduling_strategy": rooms.strategy(rank),
        } | ({"runtime_env": {"env_vars": variables}} if devices else {})
        return actor_class.options(**options).remote(
            config.model,
            replace(config.rollout, history=config.history),
            index=replica,
            placement=config.rollout_placement,
            max_model_tokens=config.max_model_tokens,
            seed=config.run.seed,
            environment=environment,
            environment_timeout_s=config.reward.timeout_s,
            front=front,
            needs_reward=not (
                config.reward.weights or config.uses_reward_model or config.uses_judge
            ),
            transfer_timeout_s=config.resources.collective_timeout_s,
        )

    return make


def engine_pool(
    config: Config, make: MakeActor, rooms: EngineRooms | None, **options: Any
) -> EnginePool:
    """Make the actors of a run's engines. rooms: of a range of engines. options: see `EnginePool`."""
    resources = config.resources
    settings = replace(config.rollout, replicas=config.engine_range.setting)
    options |= {
        "start_timeout_s": resources.start_timeout_s,
        "adapter_versions": config.model.lora.versions,
    }
    if rooms is None:
        return EnginePool(make, settings, **options)
    timeout_s = resources.placement_timeout_s
    return ElasticEnginePool(make, settings, rooms, room_timeout_s=timeout_s, **options)


def shared_devices(
    ranks: list[dict[str, Any]], engines: int, ranks_per_engine: int
) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each colocated engine. ranks: `Worker.facts` of every policy rank."""
    devices = []
    for replica in range(engines):
        gpus = [ranks[rank]["gpus"] for rank in ranks_of_engine(replica, ranks_per_engine)]
        devices.append(",".join(gpus))
    return devices


def session_front(config: Config, console: Console, stack: ExitStack) -> Any:
    """Start the actor on the driver's node from which agents elsewhere get sessions. Raises ConfigError."""
    gateway = config.rollout.gateway
    node = ray.get_runtime_context().get_node_id()
    front = (
        ray.remote(SessionFront)
        .options(
            name="session front",
            num_cpus=0,
            max_concurrency=10**6,  # each session waits in a call
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(
            os.environ[GATEWAY_KEY],
            gateway.host,
            gateway.port,
            max_request_mib=gateway.max_request_mib,
            timeout_s=config.rollout.agent_timeout_s,
        )
    )
    stack.callback(_end_front, front)
    try:
        ray.get(front.start.remote(), timeout=config.resources.start_timeout_s)
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        raise (
            cause
            if isinstance(cause, BallastError)
            else WorkerError(f"the front of sessions: {error}")
        ) from error
    console.log(
        f"agents get sessions at POST http://{gateway.host}:{gateway.port}/sessions"
    )
    return front


def _end_front(front: Any) -> None:
    with suppress(RayError):
        # Frees its port at once.
        ray.get(front.stop.options(max_task_retries=0).remote(), timeout=STOP_SECONDS)
    ray.kill(front)
