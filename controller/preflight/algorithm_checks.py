"""Check algorithm.*, critic, reward model and validation.* for contradictions."""

import re
from collections.abc import Iterable

from controller.algorithm.validation_metrics import is_possible, possible_metrics
from controller.config import Config
from controller.config.functions import check_function
from controller.preflight.data_checks import check_column_names
from controller.preflight.training_checks import OPTIMIZER_STEPS, check_optimizer
from workers.config.loss import check_policy_loss
from workers.errors import ConfigError, check_together


def check_advantage(config: Config) -> None:
    algorithm = config.algorithm
    samples = config.rollout.samples_per_prompt
    if algorithm.advantage == "gigpo" and (
        config.rollout.max_turns == 1 or not config.rollout.plays_episodes
    ):
        raise ConfigError(
            "algorithm.advantage=gigpo: it compares turns, and a sample has one. Set rollout.environment or "
            "rollout.tools, and rollout.max_turns above 1, or another estimator such as grpo."
        )
    if (algorithm.compares_groups or algorithm.advantage == "gigpo") and samples == 1:
        raise ConfigError(
            f"rollout.samples_per_prompt=1: algorithm.advantage={algorithm.advantage} compares samples. Set "
            "2 or more."
        )
    if algorithm.advantage == "pass_at_k" and samples <= algorithm.pass_k:
        raise ConfigError(
            f"algorithm.pass_k={algorithm.pass_k}: every advantage is 0 unless it is below "
            f"rollout.samples_per_prompt={samples}. Lower it, or sample more."
        )
    penalty = algorithm.kl_in_reward
    taught = config.uses_teacher
    equal = (
        algorithm.compares_groups
        or algorithm.advantage == "custom"
        or algorithm.group_filter
    )
    learns = (penalty.coefficient or taught) and not algorithm.group_filter
    if algorithm.zero_variance_groups != "keep" and (learns or not equal):
        estimator = f"algorithm.advantage={algorithm.advantage} with algorithm.credit={algorithm.credit}"
        signals = {
            "algorithm.kl_in_reward": penalty.coefficient,
            "algorithm.loss.distillation": taught,
            estimator: True,
        }
        by = next(name for name, is_set in signals.items() if is_set)
        raise ConfigError(
            f"algorithm.zero_variance_groups={algorithm.zero_variance_groups}: it leaves out sequences from "
            f"which the policy learns by {by}. Remove it."
        )
    if algorithm.advantage == "none" and not taught:
        raise ConfigError(
            "algorithm.advantage=none: nothing is learned from rewards. Set "
            "algorithm.loss.distillation.coefficient, or another estimator such as grpo."
        )
    if algorithm.advantage == "maxrl" and (
        penalty.coefficient or config.reward.overlong_tokens
    ):
        by = "algorithm.kl_in_reward" if penalty.coefficient else "reward.overlong_tokens"
        raise ConfigError(
            f"algorithm.advantage=maxrl: it takes rewards as rates of success, and {by} makes them "
            "negative. Remove one of the two."
        )
    if (
        penalty.coefficient
        and penalty.target
        and penalty.horizon < config.sequences_per_step
    ):
        raise ConfigError(
            f"algorithm.kl_in_reward.horizon={penalty.horizon}: the weight would jump below the "
            f"{config.sequences_per_step} sequences of a step. Raise it, such as to 20 steps."
        )


def check_loss(config: Config) -> None:
    check_together(
        lambda: _check_named_loss(config),
        lambda: _check_teacher(config),
        lambda: _check_staleness(config),
        lambda: _check_sampled_ratios(config),
        lambda: _check_kl_correction(config),
    )


def _check_named_loss(config: Config) -> None:
    loss = config.algorithm.loss
    check_policy_loss(loss)
    if loss.name == "custom":
        check_together(
            lambda: check_function("algorithm.loss.function", loss.function),
            lambda: check_column_names(config.loss_columns),
        )
    if loss.name in ("clip_cov", "kl_cov") and config.old_log_probs == "update":
        raise ConfigError(
            f"algorithm.loss.name={loss.name}: it chooses tokens by old log-probs, which one update a step "
            "does not compute. Set batch.mini_batches or batch.epochs to 2 or more."
        )
    if config.batch.epochs > 1 and loss.name == "reinforce":
        raise ConfigError(
            "algorithm.loss.name=reinforce: it needs samples of the current policy, and "
            f"batch.epochs={config.batch.epochs} trains on older ones. Set epochs to 1, or another loss."
        )
    by_turn = config.algorithm.advantage == "gigpo"
    if loss.name == "gmpo" and (config.uses_token_returns or config.uses_critic or by_turn):
        raise ConfigError(
            "algorithm.loss.name=gmpo: it weighs a sequence by one advantage, and algorithm.advantage="
            f"{config.algorithm.advantage} with algorithm.gamma below 1, algorithm.kl_in_reward, rewards of "
            "turns or a critic gives one to each token. Choose another loss, such as ppo_clip."
        )


def _check_teacher(config: Config) -> None:
    teacher = config.teacher
    distillation = config.algorithm.loss.distillation
    if not config.uses_teacher:
        return
    if not (config.starts_teacher or teacher.context_key):
        raise ConfigError(
            f"teacher.path is empty, and algorithm.loss.distillation.coefficient={distillation.coefficient} "
            "needs a teacher. Name a model, or a column that only the teacher reads (teacher.context_key)."
        )
    if teacher.path and teacher.paths:
        raise ConfigError(
            f"teacher.path={teacher.path}: teacher.paths names teachers too. Set one of the two."
        )
    if teacher.paths and distillation.over == "vocabulary":
        raise ConfigError(
            f"teacher.paths={teacher.paths}: algorithm.loss.distillation.over=vocabulary would keep all "
            "teachers' output layers on every rank. Set top_k or token."
        )
    if teacher.context_key and config.rollout.plays_episodes:
        raise ConfigError(
            f"teacher.context_key={teacher.context_key}: it replaces a record's prompt, which "
            f"{config.rollout.code[0]} continues in its own way. Remove one of the two."
        )
    if not config.starts_teacher and config.model.router_replay != "none":
        raise ConfigError(
            f"model.router_replay={config.model.router_replay}: engines chose no experts for the teacher's "
            "prompts. Set none, or teacher.path."
        )
    if not all(place in teacher.context_template for place in ("{prompt}", "{context}")):
        raise ConfigError(
            f"teacher.context_template={teacher.context_template!r}: must contain {{prompt}} and "
            f"{{context}}. Add them."
        )


def _check_staleness(config: Config) -> None:
    loss = config.algorithm.loss
    setting = config.older_samples
    if setting and loss.name == "reinforce" and not loss.rollout_correction.is_on:
        raise ConfigError(
            f"algorithm.loss.name=reinforce: it needs samples of the current policy, and {setting} trains "
            "on older ones. Set algorithm.loss.rollout_correction.weights=token, or another loss."
        )
    if not config.rollout.max_staleness:
        return
    if config.algorithm.advantage == "remax":
        raise ConfigError(
            f"algorithm.advantage=remax: its greedy response needs the samples' weights, which {setting} "
            "changes meanwhile. Set rollout.max_staleness=0, or another estimator such as rloo."
        )
    if config.uses_reward_model and config.algorithm.zero_variance_groups == "replace":
        raise ConfigError(
            "algorithm.zero_variance_groups=replace: it needs rewards as samples come, and "
            f"reward.model.path scores on the policy's ranks, which train meanwhile with {setting}. Set "
            "drop, or rollout.max_staleness=0."
        )


def check_replay(config: Config) -> None:
    algorithm = config.algorithm
    setting = f"batch.replay.share={config.batch.replay.share}"
    if not config.batch.replay.share:
        return
    if (
        config.uses_critic
        or config.uses_token_returns
        or algorithm.advantage in ("gigpo", "none")
    ):
        raise ConfigError(
            f"{setting}: a replayed sample keeps its one advantage, and "
            f"algorithm.advantage={algorithm.advantage} gives none, or one to each token. Choose another "
            "estimator such as grpo, or remove batch.replay."
        )


def _check_sampled_ratios(config: Config) -> None:
    sampling = config.rollout.sampling
    correction = config.algorithm.loss.rollout_correction
    if sampling.changes and (
        correction.weights == "none" or correction.rejection != "none"
    ):
        raise ConfigError(
            f"rollout.sampling.{sampling.changes[0]}: it samples from another distribution than the "
            "policy's, which is trained. Set algorithm.loss.rollout_correction.weights=token or sequence, "
            "without rejection, or set it in validation.sampling alone."
        )
    if sampling.changes:
        return
    readers = {
        config.older_samples: config.old_log_probs == "sampler",
        "algorithm.loss.rollout_correction": correction.is_on,
    }
    for reader in (
        name
        for name, reads in readers.items()
        if reads and not sampling.log_probs_are_whole
    ):
        raise ConfigError(
            f"rollout.sampling.{sampling.cuts[0]}: at temperature={sampling.temperature:g} engines give "
            f"log-probs of the kept tokens alone, and the ratios of {reader} would not be 1 at equal "
            "weights. Set rollout.sampling.temperature=1, or sample without a cut."
        )


def _check_kl_correction(config: Config) -> None:
    correction = config.algorithm.loss.kl_correction
    estimator = config.algorithm.loss.kl_estimator
    if correction == "straight_through" and estimator == "k2":
        raise ConfigError(
            "algorithm.loss.kl_correction=straight_through: algorithm.loss.kl_estimator=k2 has its "
            "gradient already. Remove it."
        )
    if correction == "importance" and estimator not in ("k1", "k3"):
        raise ConfigError(
            "algorithm.loss.kl_correction=importance: the mean of algorithm.loss.kl_estimator="
            f"{estimator} is not the KL. Set k1 or k3."
        )


def check_critic(config: Config) -> None:
    if not config.uses_critic:
        return
    if config.critic.warmup_steps >= config.run.steps:
        raise ConfigError(
            f"critic.warmup_steps={config.critic.warmup_steps}: the policy learns in no step of "
            f"run.steps={config.run.steps}. Lower it."
        )
    check_optimizer(config, "critic", config.schedule_steps("critic"), OPTIMIZER_STEPS)


COUNTED = re.compile(r"(?:.*/)?(?:pass|maj)@\d+")


def check_validation(config: Config) -> None:
    """Raise ConfigError for identical samples, or a pass@k or maj@n that needs more validation.samples."""
    name = config.validation.keep_best
    samples = config.validation.samples
    if samples > 1 and config.validation.sampling.temperature == 0:
        raise ConfigError(
            f"validation.samples={samples}: responses at validation.sampling.temperature=0 are equal. Set "
            "1, or the temperature above 0."
        )
    if COUNTED.fullmatch(name) and not is_possible(name, samples, ()):
        raise ConfigError(
            f"validation.keep_best={name} is not a validation metric: validation.samples={samples} gives "
            f"{', '.join(possible_metrics(samples, ()))}. Choose one of them, or change validation.samples."
        )


def check_keep_best(config: Config, parts: Iterable[str]) -> None:
    """Raise ConfigError if rewards with these parts lack the metric in validation.keep_best.

    Parts from an environment, a reward model or the overlong penalty are known only during the run.
    """
    name = config.validation.keep_best
    samples = config.validation.samples
    played = config.rollout.environment or config.rollout.runs_agent
    adds = (
        played
        or config.uses_reward_model
        or config.uses_judge
        or config.reward.overlong_tokens
    )
    if name and not adds and not is_possible(name, samples, parts):
        raise ConfigError(
            f"validation.keep_best={name} is not a validation metric: the reward gives "
            f"{', '.join(possible_metrics(samples, parts))}. Choose one of them, or return {name} for every "
            "response."
        )
