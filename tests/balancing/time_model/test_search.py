"""The search finds the best layouts of all, and memory by formula is what the simulated GPU measured."""

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.cost_model import SEVEN_BILLION
from balancing.time_model import Efficiency, Layout, ModelShape, Workload, machine_named
from balancing.time_model.memory import Needs, engine_holds, training_gib
from balancing.time_model.search import (
    Problem,
    best_layouts,
    engine_halves,
    training_halves,
)
from balancing.time_model.training import held_parameters
from tests.balancing.published_models import QWEN3_5_9B
from tests.controller.qwen import qwen_description

THIRTY_TWO_BILLION = qwen_description("32B")
SHARES = {"colocated": 40.0, "apart": 72.0}

MEASURED = [
    (SEVEN_BILLION, {"dp": 8}, 0.0, 119.0),
    (SEVEN_BILLION, {"dp": 8}, 0.8, 29.6),
    (SEVEN_BILLION, {"dp": 8}, 1.0, 26.8),
    (SEVEN_BILLION, {"dp": 4, "tp": 2}, 0.3, 45.9),
    (SEVEN_BILLION, {"dp": 4, "cp": 2}, 0.8, 29.8),
    (SEVEN_BILLION, {"dp": 4, "pp": 2}, 0.8, 29.4),
    (SEVEN_BILLION, {"dp": 8, "replicate": 2}, 1.0, 40.9),
    (SEVEN_BILLION, {"dp": 8, "max_tokens": 8192}, 1.0, 24.0),
    (THIRTY_TWO_BILLION, {"dp": 64}, 0.0, 338.8),
    (THIRTY_TWO_BILLION, {"dp": 64}, 0.8, 42.4),
    (THIRTY_TWO_BILLION, {"dp": 64}, 1.0, 32.6),
    (THIRTY_TWO_BILLION, {"dp": 32, "tp": 2}, 0.3, 104.4),
    (THIRTY_TWO_BILLION, {"dp": 32, "cp": 2}, 0.8, 42.6),
    (THIRTY_TWO_BILLION, {"dp": 32, "pp": 2}, 0.8, 41.0),
    (THIRTY_TWO_BILLION, {"dp": 64, "replicate": 2}, 1.0, 40.2),
    (THIRTY_TWO_BILLION, {"dp": 64, "max_tokens": 8192}, 1.0, 24.2),
]
"""Model, layout, recomputed share, and GiB of an update by controller.preflight.memory.measure,
torch 2.13.
"""


def test_ranks_of_tensor_parallelism_gather_modules_with_a_state_whole_and_keep_shards():
    shape = ModelShape.from_model_config(QWEN3_5_9B)
    alone, pairs = (Layout(dp=8), Layout(dp=4, tp=2))
    # in_proj_qkv, z, a, b and out_proj of 24 layers: (8192 + 4096 + 2 * 32 + 4096) * 4096 weights.
    assert shape.state_parameters == 24 * (8192 + 4096 + 64 + 4096) * 4096
    matrices = shape.parameters - shape.state_parameters
    assert held_parameters(shape, pairs) == matrices / 2 + shape.state_parameters
    residents = [training_gib(shape, layout, Needs())[0] for layout in (alone, pairs)]
    assert residents[1] == pytest.approx(residents[0])


@pytest.mark.parametrize(("model", "degrees", "recomputed", "measured"), MEASURED)
def test_memory_is_that_of_the_simulated_gpu(
    model: dict, degrees: dict, recomputed: float, measured: float
) -> None:
    layout = Layout(**{"max_tokens": 16_384, "recomputed": recomputed} | degrees)
    kept, passing = training_gib(ModelShape.from_model_config(model), layout, Needs())
    assert passing == pytest.approx(measured, rel=0.05)
    assert kept < passing


@settings(max_examples=25)
@given(st.data())
def test_the_first_layouts_are_those_of_the_exhaustive_search(data: st.DataObject) -> None:
    rng = data.draw(st.integers(0, 2**31))
    lengths = [1 + (rng * (place + 1)) % 3000 for place in range(32)]
    experts = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
        if data.draw(st.booleans())
        else {}
    )
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": data.draw(st.integers(2, 40)),
    }
    model = (
        sizes
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_000}
        | experts
    )
    problem = Problem(
        ModelShape.from_model_config(model),
        Workload(
            [100] * 32, lengths, samples_per_prompt=4, updates=data.draw(st.integers(1, 4))
        ),
        machine_named(data.draw(st.sampled_from(["H100", "L40S"]))),
        Efficiency(),
    )
    nodes, gpus = data.draw(st.sampled_from([(1, 1), (1, 3), (1, 8), (2, 2), (4, 2)]))
    base, needs = (
        Layout(
            nodes=nodes, gpus_per_node=gpus, max_tokens=data.draw(st.integers(1000, 40_000))
        ),
        Needs(),
    )
    room = data.draw(st.floats(5.0, 80.0))
    engines = [(ranks, half) for ranks, half in engine_halves(base, SHARES)]

    def fits(layout: Layout) -> bool:
        return training_gib(problem.shape, layout, needs)[1] <= room and engine_holds(
            problem.shape, layout, needs
        )

    def halves(ranks: int) -> list:
        return list(training_halves(base, ranks, problem.shape.experts))

    found = list(islice(best_layouts(problem, base, engines, halves, fits), 10))
    pairs = [
        replace(base, **half, **trainer)
        for ranks, half in engines
        for trainer in halves(ranks)
    ]
    every = sorted(problem.seconds(layout).seconds for layout in pairs if fits(layout))
    assert [step.seconds for step, _ in found] == every[:10]


def test_halves_use_all_gpus_once() -> None:
    base = Layout(nodes=2, gpus_per_node=4)
    halves = [tuple(sorted(half.items())) for half in training_halves(base, 8, experts=8)]
    assert len(set(halves)) == len(halves)
    for half in map(dict, halves):
        assert half["dp"] * half["cp"] * half["tp"] * half["pp"] == 8
        assert half["dp"] // half["replicate"] * half["cp"] * half["tp"] % half["ep"] == 0
    placed = list(engine_halves(base, SHARES))
    assert {ranks for ranks, half in placed if half["placement"] == "apart"} == {4}
    assert all(half["engines"] * half["engine_tp"] in (4, 8) for _, half in placed)
