"""From a configuration: a model that the engine would compute wrongly is refused, by a dry run
and by a run.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from controller.lifecycle import model_checks
from examples.addition.warm_start import create_model
from tests.controller.stand_ins.run import StandIns
from tests.controller.tokenizer_file import write_tokenizer
from tests.workers.model.broken import as_broken, save_broken_model
from tests.workers.model.quantized_checkpoints import quantize_checkpoint
from tests.workers.model.tiny import save_tiny_model
from workers.errors import UnsupportedModelError
from workers.model.engine import TrainingEngine
from workers.model.sharding.parallel import make_parallel

DryRun = Callable[..., str]


def test_a_dry_run_says_how_well_each_model_is_computed(
    workspace: Path, dry_run: DryRun
) -> None:
    save_tiny_model(workspace / "tiny", head_dim=32)
    write_tokenizer(workspace / "tiny")
    overrides = (
        "model.path=tiny",
        "algorithm.advantage=gae",
        "algorithm.loss.kl_coefficient=0.1",
    )
    lines = [
        line for line in dry_run(*overrides).splitlines() if line.startswith("numerics")
    ]
    assert len(lines) == 2, (
        "the reference is the policy's model, the critic has a head of its own"
    )
    assert lines[0].startswith(
        "numerics: packed rows of model.path match the model's own forward pass within "
    )
    assert lines[0].endswith("e-06 nats") or lines[0].endswith("e-07 nats")
    assert "critic.path" in lines[1]


def test_a_dry_run_says_what_quantized_weights_take(
    workspace: Path, dry_run: DryRun
) -> None:
    save_tiny_model(workspace / "tiny", head_dim=32, hidden_size=64)
    write_tokenizer(workspace / "tiny")
    assert quantize_checkpoint(workspace / "tiny", workspace / "plain", "fp8 channels") > 0
    lines = [
        line
        for line in dry_run("model.path=tiny").splitlines()
        if line.startswith(("weights", "numerics"))
    ]
    assert lines[0].startswith(
        "weights: model.path has 0.0 GiB quantized by compressed-tensors, read as 0.0 in "
    )
    assert "match the model's own forward pass" in lines[1]


@pytest.mark.parametrize(
    ("tokens", "effect"),
    [
        (8, "in sequences of 9 to 96 tokens"),
        (96, "sequences of up to 96 tokens select all of their tokens"),
    ],
)
def test_a_dry_run_says_which_sequences_select_tokens(
    workspace: Path, dry_run: DryRun, tokens: int, effect: str
) -> None:
    save_tiny_model(workspace / "tiny", "deepseek_v32", index_topk=tokens)
    write_tokenizer(workspace / "tiny")
    page = dry_run("model.path=tiny", "resources.device=cuda")
    assert "numerics: packed rows of model.path match" in page
    assert f"selection: model.path has index_topk={tokens}: {effect}" in page


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("louder", (), r"(louder): with model.layout=packed log-probs differ by up to"),
        (
            "louder",
            ("model.layout=padded",),
            r"(louder): with model.layout=padded log-probs differ by up to",
        ),
        ("leaking", (), r"(leaking): with model.layout=packed log-probs differ by up to"),
    ],
)
def test_a_dry_run_refuses_a_broken_model_in_one_line(
    workspace: Path,
    dry_run: DryRun,
    name: str,
    overrides: tuple[str, ...],
    message: str,
) -> None:
    save_broken_model(workspace / "broken", name)
    (line,) = dry_run("model.path=broken", *overrides, code=2).splitlines()
    assert message in line


def test_a_dry_run_refuses_weights_with_nan(workspace: Path, dry_run: DryRun) -> None:
    path = Path(save_tiny_model(workspace / "tiny", head_dim=32)) / "model.safetensors"
    write_tokenizer(workspace / "tiny")
    weights = load_file(path)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    refusal = dry_run("model.path=tiny", code=2)
    assert "its weights contain NaN or infinity (first: model.norm.weight)" in refusal


def test_a_dry_run_leaves_a_large_model_to_the_run(
    workspace: Path, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_checks, "MOST_BYTES", 1000)
    save_broken_model(workspace / "broken", "louder")
    assert "is not loaded here (limit 0.0)" in dry_run("model.path=broken")


@pytest.fixture
def process_group() -> None:
    """Of this process alone, made before stand-ins take the place of what makes them."""
    make_parallel(torch.device("cpu"))


@pytest.mark.parametrize("name", ["louder", "leaking"])
def test_a_run_ends_before_its_first_sample_where_the_model_is_broken(
    process_group: None,
    stand_ins: StandIns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(
        "workers.roles.model_worker.TrainingEngine",
        lambda model, **settings: TrainingEngine(model, **settings | {"device": "cpu"}),
    )
    create_model(tmp_path / "model", seed=0, width=32, layers=2)
    as_broken(tmp_path / "model", name)
    settings = (
        f"run.dir={tmp_path}",
        f"model.path={tmp_path / 'model'}",
        "policy.data_parallel=1",
    )
    with pytest.raises(
        UnsupportedModelError,
        match=rf"^policy dp=0: model\.path=.* \({name}\): with model\.layout=packed",
    ):
        stand_ins.run(settings)
    assert "generate" not in [what for _, what in stand_ins.world.ledger.events]
