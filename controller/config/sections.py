"""Sections of a configuration: settings of the run as a whole. Those of the roles are in `workers.config`."""

from dataclasses import dataclass, field
from typing import ClassVar, cast

from workers.config import GaeConfig, KlInRewardConfig, LossConfig, RewardModelConfig, SamplingConfig, setting


@dataclass
class BaseRunConfig:
    """Settings of every command's run."""

    only_with: ClassVar[tuple[tuple[str, str], ...]] = (
        (".checkpoint_every above 0", "keep_checkpoints"),
        (".resume other than never", "other_data"),
    )

    name: str = setting(
        "",
        "Name of the run and of its folder in run.dir. Empty takes the name of the configuration file, or of its "
        "folder if that is config.yaml, and adds the next free number if such a run exists and run.resume is not auto.",
    )
    dir: str = setting("runs", "Folder of all runs.")
    steps: int = setting(100, "Training steps; each generates samples and trains on them.", minimum=1)
    seed: int = setting(
        0, "Seed of data order, mini-batches and sampling; a run with the same seed repeats.", minimum=0, maximum=2**53
    )
    save_every: int = setting(0, "Steps between saved models; 0 saves only at the end.", minimum=0)
    checkpoint_every: int = setting(
        0, "Steps between checkpoints, from which a run resumes exactly; 0 writes none.", minimum=0
    )
    keep_checkpoints: int = setting(2, "Number of latest checkpoints to keep; older ones are deleted.", minimum=1)
    push_to_hub: str = setting(
        "",
        "Repository of the Hugging Face hub, `owner/name`, that the model is uploaded to at the end, with adapters and "
        "critic where there are any; needs a token (`hf auth login`, or HF_TOKEN). A new one is private.",
    )
    resume: str = setting(
        "never",
        "`auto` resumes from the last complete checkpoint of run.name, or starts from the beginning if there is none; "
        "a path resumes from that checkpoint, or from the last one of that run, under a new name; `never` starts from "
        "the beginning.",
    )
    other_data: str = setting(
        "refuse",
        "If the training prompts, or their order, are not those of the checkpoint that run.resume names: `refuse` to "
        "resume, take the new prompts from the first (`restart`), or from the place that the run had reached "
        "(`keep_place`).",
        choices=("refuse", "restart", "keep_place"),
    )
    max_restarts: int = setting(
        10,
        "Number of losses that a run survives. A lost engine is replaced alone; after the loss of a training worker "
        "the run starts again from its last checkpoint. The next loss stops the run.",
        minimum=0,
    )


@dataclass
class RunConfig(BaseRunConfig):
    log_completions: int = setting(0, "Samples printed at every step, with their rewards; 0 prints none.", minimum=0)
    record_samples: bool = setting(
        False,
        "Keep the samples of every step in runs/NAME/samples: tokens, log-probs, versions of weights and rewards, from "
        "which `python -m controller.replay runs/NAME --step 3` trains a step again.",
    )
    step: str = setting(
        "",
        "Function that makes each step in place of the usual one, `module:function` or `path/file.py:function`. It "
        "takes the run, and is made of the parts in `controller.step`, see docs/your-own.md.",
    )


@dataclass
class DataConfig:
    only_with = ((".curriculum left empty", "shuffle"),)

    train: str = setting(
        "",
        "Prompts: a .jsonl, .json, .parquet or .arrow file, a folder of one kind of them (`datasets.save_to_disk`, a "
        "hub repository), or a data set of the hub, `owner/name[:subset][@split]`, as in `openai/gsm8k:main@train`, "
        "which is the default split; other columns go to the reward function.",
    )
    sources: dict[str, float] = setting(
        {}, "Several sources in place of data.train, each with its weight; prompts are drawn in this proportion."
    )
    validation: str = setting("", "Held-out prompts, as data.train; empty validates nothing.")
    prompt_key: str = setting("prompt", "Column of the prompt: a string, or a list of chat messages.")
    source_key: str = setting(
        "", "Column that names a record's source, for validation by source; empty takes the path it was read from."
    )
    system_prompt: str = setting("", "System message put before chat messages that have none.")
    continue_last_message: bool = setting(
        False,
        "Let responses continue chat messages that end with an assistant's; otherwise such prompts are refused.",
    )
    max_prompt_tokens: int = setting(1024, "Longest prompt, in tokens.", minimum=1)
    over_long: str = setting(
        "drop",
        "What to do with longer prompts: `drop` removes and counts them, `truncate` keeps their last tokens and counts "
        "them, `error` stops the run.",
        choices=("drop", "truncate", "error"),
    )
    shuffle: bool = setting(True, "Shuffle the prompts anew in every epoch.")
    curriculum: str = setting(
        "",
        "Function that orders each epoch in place of the shuffle, `module:function` or `path/file.py:function`: "
        "f(records, epoch) returns record numbers.",
    )

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every source of training prompts, by path."""
        return self.sources or {self.train: 1.0}


@dataclass
class BatchConfig:
    only_with = ((".mini_batches above 1", "mini_batches_by"),)

    prompts_per_step: int = setting(
        32, "Prompts of a step; each is sampled rollout.samples_per_prompt times.", minimum=1, maximum=10**6
    )
    mini_batches: int = setting(
        1,
        "Optimiser steps in a pass over a step's samples; each takes an equal share of the sequences.",
        minimum=1,
        maximum=10**6,
    )
    mini_batches_by: str = setting(
        "sequence",
        "What is drawn at random into mini-batches: each `sequence` by itself, or the `group` of a prompt's samples as "
        "a whole, which then can share the prompt's tokens (model.share_prefixes).",
        choices=("sequence", "group"),
    )
    epochs: int = setting(
        1,
        "Passes of policy and critic over a step's samples, each in newly drawn mini-batches; old log-probs and values "
        "are those from before the first pass.",
        minimum=1,
    )


@dataclass
class RewardConfig:
    only_with = ((".overlong_tokens above 0", "overlong_penalty"), (".model.path", "model"))

    function: str = setting("", "Reward function: `module:function` or `path/file.py:function`.")
    functions: dict[str, float] = setting(
        {},
        "Several reward functions in place of reward.function, each with its weight; the reward is their weighted sum.",
    )
    workers: int = setting(1, "Processes that score samples during generation.", minimum=1, maximum=10_000)
    timeout_s: float = setting(
        30.0,
        "Seconds that one call of a reward function, or of rollout.environment, may take.",
        minimum=0,
        exclusive_minimum=True,
    )
    concurrency: int = setting(
        16, "Samples that one worker scores at a time, if a reward function is a coroutine function.", minimum=1
    )
    on_failure: str = setting(
        "zero",
        "What to do with a sample whose reward function or environment raised, hung, died or returned no number: give "
        "it the reward `zero`, leave it out (`drop`), or end the run (`stop`). It is counted in any case.",
        choices=("zero", "drop", "stop"),
    )
    overlong_tokens: int = setting(
        0,
        "Soft punishment of long responses (DAPO): the reward falls linearly over this many tokens before "
        "sampling.max_new_tokens (of an episode: before rollout.max_episode_tokens), by reward.overlong_penalty in "
        "all; 0 punishes none.",
        minimum=0,
    )
    overlong_penalty: float = setting(1.0, "Reward that a response of full length loses.", minimum=0)

    model: RewardModelConfig = field(default_factory=RewardModelConfig)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every reward function, by `module:function`; there may be none beside an environment or a reward
        model."""
        return self.functions or ({self.function: 1.0} if self.function else {})


@dataclass
class AlgorithmConfig:
    only_with = (
        (".advantage=grpo", "normalize_by_std"),
        (".advantage=reinforce_plus_plus or reinforce_plus_plus_baseline", "gamma"),
        (".advantage=pass_at_k", "pass_k"),
        (".groups_without_signal=replace", "max_sampling_rounds"),
        (".advantage=gae", "gae"),
        (".kl_in_reward.coefficient above 0", "kl_in_reward"),
    )

    advantage: str = setting(
        "grpo",
        "Advantage estimator; formulas: `controller.algorithm.advantages`. `gae` is PPO's, with a critic.",
        choices=(
            "gae",
            "grpo",
            "dr_grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "opo",
            "pass_at_k",
            "maxrl",
        ),
    )
    normalize_by_std: bool = setting(True, "Divide a group's centred rewards by their standard deviation (grpo).")
    gamma: float = setting(
        1.0,
        "Discount per token in the returns of reinforce_plus_plus and reinforce_plus_plus_baseline; gae has "
        "algorithm.gae.gamma.",
        minimum=0,
        maximum=1,
    )
    pass_k: int = setting(
        4, "The k of pass_at_k, which rewards the best of k responses; below samples_per_prompt.", minimum=1
    )
    groups_without_signal: str = setting(
        "keep",
        "Groups of equal rewards, whose advantages are 0: `keep` them, `drop` them, or `replace` them by new prompts "
        "until a step has batch.prompts_per_step groups with signal (DAPO's dynamic sampling).",
        choices=("keep", "drop", "replace"),
    )
    max_sampling_rounds: int = setting(
        10,
        "Most rounds of generation in a step with `replace`; after the last it trains on the groups that have signal.",
        minimum=2,
    )
    gae: GaeConfig = field(default_factory=GaeConfig)
    kl_in_reward: KlInRewardConfig = field(default_factory=KlInRewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    @property
    def compares_groups(self) -> bool:
        """Whether advantages are 0 in a group of equal rewards."""
        return self.advantage not in ("reinforce_plus_plus", "gae", "remax")


@dataclass
class BalanceConfig:
    only_with = ((".algorithm=karmarkar_karp or load_balance", "order"), (".algorithm other than none", "refit"))

    algorithm: str = setting(
        "karmarkar_karp",
        "Assignment of sequences to ranks and micro-batches. `karmarkar_karp` (also named `load_balance`) takes "
        "largest differencing and refines it over all ranks and micro-steps within the caps; `none` keeps the order "
        "drawn; the others balance rank by rank as the systems of that name do, within the caps.",
        choices=("karmarkar_karp", "load_balance", "none", "verl", "roll", "mindspeed_rl"),
    )
    count_multiple: int = setting(
        1,
        "The number of micro-batches of a rank in each mini-batch is a multiple of this, as pipelines need.",
        minimum=1,
    )
    order: str = setting(
        "auto",
        "Order of micro-steps: `descending`, the heaviest first, `small_ends`, light ones first and last, where a "
        "pipeline fills and drains, or `makespan`, which chooses number, weights and order of the micro-steps of a "
        "pipeline for the least time. `auto` is `makespan` in a pipeline, else `descending`.",
        choices=("auto", "descending", "small_ends", "makespan"),
    )
    refit: str = setting(
        "auto",
        "Fit the cost model of the planner to the measured times of micro-steps, every ten steps. `auto` does so on "
        "GPUs; on CPUs plans follow config.json alone, so that a run repeats exactly.",
        choices=("auto", "always", "never"),
    )


def _validation_sampling() -> SamplingConfig:
    return SamplingConfig(max_new_tokens=cast(int, "${rollout.sampling.max_new_tokens}"))


@dataclass
class ValidationConfig:
    only_with = ((".samples above 1", "success"),)

    every: int = setting(0, "Steps between validations; 0 validates only before and after training.", minimum=0)
    at_start: bool = setting(True, "Validate before the first step.")
    samples: int = setting(1, "Responses sampled for each held-out prompt.", minimum=1, maximum=100_000)
    prompts: int = setting(0, "Number of held-out prompts to use, from the first; 0 uses all.", minimum=0)
    success: str = setting(
        "reward",
        "Score that decides whether a response is right, for pass@k and maj@n: `reward`, or a part of it by name.",
    )
    success_threshold: float = setting(1.0, "A response is right if validation.success is at least this.")
    keep_best: str = setting(
        "", "Validation metric, such as `reward` or `pass@8`; the model with its highest value is saved as model-best."
    )
    sampling: SamplingConfig = field(default_factory=_validation_sampling)


@dataclass
class ResourcesConfig:
    only_with = ((".ray_address left empty", "dashboard"),)

    device: str = setting(
        "auto",
        "Device of all models. `auto` is cuda if this machine has an NVIDIA GPU and vLLM is not its CPU build; set it "
        "if the workers' machines differ from the driver's.",
        choices=("auto", "cpu", "cuda"),
    )
    ray_address: str = setting(
        "",
        "Ray cluster: `host:port`, or `auto` for the one on this machine; empty takes RAY_ADDRESS or starts a local "
        "Ray.",
    )
    cpus_per_worker: float = setting(
        0.25,
        "CPUs that each actor reserves in Ray; roles take turns, so that fractions are fine.",
        minimum=0,
        exclusive_minimum=True,
    )
    placement_timeout_s: float = setting(
        120.0, "Seconds to wait until the cluster has room.", minimum=0, exclusive_minimum=True
    )
    start_timeout_s: float = setting(
        600.0, "Seconds to wait for actors to load their models.", minimum=0, exclusive_minimum=True
    )
    collective_timeout_s: float = setting(
        1800.0,
        "Seconds that ranks wait for each other, for instance while one of them reads or writes files, and that the "
        "transfer of new weights to engines on GPUs may take.",
        minimum=0,
        exclusive_minimum=True,
    )
    user_code_timeout_s: float = setting(
        60.0,
        "Time limit in seconds of each of these, which run before training starts: the import of a reward function, "
        "environment, loss or curriculum; the chat template on the first prompts, and on each later one; an epoch of "
        "data.curriculum, in training too.",
        minimum=0,
        exclusive_minimum=True,
    )
    dashboard: bool = setting(False, "Start Ray's dashboard if the run starts a local Ray.")


@dataclass
class TrackingConfig:
    only_with = (("tracker", "project"),)

    verbose: bool = setting(
        False, "Show imbalances and mismatch of every step on the terminal, as -v does; else where they are bad."
    )
    tensorboard: bool = setting(True, "Write TensorBoard events beside metrics.jsonl.")
    timeline: bool = setting(True, "Write timeline.jsonl, for `python -m controller.timeline runs/NAME`.")
    wandb: bool = setting(
        False, "Log to Weights & Biases, as WANDB_MODE, WANDB_API_KEY and its other environment variables say."
    )
    mlflow: bool = setting(False, "Log to the MLflow server or folder that MLFLOW_TRACKING_URI names.")
    project: str = setting("ballast", "Project in Weights & Biases, experiment in MLflow.")
