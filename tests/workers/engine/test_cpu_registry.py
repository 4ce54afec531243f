"""What vLLM asks of a model's class, without a process of its own."""

import json
from pathlib import Path

import pytest
from vllm.model_executor.models import registry

from workers.engine.vllm_interface import carries_state


@pytest.mark.parametrize(
    ("architecture", "has_states"),
    [("Qwen2ForCausalLM", False), ("FalconH1ForCausalLM", True)],
)
def test_a_class_is_looked_at_in_the_process_that_asks(
    architecture: str, has_states: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    # A new process would be asked by this name.
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert carries_state(str(tmp_path)) == has_states
    assert list((tmp_path / "cache/modelinfos").iterdir())  # no earlier answer was read
