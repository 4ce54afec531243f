"""Whatever a user gives: every command ends with 0, or with 1 or 2 and one line. Nothing is a traceback.

Commands run in this process, up to where something would be started. Users' code and chat templates, which
are tried in processes of their own, and the numerics of a model, which take a second each, have stand-ins.
"""

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ballast import doctor
from ballast.commands import COMMANDS, main_of
from ballast.doctor.report import Report
from tests.controller.config_workspace import write_workspace
from tests.controller.observability.recorded_run import write_run
from tests.hostile.draws import Draw, of_arguments, of_files, of_settings, of_yaml
from workers.batch.score import Score
from workers.model.checkpoint.checkpoint_folder import Manifest, commit, unfinished_folder
from workers.user_code.functions import Signature, UserFunction

QUICK_DRAWS, SLOW_DRAWS = 24, 2000  # of each kind
TRAINING = [
    ("fit", ("--config", "config.yaml", "--dry-run")),
    ("sft", ("--config", "sft.yaml", "--dry-run")),
    ("preferences", ("--config", "preferences.yaml", "--dry-run")),
    ("reward-model", ("--config", "preferences.yaml", "--dry-run")),
    ("evaluate", ("--config", "config.yaml", "--dry-run")),
    (
        "generate",
        ("--config", "config.yaml", "--model", "model", "--prompts", "3", "--dry-run"),
    ),
]
READING = [
    ("report", ("runs/done",)),
    ("timeline", ("runs/done", "--steps", "2-3", "--output", "trace.json")),
    ("replay", ("runs/done", "--step", "3", "policy.data_parallel=1")),
    ("balance", ("runs/done", "--step", "3")),
    (
        "balance",
        ("lengths.jsonl", "--column", "length", "--ranks", "2", "--mini-batches", "2"),
    ),
    (
        "balance",
        (
            "--distribution",
            "lognormal",
            "--count",
            "64",
            "--ranks",
            "2",
            "--model",
            "model",
        ),
    ),
    ("migrate", ("verl.yaml",)),
    ("evaluate", ("--model", "runs/done", "--trust-run", "--dry-run")),
    ("show", ("runs/done", "--step", "3")),
    ("show", ("runs/done", "--session", "2")),
]
REWARD = UserFunction(
    b"", Signature(("response", "solution"), ("response", "solution"), False)
)
DOCTOR = [("doctor", ("--config", "config.yaml", "run.steps=3"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The working directory, in which every command works."""
    folder = tmp_path_factory.mktemp("hostile")
    write_workspace(folder)
    (folder / "sft.yaml").write_text(
        "run: {name: sft}\nmodel: {path: model}\ndata: {train: sft.jsonl, max_tokens: 64}\nresources: "
        "{device: cpu}\n"
    )
    (folder / "preferences.yaml").write_text(
        (folder / "sft.yaml").read_text().replace("sft", "preferences")
    )
    (folder / "sft.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 3)
    (folder / "preferences.jsonl").write_text(
        '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 3
    )
    (folder / "lengths.jsonl").write_text(
        "".join(f'{{"length": {5 * n + 1}}}\n' for n in range(8))
    )
    (folder / "verl.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\ndata: {train_batch_size: 8}\n"
    )
    run = folder / "runs" / "done"
    write_run(run, steps=3, ranks=2)
    shutil.copy(folder / "config.yaml", run / "config.yaml")
    (run / "summary.json").write_text(
        '{"steps": 3, "validation": {"before": {}, "after": {}}}'
    )
    (run / "samples").mkdir()
    for step in (1, 2, 3):
        (run / "samples" / f"step-{step}.npz").write_bytes(b"")
    checkpoint = run / "checkpoints" / "policy" / "step-2"
    begun = unfinished_folder(checkpoint)
    begun.mkdir(parents=True)
    commit(begun, checkpoint, Manifest(2, 1, {}, {}, {}))
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    for module in ("controller.fit", "controller.offline.offline_training"):
        patch.setattr(f"{module}.numerics_lines", lambda config: iter(()))
    patch.setattr(
        "controller.lifecycle.user_functions.find_function", lambda *_, **__: REWARD
    )
    patch.setattr(
        "controller.lifecycle.reward_inputs.try_rewards", lambda *_, **__: Score(0.0, "")
    )
    patch.setattr("controller.lifecycle.chat_inputs.examine", lambda *_, **__: None)
    for name in (
        "reward_inputs.find_class",
        "reward_inputs.try_environment",
        "user_functions.check_loss",
    ):
        patch.setattr(f"controller.lifecycle.{name}", _out_of_reach)
    patch.setattr("controller.lifecycle.session.lock_run", _nothing)
    for module in ("controller.lifecycle.session", "ballast.replay.__main__"):
        patch.setattr(f"{module}.check_cluster", _nothing)
    patch.setattr("ballast.replay.__main__.run", _nothing)
    patch.setattr(
        "ballast.doctor.examine",
        lambda options, _: doctor.configuration(options, Report()) and None,
    )
    yield folder
    patch.undo()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _out_of_reach(*_: Any, **__: Any) -> Any:
    pytest.skip("needs a process of its own")


def ends_well(folder: Path, draw: Draw) -> None:
    """Run the draw's command on its files, which are put back afterwards."""
    before = {name: (folder / name).read_bytes() for name in draw.files}
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors)
        for errors in ("strict", "backslashreplace")
    )
    try:
        for name, content in draw.files.items():
            (folder / name).unlink() if content is None else (folder / name).write_bytes(
                content
            )
        with redirect_stdout(out), redirect_stderr(err):
            code = _code(main_of(COMMANDS[draw.command]), draw)
    finally:
        for name, content in before.items():
            (folder / name).write_bytes(content)
    err.flush()
    said = err.buffer.getvalue().decode()
    assert code in (0, 1, 2), said
    assert code == 0 or draw.command == "doctor" or has_one_line_a_problem(said), said
    assert "Traceback" not in said


def has_one_line_a_problem(said: str) -> bool:
    """Independent problems come together, each in one line and without characters that steer a terminal."""
    *lines, last = said.split("\n")
    return (
        bool(lines)
        and not last
        and all(line.startswith("error: ") and line.isprintable() for line in lines)
    )


def _code(main: Callable[[Any], int | None], draw: Draw) -> Any:
    try:
        return main(list(draw.arguments)) or 0
    except SystemExit as end:
        return end.code or 0


def contents(folder: Path, *patterns: str) -> dict[str, bytes]:
    """The files of the patterns that have a content, by their paths in the folder."""
    found = sorted(
        path for pattern in patterns for path in folder.glob(pattern) if path.is_file()
    )
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path.stat().st_size
    }


KINDS: dict[str, Callable[[Path], st.SearchStrategy[Draw]]] = {
    "settings": lambda folder: of_settings(),
    "yaml": lambda folder: of_yaml(contents(folder, "*.yaml")),
    "data": lambda folder: of_files(contents(folder, "*.jsonl"), [*TRAINING, READING[4]]),
    "records": lambda folder: of_files(contents(folder, "runs/**/*"), READING),
    "models": lambda folder: of_files(contents(folder, "model/*.json"), TRAINING),
    "arguments": lambda folder: of_arguments([*TRAINING, *READING, *DOCTOR]),
}


def search(folder: Path, kind: str, draws: int) -> None:
    @settings(
        max_examples=draws,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(draw=KINDS[kind](folder))
    def every_draw_ends_well(draw: Draw) -> None:
        ends_well(folder, draw)

    every_draw_ends_well()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_ends_well(folder: Path, kind: str) -> None:
    search(folder, kind, QUICK_DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_ends_well_on_many_draws(folder: Path, kind: str) -> None:
    search(folder, kind, SLOW_DRAWS)


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("command", "arguments"), [*TRAINING, *READING, *DOCTOR])
def test_the_folder_is_one_in_which_every_command_works(
    folder: Path, command: str, arguments: tuple[str, ...]
) -> None:
    """Otherwise all draws would be refused for the same reason."""
    Path("trace.json").unlink(missing_ok=True)  # a draw before may have written it
    assert _code(main_of(COMMANDS[command]), Draw(command, arguments, {})) == 0
