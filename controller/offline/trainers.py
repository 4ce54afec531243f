"""The steps of training on given sequences:

records -> batch -> plan -> update                                             SftTrainer
records -> batch -> plan -> log-probs, the reference's -> loss -> update       PreferencesTrainer
"""

import math
from abc import abstractmethod
from typing import Generic, TypeVar

import numpy as np

from balancing import CostModel, Plan, plan_statistics
from balancing.analysis.lengths_file import plan_record
from controller.actors.roles import TrainingRoles
from controller.config.offline import OfflineConfig, PreferencesConfig, SftConfig
from controller.observability.metrics import update_throughput
from controller.offline.datasets import SequenceDataset
from controller.offline.preference_losses import PairLoss, pair_loss
from controller.session import Session
from controller.training_loop import TrainingLoop, prefixed
from workers.metrics import Metrics, results
from workers.remote_batch import RemoteBatch

Settings = TypeVar("Settings", bound=OfflineConfig)


class OfflineTrainer(TrainingLoop, Generic[Settings]):
    """The part that both have: a step's records, its plan, its metrics."""

    def __init__(
        self,
        config: Settings,
        session: Session[TrainingRoles],
        train: SequenceDataset,
        validation: SequenceDataset | None,
        *,
        cost_model: CostModel,
    ) -> None:
        """`cost_model`: FLOPs of a sequence, which the plan balances."""
        super().__init__(
            config,
            session,
            steps=config.steps_over(len(train)),
            validate_every=config.validation.every,
            validate_at_start=config.validation.at_start,
            cost_model=cost_model,
        )
        self.config, self.roles, self.dataset, self.held_out = config, session.roles, train, validation

    @abstractmethod
    def learn(self, batch: RemoteBatch, plan: Plan) -> dict[str, float]:
        """The optimiser step on the batch; `interrupts` are held from its beginning on. Returns its metrics."""

    @abstractmethod
    def measure(self, batch: RemoteBatch) -> dict[str, float]:
        """Loss and others of the batch, forward only."""

    def step(self, step: int) -> dict[str, float]:
        """One step of the picture above; returns its metrics."""
        record = self.record
        with record.step(step, self.last_step):
            with record.phase("plan"):
                count = self._records_of_step()
                batch = self.dataset.take(self.progress.position, count)
                plan = self.planner.plan(batch, [np.arange(len(batch))], "policy.update")
            record.writer.lengths(step, plan_record(plan), lengths=batch["length"])
            metrics = self.learn(batch, plan)
            self.progress.position += count
            metrics |= self.compare_with_plan(self.roles.take_micro_step_times())
        metrics |= record.times() | update_throughput(batch, record.seconds)
        metrics |= prefixed("balance", plan_statistics(plan))
        metrics["data/epoch"] = self.progress.position / len(self.dataset)
        metrics["data/dropped"] = float(self.dataset.dropped)
        metrics["checkpoint/failures"] = float(self.checkpoints.failures)
        return metrics

    def _records_of_step(self) -> int:
        """As many as are asked for; in the last step of run.epochs, those that are left."""
        wanted = self.config.records_per_step
        if self.config.run.steps:
            return wanted
        return min(wanted, self.config.run.epochs * len(self.dataset) - self.progress.position)

    def validate(self, step: int) -> dict[str, float]:
        """Measure the policy on data.validation, and show it; empty without it."""
        if self.held_out is None:
            return {}
        with self.record.phase("validation"):
            metrics = self.measure(self.held_out.first(self.config.validation.records))
        self.roles.take_micro_step_times()  # those of the next step are of the step alone
        self.record.console.validation(step, metrics)
        return metrics


class SftTrainer(OfflineTrainer[SftConfig]):
    """Supervised fine-tuning."""

    def learn(self, batch: RemoteBatch, plan: Plan) -> dict[str, float]:
        """Maximise the likelihood of the tokens to learn."""
        self.interrupts.hold()
        with self.record.phase("update"):
            updated: Metrics = self.roles.policy.learn_tokens(batch, plan, self.config.loss)
        return prefixed("policy", results(updated))

    def measure(self, batch: RemoteBatch) -> dict[str, float]:
        """`loss`, mean over tokens in nats, `perplexity` exp(loss), and `entropy`."""
        plan = self.planner.whole(batch, "policy.log_probs")
        measured = results(self.roles.policy.measure_tokens(batch, plan))
        return {"loss": measured["loss"], "perplexity": math.exp(measured["loss"]), "entropy": measured["entropy"]}


class PreferencesTrainer(OfflineTrainer[PreferencesConfig]):
    """Preference optimisation. A pair's two sequences are planned apart, and couple through numbers on the driver."""

    def learn(self, batch: RemoteBatch, plan: Plan) -> dict[str, float]:
        """A forward pass for the loss of every pair, then a step along its gradient."""
        with self.record.phase("log_probs"):
            found = self.pair_loss(batch)
        self.interrupts.hold()
        with self.record.phase("update"):
            weighted = batch.with_columns(coefficient=found.coefficients)
            updated: Metrics = self.roles.policy.learn_weighted(weighted, plan)
        # The update's own loss is the weighted sum of log-probs, which has the gradient of the pairs' loss.
        return prefixed("policy", results(updated) | {"loss": found.loss}) | prefixed("preferences", found.metrics)

    def measure(self, batch: RemoteBatch) -> dict[str, float]:
        """`loss`, and the metrics of `pair_loss`."""
        found = self.pair_loss(batch)
        return {"loss": found.loss, **found.metrics}

    def pair_loss(self, batch: RemoteBatch) -> PairLoss:
        """The loss of the batch's pairs and its gradient by each sequence's log-prob."""
        plan = self.planner.whole(batch, "policy.log_probs")
        log_probs = self.roles.policy.sequence_log_probs(batch, plan)
        reference = None
        if self.config.uses_reference:
            plan = self.planner.whole(batch, "reference.log_probs")
            reference = self.roles.reference_sequence_log_probs(batch, plan)
        return pair_loss(self.config.loss, log_probs, reference, batch["response_tokens"])
