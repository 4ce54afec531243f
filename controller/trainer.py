"""The algorithm, one step after another:

    prompts -> rollout (vLLM, sample by sample; rewards alongside) -> keep groups with signal -> plan
            -> old, reference log-probs -> values, advantages -> update, mini-batch by mini-batch: critic, policy
            -> weights to vLLM -> metrics

The driver works on lengths, ids and rewards; tokens stay in the object store (see `workers.remote_batch`).
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from balancing import CostModel, Plan, plan_statistics
from balancing.analysis.lengths_file import plan_record
from controller import advantages
from controller.actors.roles import Roles
from controller.actors.worker_group import WorkerGroup
from controller.advantage_computer import AdvantageComputer
from controller.checkpoint import Progress, remove_old_samples, samples_path
from controller.collector import Collector
from controller.config import Config
from controller.continuous_collector import ContinuousCollector
from controller.data.prompts import PromptDataset, Prompts
from controller.mismatch import LARGEST, MEAN, MismatchWatch, Proof
from controller.observability.metrics import staleness, throughput, waiting
from controller.observability.run_folder import step_file
from controller.observability.shown_text import other_columns, shown_prompt
from controller.planner import group_numbers, with_group_tokens
from controller.sample_files import write_step
from controller.samples import Rollout
from controller.session import Session
from controller.training_loop import TrainingLoop, prefixed
from controller.validation_metrics import summarize
from workers.config import LossConfig, ValueLossConfig
from workers.errors import ConfigError
from workers.metrics import Metric, Metrics, merge, results
from workers.remote_batch import RemoteBatch
from workers.rollout.requests import PROOF_STEP, VALIDATION_STEP

# `AdvantageComputer` gives those of the values before the update; after it they have seen the returns.
CRITIC_METRICS = ("loss", "value_clip_fraction", "grad_norm", "learning_rate", "skipped_steps")
PROOF_TOKENS = 32  # of samples that are compared and not trained


class Trainer(TrainingLoop):
    """Group-relative policy optimisation over the roles of one run."""

    def __init__(
        self,
        config: Config,
        session: Session[Roles],
        prompts: Prompts,
        validation: PromptDataset | None,
        *,
        cost_model: CostModel,
    ) -> None:
        """cost_model: see `TrainingLoop`."""
        super().__init__(
            config,
            session,
            steps=config.run.steps,
            validate_every=config.validation.every,
            validate_at_start=config.validation.at_start,
            cost_model=cost_model,
        )
        self.config, self.roles, self.validation = config, session.roles, validation
        self.collector = self.new_collector(prompts)
        self.advantages = AdvantageComputer(config, self.roles, self.planner, self.progress)
        self.mismatch = MismatchWatch(config, self.progress.weight_version)
        self._sampled: Rollout | None = None

    def new_collector(self, prompts: Prompts) -> Collector:
        """The source of the steps' samples."""
        collector = ContinuousCollector if self.config.rollout.max_staleness else Collector
        return collector(self.config, self.roles, prompts, self.planner, self.record, self.progress)

    def begin(self) -> None:
        """Send the policy's weights to the engines.

        Also if they are those of the files, which the engines have: a transfer that fails or corrupts shows at once.
        """
        self.roles.send_weights(self.progress.weight_version)
        self.collector.begin()

    def save_models(self) -> None:
        """The policy, and the critic where there is one."""
        super().save_models()
        if self.roles.critic is not None:
            self.roles.critic.save_pretrained(str(self.folder / "critic"))

    def save_beside(self, checkpoint: Path, progress: Progress) -> None:
        """Samples that no step has trained on."""
        if progress.active:
            self.collector.save(samples_path(checkpoint), progress.active)
        remove_old_samples(self.folder, progress.step)

    def step(self, step: int) -> dict[str, float]:
        """One step of the picture above; returns its metrics."""
        record = self.record
        with record.step(step, self.config.run.steps):
            with record.phase("rollout"):
                rollout = self.collector.collect(step)
                batch = rollout.trained
            metrics = rollout.metrics() | self.staleness(rollout)
            record.samples(step, rollout, self.asked)
            self._sampled = rollout.without_tokens()
            if self.config.run.record_samples:
                with record.phase("record"):
                    write_step(step_file(self.folder, step), rollout)
            metrics["rollout/samples_left_out"] = float(len(rollout.batch) - len(batch))
            metrics |= self.signal(rollout)
            if len(batch):
                metrics |= self.learn(rollout, batch, step)
            else:
                self.show_completions(rollout, batch)
            self.collector.published()
            self.progress.position, self.progress.active = self.collector.position, self.collector.active
        record.timeline.weight_loads(self.roles.take_weight_loads())
        engines = self.roles.rollouts
        metrics |= waiting(engines.take_idle_seconds(), engines.queued, record.seconds)
        metrics |= record.times() | throughput(rollout.batch, batch, record.seconds, self.config.batch.epochs)
        metrics["rollout/weight_version"] = float(self.progress.weight_version)
        metrics["checkpoint/failures"] = float(self.checkpoints.failures)
        return metrics | self.roles.rollouts.fleet.budget.metrics()

    def learn(self, rollout: Rollout, batch: RemoteBatch, step: int) -> dict[str, float]:
        """Plan, log-probs, advantages, update with `batch` of the rollout, weights to the engines."""
        record = self.record
        prefixes = self.planner.prefixes(batch, "policy.update")
        prompts = batch["uid"].astype(np.int64)  # their places in the stream
        columns = {"groups": group_numbers(batch), "prompts": prompts, **prefixes}
        batch = batch.with_meta(step=step, steps=self.config.run.steps)
        with record.phase("plan"):
            drawn = [self.planner.draw(batch, step, epoch) for epoch in range(self.config.batch.epochs)]
            plans = [self.planner.plan(batch, epoch, "policy.update") for epoch in drawn]
        record.writer.lengths(step, plan_record(plans[0]), lengths=batch["length"], **columns)
        with record.phase("log_probs"):
            self.roles.sleep_engines()
            batch, mismatch = self.with_log_probs(batch, step)
        with record.phase("advantages"):
            batch, metrics = self.advantages.compute(batch)
        self.show_completions(rollout, batch)
        self.interrupts.hold()
        with record.phase("update"):
            metrics |= self.update_critic(batch, drawn)
            learns = step > self.config.critic.warmup_steps
            updated = update(self.roles.policy, batch, drawn, plans, self.config.policy_loss) if learns else {}
        if not mismatch:
            self.mismatch.judge(step, updated)
        metrics |= self.compare_with_plan(self.roles.take_micro_step_times())
        with record.phase("weights"):
            if learns:
                self.send_weights()
                self.prove_changed_weights(step)
        # Of a separate log-prob pass and the updates, only the pass compares sampler and trainer at equal weights.
        statistics = mean_statistics(plans, self.config.longest_sequence)
        return metrics | prefixed("balance", statistics) | prefixed("policy", results(updated | mismatch))

    def show_completions(self, rollout: Rollout, trained_on: RemoteBatch) -> None:
        """Some samples on the terminal, where run.log_completions asks for them."""
        self.record.console.completions(rollout, self.config.run.log_completions, trained_on, self.asked)

    def asked(self, uid: str) -> dict[str, str]:
        """The prompt of training samples with this uid, as text: `prompt`, and `record`, its other columns."""
        key = self.config.data.prompt_key
        (found,) = self.collector.prompts.take(int(uid), 1)
        return {"prompt": shown_prompt(found.columns[key]), "record": other_columns(found.columns, key)}

    def samples(self) -> list[dict[str, Any]]:
        """All samples of the last step, with their whole texts."""
        return self._sampled.examples(len(self._sampled.batch), self.asked, sys.maxsize) if self._sampled else []

    def signal(self, rollout: Rollout) -> dict[str, float]:
        """Metric of the groups that teach nothing, where advantages compare groups and nothing comes to the rewards."""
        if not self.config.algorithm.compares_groups or self.config.algorithm.kl_in_reward.coefficient:
            return {}
        share = advantages.share_without_signal(rollout.batch["reward"], rollout.batch["uid"])
        return {"rollout/groups_without_signal": share}

    def staleness(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of the samples' age."""
        oldest, newest = rollout.batch["weight_version"], rollout.batch["newest_weight_version"]
        return staleness(oldest, newest, rollout.version_tokens, self.progress.weight_version)

    def update_critic(self, batch: RemoteBatch, drawn: list[list[np.ndarray]]) -> dict[str, float]:
        """The critic's optimiser steps, on the policy's mini-batches of every epoch; nothing without a critic."""
        if self.roles.critic is None:
            return {}
        plans = [self.planner.plan(batch, epoch, "critic.update") for epoch in drawn]
        updated = update(self.roles.critic, batch, drawn, plans, self.config.critic.loss)
        return prefixed("critic", {name: value for name, value in results(updated).items() if name in CRITIC_METRICS})

    def with_log_probs(self, batch: RemoteBatch, step: int) -> tuple[RemoteBatch, Metrics]:
        """Add old log-probs if they are needed before the first update, and the reference's if there is a KL.

        With one optimiser step, old log-probs are those of the update's own forward pass: a separate pass would compute
        the same numbers, so there is none but in the first steps, for `controller.mismatch`. Samples that are one
        version old carry the log-probs of the policy that sampled them.

        Raises MismatchError if a pass shows that engines and trainer differ by more than they may.
        """
        mismatch: Metrics = {}
        config, version = self.config, self.progress.weight_version
        if config.old_log_probs == "sampler":
            batch = batch.with_tokens(old_log_probs=batch.tokens["rollout_log_probs"])
        proof = self.mismatch.proof(batch["weight_version"], batch["newest_weight_version"], version)
        if config.has_forward_pass or proof is not Proof.NONE:
            plan = self.planner.whole(batch, "policy.log_probs")
            entropies = config.algorithm.loss.old_entropies
            read = self.roles.policy.log_probs_and_entropies if entropies else self.roles.policy.log_probs
            passed = read(batch, plan)
            self.mismatch.judge(step, passed.metrics, proof)
            if config.has_forward_pass:
                mismatch = {name: metric for name, metric in passed.metrics.items() if name in (MEAN, LARGEST)}
            if config.old_log_probs == "forward_pass":
                batch = batch.with_tokens(old_log_probs=passed.tokens["log_probs"])
            if entropies:
                batch = batch.with_tokens(old_entropies=passed.tokens["entropies"])
        if self.config.uses_reference:
            plan = self.planner.whole(batch, "reference.log_probs")
            batch = batch.with_tokens(reference_log_probs=self.roles.reference_log_probs(batch, plan))
        return batch, mismatch

    def save(self, name: str) -> None:
        """As `TrainingLoop.save`; it gathers whole weights, so engines that share the policy's GPUs sleep before."""
        self.roles.sleep_engines()
        super().save(name)

    def send_weights(self) -> None:
        """New weights to every engine, under the next version."""
        self.progress.weight_version += 1
        self.roles.send_weights(self.progress.weight_version)

    def prove_changed_weights(self, step: int) -> None:
        """Compare engines and trainer at the first weights that an update has changed, where samples are made ahead.

        Raises MismatchError if they differ by more than rounding.
        """
        config = self.config
        if not config.rollout.max_staleness or not self.mismatch.awaits(Proof.CHANGED):
            return
        sampling = config.rollout.sampling
        sampling = replace(sampling, max_new_tokens=min(PROOF_TOKENS, sampling.max_new_tokens))
        prompts = self.collector.prompts.take(0, config.batch.prompts_per_step)
        batch = self.collector.roll_out(prompts, config.rollout.samples_per_prompt, sampling, PROOF_STEP).batch
        passed = self.roles.policy.log_probs(batch, self.planner.whole(batch, "policy.log_probs"))
        self.mismatch.judge(step, passed.metrics, Proof.CHANGED)

    def validate(self, step: int) -> dict[str, float]:
        """Score responses to the held-out prompts, record and show them; empty without data.validation."""
        if self.validation is None:
            return {}
        settings = self.config.validation
        prompts = list(self.validation)[: settings.prompts or None]
        with self.record.phase("validation"):
            rollout = self.collector.roll_out(prompts, settings.samples, settings.sampling, VALIDATION_STEP)
        responses = rollout.scored_responses({prompt.uid: prompt for prompt in prompts}, self.config.data.prompt_key)
        metrics = summarize(responses, settings.success, settings.success_threshold)
        self.record.writer.validation(step, responses)
        self.record.console.validation(step, metrics)
        self._keep_best(step, metrics)
        return metrics

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        name = self.config.validation.keep_best
        if not name:
            return
        if name not in metrics and not step:
            raise ConfigError(f"validation.keep_best={name} is not a validation metric; there are {sorted(metrics)}.")
        if name not in metrics:
            self.record.console.log(f"validation.keep_best={name}: no response of this validation has a value")
            return
        if self.progress.best is None or metrics[name] > self.progress.best:
            self.progress.best = metrics[name]
            if step:  # at step 0 it is the model that the run was given
                self.save("model-best")


def update(
    group: WorkerGroup,
    batch: RemoteBatch,
    drawn: Sequence[Sequence[np.ndarray]],
    plans: Sequence[Plan],
    loss: LossConfig | ValueLossConfig,
) -> Metrics:
    """The optimiser steps of one role: epoch by epoch, on its mini-batches `drawn` and by its plan."""
    parts = []
    for epoch, (mini_batches, plan) in enumerate(zip(drawn, plans, strict=True)):
        part = with_group_tokens(batch, mini_batches).with_meta(epoch=epoch)
        updated = group.update(part, plan, loss)
        # A sum over ranks and micro-batches, but a mean over mini-batches, and so over epochs.
        parts.append(updated | {"loss": Metric.sum(updated["loss"].value / len(plans))})
    return merge(parts)


def mean_statistics(plans: Sequence[Plan], width: int) -> dict[str, float]:
    """The statistics of an epoch's plan, mean over epochs. width: tokens of the longest possible sequence."""
    found = [plan_statistics(plan, width) for plan in plans]
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}
