"""Started engines, requests to them, and what they returned, for the tests of a real engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoTokenizer

from controller.engines.engine_pool import EnginePool, Sample
from controller.engines.fleet import RestartBudget
from tests.controller.engines.generation import generate
from tests.workers.rollout import tiny
from tests.workers.rollout.probed_actor import ProbedActor
from workers.batch.dataproto import DataProto, object_column
from workers.batch.placed_images import Placed, PlacedImage
from workers.config.roles import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
)
from workers.engine.requests import (
    EpisodeStart,
    SampleRequest,
    SampleResult,
    sample_seed,
)
from workers.engine.weights.weight_transfer import pack_weights
from workers.model.engine import TrainingEngine

LOG_PROB_TOLERANCE = 3e-5  # float32, two implementations
PREFILL_TOKENS = 512  # of one forward pass: the prompts of most rounds take several
NO_ADAPTERS = LoraConfig()
Row = dict[str, np.ndarray]


def actor_of(
    index: int,
    model: ModelConfig,
    config: RolloutConfig,
    variables: dict[str, str],
    **options: Any,
) -> Any:
    runtime = {"env_vars": variables}
    return (
        ray.remote(ProbedActor)
        .options(num_cpus=1, max_concurrency=1000, runtime_env=runtime)
        .remote(
            model,
            config,
            index=index,
            max_model_tokens=tiny.MAX_MODEL_TOKENS,
            seed=0,
            **({"placement": "shared_memory"} | options),
        )
    )


class Engines:
    """Started engines of one thread each, with what the tests ask of them again and again."""

    def __init__(
        self,
        model: Path,
        replicas: int = 1,
        restarts: int = 0,
        environment: bytes = b"",
        variables: dict[str, str] | None = None,
        train_vision: bool = False,
        lora: LoraConfig = NO_ADAPTERS,
        **settings: Any,
    ) -> None:
        config = RolloutConfig(
            replicas=replicas, threads=1, cpu_kv_cache_gib=0.125, max_retries=1, **settings
        )
        policy = ModelConfig(path=str(model), train_vision=train_vision, lora=lora)
        options = {"environment": environment, "environment_timeout_s": 5.0}
        self.pool = EnginePool(
            lambda replica, attempt: actor_of(
                replica, policy, config, variables or {}, **options
            ),
            config,
            RestartBudget(restarts),
            adapter_versions=lora.versions,
        )
        self.pool.start()
        self.pool.wait_started()
        self.version = 0
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def call(self, method: str, *arguments: Any, replica: int = 0) -> Any:
        """Call a method of the actor itself."""
        return ray.get(getattr(self.pool.actors[replica], method).remote(*arguments))

    def load(self, model: Any, left_out: str = "") -> int:
        """Send the model's weights under the next version."""
        weights = (
            (name, weight)
            for name, weight in model.state_dict().items()
            if name != left_out
        )
        self.pool.update_weights(ray.put(pack_weights(weights)), self.version + 1)
        self.version += 1
        return self.version

    def sample(
        self,
        requests: list[SampleRequest],
        watch: Callable[..., None] | None = None,
        **sampling: Any,
    ) -> list[Sample]:
        """A round of which no sample is dropped."""
        finished, router = generate(
            self.pool, requests, SamplingConfig(**{"max_new_tokens": 16} | sampling), watch
        )
        assert router.dropped == [], router.dropped
        assert [result.key for result, _ in finished] == [
            request.key for request in requests
        ]
        return finished


def requests_for(prompts: int, samples: int, *, step: int = 0) -> list[SampleRequest]:
    """Prompts of 3 to 40 tokens."""
    rng = np.random.default_rng(7)
    ids = [
        rng.integers(2, tiny.VOCABULARY, rng.integers(3, 41)).astype(np.int32)
        for _ in range(prompts)
    ]
    return [
        SampleRequest(f"p{i}", sample, ids[i], sample_seed(0, step, f"p{i}", sample))
        for i in range(prompts)
        for sample in range(samples)
    ]


def episodes(count: int, samples: int, opening: str = "(") -> list[SampleRequest]:
    return [
        replace(r, start=EpisodeStart({"opening": opening}, ""))
        for r in requests_for(count, samples, step=5)
    ]


def rows_of(finished: list[Sample]) -> list[tuple[SampleResult, Row]]:
    return [(result, ray.get(block).row(result.row)) for result, block in finished]


def trainer_of(path: Path, **settings: Any) -> TrainingEngine:
    model = ModelConfig(path=str(path), **settings)
    return TrainingEngine(model, optimizer=OptimizerConfig(), total_steps=9, device="cpu")


def fetched(placed: PlacedImage) -> PlacedImage:
    data = placed.image.data
    data = data if isinstance(data, bytes) else ray.get(data)
    return replace(placed, image=replace(placed.image, data=data))


def trainer_difference(
    trainer: TrainingEngine, rows: list[Row], images: Sequence[Placed] = (), behind: int = 0
) -> float:
    """Largest difference between the engine's log-probs and the trainer's, whose rows are packed.

    images: of each row. behind: response tokens of each row that are not compared.
    """
    columns = ("input_ids", "loss_mask")
    batch = DataProto.from_list(
        [{name: torch.tensor(row[name]) for name in columns} for row in rows]
    )
    if images:
        shown = [tuple(map(fetched, placed)) for placed in images]
        batch.objects["images"] = object_column(shown)
    log_probs, _ = trainer.log_probs(batch, [(0, len(rows))])
    sampled = np.concatenate([row["rollout_log_probs"] for row in rows])
    masks = [row["loss_mask"] & (np.cumsum(row["loss_mask"]) > behind) for row in rows]
    return float(np.abs(log_probs.numpy() - sampled)[np.concatenate(masks)].max())


def largest_difference(
    finished: list[Sample], model: Any, temperature: float = 1.0
) -> float:
    """Largest difference between the engine's log-probs and the model's, over all response tokens
    of a round.
    """
    return max(
        tiny.largest_difference(row, model, temperature) for _, row in rows_of(finished)
    )
