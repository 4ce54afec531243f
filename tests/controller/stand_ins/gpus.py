"""GPUs as a ledger: who owns memory of which, what is done with it, and a refusal where two would not fit.

    vLLM      weights, kv_cache          from its start, given up by sleep, taken back by wake_up, tag by tag
    training  states                     from build on
              working -> cached          in a pass; torch's allocator keeps it until empty_cache

A pass, or a gathering of weights, may begin only while no engine has a KV cache there; an engine takes a KV
cache only while nothing is cached, and samples only with weights that it was sent or loaded since it slept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.controller.stand_ins.ledger import Ledger
from tests.controller.stand_ins.local_ray import LocalActor, LocalRay, NeverReturnsError
from workers.batch.metrics import Metric, Metrics
from workers.batch.score import Score
from workers.errors import LostError
from workers.model.checkpoint.checkpoint import RankCopy
from workers.model.checkpoint.checkpoint_folder import (
    Manifest,
    check_json,
    commit,
    read_manifest,
    unfinished_folder,
)

GPU_OWNERSHIPS = ("weights", "kv_cache", "states", "working", "cached")
UNDEFINED = -1  # the version of weights whose memory is there and whose values are not
TOKENS = 3  # of every response
# Of a token at the first weights, and what an optimiser step does to it.
FIRST_LOG_PROB, MOVE = (-1.0, -0.25)


WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")
TOWER = ("visual.patch_embed.weight", "visual.merger.weight")
"""Of a vision tower, frozen: the same in every version."""


class World:
    """One run's Ray and GPUs. trouble: called with (actor's name, what it is about to do).

    log_prob: that of every token by the policy's present weights. loses_updates: engines keep their first
    weights and say nothing of it. routed_experts: int16 [layers, k], what engines say that every token went
    through, if anything.
    answer: tokens, or their number, and finish reason of the response to a seed. prompt: which it answers.
    turns: name, prompt and tokens of each request.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.log_prob = FIRST_LOG_PROB
        self.loses_updates = False
        self.tower: tuple[str, ...] = TOWER  # weights of the model's frozen vision tower
        self.routed_experts: np.ndarray | None = None
        self.answer: Callable[[int], tuple[int | list[int], str]] = lambda seed: (
            TOKENS,
            "stop",
        )
        self.prompt: list[int] = []
        self.turns: list[tuple[str, list[int], list[int]]] = []
        self.broadcast: list[
            LocalActor
        ] = []  # engines of the present communicator, with `apart`
        self.ray: LocalRay
        self.trouble: Callable[[str, str], None] = lambda actor, what: None

    @property
    def actor(self) -> str:
        return self.ray.running[-1].name

    @property
    def gpus(self) -> list[int]:
        return self.ray.running[-1].gpus

    def event(self, what: str) -> None:
        self.trouble(self.actor, what)
        self.ledger.record(self.actor, what)
        if not self.ray.running[-1].lives:
            raise RuntimeError(f"{self.actor} died")

    def bury(self, actor: LocalActor) -> None:
        """What a dead process owned is free."""
        self.ledger.give(actor.gpus, actor.name, *GPU_OWNERSHIPS)

    def empty_cache(self) -> None:
        self.event("free")
        self.ledger.give(self.gpus, self.actor, "cached")


class StandInVllm:
    """`AsyncLLM` as VllmEngineActor calls it. versions: of each weight that it would sample with."""

    def __init__(self, world: World) -> None:
        self._world, self._name, self._updating = world, "0", False
        self.versions = dict.fromkeys((*WEIGHTS, *world.tower), 0)
        self._received: set[str] = set()
        self._sleeps, self._log_prob = False, FIRST_LOG_PROB
        self._cached: dict[
            tuple[str, str], int
        ] = {}  # versions of keys and values, by salt and adapters
        self._adapters: dict[int, str] = {}
        world.event("start")
        # A replacement starts beside a trained model, when no rank computes.
        beside = ("states",) if " restart " in world.actor else ()
        world.ledger.take(world.gpus, world.actor, "weights", beside=beside)
        world.ledger.take(world.gpus, world.actor, "kv_cache", beside=beside)
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: 1 << 30, get_num_experts=lambda: 4
        )
        self.errored = False
        self.engine_core, self.output_processor = self, SimpleNamespace(request_states={})

    async def sleep(self, level: int) -> None:
        self._world.event(f"sleep {level}")
        self._world.ledger.give(self._world.gpus, self._world.actor, "weights", "kv_cache")
        self._sleeps = True
        if level == 2:
            self.versions = dict.fromkeys(self.versions, UNDEFINED)

    async def wake_up(self, tags: list[str]) -> None:
        (tag,) = tags
        self._world.event(f"wake {tag}")
        self._world.ledger.take(
            self._world.gpus, self._world.actor, tag, beside=("states",)
        )
        self._sleeps = tag == "weights"

    async def check_health(self) -> None:
        pass

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        if clear_cache:
            self._cached.clear()
        self._world.event("pause")

    async def start_weight_update(self) -> None:
        assert not self._updating
        self._updating = True

    async def update_weights(self, request: Any) -> None:
        assert self._updating and "weights" in self._owned()
        self._received.update(request.update_info.get("names", WEIGHTS))
        self._world.event("receive")
        if not all(actor.lives for actor in self._world.broadcast):
            self._updating = False
            raise TimeoutError("a member of the communicator is missing")

    async def finish_weight_update(self, weight_version: str) -> None:
        assert self._updating
        self._updating, self._name = False, weight_version
        self.versions.update(dict.fromkeys(self._received, int(weight_version)))
        self._received.clear()
        if not self._world.loses_updates:
            self._log_prob = self._world.log_prob

    async def update_weight_version(self, version: str) -> None:
        self._name = version

    async def get_weight_version(self) -> str:
        return self._name

    async def add_lora(self, adapters: Any) -> None:
        assert adapters.lora_int_id not in self._adapters
        self._adapters[adapters.lora_int_id] = adapters.lora_name

    async def remove_lora(self, number: int) -> None:
        del self._adapters[number]

    async def resume_generation(self) -> None:
        self._world.event("resume")

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self._world.event("meet")

    async def generate(
        self,
        prompt: Any,
        parameters: Any,
        name: str,
        *,
        priority: int,
        lora_request: Any = None,
    ) -> Any:
        del priority
        self._world.event("generate")
        assert self._owned() >= {"weights", "kv_cache"} and not self._sleeps, (
            "the engine sleeps"
        )
        undefined = [
            name for name, version in self.versions.items() if version == UNDEFINED
        ]
        assert not undefined, (
            f"{undefined} were dropped by a sleep, and no update brought them"
        )
        version, adapters = self.versions[WEIGHTS[0]], ""
        if lora_request is not None:
            version, adapters = lora_request.lora_int_id, lora_request.lora_name
            assert self._adapters[version] == adapters
        elif not self._adapters:
            assert {self.versions[name] for name in WEIGHTS} == {int(self._name)}, (
                f"{self.versions} as {self._name}"
            )
        assert (
            self._cached.setdefault((prompt["cache_salt"], adapters), version) == version
        ), "keys of older weights"
        self._world.prompt = prompt["prompt_token_ids"]
        answer, reason = self._world.answer(parameters.seed)
        if isinstance(answer, int):
            answer = [
                1 + (parameters.seed + i) % 30
                for i in range(min(answer, parameters.max_tokens))
            ]
        tokens = answer
        self._world.turns.append((name, prompt["prompt_token_ids"], tokens))
        routed, read = (
            self._world.routed_experts,
            len(prompt["prompt_token_ids"]) + len(tokens) - 1,
        )
        completion = SimpleNamespace(
            finish_reason=reason,
            stop_reason=None,
            token_ids=tokens,
            logprobs=SimpleNamespace(logprobs=[self._log_prob] * len(tokens)),
            weight_versions=[SimpleNamespace(version=self._name, start=0, end=len(tokens))],
            routed_experts=None
            if routed is None
            else np.repeat(routed[None], read, axis=0),
        )
        yield SimpleNamespace(
            outputs=[completion], prompt_token_ids=(), num_cached_tokens=None
        )

    def _owned(self) -> set[str]:
        return self._world.ledger.owned.get((self._world.gpus[0], self._world.actor), set())

    def shutdown(self, timeout: float | None = None) -> None:
        self._world.ledger.give(self._world.gpus, self._world.actor, "weights", "kv_cache")


class StandInEngine:
    """`workers.model.engine.TrainingEngine` as the training actors call it, of a model with a frozen vision
    tower.
    """

    def __init__(self, world: World, settings: dict[str, Any]) -> None:
        self._world, self.num_parameters, self.dtype = world, 8, torch.bfloat16
        self.data_parallel_groups: list[Any] = []
        self.device = torch.device("cpu")
        self.clock = SimpleNamespace(take=list)
        self._trains = settings["optimizer"] is not None
        self.steps, self.total_steps = 0, settings["total_steps"]
        if self._trains and world.actor.startswith("policy"):
            world.log_prob = FIRST_LOG_PROB
        with self._pass("build"):
            world.ledger.take(world.gpus, world.actor, "states", beside=("states",))

    @contextmanager
    def _pass(self, what: str, *, beside: Sequence[str] = ("states",)) -> Iterator[None]:
        world = self._world
        world.event(what)
        world.ledger.take(world.gpus, world.actor, "working", beside=beside)
        yield
        world.ledger.give(world.gpus, world.actor, "working")
        world.ledger.take(world.gpus, world.actor, "cached", beside=beside)

    def log_probs(self, sequences: Any, micro_batches: Any) -> tuple[torch.Tensor, Metrics]:
        with self._pass("log_probs"):
            found = torch.full((sequences.num_tokens,), self._log_prob)
            return found, {"entropy": Metric.mean(1.0, 1, "tokens")} | self._mismatch(
                sequences
            )

    def counted(self, sequences: Any) -> torch.Tensor:
        return torch.ones(len(sequences), dtype=torch.bool)

    @property
    def _log_prob(self) -> float:
        return FIRST_LOG_PROB + MOVE * self.steps

    def _mismatch(self, sequences: Any) -> Metrics:
        tokens = sequences.tokens
        if "rollout_log_probs" not in tokens:
            return {}
        found = (tokens["rollout_log_probs"][tokens["loss_mask"]] - self._log_prob).abs()
        return {
            "rollout_mismatch_mean": Metric.mean(float(found.sum()), len(found), "tokens"),
            "rollout_mismatch_max": Metric.max(float(found.max())),
        }

    def log_probs_and_entropies(
        self, sequences: Any, micro_batches: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        log_probs, metrics = self.log_probs(sequences, micro_batches)
        return log_probs, torch.ones(sequences.num_tokens), metrics

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        yield

    def values(self, sequences: Any, micro_batches: Any) -> tuple[torch.Tensor, Metrics]:
        with self._pass("values"):
            return torch.zeros(sequences.num_tokens), {}

    def scores(self, sequences: Any, micro_batches: Any) -> torch.Tensor:
        with self._pass("scores"):
            return torch.arange(len(sequences), dtype=torch.float32)

    def forward_backward(
        self,
        sequences: Any,
        micro_batches: Any,
        loss: Any,
        denominators: Any,
        cells: Any = (),
    ) -> Metrics:
        with self._pass("update"):
            return {"loss": Metric.mean(self._log_prob, 1)} | self._mismatch(sequences)

    def forward_backward_log_probs(
        self, sequences: Any, micro_batches: Any, loss: Any, denominators: Any
    ) -> tuple[torch.Tensor, Metrics]:
        metrics = self.forward_backward(sequences, micro_batches, loss, denominators)
        return torch.full((sequences.num_tokens,), self._log_prob), metrics

    def optimizer_step(self, given: Any = None) -> Metrics:
        assert self._trains
        self.steps += 1
        if self._world.actor.startswith("policy"):
            self._world.log_prob = self._log_prob
        return {"grad_norm": Metric.mean(1.0, 1), "skipped_steps": Metric.sum(0)}

    def named_weights(
        self,
        dtype: torch.dtype | None = None,
        keeper: int | None = None,
        *,
        frozen_tower: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        # What is gathered lies beside the weights of an engine that is waiting for it.
        with self._pass("gather", beside=("states", "weights")):
            yield from (
                (name, torch.zeros(2, 2))
                for name in self.weights_metadata(frozen_tower=frozen_tower)
            )

    def weights_metadata(
        self, dtype: torch.dtype | None = None, *, frozen_tower: bool = False
    ) -> dict[str, torch.Tensor]:
        names = (*WEIGHTS, *TOWER) if frozen_tower else WEIGHTS
        return {name: torch.empty(2, 2, device="meta") for name in names}

    def save_pretrained(self, path: str) -> None:
        with self._pass("save"):
            Path(path).mkdir(parents=True, exist_ok=True)

    def save_adapters(self, path: str) -> None:
        with self._pass("save adapters"):
            Path(path).mkdir(parents=True, exist_ok=True)

    def save_checkpoint(
        self, path: str, *, step: int, extra: dict[str, Any], policy: str = ""
    ) -> None:
        self._world.event("checkpoint")
        final = Path(path)
        if final.exists():  # another rank's actor was first
            return
        unfinished = unfinished_folder(final)
        unfinished.mkdir(parents=True)
        commit(
            unfinished,
            final,
            Manifest(step, 1, {"steps": self.steps}, check_json(extra), {}),
        )

    def wait_for_checkpoint(self) -> None:
        pass

    @property
    def checkpointer(self) -> "StandInEngine":
        return self

    def copy(self, extra: dict[str, Any]) -> RankCopy:
        self._world.event("copy")
        return RankCopy({"steps": self.steps}, check_json(extra), {}, np.empty(0, np.uint8))

    def load_copy(self, copy: RankCopy) -> dict[str, Any]:
        self._world.event("load copy")
        self._resume(copy.numbers["steps"])
        return copy.extra

    def _resume(self, steps: int) -> None:
        self.steps = steps
        if self._world.actor.startswith("policy"):
            self._world.log_prob = self._log_prob

    def load_checkpoint(self, path: str, *, policy: str = "") -> dict[str, Any]:
        self._world.event("load")
        manifest = read_manifest(Path(path))
        self._resume(manifest.engine["steps"])
        return manifest.extra


class StandInSender:
    """`WeightSender` with the calls that vLLM's trainer side makes, and nothing sent."""

    def __init__(
        self,
        world: World,
        placement: str,
        engines: Sequence[Any],
        weights: Callable[[], Any],
        rank: int,
    ) -> None:
        from workers.engine.weights.gpu_transfer import EngineClient

        self._world, self._weights, self._rank = world, weights, rank
        self._client = EngineClient(
            engines, tensor_parallel=1, together=placement == "apart"
        )
        self._client.abort = lambda: world.ledger.record(world.actor, "abort")
        world.event("connect")
        if rank == 0:
            world.broadcast = list(engines) if placement == "apart" else []
            try:
                self._client.init_weight_transfer_engine({})
            except LostError as error:
                if placement == "colocated":
                    raise
                raise NeverReturnsError from error  # rank 0 waits for the member that does not come

    def send(self, version: int) -> list[int]:
        self._world.event("send")
        self._client.version = version
        if self._rank:
            list(self._weights())
            return []
        self._client.start_weight_update()
        names = [name for name, _ in self._weights()]
        self._client.update_weights({"names": names})
        self._client.finish_weight_update()
        return sorted(self._client.lost)

    def close(self) -> None:
        self._world.ledger.record(self._world.actor, "disconnect")


class StandInReward:
    """`RewardWorker`: half of the samples of a group get a reward."""

    def __init__(self, functions: bytes, tokenizer_path: str, **_: Any) -> None:
        pass

    def ready(self) -> bool:
        return True

    def score(self, block: Any, requests: Sequence[Any]) -> list[Score]:
        return [Score(float(request.row % 2), "text") for request in requests]
