"""What stands on the terminal, and in a log."""

import io
import re
import threading
from pathlib import Path

import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st

from controller.observability.console import Console, LiveLine, SamplingRound
from controller.observability.run_log import run_log

METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.1,
    "reward/failures": 0.0,
    "reward/exact_match": 0.25,
    "time/step_s": 2.0,
}
QUICKSTART = METRICS | {
    "rollout/response_tokens_mean": 24.1,
    "policy/loss": -0.0123,
    "policy/grad_norm": 1.39,
    "policy/rollout_mismatch_mean": 1e-7,
    "policy/rollout_mismatch_max": 9.5e-7,
    "data/epoch": 0.12,
    "throughput/tokens_per_s": 12345.6,
}


def recorded(terminal: bool, width: int = 100) -> rich.console.Console:
    return rich.console.Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        highlight=False,
        soft_wrap=True,
        record=True,
    )


def balance(given: float, planned: float) -> dict[str, float]:
    values = {
        "imbalance_before": given,
        "imbalance_karmarkar_karp": 0.12 * given,
        "imbalance": planned,
    }
    return {f"balance/{name}/micro_steps": value for name, value in values.items()}


def lines_of(
    steps: list[dict[str, float]], *, terminal: bool, width: int, verbose: bool = False
) -> list[str]:
    output = recorded(terminal, width)
    console = Console(output, verbose=verbose)
    for step, metrics in enumerate(steps, start=1):
        console.begin_step(step, len(steps))
        console.step(step, len(steps), metrics)
    return output.export_text().splitlines()


def shown(status: LiveLine, now: float, width: int = 100) -> str:
    console = recorded(terminal=False, width=width)
    lines = console.render_lines(status.row(now), pad=False)
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def test_in_a_log_there_are_lines_and_nothing_else() -> None:
    output = recorded(terminal=False)
    console = Console(output)
    console.begin_step(1, 20)
    with console.phase("rollout"), console.samples(8) as advance:
        advance(8)
    console.step(1, 20, METRICS)
    line = re.sub(r"\d:\d\d", "m:ss", output.export_text())
    assert (
        line
        == "step  1/20  elapsed m:ss  left m:ss  reward 0.500  exact_match 0.250  s 2.00\n"
    )
    assert "\x1b" not in output.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("terminal", [True, False])
def test_the_quickstart_shows_what_a_user_looks_at_in_a_line_that_fits(
    terminal: bool, width: int
) -> None:
    *header, first, second = lines_of(
        [QUICKSTART | balance(0.2, 0.001)] * 2, terminal=terminal, width=width
    )
    assert len(header) == terminal
    labels = ["step", "left", "reward", "exact_match", "response"]
    labels += [
        "s",
        *["tokens/s"] * (terminal or width >= 100),
        *["elapsed"] * (terminal or width >= 160),
    ]
    for label in labels:
        assert label in " ".join([*header, first]).split()
    assert not {"imbalance", "mismatch"} & set(" ".join([*header, first, second]).split())
    assert all(value in second for value in ("2/2", "0.500", "0.250", "24.1", "2.00"))
    assert max(map(len, [*header, first, second])) <= width


@given(
    metrics=st.dictionaries(
        st.text("abcdefghij_/", min_size=1, max_size=30).map("reward/".__add__)
        | st.sampled_from([*QUICKSTART]),
        st.floats(),
        max_size=12,
    ),
    width=st.integers(40, 200),
    terminal=st.booleans(),
    verbose=st.booleans(),
)
def test_a_step_is_one_line_at_any_width_and_the_log_has_all_of_it(
    metrics: dict[str, float], width: int, terminal: bool, verbose: bool
) -> None:
    kept, output = io.StringIO(), recorded(terminal, width)
    console = Console(output, verbose=verbose)
    with console.keep_in(kept):
        console.step(7, 60, {"reward/failures": 0.0} | metrics)
    lines = output.export_text().splitlines()
    with console.phase("what is alive is drawn too"):
        pass
    assert len(lines) == 1 + terminal
    assert max(map(len, lines)) <= width
    (whole,) = kept.getvalue().splitlines()
    hidden = {
        "reward/mean",
        "reward/std",
        "reward/failures",
        "policy/rollout_mismatch_mean",
    }
    names = [
        name.removeprefix("reward/")
        for name in metrics
        if name.startswith("reward/") and name not in hidden
    ]
    assert all(f"  {name} " in whole for name in names)


@pytest.mark.parametrize(
    ("found", "verbose", "shown"),
    [
        (balance(0.25, 0.01), False, False),
        (balance(0.25, 0.11), False, True),
        (balance(0.25, 0.01), True, True),
        (balance(0.0, 0.0), True, False),  # of one rank there is none
        (balance(0.25, 0.01) | {"policy/rollout_mismatch_mean": 0.02}, False, False),
    ],
)
@pytest.mark.parametrize("terminal", [True, False])
def test_imbalance_and_mismatch_are_shown_where_asked_for_or_bad(
    found: dict[str, float], verbose: bool, shown: bool, terminal: bool
) -> None:
    steps = [
        QUICKSTART | found,
        QUICKSTART | balance(found["balance/imbalance_before/micro_steps"], 0.01),
    ]
    lines = lines_of(steps[: 1 + terminal], terminal=terminal, width=200, verbose=verbose)
    text = "\n".join(lines)
    assert [name in text for name in ("imbalance given", "Karmarkar-Karp", "planned")] == [
        shown
    ] * 3
    assert ("mismatch" in text) == (verbose or "policy/rollout_mismatch_mean" in found)
    if terminal:
        assert len(lines) == 3  # what was shown once stays, under the same header


def test_the_time_left_follows_from_the_steps_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("controller.observability.console.time.monotonic", lambda: now)
    output = recorded(terminal=False, width=200)
    console = Console(output)
    for step, lasts in ((6, 40.0), (7, 20.0)):  # a run that resumes after step 5
        now += 1.0
        console.begin_step(step, 100)
        now += lasts
        console.step(step, 100, METRICS)
    console.step(101, 100, METRICS)  # of a loop of one's own
    assert [line.split()[1:6] for line in output.export_text().splitlines()] == [
        ["6/100", "elapsed", "0:41", "left", "1:02:40"],
        ["7/100", "elapsed", "1:02", "left", "47:16"],
        ["101", "elapsed", "1:02", "reward", "0.500"],
    ]


def test_where_a_line_is_alive_waiting_is_told_in_it_and_kept_in_the_log(
    tmp_path: Path,
) -> None:
    """Elsewhere it is a line."""
    for terminal in (True, False):
        output = recorded(terminal)
        console = Console(output)
        with run_log(tmp_path / str(terminal), console), console.phase("starting"):
            console.note("waiting for [policy]")
        assert (
            "waiting for [policy]\n" in (tmp_path / str(terminal) / "run.log").read_text()
        )
        assert "waiting for [policy]" in (drawn := output.file.getvalue())
        assert (drawn == "waiting for [policy]\n") is not terminal


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_nothing_is_alive_in_a_pipe_whatever_the_environment_says(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "1")
    console = Console()
    with console.phase("rollout"):
        console.step(1, 1, METRICS)
    assert "\x1b" not in capsys.readouterr().out


def test_in_a_log_a_step_that_lasts_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controller.observability.console.HEARTBEAT_SECONDS", 0.0)
    output, told = recorded(terminal=False), threading.Event()
    console = Console(output)
    monkeypatch.setattr(console, "log", lambda text: (said.append(text), told.set()))
    said: list[str] = []
    console.begin_step(3, 20)
    with console.phase("step"), console.phase("rollout"), console.samples(8) as advance:
        advance(6)
        told.clear()
        told.wait()
    assert any(line.startswith("step 3/20: rollout, 6 of 8 samples") for line in said)


@pytest.mark.parametrize(
    ("metrics", "text", "told"),
    [
        ({"reward/failures": 3.0}, "failures 3", True),
        ({"rollout/staleness_mean": 1.2, "rollout/staleness_max": 0.0}, "age 1.2", False),
        ({"rollout/staleness_mean": 1.2, "rollout/staleness_max": 2.0}, "age 1.2", True),
    ],
)
def test_failed_rewards_and_older_samples_are_told_where_there_are_some(
    metrics: dict[str, float], text: str, told: bool
) -> None:
    output = recorded(terminal=False)
    Console(output).step(1, 1, METRICS | metrics)
    assert (text in output.export_text()) == told


def test_on_a_terminal_a_line_is_alive_while_a_phase_is_and_leaves_only_lines() -> None:
    output = recorded(terminal=True)
    console = Console(output)
    console.begin_step(3, 20)
    with (
        pytest.raises(KeyboardInterrupt),
        console.phase("rollout"),
        console.samples(8) as advance,
    ):
        advance(6)
        console.log("one line")
        raise KeyboardInterrupt
    drawn = output.file.getvalue()
    assert "3/20" in drawn
    assert "rollout" in drawn
    # The cursor is hidden once, and comes back.
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1
    assert drawn.rstrip().endswith("\x1b[2K")  # the live line is erased


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_live_line_has_phase_seconds_samples_and_the_last_rewards(width: int) -> None:
    status = LiveLine(
        "7/60",
        [("step", 0.0), ("rollout", 10.0)],
        [SamplingRound(256, 180)],
        began=-50.0,
        ends=111.4,
    )
    status.rewards.extend([0.1, 0.5, 0.9])
    status.note = "waiting for " * 20
    (row,) = shown(status, now=11.4, width=width).splitlines()
    assert len(row) <= width
    assert row.split()[1:8] == ["7/60", "1:01,", "1:40", "left", "rollout", "1.4", "s"]
    assert "180/256" in row
    assert "▁▅█" in row
    starting = LiveLine(phases=[("starting", 1.0)], note="waiting for Ray", began=0.0)
    assert shown(starting, now=2.0).split()[1:] == [
        "0:02",
        "starting",
        "1.0",
        "s",
        "waiting",
        "for",
        "Ray",
    ]


def test_phases_of_two_threads_end_in_any_order() -> None:
    output = recorded(terminal=True)
    console = Console(output)
    first, second = console.phase("update"), console.phase("rollout")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "\x1b[?25h" not in output.file.getvalue()  # the table is still there
    second.__exit__(None, None, None)
    drawn = output.file.getvalue()
    assert drawn.count("\x1b[?25h") == 1  # it ends with the last of them
    assert "rollout" in drawn


def completions(*rows: dict) -> str:
    output = recorded(terminal=False)
    Console(output).completions([{"uid": "a", "sample": 0} | row for row in rows])
    return output.export_text()


def test_completions_stand_with_reward_and_advantage_whatever_they_contain() -> None:
    trained = {
        "prompt": "[b]a",
        "response": "[bold]4[/bold] \\boxed",
        "reward": 1.0,
        "advantage": 0.75,
    }
    text = completions(
        trained, {"prompt": "[b]b", "response": "5", "reward": 0.0, "advantage": None}
    )
    assert "[bold]4[/bold] \\boxed" in text
    assert "+0.750" in text
    (without,) = [line for line in text.splitlines() if "│ [b]b " in line]
    assert [cell.strip() for cell in without.split("│")][1:-1] == [
        "[b]b",
        "0",
        "5",
        "0.000",
        "-",
    ]


def test_completions_have_no_advantages_with_a_critic_whose_are_per_token() -> None:
    assert completions() == ""
    assert "advantage" not in completions({"prompt": "a", "response": "4", "reward": 1.0})
