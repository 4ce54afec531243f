"""Settings of commands that only sample: a training configuration, narrowed to the settings they use.

    Config <-- SamplerConfig <-- EvaluateConfig (data.validation, validation.sampling)
                             '-- GenerateConfig (data.train or data.sources, rollout.sampling)

They read a training's configuration unchanged, and refuse training settings on the command line.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

from controller.config.algorithm import AlgorithmConfig
from controller.config.role_table import REWARD_MODEL
from controller.config.schema import Config
from controller.config.sections import VALIDATED_ALIKE, BatchConfig, DataConfig
from workers.config.roles import SamplingConfig
from workers.engine.requests import GENERATION_STEP, VALIDATION_STEP
from workers.errors import ConfigError

TRAINING_KEYS = """
    run.steps run.save_every run.checkpoint_every run.keep_checkpoints run.resume run.on_data_change
    run.peer_copies
    run.log_completions run.record_samples run.step run.metrics
    batch. algorithm. reference. teacher. critic. tracking.
    data.shuffle data.curriculum data.sampler reward.overlong_ reward.truncated reward.shaping
    reward.model.normalize
    validation.every validation.at_start validation.keep_best
    rollout.placement rollout.max_staleness rollout.out_of_order_window rollout.kv_cache_after_update
    rollout.weight_sync
"""
OF_TRAINING = tuple(TRAINING_KEYS.split())
"""Keys, or prefixes of keys, that commands without training do not read."""
OF_RANKS = ("policy.", "balance.", "resources.collective_timeout_s")


@dataclass
class SamplerConfig(Config):
    """Engines, reward workers and, with a reward model, its ranks."""

    # Facts about the command.
    command = ""
    does = ""
    seed_step = 0
    writes_tokens = False
    needs_reward = False
    without_effect = OF_TRAINING
    role_table = (REWARD_MODEL,)

    @property
    def first_prompts(self) -> int:
        return 0

    @property
    def rollout_placement(self) -> str:
        """Engines have separate GPUs, because no policy shares them."""
        return "apart" if self.uses_gpus else "shared_memory"

    def narrowed(self, output: Path) -> Self:
        """Keep only the command's settings, with `output` as the run's folder."""
        raise NotImplementedError

    def _narrowed(
        self, output: Path, data: DataConfig, sampling: SamplingConfig, samples: int
    ) -> Self:
        return replace(
            self,
            run=replace(
                self.run,
                dir=str(output.parent),
                name=output.name,
                resume="auto",
                on_data_change="keep_place",
                metrics="",
            ),
            data=replace(data, curriculum="", sampler="", shuffle=False),
            reward=replace(self.reward, shaping=""),
            rollout=replace(
                self.rollout, sampling=sampling, samples_per_prompt=samples, max_staleness=0
            ),
            validation=replace(self.validation, keep_best=""),
            algorithm=AlgorithmConfig(),
            batch=BatchConfig(),
        )


@dataclass
class EvaluateConfig(SamplerConfig):
    """Settings of `ballast.sampling_commands.evaluate`: a validation as in training."""

    command = "evaluate"
    does = "Validation metrics of a model on data.validation, with confidence intervals."
    seed_step = VALIDATION_STEP
    needs_reward = True
    # validation.sampling may follow the others of rollout.sampling
    without_effect = (
        *(*OF_TRAINING, "data.train", "data.sources", "rollout.samples_per_prompt"),
        *(
            f"rollout.sampling.{each.name}"
            for each in fields(SamplingConfig)
            if each.name not in VALIDATED_ALIKE
        ),
    )

    @property
    def sampling_key(self) -> str:
        return "validation.sampling"

    @property
    def first_prompts(self) -> int:
        return self.validation.prompts

    def narrowed(self, output: Path) -> Self:
        """Raises ConfigError without data.validation."""
        if not self.data.validation:
            raise ConfigError(
                "data.validation is not set. Name the data to evaluate on, data.validation=FILE."
            )
        data = replace(self.data, train=self.data.validation, sources={}, validation="")
        return self._narrowed(
            output, data, self.validation.sampling, self.validation.samples
        )


@dataclass
class GenerateConfig(SamplerConfig):
    """Settings of `ballast.sampling_commands.generate`: samples as in training."""

    command = "generate"
    does = "Sample responses, with token ids and log-probs, into a file."
    seed_step = GENERATION_STEP
    writes_tokens = True
    without_effect = (*OF_TRAINING, "data.validation", "validation.")

    def narrowed(self, output: Path) -> Self:
        """Take data.train or data.sources in file order."""
        data = replace(self.data, validation="")
        return self._narrowed(
            output, data, self.rollout.sampling, self.rollout.samples_per_prompt
        )


def check_effect(
    config: SamplerConfig, overrides: Iterable[str], *, uses_ranks: bool
) -> None:
    """Raise ConfigError for an override that the command does not read. Settings in a file are left alone.

    uses_ranks: whether training ranks compute a reward model or a checkpoint.
    """
    ignored = (*config.without_effect, *(() if uses_ranks else OF_RANKS))
    for override in overrides:
        key = override.partition("=")[0]
        if key.startswith(ignored):
            raise ConfigError(
                f"{key} has no effect in controller.{config.command}, which trains nothing. Leave it out."
            )
