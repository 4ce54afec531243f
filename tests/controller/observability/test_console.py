"""What stands on the terminal, and in a log."""

import io
import threading

import numpy as np
import pytest
import rich.console

from controller.observability.console import BLOCKS, Console, Samples, Status, sparkline
from controller.samples import Rollout
from workers.remote_batch import RemoteBatch
from workers.score import Score

METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.1,
    "reward/failures": 0.0,
    "reward/exact_match": 0.25,
    "time/step_s": 2.0,
}


def recorded(terminal: bool) -> rich.console.Console:
    return rich.console.Console(
        file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, soft_wrap=True, record=True
    )


def shown(status: Status, now: float) -> str:
    console = recorded(terminal=False)
    console.print(status.table(now))
    return console.export_text()


def test_in_a_log_there_are_lines_and_nothing_else() -> None:
    output = recorded(terminal=False)
    console = Console(output)
    console.begin_step(1, 20)
    with console.phase("rollout"), console.samples(8) as advance:
        advance(8)
    console.step(1, 20, METRICS)
    assert output.export_text() == "step  1/20  reward 0.500  exact_match 0.250  s 2.00\n"
    assert "\x1b" not in output.file.getvalue()


@pytest.mark.parametrize(
    ("imbalance", "line"),
    [(0.25, "imbalance given 25.0%  Karmarkar-Karp 3.00%  planned 1.00%  s 2.00"), (0.0, "exact_match 0.250  s 2.00")],
)
def test_the_imbalance_is_told_where_ranks_can_differ(imbalance: float, line: str) -> None:
    output = recorded(terminal=False)
    names = ("imbalance_before", "imbalance_karmarkar_karp", "imbalance")
    values = (imbalance, 0.12 * imbalance, 0.04 * imbalance)
    balance = {f"balance/{name}/micro_steps": value for name, value in zip(names, values, strict=True)}
    Console(output).step(1, 20, METRICS | balance)
    assert output.export_text().strip().endswith(line)


def test_in_a_log_a_step_that_lasts_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_failed_rewards_are_told_where_there_are_some() -> None:
    output = recorded(terminal=False)
    Console(output).step(1, 1, METRICS | {"reward/failures": 3.0})
    assert "failures 3" in output.export_text()


@pytest.mark.parametrize(("oldest", "told"), [(0.0, False), (2.0, True)])
def test_the_age_of_samples_is_told_where_some_are_older_than_the_weights(oldest: float, told: bool) -> None:
    output = recorded(terminal=False)
    Console(output).step(1, 1, METRICS | {"rollout/staleness_mean": 1.2, "rollout/staleness_max": oldest})
    assert ("age 1.2" in output.export_text()) == told


def test_on_a_terminal_a_table_is_alive_while_a_phase_is_and_leaves_only_lines() -> None:
    output = recorded(terminal=True)
    console = Console(output)
    console.begin_step(3, 20)
    with console.phase("rollout"):
        with console.samples(8) as advance:
            advance(6)
        console.log("one line")
    drawn = output.file.getvalue()
    assert "3/20" in drawn
    assert "rollout" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1  # the cursor is hidden once, and comes back
    assert drawn.rstrip().endswith("\x1b[2K")  # what was alive is wiped off


def test_the_cursor_comes_back_where_a_phase_fails() -> None:
    output = recorded(terminal=True)
    with pytest.raises(KeyboardInterrupt), Console(output).phase("update"):
        raise KeyboardInterrupt
    assert output.file.getvalue().count("\x1b[?25h") == 1


def test_the_live_table_has_phase_seconds_samples_and_the_last_rewards() -> None:
    status = Status("7/60", [("step", 0.0), ("rollout", 10.0)], [Samples(256, 180)])
    status.rewards.extend([0.1, 0.5, 0.9])
    header, row = shown(status, now=11.4).splitlines()
    assert header.split() == ["step", "phase", "seconds", "samples", "reward"]
    assert row.split()[:3] == ["7/60", "rollout", "1.4"]
    assert "180/256" in row
    assert row.rstrip().endswith("▁▅█ 0.900")


def test_a_table_without_samples_or_rewards_is_shown_too() -> None:
    assert shown(Status("1/2", [("update", 1.0)]), now=2.0).split()[-3:] == ["1/2", "update", "1.0"]


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


def asked(uid: str) -> dict[str, str]:
    return {"prompt": f"[b]{uid}"}


def test_completions_stand_with_reward_and_advantage_whatever_they_contain() -> None:
    scores = {("a", 0): Score(1.0, "[bold]4[/bold] \\boxed"), ("b", 0): Score(0.0, "5"), ("b", 1): Score(0.0, "6")}
    trained_on = RemoteBatch(
        {"uid": np.array(["a"]), "sample": np.array([0]), "advantages": np.array([0.75], np.float32)}, {}
    )
    output = recorded(terminal=False)
    Console(output).completions(Rollout(trained_on, scores, 0, 0), 2, trained_on, asked)
    text = output.export_text()
    assert "[bold]4[/bold] \\boxed" in text
    assert "+0.750" in text
    (without,) = [line for line in text.splitlines() if "│ [b]b " in line]
    assert [cell.strip() for cell in without.split("│")][1:-1] == ["[b]b", "0", "5", "0.000", "-"]


def test_with_a_critic_there_is_no_column_of_advantages() -> None:
    """They are of tokens then, and stay where these are."""
    batch = RemoteBatch({"uid": np.array(["a"]), "sample": np.array([0])}, {})
    output = recorded(terminal=False)
    Console(output).completions(Rollout(batch, {("a", 0): Score(1.0, "4")}, 0, 0), 1, batch, asked)
    assert "advantage" not in output.export_text()


def test_no_completions_are_shown_unless_asked_for() -> None:
    output = recorded(terminal=False)
    batch = RemoteBatch({"uid": np.array(["a"])}, {})
    Console(output).completions(Rollout(batch, {("a", 0): Score(1.0, "4")}, 0, 0), 0, batch, asked)
    assert output.export_text() == ""


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 1.0]) == BLOCKS[0] + BLOCKS[-1]
    assert sparkline([2.0, 2.0, 2.0]) == BLOCKS[0] * 3
