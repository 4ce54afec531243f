"""TrainedWorker: a rank with an optimiser; the update loop, checkpoints and export that policy and critic share."""

from collections.abc import Callable
from typing import Any

from balancing import RankPlan
from workers.dataproto import DataProto
from workers.dispatch import Join, Split, dispatch
from workers.metrics import Metric, Metrics, merge
from workers.model.losses import Denominators
from workers.model_worker import ModelWorker


class TrainedWorker(ModelWorker):
    """One rank of a role with an optimiser."""

    def train(self, batch: DataProto, plan: RankPlan, loss_function: Callable[..., Any]) -> Metrics:
        """One optimiser step for each mini-batch of the plan, micro-step by micro-step."""
        parts: list[Metrics] = []
        for mini_batch in plan.mini_batches:
            denominators = Denominators(mini_batch.loss_tokens, mini_batch.sequences, mini_batch.groups)
            metrics = self.engine.forward_backward(batch, mini_batch.micro_batches, loss_function, denominators)
            # A sum over ranks, but a mean over mini-batches.
            metrics["loss"] = Metric.sum(metrics["loss"].value / len(plan.mini_batches))
            parts += [metrics, self.engine.optimizer_step()]
        self.free_cached_memory()
        return merge(parts)

    @dispatch(Split.ALL)
    def save_checkpoint(self, path: str, step: int, extra: dict[str, Any]) -> None:
        """Start saving a checkpoint for resuming, with the driver's `extra`; see `TrainingEngine.save_checkpoint`.

        Raises CheckpointError if the save before this one failed.
        """
        self.engine.save_checkpoint(path, step=step, extra=extra)

    @dispatch(Split.ALL)
    def wait_for_checkpoint(self) -> None:
        """Return when no save is under way. Raises CheckpointError if the last one failed."""
        self.engine.wait_for_checkpoint()

    @dispatch(Split.ALL, Join.RANK_ZERO)
    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Resume from a checkpoint; returns the driver's `extra`. Raises CheckpointError if it is torn or foreign."""
        return self.engine.load_checkpoint(path)

    @dispatch(Split.ALL)
    def save_pretrained(self, path: str) -> None:
        """Write the model and tokenizer in Hugging Face format; ranks share the writing.

        Raises OutputError if a rank cannot write.
        """
        self.engine.save_pretrained(path)
        self.free_cached_memory()
