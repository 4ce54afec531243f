"""A configuration of a training is taken as it is; what a job would sample is known, and checked, before it
starts.
"""

import shlex
import shutil
from pathlib import Path

import pytest

from ballast.sampling_commands import evaluate, generate
from controller.actors.layout import pools, role_requests
from controller.config import load_as
from controller.config.sampler import EvaluateConfig, GenerateConfig, SamplerConfig
from controller.sampling.jobs import JobRequest, job_settings
from controller.sampling.models import choose_model
from tests.controller.config_workspace import write_model
from workers.errors import CheckpointError, ConfigError
from workers.model.checkpoint.checkpoint_folder import Manifest, commit, unfinished_folder


def narrowed(
    schema: type[SamplerConfig], *overrides: str, model: str = ""
) -> SamplerConfig:
    return job_settings(
        schema, JobRequest(Path("config.yaml"), model, overrides=overrides)
    )[0]


def test_an_evaluation_samples_as_a_validation_and_a_generation_as_training(
    workspace: Path,
) -> None:
    overrides = [
        "validation.samples=3",
        "validation.prompts=7",
        "validation.sampling.temperature=0.5",
    ]
    of_file = [*overrides, "rollout.sampling.top_p=0.9"]
    (workspace / "config.yaml").write_text(
        (workspace / "config.yaml").read_text() + "validation: {samples: 2}\n"
    )
    found = narrowed(EvaluateConfig, *overrides)
    assert (found.data.weights, found.rollout.samples_per_prompt) == (
        {"validation.jsonl": 1.0},
        3,
    )
    assert (found.rollout.sampling.temperature, found.rollout.sampling.max_new_tokens) == (
        0.5,
        64,
    )
    assert (found.first_prompts, str(found.run_folder)) == (7, "runs/test-evaluate")
    found = narrowed(GenerateConfig, of_file[-1])
    assert (found.data.weights, found.rollout.samples_per_prompt) == (
        {"train.jsonl": 1.0},
        8,
    )
    assert (found.rollout.sampling.top_p, str(found.run_folder)) == (
        0.9,
        "runs/test-generate",
    )


@pytest.mark.parametrize(
    ("schema", "override"),
    [
        (EvaluateConfig, "run.steps=3"),
        (EvaluateConfig, "data.train=train.jsonl"),
        (EvaluateConfig, "rollout.sampling.temperature=0.3"),
        (GenerateConfig, "validation.samples=4"),
        (GenerateConfig, "algorithm.advantage=rloo"),
        (GenerateConfig, "policy.data_parallel=3"),
        (GenerateConfig, "rollout.max_staleness=1"),
    ],
)
def test_a_setting_of_training_is_refused_on_the_command_line_alone(
    workspace: Path, schema: type[SamplerConfig], override: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{override.partition('=')[0]} .*controller\.{schema.command}"
    ):
        narrowed(schema, override)


def test_every_setting_is_read_or_refused(workspace: Path) -> None:
    """The beginnings of keys that are refused are those of keys, and what is left belongs to what samples."""
    from controller.config.file import settings

    for schema in (EvaluateConfig, GenerateConfig):
        keys = [found.key for found in settings(schema())]
        ignored = schema.without_effect
        assert all(any(key.startswith(prefix) for key in keys) for prefix in ignored)
        left = {key.partition(".")[0] for key in keys if not key.startswith(ignored)}
        assert {"model", "data", "rollout", "reward", "resources", "run"} <= left
        assert left <= {
            "model",
            "data",
            "rollout",
            "reward",
            "resources",
            "run",
            "policy",
            "balance",
            "validation",
        }


def test_what_is_reserved_are_engines_and_rewards_alone(workspace: Path) -> None:
    found = load_as(
        GenerateConfig,
        "config.yaml",
        ["resources.device=cuda", "rollout.tensor_parallel=2"],
    )
    assert [(pool.name, pool.bundles) for pool in pools(found)] == [
        ("rollout", ({"CPU": 0.25, "GPU": 2.0},))
    ]
    assert [request.role for request in role_requests(found)] == ["rollout", "reward"]
    judged = load_as(
        GenerateConfig, "config.yaml", ["resources.device=cuda", "reward.model.path=judge"]
    )
    assert [pool.name for pool in pools(judged)] == ["training", "rollout"]
    assert [request.role for request in role_requests(judged)] == [
        "reward_model",
        "rollout",
        "reward",
    ]
    assert list(judged.limits) == ["reward_model.scores"]


def test_a_dry_run_says_what_would_be_sampled_and_starts_nothing(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "train.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n' * 5)
    assert (
        generate.main(
            [
                "--config",
                "config.yaml",
                "--output",
                "samples",
                "--prompts",
                "3",
                "--dry-run",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "data: train.jsonl, 3 prompts\nsamples: 24, 8 of each prompt; temperature 1,"
        in said
    )
    assert "rewards: reward.py:reward\nengines: 1, on CPUs\noutput: samples\n" in said
    assert evaluate.main(["--config", "config.yaml", "--dry-run"]) == 0
    assert "samples: 1, 1 of each prompt; " in capsys.readouterr().out
    assert not {"samples", "runs"} & {path.name for path in workspace.iterdir()}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--config config.yaml data.validation=''", "data.validation is not set. Name the"),
        (
            "--config config.yaml validation.sampling.temperature=0 validation.samples=2",
            "are equal",
        ),
        (
            "--config config.yaml validation.sampling.max_new_tokens=999",
            "validation.sampling.max_new_tokens or",
        ),
        (
            "--config config.yaml reward.function=''",
            "one of reward.function and reward.functions",
        ),
        ("--config config.yaml --model model model.path=model", "--model and model.path"),
        ("", "--config is not given. Give it, or --model runs/NAME"),
        ("--config config.yaml --model nowhere", "there is no folder nowhere"),
        (
            "--config config.yaml --steps",
            "unrecognized arguments: --steps; usage: python -m",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(
    workspace: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert evaluate.main(shlex.split(command)) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_a_generation_needs_no_reward(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After all checks.
    monkeypatch.setattr("controller.sampling.jobs.read_inputs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate.main(["--config", "config.yaml", "reward.function=''"])


def write_run(folder: Path, *steps: int) -> Path:
    """The folder of a run with checkpoints."""
    run = folder / "runs" / "mine"
    for step in steps:
        path = run / "checkpoints" / "policy" / f"step-{step}"
        begun = unfinished_folder(path)
        begun.mkdir(parents=True)
        commit(begun, path, Manifest(step, 1, {}, {}, {}))
    run.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "config.yaml", run / "config.yaml")
    return run


def test_a_run_is_its_model_or_its_last_checkpoint(workspace: Path) -> None:
    run = write_run(workspace, 2, 10)
    found = choose_model(str(run))
    assert (found.path, found.checkpoint) == (
        str(run / "model-10"),
        run / "checkpoints" / "policy" / "step-10",
    )
    write_model(run / "model")
    found = choose_model(str(run))
    assert (found.path, found.run, found.checkpoint) == (str(run / "model"), run, None)
    assert choose_model(str(run / "model")).run == run
    found = choose_model(str(run / "checkpoints" / "policy" / "step-2"))
    assert (found.path, found.name, found.is_missing) == (
        str(run / "model-2"),
        "step-2",
        True,
    )
    write_model(run / "model-2")  # as run.save_every leaves it, or an evaluation before
    assert not found.is_missing
    assert choose_model("owner/name").path == "owner/name"


def test_a_model_of_a_run_is_evaluated_with_the_runs_settings_into_its_folder(
    workspace: Path,
) -> None:
    run = write_run(workspace)
    write_model(run / "model-best")
    config, _ = job_settings(
        EvaluateConfig, JobRequest(model=str(run / "model-best"), trust_run=True)
    )
    assert (config.model.path, config.run_folder) == (
        str(run / "model-best"),
        run / "evaluate" / "model-best",
    )
    request = JobRequest(
        model=str(run / "model-best"), output=Path("elsewhere"), reward=lambda **_: 1.0
    )
    config, _ = job_settings(EvaluateConfig, request)
    assert config.run_folder == Path("elsewhere")


def test_what_is_no_model_is_told(workspace: Path) -> None:
    run = write_run(workspace, 3)
    with pytest.raises(ConfigError, match=r"^--model="):
        choose_model(str(run / "checkpoints"))
    critics = (run / "checkpoints" / "policy").rename(run / "checkpoints" / "critic")
    with pytest.raises(CheckpointError, match=r"^--model="):
        choose_model(str(critics / "step-3"))
    with pytest.raises(ConfigError, match=r"^--model="):
        choose_model(str(run))
