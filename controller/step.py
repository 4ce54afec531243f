"""A step of reinforcement learning, and its parts, from which you can build other steps.

    prompts -> samples, rewards -> keep groups with signal -> plan -> old, reference, teacher log-probs
            -> advantages -> update, mini-batch by mini-batch: critic, policy -> weights to the engines

With rollout.max_staleness, samples are made ahead during training, and `collect` takes the ready ones.
Otherwise `collect` makes them. With batch.replay.share, it adds good samples of earlier steps.

Each part takes the run and a batch, and returns the batch with more columns, or an update's metrics. The
driver handles lengths, ids and rewards. Tokens stay in the object store (see `workers.batch.remote_batch`).
`run.record` only observes.

B sequences.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np

from balancing import Plan
from controller.algorithm import advantages
from controller.algorithm.credit import has_offsets, session_advantages, turn_rewards
from controller.algorithm.logprob_check import AtEqualWeights
from controller.planning.planner import with_loss_counts
from controller.primitives import learn as learn_mini_batches
from controller.rollout.batch_rows import (
    assign_teachers,
    newly_sampled,
    sample_numbers,
    trainable_rows,
)
from controller.rollout.update_record import UpdateRecord
from controller.update_passes import RecordedForwardBackward
from workers.batch.metrics import Metric, Metrics, add_prefix, merge, results
from workers.batch.remote_batch import RemoteBatch
from workers.config.roles import LossConfig, ValueLossConfig
from workers.engine.requests import NUMERICS_CHECK_STEP
from workers.model.losses.returns import KlPenalty

if TYPE_CHECKING:
    from controller.actors.worker_group import WorkerGroup
    from controller.run import Run
    from controller.training_loop import Step

# Values before the update, which have not seen the returns.
CRITIC_METRICS = (
    "loss",
    "value_clip_fraction",
    "grad_norm",
    "learning_rate",
    "skipped_steps",
)
COMPARED_TOKENS = 32  # tokens of samples that are compared and not trained


def step(run: "Run") -> None:
    batch = collect(run)
    if len(batch):
        learn(run, batch)


def step_of(pickled: bytes) -> "Step":
    """Return the function of run.step, pickled by `find_step`, or empty for the usual one."""
    return cloudpickle.loads(pickled) if pickled else step


def learn(run: "Run", batch: RemoteBatch) -> None:
    """Update critic and policy with a step's samples, and send the new weights."""
    epochs = plan_updates(run, batch)
    batch = with_old_log_probs(run, batch)
    batch = with_reference_log_probs(run, batch)
    batch = with_teacher(run, batch)
    batch = with_advantages(run, batch)
    update_critic(run, batch, epochs)
    if run.number > run.config.critic.warmup_steps:
        update_policy(run, batch, epochs)
        send_weights(run)


@dataclass(frozen=True)
class Epoch:
    """A pass over a step's trainable samples. mini_batches: rows of each, in order. plan: the policy's."""

    mini_batches: list[np.ndarray]
    plan: Plan


@contextmanager
def on_training_roles(run: "Run", phase: str) -> Iterator[None]:
    """Let colocated engines sleep, and time the block, which computes on training roles, as `phase`."""
    with run.record.phase(phase):
        run.roles.sleep_engines()
        yield


def collect(run: "Run") -> RemoteBatch:
    """Return the step's training samples, or empty if no group has signal (see
    algorithm.zero_variance_groups).

    A sample is one row, or several where the chat template changed what came before a turn. Columns [B]: uid
    (equal for samples of one prompt), group_number (the same, numbered from 0), sample_number (equal for rows
    of one sample), sample, reward, length, prompt_tokens, response_tokens, truncated, weight_version, and
    columns of `RolloutBatch`. Tokens: input_ids, loss_mask, rollout_log_probs.
    """
    with run.record.phase("rollout"):
        rollout = run.buffer.collect(run.number)
    run.record_samples(rollout)
    batch = run.replay.with_replayed(rollout.trained, run.number, run.weight_version)
    groups = np.unique(batch["uid"], return_inverse=True)[1]
    batch = batch.with_columns(group_number=groups, sample_number=sample_numbers(batch))
    batch = batch.with_meta(step=run.number, steps=run.config.run.steps)
    return batch if len(trainable_rows(batch, run.config.reward)) else batch.select([])


def plan_updates(run: "Run", batch: RemoteBatch) -> list[Epoch]:
    """Draw mini-batches of batch.epochs passes, and assign their sequences to ranks and micro-steps.

    Rows number the sequences of `trainable_rows`.
    """
    planner = run.planner
    batch = trainable_rows(batch, run.config.reward)
    with run.record.phase("plan"):
        drawn = [
            planner.draw(batch, run.number, epoch)
            for epoch in range(run.config.batch.epochs)
        ]
        epochs = [Epoch(rows, planner.plan(batch, rows, "policy.update")) for rows in drawn]
    places = batch["uid"].astype(np.int64)  # in the stream of prompts
    columns = {
        "lengths": batch["length"],
        "groups": batch["group_number"],
        "prompts": places,
    }
    columns |= planner.prefixes(batch, "policy.update")
    run.record.plans(
        [epoch.plan for epoch in epochs], run.config.longest_sequence, **columns
    )
    return epochs


def with_old_log_probs(
    run: "Run", batch: RemoteBatch, *, recompute: bool = False
) -> RemoteBatch:
    """Add the tokens `old_log_probs`, the loss ratios' denominator, if needed before the update.

    A single optimiser step uses its own forward pass, which gives the same numbers. Stale samples use the
    engines'.
    recompute: use the current policy, for example between two updates. With algorithm.loss.old_entropies also
    adds `old_entropies`.

    Raises MismatchError if engines and trainer differ too much.
    """
    config = run.config
    check = run.logprob_check
    needed = recompute or config.has_forward_pass
    equal_weights = check.at_equal_weights(
        batch["weight_version"], batch["newest_weight_version"], run.weight_version
    )
    if config.old_log_probs == "sampler" and not recompute:
        batch = batch.with_tokens(old_log_probs=batch.tokens["rollout_log_probs"])
    entropies = config.algorithm.loss.old_entropies
    with on_training_roles(run, "log_probs"):
        if not needed and equal_weights is AtEqualWeights.NONE:
            return batch
        read = (
            run.roles.policy.log_probs_and_entropies
            if entropies
            else run.roles.policy.log_probs
        )
        passed = read(batch, run.planner.forward_plan(batch, "policy.log_probs"))
    check.compare(run.number, passed.metrics, equal_weights)
    if needed:
        run.record.add(add_prefix("policy", check.keep(run.number, passed.metrics)))
    if recompute or config.old_log_probs == "forward_pass":
        batch = batch.with_tokens(old_log_probs=passed.tokens["log_probs"])
    return (
        batch.with_tokens(old_entropies=passed.tokens["entropies"]) if entropies else batch
    )


def with_reference_log_probs(run: "Run", batch: RemoteBatch) -> RemoteBatch:
    """Add the tokens `reference_log_probs` if a KL needs them."""
    if not run.config.uses_reference:
        return batch
    with on_training_roles(run, "log_probs"):
        outputs = run.roles.reference_method("log_probs")(
            batch, run.planner.forward_plan(batch, "reference.log_probs")
        )
    return batch.with_tokens(reference_log_probs=outputs.tokens["log_probs"])


def with_teacher(run: "Run", batch: RemoteBatch) -> RemoteBatch:
    """Add the tokens that algorithm.loss.distillation reads, of each sequence by its record's teacher.

    Without a model of its own, the teacher is the policy, which reads the record's context too.
    """
    config = run.config
    settings = run.config.algorithm.loss.distillation
    if not config.uses_teacher:
        return batch
    teacher = run.roles.teacher or run.roles.policy
    read, arguments = {
        "token": ("teacher_log_probs", ()),
        "top_k": ("top_tokens", (settings.top_k, config.vocabulary)),
        "vocabulary": ("hidden_states", ()),
    }[settings.over]
    prompts = {
        uid: run.buffer.prompts.take(int(uid), 1)[0] for uid in set(batch["uid"].tolist())
    }
    names, taught = assign_teachers(config.teacher, batch, prompts)
    columns: dict[str, np.ndarray] = {}
    with on_training_roles(run, "log_probs"):
        if settings.over == "vocabulary" and run.roles.teacher is None:
            teacher.take_teacher_layer(teacher.output_layer()[0])
        for name in np.unique(names):
            rows = np.flatnonzero(names == name)
            of_teacher = taught.select(rows)
            plan = run.planner.forward_plan(of_teacher, "teacher.log_probs")
            for column, places in getattr(teacher, read)(
                of_teacher, plan, name, *arguments
            ).tokens.items():
                columns.setdefault(column, np.empty(len(batch), object))[rows] = places
    return batch.with_tokens(**columns)


def with_advantages(run: "Run", batch: RemoteBatch) -> RemoteBatch:
    """Add `advantages` by algorithm.advantage: a column [B], or tokens (with a critic, also `returns` and
    `old_values`).

    rewards - weight * KL to the reference --estimator, on the driver--> a column
    rewards, KL to the reference, critic's values --GAE, on the ranks that have the tokens--> tokens
    rewards, KL to the reference --REINFORCE++: discounted returns, also there--> tokens
    rewards of turns --gigpo, on the driver--> a number a turn --on the ranks--> tokens
    rewards of an agent's responses --estimator, on the driver--> a number a turn --on the ranks--> tokens
    """
    algorithm = run.config.algorithm
    planner = run.planner
    critic = run.roles.critic
    full_batch = batch
    batch = newly_sampled(batch)
    with on_training_roles(run, "advantages"):
        weight, kl = _kl_in_reward(run, batch)
        penalty = KlPenalty(weight, algorithm.kl_in_reward.estimator) if weight else None
        if critic is not None:
            plan = planner.forward_plan(batch, "critic.values")
            outputs = critic.advantages(
                _add_baseline_and_turns(run, batch),
                plan,
                algorithm.gae,
                penalty,
                algorithm.gamma_per,
            )
            run.record.add(add_prefix("critic", advantages.value_metrics(outputs.metrics)))
            batch = batch.with_tokens(**outputs.tokens)
        elif run.config.uses_token_returns:
            plan = planner.forward_plan(batch, "policy.log_probs")
            settings = (algorithm.gamma, penalty)
            outputs = run.roles.policy.token_advantages(
                _add_baseline_and_turns(run, batch), plan, *settings, algorithm.gamma_per
            )
            batch = batch.with_tokens(**outputs.tokens)
        elif algorithm.advantage == "gigpo":
            plan = planner.forward_plan(batch, "policy.log_probs")
            penalised = batch.with_columns(reward=batch["reward"] - weight * kl)
            outputs = run.roles.policy.turn_advantages(
                _add_baseline_and_turns(run, penalised), plan
            )
            batch = batch.with_tokens(**outputs.tokens)
        elif has_offsets(batch):
            batch = batch.with_columns(
                by_turn=session_advantages(algorithm, batch, batch["reward"] - weight * kl)
            )
            outputs = run.roles.policy.turn_advantages(
                batch, planner.forward_plan(batch, "policy.log_probs")
            )
            batch = batch.with_tokens(**outputs.tokens)
        else:
            rewards = batch["reward"] - weight * kl
            custom_function = run.functions.get("algorithm.advantage_function")
            batch = batch.with_columns(
                advantages=advantages.sequence_advantages(
                    algorithm, batch, rewards, custom_function
                )
            )
    batch = run.replay.with_advantages(full_batch, batch)
    run.record.trains_on(batch)
    return batch


def _add_baseline_and_turns(run: "Run", batch: RemoteBatch) -> RemoteBatch:
    """Give rewards their baseline by group, and their turns, where the estimator has them."""
    algorithm = run.config.algorithm
    rewards = batch["reward"]
    if algorithm.advantage == "reinforce_plus_plus_baseline":
        rewards = advantages.dr_grpo(rewards, batch["group_number"])
    turns = (
        {"by_turn": turn_rewards(algorithm, batch, rewards)}
        if algorithm.reads_turns
        else {}
    )
    return batch.with_columns(reward=rewards, **turns)


def _kl_in_reward(run: "Run", batch: RemoteBatch) -> tuple[float, np.ndarray]:
    """Return the weight and each sequence's KL [B], and set the next step's weight."""
    settings = run.config.algorithm.kl_in_reward
    if not settings.coefficient:
        return 0.0, np.zeros(len(batch))
    adapted = run.progress.kl_coefficient
    weight = settings.coefficient if adapted is None else adapted
    plan = run.planner.forward_plan(batch, "reference.log_probs")
    rows = (run.roles.reference or run.roles.policy).kl(batch, plan, settings.estimator)
    sample = advantages.samples_of(batch)[1]
    kl = np.bincount(sample, rows)
    run.kl_coefficient = advantages.adapted_kl_weight(
        weight, float(kl.mean()), len(kl), settings
    )
    run.record.add({"reward/kl": float(kl.mean()), "reward/kl_coefficient": weight})
    return weight, kl[sample]


def update_critic(
    run: "Run", batch: RemoteBatch, epochs: Sequence[Epoch]
) -> dict[str, float]:
    """Make the critic's optimiser steps on the policy's mini-batches, and return the metrics under `critic/`.

    batch: with `returns` and `old_values`, see `with_advantages`.
    """
    if run.roles.critic is None:
        return {}
    plans = [
        run.planner.plan(
            trainable_rows(batch, run.config.reward), epoch.mini_batches, "critic.update"
        )
        for epoch in epochs
    ]
    update_metrics = results(
        _update(run, run.roles.critic, batch, epochs, plans, run.config.critic.loss)
    )
    metrics = {
        name: value for name, value in update_metrics.items() if name in CRITIC_METRICS
    }
    run.record.add(add_prefix("critic", metrics))
    return metrics


def update_policy(
    run: "Run",
    batch: RemoteBatch,
    epochs: Sequence[Epoch],
    *,
    loss: LossConfig | None = None,
    recorded_as: str = "policy",
) -> dict[str, float]:
    """Make the policy's optimiser steps, and return the metrics recorded under `recorded_as`.

    batch: with `advantages` and required log-probs. Without `old_log_probs`, ratios are 1. loss: replaces
    algorithm.loss. Raises MismatchError as `with_old_log_probs`, if log-probs are first compared here.
    """
    trained = trainable_rows(batch, run.config.reward)
    record = None
    if recorded_as == "policy":
        run.record_update(trained, epochs[0].mini_batches)
        record = run.new_update_record(len(trained))
    plans = [epoch.plan for epoch in epochs]
    settings = loss or run.config.policy_loss
    updated = _update(run, run.roles.policy, batch, epochs, plans, settings, record)
    if record is not None:
        run.record_log_probs(record)
    run.logprob_check.compare_update(run.number, updated)
    # Only a separate log-prob pass compares sampler and trainer at equal weights.
    metrics = results(updated) | run.logprob_check.metrics_before_update(run.number)
    run.record.add(add_prefix(recorded_as, metrics))
    return metrics


def _update(
    run: "Run",
    group: "WorkerGroup",
    batch: RemoteBatch,
    epochs: Sequence[Epoch],
    plans: Sequence[Plan],
    loss: LossConfig | ValueLossConfig,
    record: UpdateRecord | None = None,
) -> Metrics:
    """record: filled by the first epoch."""
    parts = []
    batch = trainable_rows(batch, run.config.reward)
    with on_training_roles(run, "update"):
        run.interrupts.hold()
        for number, (epoch, plan) in enumerate(zip(epochs, plans, strict=True)):
            part = with_loss_counts(batch, epoch.mini_batches).with_meta(epoch=number)
            recorded = None if number or record is None else RecordedForwardBackward(record)
            updated = learn_mini_batches(group, part, plan, loss, recorded)
            # Sum over ranks and micro-batches, mean over mini-batches and epochs.
            parts.append(updated | {"loss": Metric.sum(updated["loss"].value / len(plans))})
    return merge(parts)


def send_weights(run: "Run", adapter: str = "") -> None:
    """Send the policy's weights to every engine, under the next version. adapter: see
    `WorkerGroups.send_weights`.

    With samples of older weights, compares engines and trainer after the first update, and may raise
    MismatchError.
    """
    with run.record.phase("weights"):
        run.weight_version += 1
        run.record.add(
            add_prefix("rollout", run.roles.send_weights(run.weight_version, adapter))
        )
        if run.config.older_samples and run.logprob_check.awaits(AtEqualWeights.CHANGED):
            _check_changed_weights(run)


def _check_changed_weights(run: "Run") -> None:
    config = run.config
    sampling = config.rollout.sampling
    sampling = replace(
        sampling, max_new_tokens=min(COMPARED_TOKENS, sampling.max_new_tokens)
    )
    prompts = run.buffer.prompts.take(0, config.batch.prompts_per_step)
    batch = run.buffer.roll_out(
        prompts, config.rollout.samples_per_prompt, sampling, NUMERICS_CHECK_STEP
    ).rows
    with on_training_roles(run, "log_probs"):
        passed = run.roles.policy.log_probs(
            batch, run.planner.forward_plan(batch, "policy.log_probs")
        )
    run.logprob_check.compare(run.number, passed.metrics, AtEqualWeights.CHANGED)
