"""Every metric of a run, declared once: name, unit, meaning, kind, and how parts of it join.

    step's metrics {name: value} --declaration_of--> Declaration --> docs/metrics.md (`metric_page`)
    LIVE, exported by `live_metrics` --------------------^    +----> Ray, Prometheus, Grafana: `series`, labels

`{label}` in a name stands for a name in the run: a part of the reward, a phase, a held-out source. A new metric is
declared here; a test compares what real runs record with what is declared.
"""

from functools import cache

from controller.observability.declaration import Declaration, Kind
from controller.observability.live_catalog import LIVE

MEAN_OVER_TOKENS = "mean over tokens"
WITH_CRITIC = "a critic"
CORRECTION = "algorithm.loss.rollout_correction is used"

REWARD = (
    Declaration("reward/mean", "reward", "Reward of the step's samples.", "mean over samples"),
    Declaration("reward/std", "reward", "Spread of the step's rewards.", "standard deviation over samples"),
    Declaration(
        "reward/{part}",
        "reward",
        "One reward function of several, or another number that a reward function returned.",
        "mean over samples that have it",
        when="reward functions with parts",
    ),
    Declaration(
        "reward/failures",
        "samples",
        "Samples whose reward function failed; see reward.on_failure.",
        "adds up",
        Kind.COUNTER,
    ),
)

ROLLOUT = (
    Declaration("rollout/samples", "samples", "Samples generated and scored.", "adds up", Kind.COUNTER),
    Declaration("rollout/samples_dropped", "samples", "Samples given up after all retries.", "adds up", Kind.COUNTER),
    Declaration(
        "rollout/samples_retried",
        "samples",
        "Further tries, after an engine failed at a sample.",
        "adds up",
        Kind.COUNTER,
    ),
    Declaration(
        "rollout/groups_without_signal",
        "share",
        "Groups whose rewards are all equal, so that their advantages are 0.",
        "mean over groups",
        when="advantages that compare a group's rewards",
    ),
    Declaration(
        "rollout/samples_left_out",
        "samples",
        "Samples not trained on: those of groups without signal, unless algorithm.groups_without_signal=keep.",
        "adds up",
        Kind.COUNTER,
    ),
    Declaration("rollout/sampling_rounds", "rounds", "Rounds of generation that the step took."),
    Declaration("rollout/response_tokens_mean", "tokens", "Length of responses.", "mean over samples"),
    Declaration("rollout/response_tokens_max", "tokens", "Length of the longest response.", "largest"),
    Declaration("rollout/truncated_share", "share", "Responses cut at max_new_tokens.", "mean over samples"),
    Declaration(
        "rollout/prefix_cache_hits",
        "share",
        "Share of the tokens before the policy's turns that an engine had read for another request already.",
    ),
    Declaration("rollout/turns_mean", "turns", "Turns of the policy in a sample.", "mean over samples"),
    Declaration(
        "rollout/observation_tokens_mean", "tokens", "Tokens that an environment put in between.", "mean over samples"
    ),
    Declaration("rollout/oldest_weight_version", "version", "Oldest weights that a sample was made with.", "smallest"),
    Declaration("rollout/newest_weight_version", "version", "Newest weights that a sample was made with.", "largest"),
    Declaration(
        "rollout/staleness_mean",
        "versions",
        "How many versions older than the policy's the weights are that a sample was made with.",
        "mean over samples",
    ),
    Declaration("rollout/staleness_max", "versions", "The same, of the oldest.", "largest"),
    Declaration(
        "rollout/versions_per_sample", "versions", "Versions of the weights that a sample spans.", "mean over samples"
    ),
    Declaration(
        "rollout/tokens_of_age_{age}",
        "share",
        "Share of the policy's tokens that were sampled with weights so many versions old.",
        when="tokens of that age",
    ),
    Declaration(
        "rollout/trainer_idle_share", "share", "Share of the step's time in which the trainer waited for samples."
    ),
    Declaration(
        "rollout/engine_idle_share",
        "share",
        "Share of the step's time in which an engine had no request.",
        "mean over engines",
    ),
    Declaration("rollout/queued", "requests", "Requests that no engine works on, at the end of the step."),
    Declaration("rollout/weight_version", "version", "Weights that the engines have at the end of the step."),
)

TIME = (
    Declaration("time/{phase}_s", "s", "Wall time of a phase of the step; `step` is the whole."),
    Declaration(
        "tokens/{phase}",
        "tokens",
        "Tokens that a phase worked on: rollout (response tokens), update (all tokens trained on).",
        "adds up",
        Kind.COUNTER,
    ),
    Declaration(
        "throughput/rollout_tokens_per_s", "tokens/s", "Response tokens over the time that the step waited for samples."
    ),
    Declaration("throughput/update_tokens_per_s", "tokens/s", "Tokens trained on over the time of the update."),
    Declaration("throughput/tokens_per_s", "tokens/s", "Prompt and response tokens over the time of the step."),
)

BALANCE = (
    Declaration("balance/tokens_per_rank/{figure}", "tokens", "Real tokens of a rank: min, max, mean, difference."),
    Declaration("balance/tokens_per_rank_before/{figure}", "tokens", "The same if the batch was dealt as it came."),
    Declaration("balance/imbalance/{over}", "share", "Longest over mean, less 1: of ranks, of micro-steps."),
    Declaration("balance/imbalance_before/{over}", "share", "The same if the batch was dealt as it came."),
    Declaration(
        "balance/imbalance_karmarkar_karp/{over}", "share", "The same after Karmarkar-Karp alone, without caps."
    ),
    Declaration(
        "balance/over_bound",
        "share",
        "Time of micro-steps, as predicted, over the least of any plan with as many and the same caps, less 1.",
    ),
    Declaration(
        "balance/from_karmarkar_karp", "share", "Mini-batches refined from Karmarkar-Karp; others end better elsewhere."
    ),
    Declaration("balance/idle_share", "share", "Share of ranks' time that is waiting in micro-steps, as predicted."),
    Declaration("balance/idle_share_before", "share", "The same if the batch was dealt as it came."),
    Declaration(
        "balance/predicted_time/{figure}", "FLOP or s", "Time of the heaviest ranks: total, longest_micro_step."
    ),
    Declaration(
        "balance/predicted_time_error",
        "share",
        "Root mean square of predicted over measured seconds, less 1; before a fit, predictions are scaled to seconds.",
        "over the update's micro-steps of all ranks",
    ),
    Declaration("balance/predicted_time_before/{figure}", "FLOP or s", "The same if the batch was dealt as it came."),
    Declaration(
        "balance/cap_fill", "share", "Share of max_tokens that a micro-batch takes.", "mean over micro-batches"
    ),
    Declaration(
        "balance/shared_tokens",
        "share",
        "Share of tokens that another sequence of the micro-batch computes, as planned; rows may share a few more.",
    ),
    Declaration("balance/padding_share", "share", "Share of computed tokens that are no real ones."),
    Declaration(
        "balance/padding_removed/{of}",
        "share",
        "Cells not computed of a padded tensor: of the longest sequence allowed (width), of the longest there is "
        "(longest_row).",
    ),
    Declaration("balance/micro_batches", "micro-batches", "Micro-batches of a rank."),
    Declaration("balance/empty_micro_batches", "micro-batches", "Micro-batches without work.", "adds up over ranks"),
)

CUSTOM_LOSS = Declaration(
    "policy/{statistic}",
    "",
    "What a loss of one's own returns beside these.",
    "as its Metric says",
    when="algorithm.loss.name=custom",
)
EXPERT_LOAD = "Tokens of the fullest expert over the mean of all, in the layer where that is most; 1 is even."
POLICY = (
    Declaration("policy/loss", "loss", "Loss of the mini-batches.", "sum over ranks, mean over mini-batches"),
    Declaration("policy/entropy", "nats", "Entropy of the policy's next-token distribution.", MEAN_OVER_TOKENS),
    Declaration("policy/grad_norm", "norm", "Norm of the gradient before clipping.", "mean over mini-batches"),
    Declaration("policy/learning_rate", "rate", "Learning rate.", "mean over mini-batches"),
    Declaration(
        "policy/expert_load_max_over_mean",
        "",
        EXPERT_LOAD,
        "mean over mini-batches",
        when="a mixture of experts",
    ),
    Declaration(
        "policy/router_mismatch",
        "share",
        "Experts chosen by the engine that the policy's own routers would not choose, of all choices.",
        "mean over mini-batches",
        when="model.router_replay=compare or replay",
    ),
    Declaration(
        "policy/router_aux_loss",
        "",
        "Load-balancing loss of the routers over each sequence, mean over layers, without its coefficient: 1 is even.",
        "mean over mini-batches",
        when="model.router_aux_loss_coefficient",
    ),
    Declaration(
        "policy/router_z_loss",
        "",
        "Squared log-sum-exp of the routers' logits, mean over tokens and layers, without its coefficient.",
        "mean over mini-batches",
        when="model.router_z_loss_coefficient",
    ),
    Declaration(
        "policy/skipped_steps", "steps", "Optimiser steps skipped for NaN or infinity.", "adds up", Kind.COUNTER
    ),
    Declaration(
        "policy/approximate_kl",
        "nats",
        "KL of the old policy to the new, estimator k3 (Schulman 2020).",
        MEAN_OVER_TOKENS,
    ),
    Declaration(
        "policy/clip_fraction",
        "share",
        "Tokens whose ratio the loss clips.",
        MEAN_OVER_TOKENS,
        when="a loss that clips",
    ),
    Declaration(
        "policy/dual_clip_fraction",
        "share",
        "Tokens whose loss the dual clip bounds.",
        MEAN_OVER_TOKENS,
        when="algorithm.loss.dual_clip",
    ),
    Declaration("policy/sapo_gate", "share", "SAPO's soft gate.", MEAN_OVER_TOKENS, when="algorithm.loss.name=sapo"),
    Declaration(
        "policy/held_back_fraction",
        "share",
        "Tokens held back for their covariance.",
        MEAN_OVER_TOKENS,
        when="algorithm.loss.name=clip_cov or kl_cov",
    ),
    Declaration(
        "policy/reference_kl",
        "nats",
        "KL of the policy to the reference, by algorithm.loss.kl_estimator.",
        MEAN_OVER_TOKENS,
        when="algorithm.loss.kl_coefficient above 0",
    ),
    Declaration(
        "policy/rollout_mismatch_mean", "nats", "Difference of sampler's and trainer's log-probs.", MEAN_OVER_TOKENS
    ),
    Declaration("policy/rollout_mismatch_max", "nats", "The same, of the worst token.", "largest"),
    Declaration(
        "policy/rollout_kl", "nats", "KL of sampler to trainer, estimator k3.", MEAN_OVER_TOKENS, when=CORRECTION
    ),
    Declaration(
        "policy/rollout_chi_square", "", "Chi-square of sampler and trainer.", MEAN_OVER_TOKENS, when=CORRECTION
    ),
    Declaration("policy/rollout_rejected_fraction", "share", "Tokens masked out.", MEAN_OVER_TOKENS, when=CORRECTION),
    Declaration("policy/rollout_truncated_fraction", "share", "Tokens at the cap.", MEAN_OVER_TOKENS, when=CORRECTION),
    Declaration("policy/rollout_weight_mean", "", "Importance weights.", MEAN_OVER_TOKENS, when=CORRECTION),
    Declaration("policy/rollout_weight_max", "", "Largest importance weight.", "largest", when=CORRECTION),
    Declaration("policy/rollout_weight_min", "", "Smallest importance weight.", "smallest", when=CORRECTION),
    CUSTOM_LOSS,
)

VALIDATION = (
    Declaration(
        "validation/{score}",
        "score",
        "Held-out responses: reward and its parts, pass@k, maj@n; with several sources also SOURCE/score. Of held-out "
        "sequences: loss, perplexity, entropy; of pairs: loss, accuracy, margin, rewards.",
        "mean over responses or prompts",
        when="data.validation, at steps with a validation",
    ),
)

GIVEN_SEQUENCES = "controller.sft, controller.preferences"
PAIRS = "controller.preferences"
OVER_PAIRS = "mean over pairs"
OFFLINE = (
    Declaration("data/epoch", "epochs", "Passes over data.train so far.", when=GIVEN_SEQUENCES),
    Declaration("data/dropped", "records", "Records of data.train that are too long.", when=GIVEN_SEQUENCES),
    Declaration(
        "preferences/accuracy", "share", "Pairs whose chosen response has the higher reward.", OVER_PAIRS, when=PAIRS
    ),
    Declaration("preferences/margin", "reward", "Reward of the chosen less the rejected.", OVER_PAIRS, when=PAIRS),
    Declaration(
        "preferences/chosen_reward", "reward", "beta times policy's over reference's log-prob.", OVER_PAIRS, when=PAIRS
    ),
    Declaration("preferences/rejected_reward", "reward", "The same of the rejected.", OVER_PAIRS, when=PAIRS),
)

CRITIC = (
    Declaration(
        "critic/loss", "loss", "Loss of the mini-batches.", "sum over ranks, mean over mini-batches", when=WITH_CRITIC
    ),
    Declaration(
        "critic/grad_norm", "norm", "Norm of the gradient before clipping.", "mean over mini-batches", when=WITH_CRITIC
    ),
    Declaration("critic/values", "reward", "Values before the update.", MEAN_OVER_TOKENS, when=WITH_CRITIC),
    Declaration(
        "critic/returns", "reward", "Returns that the values are to predict.", MEAN_OVER_TOKENS, when=WITH_CRITIC
    ),
    Declaration(
        "critic/explained_variance",
        "share",
        "Share of the returns' variance that the values explain.",
        "over all tokens",
        when=WITH_CRITIC,
    ),
    Declaration(
        "critic/value_clip_fraction",
        "share",
        "Tokens whose value the loss clips.",
        MEAN_OVER_TOKENS,
        when="critic.loss.clip above 0",
    ),
    Declaration(
        "critic/expert_load_max_over_mean",
        "",
        EXPERT_LOAD,
        "mean over mini-batches",
        when="a critic that is a mixture of experts",
    ),
    Declaration("critic/learning_rate", "rate", "Learning rate.", "mean over mini-batches", when=WITH_CRITIC),
    Declaration(
        "critic/skipped_steps",
        "steps",
        "Optimiser steps skipped for NaN or infinity.",
        "adds up",
        Kind.COUNTER,
        when=WITH_CRITIC,
    ),
)

RESTARTS = (
    Declaration("restarts/engines", "restarts", "Engines started anew so far.", kind=Kind.COUNTER, so_far=True),
    Declaration(
        "restarts/recoveries",
        "restarts",
        "Times that the run went on from its last checkpoint so far.",
        kind=Kind.COUNTER,
        so_far=True,
    ),
    Declaration(
        "checkpoint/failures",
        "checkpoints",
        "Checkpoints that could not be written so far.",
        kind=Kind.COUNTER,
        so_far=True,
    ),
)

SECTIONS = {
    "Reward": REWARD,
    "Rollout": ROLLOUT,
    "Time": TIME,
    "Balance": BALANCE,
    "Policy": POLICY,
    "Critic": CRITIC,
    "Given sequences": OFFLINE,
    "Failures": RESTARTS,
    "Validation": VALIDATION,
}
METRICS = {declaration.name: declaration for section in SECTIONS.values() for declaration in section}
EXPORTED = METRICS | {declaration.name: declaration for declaration in LIVE}


@cache
def declaration_of(name: str) -> tuple[Declaration, dict[str, str]] | None:
    """The declaration of metric `name` and its labels; None if there is none. An exact name precedes a family."""
    if name in METRICS:
        return METRICS[name], {}
    for declaration in METRICS.values():
        if declaration.labels and (labels := declaration.match(name)) is not None:
            return declaration, labels
    return None
