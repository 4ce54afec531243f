"""The sections of a configuration: settings of the run as a whole; those of the roles stand in `workers.config`."""

from dataclasses import dataclass, field
from typing import cast

from workers.config import (
    GaeConfig,
    KlInRewardConfig,
    LossConfig,
    RewardModelConfig,
    SamplingConfig,
    setting,
)


@dataclass
class BaseRunConfig:
    """What every command's run has."""

    name: str = setting(
        "",
        "Name of the run: its folder below run.dir. Empty takes the name of the configuration file, or of its folder "
        "if that is config.yaml, and, unless run.resume=auto, the next free number where runs of that name are there.",
    )
    dir: str = setting("runs", "Folder of all runs.")
    steps: int = setting(100, "Steps: rounds of generation and training.", minimum=1)
    seed: int = setting(
        0, "Seed of data order, mini-batches and sampling; a run with the same seed repeats.", minimum=0
    )
    save_every: int = setting(0, "Steps between saved models; 0 saves only at the end.", minimum=0)
    checkpoint_every: int = setting(
        0,
        "Steps between checkpoints, from which a run goes on as if never stopped; 0 writes none.",
        minimum=0,
    )
    keep_checkpoints: int = setting(2, "Checkpoints that are kept: the last so many.", minimum=1)
    resume: str = setting(
        "never",
        "`auto` goes on from the last good checkpoint of run.name, or starts where there is none; a path goes on from "
        "that checkpoint, or the last one of that run, under a new name; `never` starts from the beginning.",
    )
    other_data: str = setting(
        "refuse",
        "What run.resume does where the training prompts, or their order, are not those of the checkpoint: `refuse` to "
        "go on, take the new ones from the first (`restart`), or from the place that the run had reached "
        "(`keep_place`).",
        choices=("refuse", "restart", "keep_place"),
    )
    max_restarts: int = setting(
        10,
        "What is lost during the run is started anew so many times, a rollout engine alone and a training worker with "
        "the run from its last checkpoint; the next loss stops the run.",
        minimum=0,
    )


@dataclass
class RunConfig(BaseRunConfig):
    log_completions: int = setting(0, "Samples printed at every step with their rewards; 0 prints none.", minimum=0)


@dataclass
class DataConfig:
    train: str = setting(
        "",
        "Prompts: a .jsonl, .json, .parquet or .arrow file, or a folder of one kind of them (`datasets.save_to_disk`, "
        "a hub repository); other columns go to the reward function.",
    )
    sources: dict[str, float] = setting(
        {}, "Several of these in place of data.train, each with its weight: prompts are dealt in this proportion."
    )
    validation: str = setting("", "Held-out prompts, as data.train; empty validates nothing.")
    prompt_key: str = setting("prompt", "Column of the prompt: a string, or a list of chat messages.")
    source_key: str = setting(
        "", "Column that names a record's source, for validation by source; empty takes the path it was read from."
    )
    system_prompt: str = setting("", "System message put before chat messages that have none.")
    max_prompt_tokens: int = setting(1024, "Longest prompt, in tokens.", minimum=1)
    over_long: str = setting(
        "drop",
        "What happens to longer prompts: `drop` leaves them out and counts them, `truncate` keeps their last tokens "
        "and counts them, `error` stops the run.",
        choices=("drop", "truncate", "error"),
    )
    shuffle: bool = setting(True, "Draw a new order of the prompts for every epoch.")
    curriculum: str = setting(
        "",
        "`module:function` or `path/file.py:function` that orders an epoch in place of the shuffle: "
        "f(records, epoch) returns record numbers.",
    )

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every source of training prompts, by path."""
        return self.sources or {self.train: 1.0}


@dataclass
class BatchConfig:
    prompts_per_step: int = setting(
        32, "Prompts of a step; each is sampled rollout.samples_per_prompt times.", minimum=1
    )
    mini_batches: int = setting(
        1, "Optimiser steps of a pass over a step's samples; each takes its share of the sequences.", minimum=1
    )
    epochs: int = setting(
        1,
        "Passes over a step's samples, of the policy and the critic, each in mini-batches that are drawn anew; old "
        "log-probs and values are those from before the first.",
        minimum=1,
    )


@dataclass
class RewardConfig:
    function: str = setting("", "Reward function: `module:function` or `path/file.py:function`.")
    functions: dict[str, float] = setting(
        {}, "Several of these in place of reward.function, each with its weight; the reward is their weighted sum."
    )
    workers: int = setting(1, "Processes that score samples beside generation.", minimum=1)
    timeout_s: float = setting(
        30.0,
        "Seconds that one call of a reward function, or of rollout.environment, may take.",
        minimum=0,
        exclusive_minimum=True,
    )
    concurrency: int = setting(
        16, "Samples that one worker scores at a time, where a reward function is a coroutine function.", minimum=1
    )
    on_failure: str = setting(
        "zero",
        "What becomes of a sample whose reward function, or environment, raised, hung, died or returned no number: its "
        "reward is `zero`, it is left out (`drop`), or the run ends (`stop`). It is counted in any case.",
        choices=("zero", "drop", "stop"),
    )
    overlong_tokens: int = setting(
        0,
        "Soft punishment of long responses (DAPO): over the last so many tokens before sampling.max_new_tokens (of an "
        "episode: before rollout.max_episode_tokens) the reward falls linearly, by reward.overlong_penalty in all; 0 "
        "punishes none.",
        minimum=0,
    )
    overlong_penalty: float = setting(1.0, "What a response of that length loses.", minimum=0)

    model: RewardModelConfig = field(default_factory=RewardModelConfig)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every reward function, by `module:function`; there may be none beside an environment or a reward
        model."""
        return self.functions or ({self.function: 1.0} if self.function else {})


@dataclass
class AlgorithmConfig:
    advantage: str = setting(
        "grpo",
        "Advantage estimator; formulas stand in `controller.advantages`. `gae` is PPO's, with a critic.",
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
        "Discount of what comes a token later, in the returns of reinforce_plus_plus and reinforce_plus_plus_baseline; "
        "that of gae is algorithm.gae.gamma.",
        minimum=0,
        maximum=1,
    )
    pass_k: int = setting(4, "Responses of which pass_at_k rewards the best; below samples_per_prompt.", minimum=1)
    groups_without_signal: str = setting(
        "keep",
        "Groups of equal rewards, whose advantages are 0: `keep` them, `drop` them, or `replace` them by new prompts "
        "until a step has batch.prompts_per_step groups with signal (DAPO's dynamic sampling).",
        choices=("keep", "drop", "replace"),
    )
    max_sampling_rounds: int = setting(
        10, "Rounds of generation of a step with `replace`; after the last it trains on what has signal.", minimum=2
    )
    gae: GaeConfig = field(default_factory=GaeConfig)
    kl_in_reward: KlInRewardConfig = field(default_factory=KlInRewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)


@dataclass
class BalanceConfig:
    algorithm: str = setting(
        "karmarkar_karp",
        "How sequences are dealt to ranks and micro-batches: `karmarkar_karp` (or `load_balance`, another name of "
        "it) shares them by largest differencing and refines that over all ranks and micro-steps under the caps; "
        "`none` keeps the order drawn; the others balance rank by rank as those systems do, with the caps kept.",
        choices=("karmarkar_karp", "load_balance", "none", "verl", "roll", "mindspeed_rl"),
    )
    count_multiple: int = setting(
        1, "Micro-batches of a rank in each mini-batch are a multiple of this, as pipelines need.", minimum=1
    )
    order: str = setting(
        "descending",
        "Order of micro-steps: `descending`, the heaviest first, or `small_ends`, light ones first and last, where a "
        "pipeline fills and empties.",
        choices=("descending", "small_ends"),
    )
    redeal_groups: bool = setting(
        False,
        "Move whole groups between the mini-batches of a step until these weigh the same. This changes which sequences "
        "share an optimiser step: mini-batches are no longer random draws.",
    )
    refit: str = setting(
        "auto",
        "Fit the cost model that plans follow to the measured times of micro-steps, every ten steps. `auto` does it on "
        "GPUs; on CPU plans then follow config.json alone, so that a run repeats exactly.",
        choices=("auto", "always", "never"),
    )


def _validation_sampling() -> SamplingConfig:
    return SamplingConfig(max_new_tokens=cast(int, "${rollout.sampling.max_new_tokens}"))


@dataclass
class ValidationConfig:
    every: int = setting(0, "Steps between validations; 0 validates only before and after training.", minimum=0)
    samples: int = setting(1, "Responses sampled for each held-out prompt.", minimum=1)
    prompts: int = setting(0, "Held-out prompts taken, from the first; 0 takes all.", minimum=0)
    success: str = setting(
        "reward", "Score by which a response counts as right, for pass@k and maj@n: `reward`, or a part of it by name."
    )
    success_threshold: float = setting(1.0, "A response is right from this value of validation.success on.")
    keep_best: str = setting(
        "", "Validation metric, such as `reward` or `pass@8`, by whose highest value the model is kept as model-best."
    )
    sampling: SamplingConfig = field(default_factory=_validation_sampling)


@dataclass
class ResourcesConfig:
    device: str = setting(
        "auto",
        "Where models run. `auto` is cuda if this machine has an NVIDIA GPU and vLLM is not its CPU build; "
        "set it where the driver's machine is unlike the workers'.",
        choices=("auto", "cpu", "cuda"),
    )
    ray_address: str = setting(
        "",
        "Cluster: `host:port`, or `auto` for the one of this machine; empty takes RAY_ADDRESS or starts a local one.",
    )
    cpus_per_worker: float = setting(
        0.25,
        "CPUs that an actor reserves in Ray; roles work in turn, so fractions are fine.",
        minimum=0,
        exclusive_minimum=True,
    )
    placement_timeout_s: float = setting(
        120.0, "Seconds to wait for the cluster to have room.", minimum=0, exclusive_minimum=True
    )
    start_timeout_s: float = setting(
        600.0, "Seconds to wait for actors to load their models.", minimum=0, exclusive_minimum=True
    )
    collective_timeout_s: float = setting(
        1800.0,
        "Seconds for which ranks wait for each other, for instance while one of them reads or writes files, and for "
        "which new weights may take to reach the engines between GPUs.",
        minimum=0,
        exclusive_minimum=True,
    )
    user_code_timeout_s: float = setting(
        60.0,
        "Seconds that each of these may take in its process: the import of a reward function, environment, loss or "
        "curriculum, an epoch of data.curriculum, and the first prompts of a chat template, tried before a run.",
        minimum=0,
        exclusive_minimum=True,
    )
    dashboard: bool = setting(False, "Start Ray's dashboard where the run starts a local Ray.")


@dataclass
class TrackingConfig:
    tensorboard: bool = setting(True, "Write TensorBoard events beside metrics.jsonl.")
    timeline: bool = setting(True, "Write timeline.jsonl, for `python -m controller.timeline runs/NAME`.")
    wandb: bool = setting(
        False, "Log to Weights & Biases, as WANDB_MODE, WANDB_API_KEY and its other environment variables say."
    )
    mlflow: bool = setting(False, "Log to the MLflow server or folder that MLFLOW_TRACKING_URI names.")
    project: str = setting("ballast", "Project in Weights & Biases, experiment in MLflow.")
