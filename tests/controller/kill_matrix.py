"""What the tests of losses share: who dies when, and what a whole run on stand-ins must show afterwards."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.controller.stand_ins.gpus import StandInReward
from tests.controller.stand_ins.run import StandInRun, StandIns
from tests.json_lines import read_lines
from workers.batch.score import Score

STEPS = 4
PROMPTS, SAMPLES = 2, 2  # of a step, of a prompt
Run = Callable[..., StandInRun]
Moment = tuple[str, str, int]
"""An actor, what it does, and for which time."""
Loss = tuple[Moment, tuple[str, ...]]
"""A moment, and the actors that die then."""

ENGINES = ("rollout 0", "rollout 1")
RANKS = ("policy dp=0", "policy dp=1")

CHANGED_BY_LOSSES = ("time/", "throughput/", "restarts/", "checkpoint/")
CHANGED_BY_LOSSES += ("rollout/samples_retried", "rollout/engine_idle_share")
CHANGED_BY_LOSSES += (
    "rollout/trainer_idle_share",
    "rollout/weights_whole",
    "rollout/engines",
)


def score_tokens(_: StandInReward, block: Any, requests: Sequence[Any]) -> list[Score]:
    """Reward a response by its last token, so that a loss moves no reward to another sample."""
    tokens = [block.row(request.row)["input_ids"][-1] for request in requests]
    return [Score(float(token % 2), "text") for token in tokens]


def settings(placement: str, *more: str) -> tuple[str, ...]:
    return (
        f"rollout.placement={placement}",
        "rollout.replicas=2",
        f"run.steps={STEPS}",
        "run.checkpoint_every=1",
        "data.validation=''",
        *more,
    )


def do_at(stand_ins: StandIns, moment: Moment, action: Callable[[], None]) -> None:
    """Call `action` at a moment, once. What was arranged before stays."""
    actor, event, times = moment
    counts = [0]
    arranged = stand_ins.world.trouble

    def trouble(name: str, event_now: str) -> None:
        arranged(name, event_now)
        if (name, event_now) == (actor, event):
            counts[0] += 1
            if counts[0] == times:
                action()

    stand_ins.world.trouble = trouble


def kill_at(stand_ins: StandIns, moment: Moment, *victims: str) -> list[str]:
    """Let these actors die at a moment. Returns the dead."""
    dead: list[str] = []

    def kill() -> None:
        for victim in victims:
            dead.append(victim)
            stand_ins.world.ray.actors[victim].die()

    do_at(stand_ins, moment, kill)
    return dead


def compare(
    stand_ins: StandIns,
    run: Run,
    overrides: tuple[str, ...],
    arrange: Callable[[], object],
    *may_differ: str,
) -> StandInRun:
    """Run without losses, and then with those that `arrange` prepares. Both must have the same steps."""
    undisturbed = run(*overrides, "run.name=undisturbed")
    samples = sampled(stand_ins)
    clear_record(stand_ins)
    arrange()
    finished = run(*overrides)
    check_every_step(finished)
    assert sampled(stand_ins) == samples
    assert differences(finished, undisturbed, *may_differ) == []
    return finished


def compare_losses(
    stand_ins: StandIns,
    run: Run,
    overrides: tuple[str, ...],
    *losses: Loss,
    may_differ: tuple[str, ...] = (),
) -> StandInRun:
    dead: list[list[str]] = []

    def arrange() -> None:
        dead.extend(kill_at(stand_ins, moment, *victims) for moment, victims in losses)

    finished = compare(stand_ins, run, overrides, arrange, *may_differ)
    assert dead == [list(victims) for _, victims in losses], "somebody did not die"
    return finished


def check_got_weights_first(stand_ins: StandIns, engine: str) -> None:
    events = stand_ins.world.ledger.of(engine)
    assert events[0] == "start"
    if "generate" in events:
        assert events.index("meet") < events.index("receive") < events.index("generate")


def recorded(finished: StandInRun, name: str = "metrics") -> list[dict[str, Any]]:
    return read_lines(finished.config.run_folder / f"{name}.jsonl")


def check_every_step(finished: StandInRun) -> None:
    """Every step is there once, with all of its samples, and every prompt once."""
    steps = recorded(finished)
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    assert [step["rollout/samples"] for step in steps[1:]] == [PROMPTS * SAMPLES] * STEPS
    assert [step["rollout/weight_version"] for step in steps[1:]] == [1.0, 2.0, 3.0, 4.0]
    prompts = [row["prompts"] for row in recorded(finished, "lengths")]
    assert prompts == [
        [first, first, first + 1, first + 1] for first in range(0, PROMPTS * STEPS, PROMPTS)
    ]


def check_weights_of_the_step_before(finished: StandInRun) -> None:
    steps = recorded(finished)[1:]
    versions = [float(step["step"] - 1) for step in steps]
    for age in ("oldest", "newest"):
        assert [step[f"rollout/{age}_weight_version"] for step in steps] == versions


def sampled(stand_ins: StandIns) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts and responses, which follow from their seeds."""
    return {(tuple(prompt), tuple(tokens)) for _, prompt, tokens in stand_ins.world.turns}


def differences(finished: StandInRun, other: StandInRun, *but: str) -> list[Any]:
    """What two runs recorded differently of their steps. but: beginnings of names that may differ."""
    files = (_results(finished, *but), _results(other, *but))
    places = sorted(files[0].keys() | files[1].keys())
    pairs = [(place, *(results.get(place) for results in files)) for place in places]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _results(finished: StandInRun, *but: str) -> dict[tuple[str, int, str], Any]:
    """By file, step and name: what is recorded of each step, without times and losses."""
    rows = {name: recorded(finished, name) for name in ("metrics", "lengths")}
    for path in (finished.config.run_folder / "validation").glob("*.jsonl"):
        lines = path.read_text().splitlines()
        rows[path.stem] = [{"step": 0, "lines": [json.loads(line) for line in lines]}]
    results: dict[tuple[str, int, str], Any] = {}
    for file, steps in rows.items():
        for step in steps:
            for name, value in step.items():
                if not name.startswith(CHANGED_BY_LOSSES + but):
                    results[file, step["step"], name] = value
    return results


def restarts(finished: StandInRun) -> tuple[float, float]:
    """Engines that were replaced, and restarts of the run."""
    last = recorded(finished)[-1]
    return last["restarts/engines"], last["restarts/recoveries"]


def clear_record(stand_ins: StandIns) -> None:
    stand_ins.world.turns.clear()
    stand_ins.world.ledger.events.clear()


def at_all_times(
    actors: Iterable[str], events: Iterable[str], times: Iterable[int]
) -> list[Moment]:
    return [(actor, event, time) for actor in actors for event in events for time in times]
