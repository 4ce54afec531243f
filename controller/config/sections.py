"""Sections of a configuration for the whole run. `workers.config.roles` holds the sections of the roles."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from workers.config.judge import JudgeConfig
from workers.config.roles import RewardModelConfig, SamplingConfig, setting


@dataclass
class BaseRunConfig:
    """Settings of every command's run."""

    only_with: ClassVar[tuple[tuple[str, str], ...]] = (
        (".checkpoint_every above 0", "keep_checkpoints"),
        (".resume other than never", "on_data_change"),
        ("copies in memory", "peer_copies"),
    )

    name: str = setting(
        "",
        "Name of the run and of its folder in run.dir. If empty, the configuration file's name is used, or "
        "its folder's name if the file is config.yaml. The next free number is added if such a run exists "
        "and run.resume is not auto.",
    )
    dir: str = setting("runs", "Folder that contains all runs.")
    steps: int = setting(
        100, "Training steps. Each generates samples and trains on them.", minimum=1
    )
    seed: int = setting(
        0,
        "Seed of data order, mini-batches and sampling. A run with the same seed repeats.",
        minimum=0,
        maximum=2**53,
    )
    save_every: int = setting(
        0, "Save the model every this many steps. 0 saves only at the end.", minimum=0
    )
    checkpoint_every: int = setting(
        0,
        "Write a checkpoint every this many steps, to resume from exactly. 0 writes none.",
        minimum=0,
    )
    keep_checkpoints: int = setting(
        2, "Number of latest checkpoints to keep. Older ones are deleted.", minimum=1
    )
    push_to_hub: str = setting(
        "",
        "Hugging Face repository, `owner/name`, to upload the model to at the end, with its adapters and "
        "critic if any. Needs a token (`hf auth login`, or HF_TOKEN). A new repository is private.",
    )
    peer_copies: int = setting(
        0,
        "Copy every rank's training state to host memory of its node and of the next one every this many "
        "steps. After losing a training worker, the run continues from these copies if they are complete, "
        "else from the last checkpoint. Each node holds two copies of each state, with several nodes four. "
        "0 copies nothing.",
        minimum=0,
    )
    resume: str = setting(
        "never",
        "`auto` resumes from the last complete checkpoint of run.name, or starts from scratch if there is "
        "none. A path resumes from that checkpoint, or from the last one of that run, under a new name. "
        "`never` never resumes.",
    )
    on_data_change: str = setting(
        "refuse",
        "Reaction if the training prompts or their order differ from the checkpoint's when resuming: "
        "`refuse` stops, `restart` begins with the first new prompt, `keep_place` continues at the same "
        "position.",
        choices=("refuse", "restart", "keep_place"),
    )
    max_restarts: int = setting(
        10,
        "Number of lost actors that a run survives. A lost engine is replaced alone. After losing a "
        "training worker, the run restarts from its last checkpoint. The next loss stops the run.",
        minimum=0,
    )


@dataclass
class RunConfig(BaseRunConfig):
    log_completions: int = setting(
        0, "Samples to print at every step, with their rewards. 0 prints none.", minimum=0
    )
    record_samples: bool = setting(
        False,
        "Keep every step's samples in runs/NAME/samples: tokens, log-probs, weight versions and rewards, and "
        "what each update read and computed: advantages, old, reference and new log-probs, and metrics of "
        "mini-batches. `python -m ballast replay runs/NAME --step 3` trains a step again from them, and "
        "`python -m ballast audit runs/NAME` checks the steps.",
    )
    step: str = setting(
        "",
        "Function that replaces the usual training step, `module:function` or `path/file.py:function`. It "
        "receives the run and combines the parts in `controller.step`, see docs/your-own.md.",
    )
    metrics: str = setting(
        "",
        "Function that returns further metrics of a step's samples, by name, `module:function` or "
        "`path/file.py:function`. See docs/your-own.md.",
    )


@dataclass
class ImagePixelsConfig:
    """Sizes of images before the model's own processor. Others are resized, with their aspect kept."""

    min: int = setting(0, "Fewest pixels, width times height.", minimum=0)
    max: int = setting(
        2**20,
        "Most pixels. Larger images take longer, and more tokens in most models.",
        minimum=1,
    )

    @property
    def limits(self) -> tuple[int, int]:
        return self.min, self.max


IMAGE_KEY = (
    "Column with a record's images: paths, bytes, or what `datasets` writes. Messages may hold them "
    "instead. See docs/images.md. If empty, the column is not read."
)


@dataclass
class DataConfig:
    only_with = (
        (".curriculum left empty", "shuffle"),
        (".sampler left empty", "shuffle, curriculum"),
    )

    train: str = setting(
        "",
        "Prompts: a .jsonl, .json, .parquet or .arrow file, a folder with files of one kind "
        "(`datasets.save_to_disk`, a hub repository), `folder@split` if it has several splits, a pattern "
        "such as `data/part-*.jsonl`, or a data set of the hub, `owner/name[:subset][@split]`, such as "
        "`openai/gsm8k:main@train`. The hub's split defaults to `train`. Or tasks of a package, "
        "`reasoning_gym:NAME` (see docs/your-own.md) or `verifiers:NAME` (see docs/agents.md), or of "
        "`openenv:URL` or `openenv:PACKAGE` (see docs/openenv.md). Other columns go to the reward function.",
    )
    sources: dict[str, float] = setting(
        {},
        "Several sources instead of data.train, each with its weight. Prompts are drawn in this proportion.",
    )
    validation: str = setting(
        "", "Held-out prompts, in the forms of data.train. Empty disables validation."
    )
    prompt_key: str = setting(
        "prompt", "Column with the prompt: a string, or a list of chat messages."
    )
    image_key: str = setting("images", IMAGE_KEY)
    image_pixels: ImagePixelsConfig = field(default_factory=ImagePixelsConfig)
    source_key: str = setting(
        "",
        "Column with a record's source, for validation metrics by source. If empty, the file's path is used.",
    )
    system_prompt: str = setting("", "System message added to chats that have none.")
    continue_last_message: bool = setting(
        False,
        "Let responses continue chats that end with an assistant message. Otherwise such prompts are "
        "refused.",
    )
    chat_template_arguments: dict[str, Any] = setting(
        {},
        "Variables of the chat template, such as `{enable_thinking: false}` or `{reasoning_effort: low}`. "
        "A record's column `chat_template_arguments` overrides them, and its column `tools` gives "
        "functions to call.",
    )
    max_prompt_tokens: int = setting(1024, "Maximum prompt length, in tokens.", minimum=1)
    overlong_prompts: str = setting(
        "drop",
        "Handling of longer prompts: `drop` removes and counts them, `truncate` keeps their last tokens and "
        "counts them, `error` stops the run.",
        choices=("drop", "truncate", "error"),
    )
    shuffle: bool = setting(True, "Shuffle the prompts in every epoch.")
    curriculum: str = setting(
        "",
        "Function that orders each epoch instead of shuffling, `module:function` or `path/file.py:function`: "
        "f(records, epoch) returns record numbers.",
    )
    sampler: str = setting(
        "",
        "Function that chooses each step's prompts by the rewards so far, `module:function` or "
        "`path/file.py:function`. See docs/your-own.md.",
    )

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every training source, by path."""
        return self.sources or {self.train: 1.0}


@dataclass
class BatchReplayConfig:
    """Train again on good samples of earlier steps."""

    only_with = ((".share above 0", "keep, by"),)

    share: float = setting(
        0.0,
        "Samples of earlier steps that a step also trains on, as a share of its new ones "
        "(batch.prompts_per_step * rollout.samples_per_prompt). 0 replays nothing (see docs/replay.md).",
        minimum=0,
        maximum=1,
    )
    keep: int = setting(
        8, "Largest age of a replayed sample, in versions of the weights.", minimum=1
    )
    by: str = setting(
        "",
        "Function that chooses the samples to keep, `module:function` or `path/file.py:function`: those "
        "for which it returns a number above 0. If empty, samples with an advantage above 0. See "
        "docs/your-own.md.",
    )


@dataclass
class BatchConfig:
    only_with = ((".mini_batches above 1", "split_by"),)

    prompts_per_step: int = setting(
        32,
        "Prompts per step. Each is sampled rollout.samples_per_prompt times.",
        minimum=1,
        maximum=10**6,
    )
    mini_batches: int = setting(
        1,
        "Optimiser steps per pass over a step's samples. Each uses an equal share of the sequences.",
        minimum=1,
        maximum=10**6,
    )
    split_by: str = setting(
        "sequence",
        "Unit that is assigned to mini-batches at random: each `sequence` alone, or the whole `group` of a "
        "prompt's samples. Whole groups can share the prompt's tokens (model.share_prefixes).",
        choices=("sequence", "group"),
    )
    epochs: int = setting(
        1,
        "Passes of policy and critic over a step's samples, each with new mini-batches. Old log-probs and "
        "values stay as they were before the first pass.",
        minimum=1,
    )
    replay: BatchReplayConfig = field(default_factory=BatchReplayConfig)


@dataclass
class RewardConfig:
    only_with = (
        (".overlong_tokens above 0", "overlong_penalty"),
        ("a reward model", "model"),
        (".judge.model", "judge"),
    )

    function: str = setting(
        "", "Reward function: `module:function` or `path/file.py:function`."
    )
    functions: dict[str, float] = setting(
        {},
        "Several reward functions instead of reward.function, each with its weight. The reward is their "
        "weighted sum.",
    )
    workers: int = setting(
        1, "Processes that score samples during generation.", minimum=1, maximum=10_000
    )
    timeout_s: float = setting(
        30.0,
        "Time limit in seconds for one call of a reward function, a tool or rollout.environment.",
        above=0,
    )
    concurrency: int = setting(
        16,
        "Samples that one worker scores at the same time if a reward function is a coroutine.",
        minimum=1,
    )
    on_failure: str = setting(
        "zero",
        "Handling of a sample whose reward function or environment raised, hung, died or did not return a "
        "number, or of which no answer of the judge can be parsed: `zero` gives reward 0, `drop` leaves "
        "the sample out, `stop` ends the run. All failures are counted.",
        choices=("zero", "drop", "stop"),
    )
    truncated: str = setting(
        "train",
        "Handling of samples that a limit on tokens or turns cut off: `train` on them, `mask` them (their "
        "rewards count in the group's baseline, and the loss is that of the batch without them), or `drop` "
        "them, rewards included.",
        choices=("train", "mask", "drop"),
    )
    overlong_tokens: int = setting(
        0,
        "Soft penalty for long responses (DAPO), in tokens: within this distance of "
        "sampling.max_new_tokens (in an episode: of rollout.max_episode_tokens), the reward falls linearly "
        "by up to reward.overlong_penalty. 0 disables it.",
        minimum=0,
    )
    overlong_penalty: float = setting(
        1.0, "Reward that a response of maximum length loses.", minimum=0
    )
    shaping: str = setting(
        "",
        "Function that replaces the rewards of training samples, `module:function` or "
        "`path/file.py:function`. See docs/your-own.md.",
    )

    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every reward function. Can be empty with an environment, a reward model or a judge."""
        return self.functions or ({self.function: 1.0} if self.function else {})


@dataclass
class BalanceConfig:
    only_with = (
        (".algorithm=karmarkar_karp or load_balance", "order"),
        (".algorithm other than none", "fit_cost_model"),
    )

    algorithm: str = setting(
        "karmarkar_karp",
        "How sequences are assigned to ranks and micro-batches. `karmarkar_karp` (alias `load_balance`) "
        "uses largest differencing, then refines over all ranks and micro-steps. `none` keeps the random "
        "order. The others balance each rank as the named system does. All respect the caps.",
        choices=("karmarkar_karp", "load_balance", "none", "verl", "roll", "mindspeed_rl"),
    )
    count_multiple: int = setting(
        1,
        "Make each rank's number of micro-batches per mini-batch a multiple of this, as pipelines need.",
        minimum=1,
    )
    order: str = setting(
        "auto",
        "Order of micro-steps: `descending` starts with the heaviest. `small_ends` puts light ones first "
        "and last, where a pipeline fills and drains. `makespan` chooses number, weights and order to "
        "minimise a pipeline's time. `auto` is `makespan` in a pipeline, else `descending`.",
        choices=("auto", "descending", "small_ends", "makespan"),
    )
    fit_cost_model: str = setting(
        "auto",
        "Fit the planner's cost model to measured micro-step times, every ten steps. `auto` fits on GPUs "
        "only. On CPUs, plans depend on config.json alone, so runs repeat exactly.",
        choices=("auto", "always", "never"),
    )


VALIDATED_ALIKE = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "max_thinking_tokens",
    "end_of_thinking",
)
"""Settings of rollout.sampling that those of validation.sampling follow: responses end in the same way."""


def _validation_sampling() -> SamplingConfig:
    return SamplingConfig(
        **{name: cast(Any, f"${{rollout.sampling.{name}}}") for name in VALIDATED_ALIKE}
    )


@dataclass
class ValidationConfig:
    only_with = ((".samples above 1", "success"),)

    every: int = setting(
        0,
        "Validate every this many steps. 0 validates only before and after training.",
        minimum=0,
    )
    at_start: bool = setting(True, "Validate before the first step.")
    samples: int = setting(
        1, "Responses sampled per held-out prompt.", minimum=1, maximum=100_000
    )
    prompts: int = setting(
        0, "Use only the first this many held-out prompts. 0 uses all.", minimum=0
    )
    success: str = setting(
        "reward",
        "Score that decides whether a response is correct, for pass@k and maj@n: `reward`, or the name of "
        "a reward part.",
    )
    success_threshold: float = setting(
        1.0, "A response is correct if validation.success is at least this."
    )
    keep_best: str = setting(
        "",
        "Validation metric, such as `reward` or `pass@8`. The model with the highest value is saved as "
        "model-best.",
    )
    sampling: SamplingConfig = field(default_factory=_validation_sampling)


@dataclass
class ResourcesConfig:
    only_with = ((".ray_address left empty", "dashboard"),)

    device: str = setting(
        "auto",
        "Device of all models. `auto` means cuda if this machine has an NVIDIA GPU and vLLM is not the CPU "
        "build. Set it if the workers' machines differ from the driver's.",
        choices=("auto", "cpu", "cuda"),
    )
    ray_address: str = setting(
        "",
        "Ray cluster: `host:port`, or `auto` for the one on this machine. If empty, RAY_ADDRESS is used, "
        "else a local Ray is started.",
    )
    cpus_per_worker: float = setting(
        0.25,
        "CPUs that each actor reserves in Ray. Fractions are fine, because roles take turns.",
        above=0,
    )
    placement_timeout_s: float = setting(
        120.0, "Seconds to wait for room in the cluster.", above=0
    )
    start_timeout_s: float = setting(
        600.0, "Seconds to wait for actors to load their models.", above=0
    )
    collective_timeout_s: float = setting(
        1800.0,
        "Seconds that ranks wait for each other, for example while one reads or writes files. It also limits "
        "sending new weights to engines on GPUs.",
        above=0,
    )
    user_code_timeout_s: float = setting(
        60.0,
        "Time limit in seconds for each of these before training: importing a function, environment or "
        "loss, rendering the first prompts, rendering each later prompt, and one call of a function that "
        "replaces a part (also during training).",
        above=0,
    )
    dashboard: bool = setting(False, "Start Ray's dashboard with a local Ray.")


@dataclass
class TrackingConfig:
    verbose: bool = setting(
        False,
        "Show imbalances and log-prob mismatch at every step, as -v does. By default only bad values are "
        "shown.",
    )
    tensorboard: bool = setting(True, "Write TensorBoard events next to metrics.jsonl.")
    timeline: bool = setting(
        True, "Write timeline.jsonl, for `python -m ballast timeline runs/NAME`."
    )
    wandb: bool = setting(
        False,
        "Log to Weights & Biases, configured by its environment variables (WANDB_MODE, WANDB_API_KEY, ...).",
    )
    mlflow: bool = setting(
        False, "Log to the MLflow server or folder that MLFLOW_TRACKING_URI names."
    )
    swanlab: bool = setting(
        False,
        "Log to SwanLab, configured by its environment variables (SWANLAB_MODE, SWANLAB_API_KEY, ...).",
    )
    trackio: bool = setting(
        False, "Log to Trackio on this machine, in the folder TRACKIO_DIR."
    )
    project: str = setting(
        "ballast",
        "Project name in Weights & Biases, SwanLab and Trackio, experiment name in MLflow.",
    )
