"""The worked placements: each fits the cluster that its own comment names, and not a smaller one."""

import re
import shutil
from pathlib import Path

import pytest

from controller.fit import main
from tests.controller.qwen import write_hub

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
PLACEMENTS = ["one_gpu", "eight_gpus", "sixty_four_gpus"]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's examples, GSM8K's sample as its data, and models of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    write_hub(tmp_path / "hub")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        shutil.copy(ROOT / "examples" / "gsm8k" / "sample.jsonl", tmp_path / "data" / "gsm8k" / f"{split}.jsonl")
    return tmp_path


def command_of(name: str) -> list[str]:
    """The arguments of the dry run that a placement's comment shows."""
    (line,) = re.findall(r"python -m controller.fit (.+)", (LAUNCH / f"{name}.yaml").read_text())
    return line.split()


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_fits_the_cluster_that_it_is_for(
    workspace: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command_of(name)) == 0, capsys.readouterr().err
    page = capsys.readouterr().out
    assert "== cluster ==" in page
    assert "a GPU while training: " in page
    assert "idle" not in page


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_does_not_fit_with_a_gpu_less_or_a_quarter_of_its_memory(
    workspace: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command_of(name)
    fewer = re.sub(r",gpus=(\d+)", lambda found: f",gpus={int(found.group(1)) - 1}", arguments[-1])
    assert main([*arguments[:-1], fewer.replace(",gpus=0", "")]) == 2
    assert re.search("does not fit|without GPUs", capsys.readouterr().err)
    assert main([*arguments[:-1], arguments[-1].replace("gpu_gib=80", "gpu_gib=20")]) == 2
    assert re.search("training needs about|gives an engine", capsys.readouterr().err)
