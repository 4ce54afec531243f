"""One engine and one policy rank, started as in a run, go through the weight handling of a step.

start_roles --> sample --> log-probs: sampler against trainer          (before)
                           update, log-probs of the same samples       (moved)
            new weights --> checksums --> sample --> log-probs         (after)
"""

import hashlib
import time
from dataclasses import dataclass

import numpy as np
import ray
import torch

from balancing import CostModel
from controller.actors.roles import Roles, start_roles
from controller.config import Config, load
from controller.diagnosis import judgement
from controller.diagnosis.findings import Report, ok
from controller.generation.fleet import RestartBudget
from controller.observability.console import Console
from controller.observability.live_metrics import LiveMetrics
from controller.planner import Planner
from controller.preflight.memory import gpu_memory
from controller.preflight.model_shape import model_shape
from controller.samples import assemble
from workers.metrics import results
from workers.remote_batch import RemoteBatch
from workers.rollout.requests import SampleRequest, sample_seed
from workers.rollout.weight_transfer import unpack_weights
from workers.score import Score

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 24, 32
SETTINGS = (
    "run.name=doctor",
    "reward.workers=1",
    f"data.max_prompt_tokens={PROMPT_TOKENS}",
    f"rollout.sampling.max_new_tokens={NEW_TOKENS}",
    f"rollout.max_concurrent={PROMPTS}",
    "rollout.replicas=1",
    "policy.max_tokens=1024",
    "policy.optimizer.learning_rate=1e-3",  # one step of it is seen in every log-prob
)
ENGINE = {
    "cpu": ("rollout.cpu_kv_cache_gib=0.125",),
    "cuda": ("rollout.memory_fraction=0.3", "rollout.enforce_eager=true"),
}


class Quiet(Console):
    """A console that leaves the terminal to the report."""

    def log(self, text: str) -> None:
        """Print nothing."""


@dataclass(frozen=True)
class Compared:
    """Sampler against trainer over the tokens of a batch: mean and largest difference, nats."""

    mean: float
    largest: float


def trial_config(asked: Config, model: str) -> Config:
    """Settings of one rank and one engine with `model`; devices, placement and dtype are those of `asked`."""
    config = load(None, [*SETTINGS, *ENGINE[asked.device], f"model.path={model}"])
    config.resources = asked.resources
    config.rollout.placement, config.model.dtype = asked.rollout.placement, asked.model.dtype
    return config


def run_trial(config: Config, report: Report, gpu_gib: float) -> None:
    """Add a finding for every step. gpu_gib: memory of a GPU, 0 without one.

    Raises what the actors raise; all of them are stopped.
    """
    start = time.monotonic()
    with start_roles(config, [], Quiet(), RestartBudget(0), live=LiveMetrics()) as roles:
        report.add(ok("engine and rank", f"started in {time.monotonic() - start:.0f} s, {config.rollout_placement}"))
        Trial(config, roles, report, gpu_gib).run()


class Trial:
    """The steps, on roles that have started."""

    def __init__(self, config: Config, roles: Roles, report: Report, gpu_gib: float) -> None:
        description = config.model_description()
        self.config, self.roles, self.report, self.gpu_gib = config, roles, report, gpu_gib
        self.shape = model_shape(description)
        self.planner = Planner(config, CostModel.from_model_config(description))
        self.dtype = config.compute_dtype

    def run(self) -> None:
        """Run all steps."""
        batch = self.sample(version=0)
        self.roles.sleep_engines()
        before = self.compare(batch)
        self.report.add(judgement.log_probs("log-probs before an update", before.mean, before.largest, self.dtype))
        self.update(batch)
        moved = self.compare(batch)
        (facts,) = self.roles.policy.facts()
        sent = self.sent_checksums()  # before the engine takes its GPU back: whole weights are gathered for it
        start = time.monotonic()
        self.roles.send_weights(1)
        seconds = time.monotonic() - start
        self.report.add(judgement.checksums(sent, self.engine_checksums()))
        after = self.sample_and_compare(version=1)
        self.report.add(judgement.new_weights(before.mean, moved.mean, after.mean, seconds, self.dtype))
        self.report.add(judgement.log_probs("log-probs after it", after.mean, after.largest, self.dtype))
        peak, resident = facts["peak_device_bytes"], facts["resident_bytes"]
        self.report.add(judgement.peak_memory(peak, self.estimated_peak(), resident))

    def sample_and_compare(self, version: int) -> Compared:
        """Samples of the new weights, compared while the engines sleep."""
        batch = self.sample(version)
        self.roles.sleep_engines()
        return self.compare(batch)

    def sample(self, version: int) -> RemoteBatch:
        """Responses to random prompts; light columns and tokens as in a run. Raises RolloutError if none came."""
        rng = np.random.default_rng(version)
        prompts = rng.integers(2, self.shape.vocabulary, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
        requests = [
            SampleRequest(f"p{i}", 0, ids, sample_seed(self.config.run.seed, version, f"p{i}", 0))
            for i, ids in enumerate(prompts)
        ]
        self.roles.wake_engines()
        finished = self.roles.rollouts.generate(requests, self.config.rollout.sampling)
        # Any advantages that are not all equal.
        scores = {request.key: Score(float(number % 2), "") for number, request in enumerate(requests)}
        return assemble(finished, scores).batch

    def compare(self, batch: RemoteBatch) -> Compared:
        """The policy's log-probs of a batch against those that it was sampled with."""
        passed = self.roles.policy.log_probs(batch, self.planner.whole(batch, "policy.log_probs"))
        found = results(passed.metrics)
        return Compared(found["rollout_mismatch_mean"], found["rollout_mismatch_max"])

    def update(self, batch: RemoteBatch) -> None:
        """One optimiser step."""
        batch = batch.with_columns(advantages=(2 * batch["reward"] - 1).astype(np.float32))
        plan = self.planner.whole(batch, "policy.update")
        self.roles.policy.update(batch, plan, self.config.algorithm.loss)

    def sent_checksums(self) -> dict[str, str]:
        """SHA-256 of the policy's norms and other vectors, which vLLM neither fuses, shares nor arranges anew."""
        payload, _ = self.roles.policy.export_weights()
        vectors = {name: weight for name, weight in unpack_weights(ray.get(payload)).items() if weight.dim() == 1}
        return {name: hashlib.sha256(weight.view(torch.uint8).numpy()).hexdigest() for name, weight in vectors.items()}

    def engine_checksums(self) -> dict[str, str]:
        """Checksums of the engine's weights; see `RolloutWorker.weight_checksums`."""
        found: dict[str, str] = ray.get(self.roles.rollouts.actors[0].weight_checksums.remote())
        return found

    def estimated_peak(self) -> float | None:
        """GiB of the rank while it trains, as the dry run says; None on CPUs."""
        if not self.config.uses_gpus:
            return None
        return sum(gpu_memory(self.config, self.shape, self.gpu_gib).training.values())
