"""Settings without effect in a combination are refused, each with the condition that its section names for
it.
"""

import shlex
from collections.abc import Callable
from copy import deepcopy
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import ballast
import ballast.replay.__main__ as replay
from ballast import doctor
from ballast.loop import start
from ballast.sampling_commands import evaluate
from controller import fit
from controller.config import Config, load, to_yaml
from controller.config.conditions import (
    CONDITIONS,
    check_settings_have_effect,
    effect_words,
    holds,
    leave_out_cpu_settings,
)
from controller.config.file import Setting, settings, value_of
from controller.config.offline import PreferencesConfig, SftConfig
from controller.config.schema import load_as
from tests.refusals import refused
from workers.errors import ConfigError

SCHEMAS = [Config, SftConfig, PreferencesConfig]
BASE = ["model.path=model", "resources.device=cpu"]
SHORT = {
    "GAE": "algorithm.advantage=gae",
    "KL": "algorithm.loss.kl_coefficient=0.1",
    "LORA": "model.lora.rank=4",
    "DISTILLED": "algorithm.loss.distillation.coefficient=1",
}

OF_SEVERAL: dict[Any, str] = {
    dict[int, float]: "{5: 0.5}",
    dict[str, float]: "{a: 0.5}",
    dict[str, str]: "{a: b}",
    dict[str, Any]: "{a: 1}",
    list[str]: "[a]",
    list[int]: "[5]",
}


def another_value(found: Setting) -> Any:
    """A value that the setting takes and that is not its default."""
    if found.type in OF_SEVERAL:
        return OF_SEVERAL[found.type]
    if found.type is bool:
        return str(not found.default).lower()
    if found.choices or found.type is str:
        return next(
            choice for choice in found.choices or ("a.py:b",) if choice != found.default
        )
    tried = (found.default + 1, found.default + 0.1, found.default / 2)
    return next(
        found.type(value)
        for value in tried
        if found.allows(value) and found.type(value) != found.default
    )


@pytest.mark.parametrize("schema", SCHEMAS)
def test_each_setting_is_refused_without_what_it_needs_and_else_accepted(
    schema: type[Config],
) -> None:
    base = load_as(schema, None, BASE)
    check_settings_have_effect(base)
    tried = [found for found in settings(schema()) if found.only_with and not found.follows]
    # Read at once: to load each alone takes 25 s.
    changed = load_as(
        schema, None, [*BASE, *(f"{found.key}={another_value(found)}" for found in tried)]
    )
    refused = 0
    for found in tried:
        config = deepcopy(base)
        section, _, name = found.key.rpartition(".")
        setattr(value_of(config, section), name, value_of(changed, found.key))
        unmet = [condition for condition in found.only_with if not holds(config, condition)]
        if not unmet:
            check_settings_have_effect(config)
            continue
        with pytest.raises(ConfigError) as caught:
            check_settings_have_effect(config)
        needed = (
            effect_words(config.conditions, unmet[:1])
            .removeprefix("Only with ")
            .removesuffix(".")
        )
        assert str(caught.value).startswith(
            f"{found.key}="
        ) and f"without {needed}. Set that" in str(caught.value)
        refused += 1
    assert refused > 10


CPU_SETTINGS = ("resources.device=cuda", "rollout.threads=2", "rollout.cpu_kv_cache_gib=3")


def test_settings_of_cpus_are_left_out_on_gpus_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load_as(Config, None, ["model.path=model", *CPU_SETTINGS])
    leave_out_cpu_settings(config)
    assert config.rollout == Config().rollout
    line = "rollout.cpu_kv_cache_gib=3.0, rollout.threads=2: left out, because this run is on GPUs.\n"
    assert capsys.readouterr().err == line
    leave_out_cpu_settings(config)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_check_changes_nothing(device: str) -> None:
    config = load_as(
        Config, None, [*BASE, f"resources.device={device}", "rollout.threads=2"]
    )
    before = deepcopy(config)
    if device == "cpu":
        check_settings_have_effect(config)
    else:
        with refused("rollout.threads=2 has no effect"):
            check_settings_have_effect(config)
    assert config == before


def run_folder_of(workspace: Path) -> Path:
    folder = workspace / "runs" / "test"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load("config.yaml")))
    return folder


DOORS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "fit": (
        "controller.fit.check",
        lambda _: fit.main(["--config", "config.yaml", *CPU_SETTINGS]),
    ),
    "dry run": (
        "controller.fit.check",
        lambda _: fit.main(["--config", "config.yaml", "--dry-run", *CPU_SETTINGS]),
    ),
    "dry run of a cluster": (
        "controller.fit.check",
        lambda _: fit.main(
            [
                "--config",
                "config.yaml",
                "--dry-run",
                "--cluster",
                "nodes=1,gpus=8,gpu=H100",
                *CPU_SETTINGS,
            ]
        ),
    ),
    "Python": (
        "controller.fit.check",
        lambda _: ballast.fit("config.yaml", overrides=CPU_SETTINGS),
    ),
    "an own loop": (
        "ballast.loop.start.check",
        lambda _: start.prepare_run(load("config.yaml", CPU_SETTINGS)),
    ),
    "doctor": (
        "ballast.doctor.check",
        lambda _: doctor.main(["--config", "config.yaml", *CPU_SETTINGS]),
    ),
    "evaluate": (
        "controller.sampling.jobs.check_sampler",
        lambda _: evaluate.main(["--config", "config.yaml", *CPU_SETTINGS]),
    ),
    "replay": (
        "ballast.replay.__main__.check_trusted",
        lambda workspace: replay.settings(run_folder_of(workspace), CPU_SETTINGS),
    ),
}
"""What a door calls when it has left out settings of CPUs, and the door."""


class ReachedError(Exception):
    """A door has come to its checks."""


@pytest.mark.parametrize("door", DOORS)
def test_settings_of_cpus_are_left_out_at_every_door(
    door: str,
    workspace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check, call = DOORS[door]

    def stop(config: Any, *_: object, **__: object) -> None:
        if isinstance(config, Config):
            assert config.rollout.threads == Config().rollout.threads
        raise ReachedError

    monkeypatch.setattr(check, stop)
    with pytest.raises(ReachedError):
        call(workspace)
    assert capsys.readouterr().err.count("left out, because this run is on GPUs.") == 1


CASES: list[tuple[str, list[str], list[str]]] = [
    ("GPUs", ["resources.device=cuda"], [""]),
    ("CPUs", [""], ["resources.device=cuda"]),
    ("engines", [""], []),
    ("engines on GPUs", ["resources.device=cuda"], [""]),
    (
        "episodes",
        ["rollout.environment=a.py:b", "rollout.tools=a.py", "rollout.agent=http"],
        [""],
    ),
    ("an agent", ["rollout.agent=http", "rollout.agent_command=a"], ["rollout.tools=a.py"]),
    (
        "an agent's process",
        ["rollout.agent=a.py:b", "rollout.agent_command=a"],
        ["", "rollout.agent=http"],
    ),
    (
        "a reward model",
        ["reward.model.path=model", '"reward.model.paths={a: model}"'],
        [""],
    ),
    (
        "discount",
        ["GAE algorithm.gae.gamma=0.9", "algorithm.gamma=0.9"],
        ["", "GAE algorithm.gamma=0.9"],
    ),
    (
        "code in a sandbox",
        ["rollout.tools=a.py", "rollout.environment=a.py:b"],
        ["", "rollout.agent=http"],
    ),
    (
        "reasoning",
        ["rollout.tools=a.py", "validation.sampling.max_thinking_tokens=5"],
        [""],
    ),
    (
        "several ranks",
        ["policy.data_parallel=2", "policy.parallel.context_parallel=2"],
        [""],
    ),
    (
        "copies in memory",
        [""],
        ["run.max_restarts=0", "rollout.max_staleness=1", "batch.replay.share=0.5"],
    ),
    ("reference", ["KL", "algorithm.kl_in_reward.coefficient=0.1"], [""]),
    ("own reference", ["KL", "KL LORA reference.path=model"], ["", "KL LORA"]),
    (
        "own teacher",
        ["DISTILLED teacher.path=model", 'DISTILLED "teacher.paths={a: model}"'],
        ["", "DISTILLED"],
    ),
    (
        "several updates",
        ["batch.mini_batches=2", "batch.epochs=2"],
        ["rollout.max_staleness=1"],
    ),
    (
        "old policy",
        ["batch.epochs=2", "rollout.max_staleness=1", "batch.replay.share=0.5"],
        ["", "KL"],
    ),
    (
        "policy's forward pass",
        ["batch.mini_batches=2"],
        ["", "KL", "rollout.max_staleness=1"],
    ),
    (
        "forward pass",
        ["batch.epochs=2", "KL", "GAE", "DISTILLED", "reward.model.path=model"],
        [""],
    ),
    ("data.validation", ["data.validation=a.jsonl"], [""]),
    ("data.curriculum left empty", [""], ["data.curriculum=a.py:b"]),
    ("model.lora.rank above 0", ["LORA"], [""]),
    ("run.resume other than never", ["run.resume=auto", "run.resume=runs/a"], [""]),
    (
        "algorithm.loss.name=sapo or custom",
        ["algorithm.loss.name=sapo", "algorithm.loss.name=custom"],
        [""],
    ),
]
"""A condition, and overrides, separated by blanks, with which it holds and does not."""


@pytest.mark.parametrize(
    ("condition", "met", "unmet"), CASES, ids=[case[0] for case in CASES]
)
def test_a_condition_holds_with_the_settings_that_its_words_name(
    condition: str, met: list[str], unmet: list[str]
) -> None:
    assert all(holds_with(overrides, condition) for overrides in met)
    assert not any(holds_with(overrides, condition) for overrides in unmet)


def holds_with(overrides: str, condition: str) -> bool:
    words = [SHORT.get(word, word) for word in shlex.split(overrides)]
    return holds(load_as(Config, None, [*BASE, *words]), condition)


def test_every_named_condition_has_a_case_and_every_name_in_a_section_is_a_setting() -> (
    None
):
    assert CONDITIONS.keys() <= {case[0] for case in CASES}
    used = {
        condition
        for schema in SCHEMAS
        for found in settings(schema())
        for condition in found.only_with
    }
    assert CONDITIONS.keys() <= used
    left: list[Any] = [schema() for schema in SCHEMAS]
    while left:
        section = left.pop()
        left += [part for part in vars(section).values() if is_dataclass(part)]
        for _, names in getattr(section, "only_with", ()):
            assert set(names.split(", ")) <= vars(section).keys()


def test_commands_put_conditions_of_their_own_in_place() -> None:
    sft = load_as(SftConfig, None, [*BASE, "policy.forward_max_tokens_per_micro_batch=96"])
    with refused("policy.forward_max_tokens_per_micro_batch=96"):
        check_settings_have_effect(sft)
    check_settings_have_effect(
        load_as(
            PreferencesConfig, None, [*BASE, "policy.forward_max_tokens_per_micro_batch=96"]
        )
    )
    with refused("reference.path=a"):
        check_settings_have_effect(
            load_as(PreferencesConfig, None, [*BASE, "loss.name=simpo", "reference.path=a"])
        )
