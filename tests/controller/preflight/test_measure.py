"""`--dry-run --measure`: the real engine on tensors without numbers, beside the estimate that it has to confirm."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from controller.config import Config, load
from controller.fit import main
from controller.preflight.describe_cluster import Measured, measure, measured_lines, other_shapes, request, run_trace
from controller.preflight.memory import Phase, phases
from controller.preflight.model_shape import model_shape
from tests.examples.test_launch import LAUNCH, command_of
from workers.errors import ConfigError
from workers.model.memory_trace import full_micro_batches

CONFIGURATIONS = ["examples/launch/one_gpu.yaml", "examples/launch/eight_gpus.yaml"]
CONFIGURATIONS += ["examples/launch/sixty_four_gpus.yaml", "examples/gsm8k/config.yaml"]
SMALL = (
    "resources.device=cuda",
    "rollout.replicas=1",
    "policy.max_tokens_per_micro_batch=8192",
    "model.gradient_checkpointing=true",
)


def phases_of(config: Config) -> list[Phase]:
    return phases(config, model_shape(config.model_description()), other_shapes(config))


def small(*overrides: str) -> Config:
    return load(Path("config.yaml"), (*SMALL, "model.path=Qwen/Qwen2.5-0.5B-Instruct", *overrides))


def assert_estimate_holds(measured: list[Measured], above: float = 1.25) -> None:
    for found in measured:
        assert not found.problem
        assert found.gib <= found.estimated <= above * found.gib, measured_lines([found])


def test_the_estimate_of_a_launch_file_holds(documentation_workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command_of("eight_gpus"), "--measure"]) == 0, capsys.readouterr().err
    page = capsys.readouterr().out
    lines = page.partition("== memory, measured")[2].splitlines()[1:4]
    assert [line.partition(":")[0] for line in lines] == ["policy update", "policy log probs", "reference log probs"]
    for line in lines:
        assert 0 <= float(line.rpartition("(")[2].rstrip("%)")) <= 25


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGURATIONS)
def test_the_estimate_of_every_example_holds(documentation_workspace: Path, path: str) -> None:
    config = load(Path(path), ("resources.device=cuda",))
    assert_estimate_holds(measure(config, phases_of(config)))


def test_every_file_of_settings_among_the_examples_is_measured() -> None:
    found = [path for path in LAUNCH.glob("*.yaml") if "\npolicy:" in path.read_text()]
    assert {f"examples/launch/{path.name}" for path in found} <= set(CONFIGURATIONS)


@pytest.mark.slow  # test_gpu_memory.py has the estimate, tests/workers/model/test_exactness.py the reductions
def test_whole_gradients_are_measured_where_their_reduction_is_put_off(documentation_workspace: Path) -> None:
    """4 bytes a parameter more, less the shards; the failure that a reduction in every micro-step mends."""
    found = {}
    for deferred in (False, True):
        config = small("policy.data_parallel=8", f"policy.parallel.defer_gradient_reduction={deferred}")
        update = phases_of(config)[:1]
        found[deferred] = measure(config, update, layers=(3, 4))[0]
        assert_estimate_holds([found[deferred]])
    whole = 4 * 494_032_768 / 2**30
    assert found[True].gib - found[False].gib == pytest.approx(whole * 7 / 8, rel=0.35)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("policy.data_parallel=4", "policy.parallel.replicate=2"),
        ("policy.data_parallel=4", "policy.parallel.tensor_parallel=2"),
        ("policy.data_parallel=2", "policy.parallel.pipeline_parallel=2", "policy.parallel.virtual_stages=2"),
        (
            "policy.data_parallel=4",
            "policy.parallel.context_parallel=2",
            "policy.parallel.context_parallel_method=ring",
        ),
        ("policy.data_parallel=4", "model.lora.rank=16"),
        ("policy.data_parallel=4", "policy.reshard_after_forward=false"),
        ("policy.data_parallel=4", "model.gradient_checkpointing=false"),
        ("policy.data_parallel=4", "policy.cpu_offload=true"),
        ("policy.data_parallel=4", "algorithm.advantage=gae", "reward.model.path=Qwen/Qwen2.5-0.5B-Instruct"),
    ],
    ids=lambda overrides: overrides[-1].partition("=")[0],
)
def test_the_estimate_holds_or_says_what_is_not_measured(
    documentation_workspace: Path, overrides: tuple[str, ...]
) -> None:
    config = small(*overrides)
    measured = measure(config, phases_of(config))
    assert_estimate_holds([found for found in measured if not found.problem], above=1.5)
    assert all("not measured: " in line for line in measured_lines([each for each in measured if each.problem]))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of a mixture of experts without weights."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 32_000}
    config = Qwen3MoeConfig(num_experts=16, num_experts_per_tok=4, num_attention_heads=16, head_dim=64, **sizes)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8192, 32768])
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 4)])
def test_the_estimate_of_shared_experts_holds(
    documentation_workspace: Path, experts: Path, tensor: int, expert: int, tokens: int
) -> None:
    shared = {"tensor_parallel": tensor, "expert_parallel": expert, "replicate": 1}
    overrides = [f"policy.parallel.{name}={size}" for name, size in shared.items()]
    config = small(
        *overrides,
        f"policy.data_parallel={4 // tensor}",
        f"policy.max_tokens_per_micro_batch={tokens}",
        f"model.path={experts}",
    )
    assert_estimate_holds(measure(config, phases_of(config)))


def test_no_two_sequences_that_are_measured_begin_alike() -> None:
    """What they share would be computed, and measured, once."""
    sequences, micro_batches = full_micro_batches(1024, 16, 32_000, 2, padded=False)
    assert [int(sequences.lengths[start:stop].sum()) for start, stop in micro_batches] == [1024, 1024]
    beginnings = {tuple(row[:2].tolist()) for row in sequences.tokens["input_ids"].split(sequences.lengths.tolist())}
    assert len(beginnings) == len(sequences) == 128


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8192, 32768])
@pytest.mark.parametrize(("stages", "virtual"), [(4, 1), (2, 2), (4, 2)])
def test_the_estimate_of_stages_holds(documentation_workspace: Path, stages: int, virtual: int, tokens: int) -> None:
    """The last one has the output layer, and the first keeps the inputs of most micro-batches."""
    parallel = (f"policy.parallel.pipeline_parallel={stages}", f"policy.parallel.virtual_stages={virtual}")
    config = small("policy.data_parallel=2", *parallel, f"policy.max_tokens_per_micro_batch={tokens}")
    assert_estimate_holds(measure(config, phases_of(config)), above=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0.5B", "1.5B"])
def test_the_estimate_of_one_long_micro_batch_is_a_close_upper_bound(documentation_workspace: Path, size: str) -> None:
    """Where activations outweigh what does not grow with tokens: at the output layer, and in a feed-forward block."""
    config = small(
        "policy.data_parallel=8", "policy.max_tokens_per_micro_batch=32768", f"model.path=Qwen/Qwen2.5-{size}-Instruct"
    )
    assert_estimate_holds(measure(config, phases_of(config)[:1]), above=1.1)


@pytest.mark.slow
def test_c8_the_activation_memory_that_context_parallelism_saves_is_measured(documentation_workspace: Path) -> None:
    """The same sequences on one rank, or on two of which each holds half; parameters over eight ranks in both."""
    found = {}
    for size in (1, 2):
        shared = (f"policy.data_parallel={8 // size}", f"policy.parallel.context_parallel={size}")
        config = small(*shared, f"policy.max_tokens_per_micro_batch={32768 // size}")
        found[size] = measure(config, phases_of(config)[:1])[0]
    assert found[1].gib - found[2].gib > 0.5, measured_lines(list(found.values()))


@pytest.mark.slow
def test_a_few_layers_tell_of_all(documentation_workspace: Path) -> None:
    config = small("policy.data_parallel=8")
    few, every = (run_trace(request(config, phases_of(config), layers)) for layers in ((3, 4), (24,)))
    assert few["policy"] == pytest.approx(every["policy"], rel=0.01)


def test_measuring_without_a_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "config.yaml", "--dry-run", "--measure"]) == 2
    assert "add --dry-run --cluster" in capsys.readouterr().err


def test_what_cannot_be_measured_says_why() -> None:
    lines = measured_lines([Measured("critic update", 3.0, problem="critic: ValueError: no"), Measured("a", 3.0, 2.5)])
    assert lines == [
        "critic update: estimated 3.0, not measured: critic: ValueError: no",
        "a: measured 2.5, estimated 3.0 (+20%)",
    ]


def test_a_measuring_process_that_ends_is_an_error(broken_python: Callable[[], None]) -> None:
    broken_python()
    with pytest.raises(ConfigError, match="the measuring process ended with 1"):
        run_trace({})


@pytest.fixture
def broken_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no such module >&2\nexit 1\n")
    script.chmod(0o755)
    return lambda: monkeypatch.setattr("controller.preflight.describe_cluster.sys.executable", str(script))
