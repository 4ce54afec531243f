"""rollout.replicas=0: the engines that the GPUs of a placement hold; and a word about every GPU that stays
idle.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from ballast.replay.__main__ import settings
from controller.actors.layout import role_requests
from controller.config import Config, load, load_as
from controller.config import training as machine
from controller.config.file import read
from controller.config.offline import SftConfig
from controller.config.sampler import GenerateConfig
from controller.lifecycle.session import ray_session
from controller.preflight.arguments import parse_arguments
from controller.preflight.checks import check_sampler
from controller.preflight.cluster import Cluster, check_machine, memory_gib, place, run_on
from controller.preflight.describe import describe
from controller.preflight.describe_cluster import placement_lines
from controller.preflight.engine_checks import check_engine_adapters
from tests.controller.config_workspace import refusal
from tests.end_to_end.faults import Listening
from workers.config.engine_range import EngineRange
from workers.errors import ConfigError

GPUS = "resources.device=cuda"
APART = (GPUS, "rollout.placement=apart")


@pytest.fixture(autouse=True)
def see(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets this machine have some GPUs, at first none."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def see(gpus: int) -> None:
        monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)

    see(0)
    return see


def page_of(workspace: Path, *overrides: str, cluster: str = "") -> tuple[int, list[str]]:
    """Engines, and lines of the dry run about idle GPUs."""
    arguments = parse_arguments(
        [
            "--config",
            "config.yaml",
            "--dry-run",
            *(["--cluster", cluster] if cluster else []),
        ]
    )
    config = load("config.yaml", overrides)
    if arguments.cluster:
        run_on(config, arguments.cluster)
    (engines,) = (
        request.actors for request in role_requests(config) if request.role == "rollout"
    )
    return engines, [line for line in describe(config).splitlines() if "idle" in line]


def nodes(count: int, gpus: int) -> str:
    return f"nodes={count},gpus={gpus},gpu_gib=80,cpus=96"


@pytest.mark.parametrize(
    ("overrides", "cluster", "engines"),
    [
        ((), "", 1),
        (("rollout.replicas=2",), "", 2),
        ((GPUS, "policy.data_parallel=8", "rollout.tensor_parallel=2"), "", 4),
        ((GPUS, "policy.data_parallel=8", "rollout.tensor_parallel=2"), nodes(1, 8), 4),
        ((GPUS, "policy.data_parallel=2", "policy.parallel.tensor_parallel=2"), "", 4),
        ((*APART, "policy.data_parallel=3", "rollout.replicas=1"), nodes(1, 4), 1),
        ((*APART, "policy.data_parallel=3"), nodes(1, 8), 5),
        ((*APART, "policy.data_parallel=8", "rollout.tensor_parallel=4"), nodes(3, 8), 4),
    ],
)
def test_engines_take_all_gpus_of_their_placement(
    workspace: Path, overrides: tuple[str, ...], cluster: str, engines: int
) -> None:
    found, idle = page_of(workspace, *overrides, cluster=cluster)
    assert (found, idle) == (engines, [])


@pytest.mark.parametrize(
    ("overrides", "cluster", "words"),
    [
        (
            (
                GPUS,
                "policy.data_parallel=8",
                "rollout.tensor_parallel=2",
                "rollout.replicas=1",
            ),
            "",
            "6 of the policy's 8 GPUs",
        ),
        (
            (GPUS, "policy.data_parallel=3", "rollout.tensor_parallel=2"),
            "",
            "1 of the policy's 3 GPUs",
        ),
        ((GPUS, "policy.data_parallel=2"), nodes(1, 8), "6 of 8 GPUs"),
        ((*APART, "rollout.replicas=3"), nodes(1, 8), "3 of 8 GPUs"),
        (
            (*APART, "policy.data_parallel=5", "rollout.tensor_parallel=2"),
            nodes(1, 8),
            "1 of 8 GPUs",
        ),
    ],
)
def test_idle_gpus_are_a_warning_of_the_dry_run(
    workspace: Path, overrides: tuple[str, ...], cluster: str, words: str
) -> None:
    (line,) = page_of(workspace, *overrides, cluster=cluster)[1]
    assert words in line


def test_engines_apart_take_what_this_machine_has_left(
    workspace: Path, see: Callable[[int], None]
) -> None:
    see(8)
    assert page_of(workspace, *APART) == (6, [])
    sampler = load_as(GenerateConfig, "config.yaml", [GPUS]).narrowed(workspace / "out")
    assert sampler.engines == 8
    check_sampler(sampler)


@pytest.mark.parametrize("where", [(), ("resources.ray_address=head:6379",)])
def test_where_their_gpus_are_not_known_engines_apart_need_a_number(
    workspace: Path, where: tuple[str, ...]
) -> None:
    """A cluster's nodes may still be on their way when a run starts."""
    assert refusal(*APART, *where).startswith("rollout.replicas=0: ")
    sampler = load_as(GenerateConfig, "config.yaml", [GPUS, *where]).narrowed(
        workspace / "out"
    )
    with pytest.raises(ConfigError, match=r"^rollout\.replicas=0: "):
        check_sampler(sampler)


def test_a_replay_has_no_engines(workspace: Path) -> None:
    assert settings(workspace, (GPUS, "policy.data_parallel=1")).engines == 0


@pytest.mark.parametrize("command", ["fit", "sft"])
def test_idle_gpus_are_a_warning_at_the_start(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Of those that other jobs on the cluster leave free."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 8.0, "GPU": 3.0})
    sft = load_as(
        SftConfig, None, ["run.name=x", "model.path=model", "data.train=train.jsonl", GPUS]
    )
    config, console = load("config.yaml", [GPUS]) if command == "fit" else sft, Listening()
    with ray_session(config, console):
        pass
    assert any(
        f"warning: {3 - config.policy.data_parallel} of 3 GPUs" in line
        for line in console.said
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0..2", "a run needs at least 1 engine"),
        ("4..1", "the range ends before it begins"),
        ("1..100001", "at most 100,000 engines are allowed"),
    ],
)
def test_a_range_of_engines_must_make_sense(
    workspace: Path, value: str, words: str
) -> None:
    assert refusal(f"rollout.replicas={value}").startswith(
        f"rollout.replicas={value}: {words}"
    )


@pytest.mark.parametrize("value", ["'2'", "1..", "..4", "1..2..3", "one", "1.5", "[1, 4]"])
def test_engines_are_a_number_or_a_range(workspace: Path, value: str) -> None:
    assert refusal(f"rollout.replicas={value}").startswith("rollout.replicas must be ")


@pytest.mark.parametrize("overrides", [(GPUS,), (GPUS, "rollout.placement=colocated")])
def test_colocated_engines_have_a_fixed_number(
    workspace: Path, overrides: tuple[str, ...]
) -> None:
    message = refusal(*overrides, "policy.data_parallel=4", "rollout.replicas=1..4")
    assert message.startswith("rollout.replicas=1..4: colocated engines ")


def test_a_range_starts_with_its_minimum_and_warns_of_gpus_above_its_maximum(
    workspace: Path,
) -> None:
    def page(replicas: str) -> tuple[int, list[str]]:
        return page_of(
            workspace, *APART, f"rollout.replicas={replicas}", cluster=nodes(1, 8)
        )

    assert page("2..6") == (2, [])
    assert page("1..9") == (1, [])
    engines, (line,) = page("1..4")
    assert engines == 1 and "2 of 8 GPUs" in line


@pytest.mark.parametrize(
    ("replicas", "room"),
    [("1..2", "2 of 1..2"), ("1..9", "6 of 1..9"), ("6..7", "6 of 6..7")],
)
def test_a_described_cluster_says_how_many_engines_of_a_range_have_room(
    workspace: Path, replicas: str, room: str
) -> None:
    cluster = Cluster(nodes=2, cpus=96, gpus=4, gpu_gib=80)
    config = load("config.yaml", [*APART, f"rollout.replicas={replicas}"])
    run_on(config, cluster)
    lines = placement_lines(config, cluster, place(config, cluster))
    assert f"there is room for {room} engines" in lines


def test_a_range_of_equal_ends_is_a_number(workspace: Path) -> None:
    config = load("config.yaml", ["rollout.replicas=2..2"])
    assert (config.engines, config.engine_range.is_elastic) == (2, False)
    assert describe(config) == describe(
        load("config.yaml", ["rollout.replicas=2"])
    ).replace("replicas: 2\n", "replicas: 2..2\n")


def test_a_range_is_read_from_a_file_and_told_on_the_page(workspace: Path) -> None:
    (workspace / "range.yaml").write_text("rollout: {replicas: 1..4}\n")
    config = read(Config, ["config.yaml", "range.yaml"], [])
    assert config.engine_range == EngineRange(1, 4)
    assert "1 of 1..4 engines at the start" in describe(config)
    assert "1..4 engines, cpu" in config.headline


def test_a_cache_of_each_engine_that_may_be_added_fits_this_machine(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    cache = f"rollout.cpu_kv_cache_gib={0.6 * memory_gib()}"
    check_machine(load("config.yaml", ["rollout.replicas=1", cache]), dry_run=True)
    with pytest.raises(
        ConfigError, match=r"^rollout\.replicas \* rollout\.cpu_kv_cache_gib = "
    ):
        check_machine(load("config.yaml", ["rollout.replicas=1..2", cache]), dry_run=True)


@pytest.mark.parametrize(
    "player", ["rollout.agent=agent.py:play", "rollout.agent_command=run", ""]
)
def test_an_agent_has_one_policy(workspace: Path, player: str) -> None:
    several = ["model.lora.rank=4", "model.lora.policies=2"]
    config = load("config.yaml", [*several, *filter(None, [player])])
    if not player:
        check_engine_adapters(config)
        return
    with pytest.raises(ConfigError, match=r"^model\.lora\.policies=2: .* agent"):
        check_engine_adapters(config)
