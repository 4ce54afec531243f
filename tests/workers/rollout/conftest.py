"""One engine for all tests of this folder: it takes 20 seconds to start."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ray

from controller.engines.engine_pool import EnginePool, RolloutBatch
from controller.engines.fleet import RestartBudget
from tests.workers.rollout import tiny
from tests.workers.rollout.telling import Telling
from workers.config import ModelConfig, RolloutConfig, SamplingConfig
from workers.rollout.requests import SampleRequest, SampleResult, sample_seed
from workers.rollout.weight_transfer import pack_weights
from workers.rollout.worker import RolloutWorker

PREFILL = "max_num_batched_tokens"  # an argument of vLLM's that the shared engine is given
PREFILL_TOKENS = 512  # of one forward pass: the prompts of most rounds take several


def start_engines(
    path: Path,
    replicas: int = 1,
    restarts: int = 0,
    environment: bytes = b"",
    environment_variables: dict[str, str] | None = None,
    worker: type[RolloutWorker] = RolloutWorker,
    **settings: Any,
) -> EnginePool:
    """EnginePool over engines of one thread each, started."""
    config = RolloutConfig(replicas=replicas, threads=1, cpu_kv_cache_gib=0.125, max_retries=1, **settings)
    runtime = {"env_vars": environment_variables or {}}
    actor = ray.remote(worker).options(num_cpus=1, max_concurrency=1000, runtime_env=runtime)

    def make(replica: int, attempt: int) -> Any:
        return actor.remote(
            ModelConfig(path=str(path)),
            config,
            index=replica,
            placement="shared_memory",
            max_model_tokens=tiny.MAX_MODEL_TOKENS,
            seed=0,
            environment=environment,
            environment_timeout_s=5.0,
        )

    rollouts = EnginePool(make, config, RestartBudget(restarts))
    rollouts.start().result()
    return rollouts


class Engines:
    """EnginePool, with what the tests ask of it again and again."""

    def __init__(self, rollouts: EnginePool) -> None:
        self.rollouts = rollouts
        self.version = 0

    def call(self, method: str, *arguments: Any, replica: int = 0) -> Any:
        """A method of the actor itself."""
        return ray.get(getattr(self.rollouts.actors[replica], method).remote(*arguments))

    def load(self, model: Any) -> int:
        """Send the model's weights under the next version."""
        self.version += 1
        self.rollouts.update_weights(ray.put(pack_weights(model.state_dict().items())), self.version)
        return self.version

    def sample(self, requests: list[SampleRequest], **sampling: Any) -> RolloutBatch:
        """A round without watching it."""
        return self.rollouts.generate(requests, SamplingConfig(**{"max_new_tokens": 16} | sampling))


def requests_for(prompts: int, samples: int, *, step: int = 0) -> list[SampleRequest]:
    """Prompts of 3 to 40 tokens."""
    rng = np.random.default_rng(7)
    ids = [rng.integers(2, tiny.VOCABULARY, rng.integers(3, 41)).astype(np.int32) for _ in range(prompts)]
    return [
        SampleRequest(f"p{i}", sample, ids[i], sample_seed(0, step, f"p{i}", sample))
        for i in range(prompts)
        for sample in range(samples)
    ]


def rows_of(finished: RolloutBatch) -> list[tuple[SampleResult, dict[str, np.ndarray]]]:
    """Every result with its token columns."""
    pairs = zip(finished.results, finished.blocks, strict=True)
    return [(result, ray.get(block).row(result.row)) for result, block in pairs]


def largest_difference(finished: RolloutBatch, model: Any, temperature: float = 1.0) -> float:
    """Largest difference between the engine's log-probs and the model's, over all response tokens of a round."""
    differences = [
        np.abs(row["rollout_log_probs"] - tiny.log_probs(model, row["input_ids"], temperature))[row["loss_mask"]].max()
        for _, row in rows_of(finished)
    ]
    return float(max(differences))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of `tiny.random_model(0)`."""
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def engines(ray_session: None, tiny_model_path: Path) -> Iterator[Engines]:
    """One engine, shared: a test that needs certain weights loads them first."""
    environment = cloudpickle.dumps(tiny.Echo)
    rollouts = start_engines(
        tiny_model_path, environment=environment, max_turns=2, worker=Telling, engine={PREFILL: PREFILL_TOKENS}
    )
    yield Engines(rollouts)
    rollouts.stop()
