"""Make the steps of training on given sequences.

records -> batch -> plan -> update                                             sft_step
records -> batch -> plan -> log-probs, the reference's -> loss -> update       preferences_step
records -> batch -> plan -> [pairs: scores -> loss] -> update                  reward_model_step
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from balancing import CostModel, Plan
from controller.config.offline import (
    OfflineConfig,
    PreferencesConfig,
    RewardTrainingConfig,
    SftConfig,
)
from controller.lifecycle.session import Session
from controller.observability.step_metrics import update_throughput
from controller.offline.datasets import SequenceDataset
from controller.offline.preference_losses import PairLoss, bradley_terry, pair_loss
from controller.primitives import learn
from controller.training_loop import Step, TrainingRun
from workers.batch.metrics import add_prefix, results
from workers.batch.remote_batch import RemoteBatch
from workers.config.loss import WeightedLossConfig

Settings = TypeVar("Settings", bound=OfflineConfig)


class OfflineRun(TrainingRun[Settings]):
    """A run that trains on records. dataset: its records. position: index of the next one in their stream."""

    def __init__(
        self,
        config: Settings,
        session: Session,
        train: SequenceDataset,
        validation: SequenceDataset | None,
        *,
        cost_model: CostModel,
    ) -> None:
        super().__init__(
            config, session, steps=config.steps_over(len(train)), cost_model=cost_model
        )
        self.dataset = train
        self.held_out = validation
        self.position = self.progress.position

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def measure(self) -> dict[str, float]:
        metrics = self.record.times() | update_throughput(
            self.record.trained, self.record.seconds
        )
        epoch = self.position / len(self.dataset)
        return metrics | {"data/epoch": epoch, "data/dropped": float(self.dataset.dropped)}

    def validate(self, step: int) -> dict[str, float]:
        if self.held_out is None:
            return {}
        with self.record.phase("validation"):
            batch = self.held_out.first(self.config.validation.records)
            metrics = LOSSES[type(self.config)](self, batch)
        self.roles.take_micro_step_times()  # so that the next step's times exclude earlier work
        self.record.console.validation(step, metrics)
        return metrics


def sft_step(run: OfflineRun[SftConfig]) -> None:
    batch, plan = next_batch(run)
    run.interrupts.hold()
    with run.record.phase("update"):
        updated = learn(run.roles.policy, batch, plan, run.config.loss)
    run.record.add(add_prefix("policy", results(updated)))


def preferences_step(run: OfflineRun[PreferencesConfig]) -> None:
    """Compute every pair's loss in a forward pass, then step along its gradient."""
    batch, plan = next_batch(run)
    with run.record.phase("log_probs"):
        losses = losses_of_pairs(run, batch)
    _learn_pairs(run, batch, plan, losses)


def _learn_pairs(
    run: OfflineRun[Any], batch: RemoteBatch, plan: Plan, losses: PairLoss
) -> None:
    run.interrupts.hold()
    with run.record.phase("update"):
        weighted = batch.with_columns(coefficient=losses.coefficients)
        updated = learn(run.roles.policy, weighted, plan, WeightedLossConfig())
    # The update's own loss is the weighted sum of log-probs, which has the gradient of the pairs' loss.
    run.record.add(add_prefix("policy", results(updated) | {"loss": losses.loss}))
    run.record.add(add_prefix("preferences", losses.metrics))


def reward_model_step(run: OfflineRun[RewardTrainingConfig]) -> None:
    """Score pairs first, because their loss needs both scores. Other losses are of single scores."""
    batch, plan = next_batch(run)
    if run.config.compares_pairs:
        with run.record.phase("log_probs"):
            losses = scores_of_pairs(run, batch)
        return _learn_pairs(run, batch, plan, losses)
    run.interrupts.hold()
    with run.record.phase("update"):
        updated = learn(run.roles.policy, batch, plan, run.config.loss.name)
    return run.record.add(add_prefix("policy", results(updated)))


STEPS: dict[type[OfflineConfig], Step] = {
    SftConfig: sft_step,
    PreferencesConfig: preferences_step,
    RewardTrainingConfig: reward_model_step,
}


def next_batch(run: OfflineRun[Any]) -> tuple[RemoteBatch, Plan]:
    """Take a step's records and plan their update. The last step of run.epochs takes the remaining ones."""
    with run.record.phase("plan"):
        count = run.config.records_per_step
        settings = run.config.run
        if not settings.steps:
            count = min(count, settings.epochs * len(run.dataset) - run.position)
        batch = run.dataset.take(run.position, count)
        plan = run.planner.plan(batch, [np.arange(len(batch))], "policy.update")
    run.position += count
    run.record.trains_on(batch)
    run.record.plans([plan], lengths=batch["length"])
    return batch, plan


def sft_loss(run: OfflineRun[Any], batch: RemoteBatch) -> dict[str, float]:
    """Return `loss`, mean over tokens in nats, `perplexity` exp(loss), and `entropy`, of a forward pass."""
    plan = run.planner.forward_plan(batch, "policy.log_probs")
    measured = results(run.roles.policy.measure_tokens(batch, plan))
    return {
        "loss": measured["loss"],
        "perplexity": math.exp(measured["loss"]),
        "entropy": measured["entropy"],
    }


def preferences_loss(run: OfflineRun[Any], batch: RemoteBatch) -> dict[str, float]:
    """Return `loss` and the metrics of `pair_loss`, of a forward pass."""
    losses = losses_of_pairs(run, batch)
    return {"loss": losses.loss, **losses.metrics}


def reward_model_loss(
    run: OfflineRun[RewardTrainingConfig], batch: RemoteBatch
) -> dict[str, float]:
    """Return `loss` and metrics of `bradley_terry` or `score_errors`, of a forward pass."""
    if run.config.compares_pairs:
        losses = scores_of_pairs(run, batch)
        return {"loss": losses.loss, **losses.metrics}
    plan = run.planner.forward_plan(batch, "policy.log_probs")
    return results(run.roles.policy.measure_labels(batch, plan, run.config.loss.name))


LOSSES: dict[
    type[OfflineConfig], Callable[[OfflineRun[Any], RemoteBatch], dict[str, float]]
] = {
    SftConfig: sft_loss,
    PreferencesConfig: preferences_loss,
    RewardTrainingConfig: reward_model_loss,
}
"""Of held-out records."""


def scores_of_pairs(run: OfflineRun[RewardTrainingConfig], batch: RemoteBatch) -> PairLoss:
    """Return the loss of the batch's pairs, and its gradient by each sequence's score."""
    scores = run.roles.policy.score(
        batch, run.planner.forward_plan(batch, "policy.log_probs")
    )
    return bradley_terry(run.config.loss, scores, batch["label"][::2])


def losses_of_pairs(run: OfflineRun[PreferencesConfig], batch: RemoteBatch) -> PairLoss:
    """Return the loss of the batch's pairs, and its gradient by each sequence's log-prob."""
    log_probs = run.roles.policy.sequence_log_probs(
        batch, run.planner.forward_plan(batch, "policy.log_probs")
    )
    reference = None
    if run.config.uses_reference:
        plan = run.planner.forward_plan(batch, "reference.log_probs")
        reference = run.roles.reference_method("sequence_log_probs")(batch, plan)
    return pair_loss(run.config.loss, log_probs, reference, batch["response_tokens"])
