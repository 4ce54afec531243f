"""The settings of a run: their schema, and how they are read. Imports neither torch nor Ray.

    workers.config.roles, sections --> schema: Config, its properties <--load-- file: YAML, key.sub=value
    training: settings shared by all commands      offline: for controller.sft and .preferences
    values that name something: functions, model_files, python_rewards
    docs/settings.md: settings_page

Read `schema` first, then `sections`, which declares and documents the keys.
"""

from controller.config.schema import Config, changed_yaml, load, load_as, to_yaml
from controller.config.training import TrainingConfig

__all__ = ["Config", "TrainingConfig", "changed_yaml", "load", "load_as", "to_yaml"]
