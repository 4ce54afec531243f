"""Run: a reinforcement learning run, as its steps use it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from balancing import CostModel
from controller.algorithm import advantages
from controller.algorithm.logprob_check import LogProbCheck
from controller.algorithm.validation_metrics import summarize
from controller.checkpoints.progress import (
    Progress,
    remove_old_samples,
    replay_path,
    samples_path,
)
from controller.config import Config
from controller.data.prompts import PromptDataset, Prompts
from controller.data.sample_functions import NO_FUNCTIONS, Functions, columns_of
from controller.engines.fleet import READY
from controller.lifecycle.session import Session
from controller.observability.run_folder import (
    log_probs_file,
    step_file,
    thumbnails,
    update_file,
)
from controller.observability.run_record import RECORDED_SAMPLES
from controller.observability.shown_text import other_columns, show_prompt
from controller.observability.step_metrics import staleness, throughput, waiting
from controller.rollout.async_buffer import AsyncRolloutBuffer
from controller.rollout.buffer import RolloutBuffer
from controller.rollout.replay_buffer import ReplayBuffer
from controller.rollout.sample_files import write_log_probs, write_step, write_update
from controller.rollout.samples import RolloutBatch
from controller.rollout.update_record import UpdateRecord
from controller.training_loop import TrainingRun
from workers.batch.remote_batch import RemoteBatch
from workers.engine.requests import VALIDATION_STEP
from workers.errors import ConfigError


class Run(TrainingRun[Config]):
    """A reinforcement learning run.

    buffer: makes the steps' samples. replay: keeps good samples for later steps. logprob_check: compares
    engines and trainer. weight_version: of the policy. kl_coefficient: KL weight in the next step's reward,
    if adapted.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        prompts: Prompts,
        validation: PromptDataset | None,
        *,
        cost_model: CostModel,
        buffer: Callable[..., RolloutBuffer] | None = None,
        functions: Functions = NO_FUNCTIONS,
    ) -> None:
        """buffer: makes the source of the steps' samples, None follows rollout.max_staleness. functions: by
        setting.
        """
        super().__init__(config, session, steps=config.run.steps, cost_model=cost_model)
        self.validation = validation
        self.best = self.progress.best
        self.functions = functions
        self.weight_version = self.progress.weight_version
        self.kl_coefficient = self.progress.kl_coefficient
        buffer = buffer or (
            AsyncRolloutBuffer if config.rollout.max_staleness else RolloutBuffer
        )
        self.buffer = buffer(
            config, self.roles, prompts, self.planner, self.record, self.progress, functions
        )
        self.replay = ReplayBuffer(
            config, self.record, self.progress.replay, functions.get("batch.replay.by")
        )
        self.logprob_check = LogProbCheck(config, self.weight_version)

    def begin(self) -> None:
        """Send the policy's weights to the engines, so that a failing or corrupt transfer shows at once."""
        self.roles.send_weights(self.weight_version)
        self.buffer.begin()

    def step_finished(self) -> None:
        super().step_finished()
        self.record.completions(self.config.run.log_completions)
        self.buffer.weights_updated()
        self.roles.rollouts.adjust()

    def state(self) -> dict[str, Any]:
        return {
            "position": self.buffer.position,
            "active": self.buffer.active,
            "weight_version": self.weight_version,
            "best": self.best,
            "kl_coefficient": self.kl_coefficient,
            "sampler": self.buffer.sampler,
            "score_scales": dict(self.buffer.score_scales.state),
        }

    def save_models(self) -> None:
        super().save_models()
        for role, group in self.roles.trained.items():
            if role != "policy":
                group.save_pretrained(str(self.folder / role))

    def save(self, name: str) -> None:
        """Let colocated engines sleep first, because gathering needs memory."""
        self.roles.sleep_engines()
        super().save(name)

    def save_beside(self, checkpoint: Path, progress: Progress) -> None:
        if progress.active:
            self.buffer.save(samples_path(checkpoint), progress.active)
        self.replay.save(replay_path(checkpoint))
        remove_old_samples(self.folder)

    def validate(self, step: int) -> dict[str, float]:
        if self.validation is None:
            return {}
        settings = self.config.validation
        prompts = list(self.validation)[: settings.prompts or None]
        with self.record.phase("validation"):
            rollout = self.buffer.roll_out(
                prompts, settings.samples, settings.sampling, VALIDATION_STEP
            )
        responses = rollout.scored_responses(
            {prompt.uid: prompt for prompt in prompts}, self.config.data.prompt_key
        )
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
            raise ConfigError(
                f"validation.keep_best={name}: not a validation metric. Name one of {sorted(metrics)}."
            )
        if name not in metrics:
            self.record.console.log(
                f"validation.keep_best={name}: no response of this validation has a value"
            )
        elif self.best is None or metrics[name] > self.best:
            self.best = metrics[name]
            if step:  # at step 0 it is the run's initial model
                self.save("model-best")

    def record_samples(self, rollout: RolloutBatch) -> None:
        batch = rollout.trained
        record = self.record
        samples = rollout.batch
        version = self.weight_version
        text_count = max(RECORDED_SAMPLES, self.config.run.log_completions)
        record.samples(
            rollout.with_texts(text_count, self.roles.rewards.read), batch, self.prompt_text
        )
        left_out = len(samples) - len(
            set(zip(batch["uid"].tolist(), batch["sample"].tolist(), strict=True))
        )
        record.add(rollout.metrics() | {"rollout/samples_left_out": float(left_out)})
        if self.config.rollout.sampling.max_thinking_tokens:
            record.add(
                {
                    "rollout/cut_thoughts_share": float(
                        samples["cut_thoughts"].sum() / samples["turns"].sum()
                    )
                }
            )
        oldest = samples["weight_version"]
        newest = samples["newest_weight_version"]
        record.add(staleness(oldest, newest, rollout.version_tokens, version))
        # Without a KL in the reward, only unequal rewards in a group give signal.
        if (
            self.config.algorithm.compares_groups
            and not self.config.algorithm.kl_in_reward.coefficient
        ):
            share = advantages.share_without_signal(samples["reward"], samples["uid"])
            record.add({"rollout/groups_without_signal": share})
        if custom_function := self.functions.get("run.metrics"):
            metrics = custom_function(
                columns_of(
                    samples, custom_function.names, rollout.by_sample, self.buffer.record_of
                )
            )
            record.add({name: float(number) for name, number in metrics.items()})
        if self.config.run.record_samples:
            with record.phase("record"):
                write_step(step_file(self.folder, self.number), rollout)

    def record_update(self, batch: RemoteBatch, mini_batches: Sequence[np.ndarray]) -> None:
        """Keep what the policy's update reads, with run.record_samples. mini_batches: rows of each."""
        if self.config.run.record_samples:
            with self.record.phase("record"):
                write_update(update_file(self.folder, self.number), batch, mini_batches)

    def new_update_record(self, rows: int) -> UpdateRecord | None:
        """Return what the policy's update fills in, with run.record_samples."""
        if not self.config.run.record_samples:
            return None
        return UpdateRecord(np.full(rows, None, object))

    def record_log_probs(self, record: UpdateRecord) -> None:
        with self.record.phase("record"):
            write_log_probs(log_probs_file(self.folder, self.number), record)

    def prompt_text(self, uid: str) -> dict[str, str]:
        """Return a training prompt as text: `prompt`, `record`, its other columns, and names of files with
        `images`.
        """
        key = self.config.data.prompt_key
        (prompt,) = self.buffer.prompts.take(int(uid), 1)
        display_text = show_prompt(prompt.columns[key], prompt.image_names)
        text = {"prompt": display_text, "record": other_columns(prompt.columns, key)}
        return text | (
            {"images": thumbnails(self.folder, prompt.images)} if prompt.images else {}
        )

    def measure(self) -> dict[str, float]:
        record = self.record
        engines = self.roles.rollouts
        loads = self.roles.take_weight_loads()
        record.timeline.weight_loads(loads)
        metrics = record.times() | waiting(
            engines.take_idle_seconds(), engines.queued, record.seconds
        )
        if record.rollout is not None:
            metrics |= throughput(
                record.rollout.batch,
                record.trained,
                record.seconds,
                self.config.batch.epochs,
            )
        if self.config.rollout.max_staleness and loads:
            recomputed = sum(
                load.recompute_seconds for of_engine in loads.values() for load in of_engine
            )
            metrics["rollout/kv_recompute_seconds"] = recomputed / len(loads)
        if judge := self.roles.judge:
            metrics |= judge.take_metrics()
            for kind, failures in judge.take_failures().items():
                record.add_failures(kind, failures)
        return (
            metrics
            | engines.fleet.budget.metrics()
            | {
                "rollout/weight_version": float(self.weight_version),
                "rollout/engines": float(len(engines.fleet.in_state(*READY))),
            }
        )
