"""The table of roles: every model that training ranks hold is one row.

    RoleSpec    a row: its settings, its worker, when a run has it, its passes and what caps them
    ROLES       all rows by name. A command's schema lists those that it knows, in `role_table`

Schema, limits, layout, launch, memory estimate, checks and planner read the rows, so a new role needs a row
and the module of its worker (docs/your-own.md, "A role").
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from controller.config.file import value_of
from workers.config.roles import ModelConfig


@dataclass(frozen=True)
class RoleSpec:
    """A role: a model on training ranks, and the worker class that computes with it.

    worker: class by its import path, since settings import no torch. passes: calls over a batch, each with
    the settings that cap its micro-batches, of which the first above 0 counts. used_with: condition (see
    `controller.config.conditions`) under which a run needs the role, empty for always. started_with: a
    further condition for ranks of its own, without which the policy computes it. section: settings of the
    role, its name if empty. model_key: prefix of `path` or `paths`, the section if empty. head: as in
    `TrainingEngine`. learns: whether it has an optimiser. schedule_steps: length of its learning rate
    schedule, None for the one that the command gives `launch`.
    """

    name: str
    worker: str
    passes: Mapping[str, tuple[str, ...]]
    used_with: str = ""
    started_with: str = ""
    section: str = ""
    model_section: str = ""
    head: str = "lm"
    learns: bool = False
    schedule_steps: Callable[[Any], int] | None = None

    @property
    def settings_section(self) -> str:
        return self.section or self.name

    @property
    def forward_pass(self) -> str:
        """The pass without an update, such as `log_probs`."""
        return next(call for call in self.passes if call != "update")

    @property
    def takes_new_head(self) -> bool:
        """Whether the model's checkpoint may lack the role's head."""
        return self.learns or self.head == "lm"

    def path_setting(self, model_name: str = "") -> str:
        """Return the setting that names the role's model, or one of its several models."""
        section = self.model_section or self.settings_section
        return f"{section}.paths.{model_name}" if model_name else f"{section}.path"

    def models(self, config: Any) -> dict[str, ModelConfig]:
        """Return the role's models by name: several, or one without a name."""
        settings = value_of(config, self.settings_section)
        paths = getattr(settings, "paths", {}) or {"": settings.path}
        return {name: config.model.of_another_role(path) for name, path in paths.items()}


POLICY = RoleSpec(
    "policy",
    worker="workers.roles.policy:PolicyWorker",
    passes={"update": ("policy.max",), "log_probs": ("policy.forward_max", "policy.max")},
    model_section="model",
    learns=True,
)
REFERENCE = RoleSpec(
    "reference",
    worker="workers.roles.model_worker:ReferenceWorker",
    passes={"log_probs": ("reference.forward_max", "policy.max")},
    used_with="reference",
    started_with="own reference",
)
TEACHER = RoleSpec(
    "teacher",
    worker="workers.roles.model_worker:TeacherWorker",
    passes={"log_probs": ("teacher.forward_max", "policy.max")},
    used_with="algorithm.loss.distillation.coefficient above 0",
    started_with="own teacher",
)
CRITIC = RoleSpec(
    "critic",
    worker="workers.roles.critic:CriticWorker",
    passes={
        "update": ("critic.max", "policy.max"),
        "values": ("critic.forward_max", "critic.max", "policy.max"),
    },
    used_with="algorithm.advantage=gae",
    head="value",
    learns=True,
    schedule_steps=lambda config: (
        config.critic.optimizer.total_steps or config.run.steps * config.updates_per_step
    ),
)
REWARD_MODEL = RoleSpec(
    "reward_model",
    worker="workers.roles.reward_model:RewardModelWorker",
    passes={"scores": ("reward.model.max", "policy.max")},
    used_with="a reward model",
    section="reward.model",
    head="value",
)
ROLES = {spec.name: spec for spec in (POLICY, REFERENCE, TEACHER, CRITIC, REWARD_MODEL)}
"""All roles. A run starts them, and computes with them, in this order."""
LEARNING_ROLES = tuple(name for name, spec in ROLES.items() if spec.learns)
"""Roles with an optimiser."""


def path_setting(role: str, model_name: str = "") -> str:
    """Return the setting that names a role's model, or one of its several models."""
    return ROLES[role].path_setting(model_name)


def section_conditions(specs: tuple[RoleSpec, ...]) -> tuple[tuple[str, str], ...]:
    """Return, for `only_with`, the condition and the section of each role with a section of its own.

    A nested section states its condition itself.
    """
    return tuple(
        (spec.used_with, spec.settings_section)
        for spec in specs
        if spec.used_with and "." not in spec.settings_section
    )
