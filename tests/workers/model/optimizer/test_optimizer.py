import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.families.shrinking import tiny_config
from tests.refusals import refused
from tests.workers.model.test_activations import LateCopies
from tests.workers.rollout.stream_races import StreamRaces
from workers.config.optimizer import StepSettings
from workers.config.roles import ModelConfig, OptimizerConfig
from workers.model.copies import CopyStream
from workers.model.model import PackedCausalLM
from workers.model.optimizer.optimizer import (
    changed_groups,
    make_optimizer,
    make_schedule,
    optimizer_state,
    resume_schedule,
)

OWN_SCHEDULE = f"{__name__}:fifths"


def fifths(step: int, total_steps: int) -> float:
    assert total_steps == 3
    return step / 5


def factors(config: OptimizerConfig, total_steps: int) -> list[float]:
    """Share of the peak learning rate used at each step, as torch's scheduler applies it."""
    optimizer = make_optimizer([("w", torch.nn.Parameter(torch.ones(2, 2)))], config)
    schedule = make_schedule(optimizer, config, total_steps)
    used = []
    for _ in range(total_steps):
        used.append(optimizer.param_groups[0]["lr"] / config.learning_rate)
        optimizer.step()
        schedule.step()
    return used


ENDS_HIGH = {"final_learning_rate_ratio": 0.2, "total_steps": 4}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizerConfig(warmup_steps=3), [0.25, 0.5, 0.75, 1, 1, 1]),
        (OptimizerConfig(schedule="linear"), [1, 0.75, 0.5, 0.25]),
        (OptimizerConfig(schedule="cosine"), [1, 0.853553, 0.5, 0.146447]),
        (OptimizerConfig(schedule="linear", **ENDS_HIGH), [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (
            OptimizerConfig(schedule="cosine", **ENDS_HIGH),
            [1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2],
        ),
        (
            OptimizerConfig(schedule="wsd", warmup_ratio=0.2, decay_ratio=0.4),
            [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25],
        ),
        (
            OptimizerConfig(
                schedule="custom", schedule_function=OWN_SCHEDULE, warmup_steps=1
            ),
            [0.5, 0.2, 0.4],
        ),
        # Wins over the length of the run.
        (OptimizerConfig(schedule="linear", total_steps=2), [1, 0.5, 0, 0]),
    ],
)
def test_schedules_warm_up_and_fall_to_their_final_ratio(config, expected):
    assert factors(config, len(expected)) == pytest.approx(expected, abs=1e-6)


def test_a_schedule_resumes_where_it_was_and_goes_on_as_if_it_had_never_stopped():
    config = OptimizerConfig(schedule="cosine", warmup_steps=2)
    optimizer = make_optimizer([("w", torch.nn.Parameter(torch.ones(2, 2)))], config)
    schedule = make_schedule(optimizer, config, 8)
    resume_schedule(schedule, 3)
    used = []
    for _ in range(5):
        used.append(optimizer.param_groups[0]["lr"] / config.learning_rate)
        optimizer.step()
        schedule.step()
    assert used == factors(config, 8)[3:]


def test_a_schedule_that_ends_within_its_warm_up_is_refused():
    with refused("policy.optimizer.warmup_steps"):
        factors(OptimizerConfig(schedule="cosine", warmup_steps=5), 5)


@pytest.mark.parametrize(
    ("name", "decay_on", "left"), [("adamw", "matrices", 1.0), ("sgd", "all", 0.95)]
)
def test_matrices_decay_and_others_if_asked(name: str, decay_on: str, left: float) -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    config = OptimizerConfig(
        name=name,
        learning_rate=0.1,
        weight_decay=0.5,
        weight_decay_on=decay_on,
        momentum=0.0,
    )
    optimizer = make_optimizer([("matrix", matrix), ("vector", vector)], config)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(vector.detach(), torch.full((2,), left))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_making_the_state_leaves_decaying_weights_and_rates_as_they_are(name: str) -> None:
    """A checkpoint before the first step makes the state, which must not be a step of weight decay."""
    weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
    config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5, momentum=0.9)
    optimizer = make_optimizer([("weight", weight)], config)
    state = optimizer_state(optimizer)[weight]
    assert weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1] * len(
        optimizer.param_groups
    )
    assert state and all(
        not value.any() for value in state.values() if isinstance(value, torch.Tensor)
    )


class Counting(torch.optim.SGD):
    """SGD that keeps `count` for each parameter."""

    def __init__(self, parameters, rate: float, count: object) -> None:
        super().__init__(parameters, lr=rate)
        self.count = count

    def step(self, closure=None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = self.count


def counting_in_tensors(named, config: OptimizerConfig) -> Counting:
    return Counting([weight for _, weight in named], config.learning_rate, torch.zeros(()))


def counting_in_numbers(named, config: OptimizerConfig) -> Counting:
    return Counting([weight for _, weight in named], config.learning_rate, 0)


def test_an_optimizer_of_the_user_keeps_its_state_in_tensors() -> None:
    named = [("matrix", torch.nn.Parameter(torch.ones(2, 2)))]
    for function in (counting_in_tensors, counting_in_numbers):
        name = f"{__name__}:{function.__name__}"
        config = OptimizerConfig(name="custom", function=name, learning_rate=0.3)
        if function is counting_in_tensors:
            assert make_optimizer(named, config).param_groups[0]["lr"] == 0.3
        else:
            with refused("its state 'count' of matrix is a int"):
                make_optimizer(named, config)


def test_frozen_parameters_are_left_out():
    trainable, frozen = (
        torch.nn.Parameter(torch.ones(1)),
        torch.nn.Parameter(torch.ones(1), requires_grad=False),
    )
    optimizer = make_optimizer(
        [("trainable", trainable), ("frozen", frozen)], OptimizerConfig()
    )
    assert [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ] == [trainable]


SHAPES = [(3, 4), (5,), (40, 3), (2, 2), (7,), (6, 6), (0, 3), (1,)]


def trained(offload: bool) -> list[torch.Tensor]:
    """Weights and moments after three steps of buckets of at most 20 elements. One parameter skips the second
    step.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.rand(shape, generator=generator)) for shape in SHAPES
    ]
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.1)
    optimizer = make_optimizer(
        [(str(i), each) for i, each in enumerate(parameters)], config, offload=offload
    )
    schedule = make_schedule(optimizer, OptimizerConfig(warmup_steps=2), 10)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.rand(parameter.shape, generator=generator)
            if (step, index) == (1, 3):
                parameter.grad = None
        optimizer.step()
        schedule.step()
        # Read.
        moments = [
            part + 0
            for state in optimizer_state(optimizer).values()
            for part in state.values()
        ]
    return [*(parameter.detach() for parameter in parameters), *moments]


class LateCopiesOfAStep(LateCopies):
    def finish(self) -> None:
        self.wait(len(self._copies) - 1)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.model.optimizer.optimizer.BUCKET", 20)


def test_steps_with_the_state_in_host_memory_are_equal_to_the_bit(
    small_buckets, monkeypatch
):
    expected, streams = trained(False), []
    assert all(map(torch.equal, trained(True), expected))
    monkeypatch.setattr(
        "workers.model.optimizer.optimizer.copies_of",
        lambda _: streams.append(LateCopiesOfAStep()) or streams[-1],
    )
    assert all(map(torch.equal, trained(True), expected))
    assert [stream.most_waiting for stream in streams] == [2, 2]


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamRaces]:
    races = StreamRaces()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: races.new_stream())
    monkeypatch.setattr(torch.cuda, "stream", races.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", races.current_stream)
    monkeypatch.setattr("workers.model.optimizer.optimizer.copies_of", CopyStream)
    with races:
        yield races


def test_copies_and_the_step_wait_for_each_other(small_buckets, races: StreamRaces):
    trained(True)
    assert not races.races


@pytest.mark.parametrize("left_out", ["wait", "finish"])
def test_a_step_that_does_not_wait_for_its_copies_races(
    small_buckets, races: StreamRaces, monkeypatch, left_out
):
    monkeypatch.setattr(CopyStream, left_out, lambda *_: None)
    trained(True)
    assert races.races


VECTORS = r"(bias|A_log|\.D|norm\w*\.weight|sinks)$"
MATRICES = r"(_proj|embed_tokens|wte|conv1d)(\.weight)?$"


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        "jamba",
        "kimi_linear",
        "qwen3_5_text",
        "nemotron_h",
        "falcon_mamba",
        "qwen3_moe",
        "deepseek_v3",
        "gpt2",
    ],
)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_biases_and_states_are_vectors_in_whatever_shape_a_family_keeps_them(
    family: str, name: str
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    packed = PackedCausalLM(model, ModelConfig(path=family))
    names = {
        parameter: parameter_name for parameter_name, parameter in packed.named_parameters()
    }
    config = OptimizerConfig(name=name, weight_decay=0.1)
    optimizer = make_optimizer(packed.named_parameters(), config, packed.layer_matrices)
    of_a_step = StepSettings(weight_decay=0.3)
    for decay, changed in (
        (0.1, nullcontext()),
        (0.3, changed_groups(optimizer, config, of_a_step, packed.vectors)),
    ):
        with changed:
            for group in optimizer.param_groups:
                members = [names[parameter] for parameter in group["params"]]
                vectors = [member for member in members if re.search(VECTORS, member)]
                assert not vectors or (
                    group["weight_decay"] == 0 and "momentum" not in group
                ), vectors
                matrices = [member for member in members if re.search(MATRICES, member)]
                assert not matrices or group["weight_decay"] == decay, matrices
