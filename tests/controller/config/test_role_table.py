"""The table of roles: each row is true, and a new row is all that settings, layout and estimates need."""

from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import pytest

from controller.actors.launch import worker_arguments
from controller.actors.layout import role_requests, training_pool
from controller.config import Config
from controller.config.conditions import holds
from controller.config.file import settings
from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig
from controller.config.role_table import ROLES, RoleSpec
from controller.config.sampler import GenerateConfig
from controller.config.schema import load_as
from controller.config.training import TrainingConfig
from controller.preflight.time_inputs import needs_of
from tests.controller.config_workspace import write_model
from workers.roles.base import Worker
from workers.roles.model_worker import ReferenceWorker

STUDENT = RoleSpec(
    "student",
    worker="workers.roles.model_worker:ReferenceWorker",
    passes={"log_probs": ("reference.forward_max", "policy.max")},
    used_with="algorithm.gamma=0.5",
    section="reference",
    head="value",
)


@dataclass
class StudentConfig(Config):
    role_table = (*Config.role_table, STUDENT)


SCHEMAS: tuple[type[TrainingConfig], ...] = (
    Config,
    GenerateConfig,
    SftConfig,
    PreferencesConfig,
    RewardTrainingConfig,
)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_row_names_a_worker_settings_and_conditions_that_exist(
    schema: type[TrainingConfig],
) -> None:
    keys = {setting.key for setting in settings(schema())}

    for spec in schema.role_table:
        assert issubclass(resolve_name(spec.worker), Worker), spec.name
        assert {spec.path_setting(), f"{spec.settings_section}.cpu_offload"} <= keys
        caps = [cap for caps in spec.passes.values() for cap in caps]
        assert {
            f"{cap}_{unit}_per_micro_batch"
            for cap in caps
            for unit in ("tokens", "sequences")
        } <= keys
        assert not spec.learns or f"{spec.settings_section}.optimizer.name" in keys
        for condition in filter(None, (spec.used_with, spec.started_with)):
            holds(schema(), condition)


def test_a_command_without_a_role_does_not_use_it() -> None:
    config = load_as(SftConfig, None, ["model.path=model", "data.train=data"])

    assert config.training_roles == ("policy",)
    assert not any(config.uses(role) for role in ROLES if role != "policy")
    with pytest.raises(KeyError):
        config.uses("studnet")


@pytest.mark.parametrize(
    ("overrides", "uses", "starts"),
    [
        ([], False, False),
        (["algorithm.loss.kl_coefficient=0.1"], True, True),
        # Without its adapters.
        (["algorithm.loss.kl_coefficient=0.1", "model.lora.rank=4"], True, False),
        (["model.lora.rank=4"], False, False),
    ],
)
def test_a_reference_has_ranks_of_its_own_if_it_is_used_and_not_the_policy(
    overrides: list[str], uses: bool, starts: bool
) -> None:
    config = load_as(Config, None, ["model.path=model", *overrides])
    assert (config.uses("reference"), config.starts("reference")) == (uses, starts)
    assert ("reference" in config.training_roles) == starts


def test_a_new_row_reaches_limits_layout_workers_and_estimates(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    model = str(tmp_path / "model")
    plain = [
        "policy.max_tokens_per_micro_batch=4096",
        f"model.path={model}",
        "data.train=data",
    ]
    without = load_as(StudentConfig, None, plain)
    config = load_as(
        StudentConfig, None, [*plain, "algorithm.gamma=0.5", "reference.cpu_offload=true"]
    )

    assert without.training_roles == ("policy",)
    assert config.training_roles == ("policy", "student")
    assert config.limits["student.log_probs"].max_tokens == 4096
    assert config.model_of("student").path == model
    assert [request.role for request in role_requests(config)] == [
        "policy",
        "student",
        "rollout",
        "reward",
    ]
    assert (
        training_pool(config).bundles[0]["CPU"]
        == 2 * training_pool(without).bundles[0]["CPU"]
    )
    assert worker_arguments(config, "student")["cpu_offload"]
    assert "optimizer" not in worker_arguments(config, "student")
    assert needs_of(config).frozen == needs_of(without).frozen + 1
    assert resolve_name(config.spec("student").worker) is ReferenceWorker
