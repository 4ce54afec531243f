"""What a user can set, read and typed; imports nothing else of `controller`, and neither torch nor Ray.

    workers.config, sections --> schema: Config, its properties <--load-- file: YAML, key.sub=value
    values that name something: functions, function_files, model_files        docs/settings.md: settings_page

Read `schema` first, then `sections`, where each key is declared with what it does.
"""

from controller.config.schema import Config, load, to_yaml

__all__ = ["Config", "load", "to_yaml"]
