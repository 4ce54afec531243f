"""Records of a run become a trace that Perfetto and Chrome show; formats are those of
`observability.timeline`.
"""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel
from ballast.pages.timeline import main, parse_steps
from controller.observability.run_folder import RunWriter
from controller.observability.timeline import TimelineRecorder, trace_events
from tests.controller.observability.trace_format import check, slices_of
from workers.engine.requests import SampleResult, WeightLoad
from workers.model.timing import MicroStepTime

START = 1_700_000_000.0


def sample(replica: int, start: float, seconds: float, tokens: int = 10) -> SampleResult:
    return SampleResult(
        "0", 0, 5, tokens, "stop", 0, replica=replica, start=START + start, seconds=seconds
    )


def recorder() -> TimelineRecorder:
    """Two engines and two ranks: 0.3 s of generation, two micro-steps of which the second is
    twice the work.
    """
    recorder = TimelineRecorder()
    recorder.samples(
        [
            sample(0, 0.0, 0.2),
            sample(0, 0.1, 0.2),
            sample(1, 0.0, 0.1),
            sample(-1, 0.0, 0.0),
        ],
        {},
    )
    measured = {
        "policy dp=0": [(1.0, 0.2, 10, 60), (1.2, 0.4, 20, 240)],
        "policy dp=1": [(1.0, 0.1, 10, 60), (1.2, 0.3, 20, 240)],
    }
    times = {
        actor: [MicroStepTime("update", START + s, *rest) for s, *rest in rows]
        for actor, rows in measured.items()
    }
    recorder.micro_steps(times, CostModel(1.0, 0.0))
    recorder.weight_loads({"rollout 0": [WeightLoad(3, START + 2.0, 0.05)]})
    return recorder


def trace(*records: dict) -> dict:
    return {
        "traceEvents": trace_events(
            [{"step": step} | record for step, record in enumerate(records, start=1)]
        )
    }


def test_a_trace_has_a_track_for_the_driver_each_engine_and_each_rank() -> None:
    found = recorder()
    found.phase("rollout", 1.0, 2.0)
    found.phase("step", 0.0, 3.0)
    made = trace(found.take())
    check(made)
    processes = [
        e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"
    ]
    assert processes == ["driver", "policy dp=0", "policy dp=1", "rollout 0", "rollout 1"]
    assert {event["name"] for event in slices_of(made, "driver", "phases")} == {
        "step",
        "rollout",
    }


def test_an_engine_shows_when_it_generated_how_many_at_a_time_and_its_weights() -> None:
    made = trace(recorder().take())
    (generated,) = slices_of(made, "rollout 0", "generate")
    assert generated["dur"] == 300_000
    assert generated["args"] == {"step": 1, "samples": 2, "tokens": 20}
    (loaded,) = slices_of(made, "rollout 0", "weights")
    assert (loaded["dur"], loaded["args"]["version"]) == (50_000, 3)
    counters = [
        e for e in made["traceEvents"] if e["ph"] == "C" and e["pid"] == loaded["pid"]
    ]
    assert [
        event["args"]["samples"] for event in sorted(counters, key=lambda e: e["ts"])
    ] == [1, 2, 1, 0]


def test_planned_widths_are_in_proportion_to_the_cost_model_and_last_as_long_as_measured() -> (
    None
):
    """The slowest ranks took 0.2 s and 0.4 s; twice the tokens are planned to take twice the time."""
    made = trace(recorder().take())
    for rank in ("policy dp=0", "policy dp=1"):
        planned = slices_of(made, rank, "planned")
        assert [event["dur"] for event in planned] == [200_000, 400_000]
        assert [event["name"] for event in planned] == ["update 0", "update 1"]
    measured = slices_of(made, "policy dp=1", "measured")
    assert [event["dur"] for event in measured] == [100_000, 300_000]
    assert [event["args"]["planned_s"] for event in measured] == [0.2, 0.4]


def test_planned_slices_of_passes_do_not_overlap() -> None:
    """A rank's second pass begins before its first was planned to end."""
    found = TimelineRecorder()
    for rank, scale in (("policy dp=0", 1.0), ("policy dp=1", 0.1)):
        times = [
            MicroStepTime(name, START + start * scale, 0.4 * scale, 10, 60)
            for name, start in (
                ("log_probs", 0.0),
                ("update", 0.5),
                ("log_probs", 1.0),
                ("update", 1.5),
            )
        ]
        found.micro_steps({rank: times}, CostModel(1.0, 0.0))
    made = trace(found.take())
    for rank in ("policy dp=0", "policy dp=1"):
        planned = sorted(slices_of(made, rank, "planned"), key=lambda event: event["ts"])
        assert len(planned) == 4
        for before, after in itertools.pairwise(planned):
            assert before["ts"] + before["dur"] <= after["ts"] + 1


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(
            st.tuples(st.floats(1e-6, 0.2), st.integers(0, 5_000)), min_size=1, max_size=6
        ),
        max_size=4,
    ),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 10), st.floats(0, 5)), max_size=12),
)
def test_slices_of_a_track_never_cross(ranks: list, generated: list) -> None:
    """Whatever was measured, also by ranks that differ in their number of micro-steps."""
    found = TimelineRecorder()
    found.samples(
        [sample(replica, start, seconds) for replica, start, seconds in generated], {}
    )
    times = {}
    for number, steps in enumerate(ranks):
        begin, rows = START, []
        for seconds, tokens in steps:
            rows.append(MicroStepTime("update", begin, seconds, tokens, tokens**2))
            begin += seconds
        times[f"policy dp={number}"] = rows
    found.micro_steps(times, CostModel(2.0, 0.5))
    made = trace(found.take())
    check(made)
    names = [event["name"] for event in made["traceEvents"] if event["ph"] == "X"]
    assert sum(name.startswith("update") for name in names) == 2 * sum(map(len, ranks))


def test_the_command_writes_the_steps_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunWriter(tmp_path, "", []) as writer:
        for step in range(4):
            writer.timeline(step, recorder().take())
    assert (
        main([str(tmp_path), "--steps", "1-2", "--output", str(tmp_path / "part.json")])
        == 0
    )
    assert "part.json" in capsys.readouterr().out
    part = json.loads((tmp_path / "part.json").read_text())
    check(part)
    assert {
        event["args"]["step"] for event in slices_of(part, "rollout 0", "generate")
    } == {1, 2}
    assert main([str(tmp_path), "--output", str(tmp_path / "part.json")]) == 2
    assert "part.json: the file exists" in capsys.readouterr().err
    assert main([str(tmp_path), "--output", ""]) == 2
    assert "--output: is a variable of the shell not set?" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > len(
        part["traceEvents"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--steps", "7"], "--steps among its own: 0 to 0"), ([], "is missing")],
)
def test_what_is_not_there_is_said_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments:
        with RunWriter(tmp_path, "", []) as writer:
            writer.timeline(0, recorder().take())
    assert main([str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_run_without_a_timeline_writes_none(tmp_path: Path) -> None:
    with RunWriter(tmp_path, "", [], timeline=False) as writer:
        writer.timeline(0, recorder().take())
    assert not (tmp_path / "timeline.jsonl").exists()


def test_steps_are_a_number_or_two() -> None:
    assert (parse_steps("4"), parse_steps("3-5")) == (range(4, 5), range(3, 6))
    for wrong in ("", "5-3", "a", "1-2-3"):
        with pytest.raises(ValueError):
            parse_steps(wrong)
