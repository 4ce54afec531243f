"""Orders of execution of pipelines: what each stage computes, that it comes to an end, and what
is refused.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.errors import CountError, OptionError
from balancing.pipelines.pipeline import Action, Pipeline, actions, needs


def short(done: tuple[Action, ...]) -> str:
    """`F0 B0`, with the chunk behind a point if there are several."""
    chunks = any(action.chunk for action in done)
    return " ".join(
        f"{action.kind[0].upper()}{action.micro_batch}{f'.{action.chunk}' if chunks else ''}"
        for action in done
    )


@st.composite
def pipelines_and_counts(draw: st.DrawFn) -> tuple[Pipeline, int]:
    stages, virtual = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    pipeline = Pipeline(
        stages,
        virtual if stages > 1 else 1,
        backward=draw(st.sampled_from([0.0, 1.0, 2.0])),
    )
    return pipeline, draw(st.integers(1, 5)) * pipeline.count_multiple


def test_1f1b_as_published():
    """Narayanan et al. 2021, figure 4, with four micro-batches on two stages."""
    assert short(actions(Pipeline(2), 0, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert short(actions(Pipeline(2), 1, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_interleaved_1f1b_as_published():
    """Megatron-LM's order: rounds of two micro-batches, chunk after chunk, backward from the last chunk."""
    order = (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    )
    assert short(actions(Pipeline(2, 2), 0, 4)) == order
    last = "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    assert short(actions(Pipeline(2, 2), 1, 4)) == last


def test_without_backward_the_forward_passes_are_left():
    assert short(actions(Pipeline(3, backward=0.0), 1, 3)) == "F0 F1 F2"
    assert short(actions(Pipeline(2, 2, backward=0.0), 0, 2)) == "F0.0 F1.0 F0.1 F1.1"


def test_fewer_micro_batches_than_stages():
    assert [short(actions(Pipeline(4), stage, 2)) for stage in range(4)] == [
        "F0 F1 B0 B1"
    ] * 3 + ["F0 B0 F1 B1"]


@settings(max_examples=100)
@given(pipelines_and_counts())
def test_every_stage_computes_everything_once_and_all_come_to_an_end(
    case: tuple[Pipeline, int],
):
    pipeline, count = case
    orders = [actions(pipeline, stage, count) for stage in range(pipeline.stages)]
    kinds = ("forward", "backward") if pipeline.backward else ("forward",)
    everything = {
        Action(kind, i, c)
        for kind in kinds
        for i in range(count)
        for c in range(pipeline.virtual_stages)
    }
    assert all(
        len(order) == len(everything) and set(order) == everything for order in orders
    )
    done: set[tuple[int, Action]] = set()
    position = [0] * pipeline.stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                action = order[position[stage]]
                needed = needs(pipeline, stage, action)
                if needed is not None and needed not in done:
                    break
                done.add((stage, action))
                position[stage] += 1
                moved = True
    assert position == [len(everything)] * pipeline.stages


@settings(max_examples=100)
@given(pipelines_and_counts())
def test_1f1b_keeps_no_more_activations_than_there_are_stages_left(
    case: tuple[Pipeline, int],
):
    pipeline, count = case
    if pipeline.virtual_stages > 1 or pipeline.backward == 0:
        return
    for stage in range(pipeline.stages):
        kept = most = 0
        for action in actions(pipeline, stage, count):
            kept += 1 if action.kind == "forward" else -1
            most = max(most, kept)
        assert most == min(count, pipeline.stages - stage)


def test_counts_that_interleaving_cannot_take_are_refused():
    with pytest.raises(
        CountError, match=r"virtual_stages=2 .*multiple of 4 micro-batches, got 6"
    ):
        actions(Pipeline(4, 2), 0, 6)
    with pytest.raises(CountError, match="got 0"):
        actions(Pipeline(4), 0, 0)
    with pytest.raises(OptionError, match="stage=4 is outside a pipeline of stages=4"):
        actions(Pipeline(4), 4, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"stages": 0}, "stages=0 must be a whole number"),
        ({"stages": 2, "virtual_stages": 0.5}, "virtual_stages=0.5 must be a whole number"),
        (
            {"stages": 1, "virtual_stages": 2},
            "virtual_stages=2 with stages=1 changes nothing",
        ),
        ({"stages": 2, "backward": -1.0}, "backward=-1.0 of a Pipeline must be finite"),
        ({"stages": 2, "transfer": float("inf")}, "transfer=inf"),
        ({"stages": 2, "overhead": float("nan")}, "overhead=nan"),
        (
            {"stages": 2, "stage_shares": (1.0,)},
            "stage_shares holds 1 numbers. Pass one for each of .* = 2 parts",
        ),
        ({"stages": 2, "stage_shares": (1.0, 0.0)}, "must be finite and positive"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict, said: str):
    with pytest.raises(OptionError, match=said):
        Pipeline(**arguments)


def test_shares_add_up_to_one():
    assert Pipeline(2, stage_shares=(1.0, 3.0)).shares == (0.25, 0.75)
    assert Pipeline(2, 2).shares == (0.25,) * 4
