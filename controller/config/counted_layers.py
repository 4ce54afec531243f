"""Complete config.json for the cost model: weights of layers that no formula counts.

a family in COUNTED_FAMILIES   --> config.json, counted by balancing.model_counts
any other --workers.model.memory.weight_counts in a process, or the cache--> config.json with weights
"""

import json
from collections.abc import Mapping
from typing import Any

from balancing.counted_families import COUNTED_FAMILIES
from controller.config.cached_process import WORKERS, ask_module, cache_file, keep_answer

MODULE = "workers.model.memory.weight_counts"
TIMEOUT_S = 300


def complete_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """description: of config.json. Returns it as it is where nothing can be counted: the formula names the
    field that it lacks.
    """
    completed = dict(description)
    text = completed.get("text_config")
    part = text if isinstance(text, dict) else completed
    if part.get("model_type") in COUNTED_FAMILIES:
        return completed
    counted = _count(completed)
    if isinstance(text, dict):
        return completed | {"text_config": text | counted}
    return completed | counted


def _count(description: dict[str, Any]) -> dict[str, Any]:
    source = WORKERS / "model" / "memory" / "weight_counts.py"
    file = cache_file("weights", description, [source])
    if file.is_file():
        return dict(json.loads(file.read_text()))
    answer, _ = ask_module(MODULE, description, TIMEOUT_S)
    counted: dict[str, Any] = answer or {}
    keep_answer(file, json.dumps(counted))
    return counted
