"""`ballast evaluate` and `ballast generate` as functions: settings in, an
Evaluation or a samples file out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ballast.records import Records, data_file
from ballast.sampling_commands.evaluate import METRICS
from ballast.sampling_commands.evaluate import finish as finish_evaluation
from ballast.sampling_commands.generate import finish as finish_generation
from ballast.settings import Values, as_overrides, check_type, known_keys, load_settings
from ballast.training import Settings
from controller.algorithm.validation_metrics import Interval
from controller.config.python_rewards import Reward
from controller.config.sampler import EvaluateConfig, GenerateConfig, SamplerConfig
from controller.config.sections import BaseRunConfig
from controller.lifecycle.interrupts import handlers_kept
from controller.sampling.jobs import JobRequest
from controller.sampling.output import SAMPLES
from controller.sampling.sampling_run import Finish, prepare_job


@dataclass(frozen=True)
class Evaluation:
    """metrics, intervals: by name. Some metrics lack an interval.

    folder: holds samples.jsonl, with every response, and metrics.json, whose content is `facts`.
    """

    folder: Path
    metrics: dict[str, float | None]
    intervals: dict[str, Interval] = field(repr=False)
    facts: dict[str, Any] = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> "Evaluation":
        """Read the evaluation in a folder. Raises OSError if there is none."""
        facts = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        metrics = facts["metrics"]
        intervals = {
            name: Interval(one["low"], one["high"], one["method"])
            for name, one in metrics.items()
            if one["method"]
        }
        return cls(
            folder, {name: one["value"] for name, one in metrics.items()}, intervals, facts
        )


def evaluate(
    config: Settings = None,
    *,
    model: str | Path = "",
    reward: Reward | None = None,
    output: str | Path | None = None,
    overrides: Values = (),
    data: Records | None = None,
    trust_run: bool = False,
) -> Evaluation:
    """Measure a model on data.validation without training, as `python -m ballast evaluate` does.

    config: a training configuration as for `fit`, None for `model`'s run. model: a folder, hub name, run, or
    checkpoint of a run, empty for model.path. output: a folder, whose existing samples are kept, None for a
    folder in the model's run, or next to the runs. data: records instead of data.validation. trust_run: run
    the functions in the run's settings. reward, overrides and exceptions: as for `fit`. An override without
    effect is refused.
    """
    options = {
        "model": str(model),
        "reward": reward,
        "output": _path("output", output),
        "trust_run": trust_run,
    }
    return Evaluation.read(
        _run(
            EvaluateConfig,
            finish_evaluation,
            config,
            overrides,
            "data.validation",
            data,
            **options,
        )
    )


def generate(
    config: Settings = None,
    *,
    model: str | Path = "",
    reward: Reward | None = None,
    output: str | Path | None = None,
    overrides: Values = (),
    data: Records | None = None,
    trust_run: bool = False,
    prompts: int = 0,
) -> Path:
    """Sample with token ids and log-probs, as `python -m ballast generate`, and return the file, a line per
    sample.

    data: records instead of data.train. prompts: use only the first this many, or all if 0. The rest is as in
    `evaluate`, but a reward is optional.
    """
    check_type("prompts", prompts, int)
    options = {
        "model": str(model),
        "reward": reward,
        "output": _path("output", output),
        "trust_run": trust_run,
    }
    folder = _run(
        GenerateConfig,
        finish_generation,
        config,
        overrides,
        "data.train",
        data,
        prompts=prompts,
        **options,
    )
    return folder / SAMPLES


def _run(
    schema: type[SamplerConfig],
    finish: Finish,
    config: Settings,
    overrides: Values,
    key: str,
    data: Records | None,
    **options: Any,
) -> Path:
    """Make the samples and return their folder. key: setting that `data` replaces. options: of JobRequest."""
    assignments = tuple(as_overrides(overrides, known_keys(schema)))
    if data is not None:
        run_dir = (
            BaseRunConfig().dir
            if config is None
            else load_settings(schema, config, assignments).run.dir
        )
        assignments = (*assignments, f"{key}={data_file(data, 'data', run_dir)}")
        assignments += ("data.sources={}",) if key == "data.train" else ()
    if isinstance(config, Mapping):
        request = JobRequest(
            settings=tuple(as_overrides(config, known_keys(schema))),
            overrides=assignments,
            **options,
        )
    else:
        request = JobRequest(_path("config", config), overrides=assignments, **options)
    with handlers_kept():
        settings, start = prepare_job(schema, finish, request)
        start()
    return settings.run_folder


def _path(name: str, path: str | Path | None) -> Path | None:
    check_type(name, path, str, Path, type(None))
    return None if path is None else Path(path)
