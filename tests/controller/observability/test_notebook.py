"""In a notebook's cell a run says every line once, and its log has them too."""

from pathlib import Path

from tests.notebooks import executed, notebook_of

RUN = """\
from pathlib import Path
from controller.observability.console import Console
from controller.observability.run_log import run_log

console = Console()
with run_log(Path("run"), console):
    with console.phase("rollout"), console.waiting("nothing"):
        console.log("a line")
    console.step(1, 4, {"reward/mean": 0.5, "time/step_s": 2.0})
    print("printed by a reward")
"""
RESULT = """\
from ballast import Result

Result(Path("run"), {"steps": 4, "validation": {"before": {}}}, [{"step": 1, "reward/mean": 0.5}] * 500)
"""


def test_a_cell_shows_each_line_of_a_run_once_and_a_result_in_one(tmp_path: Path) -> None:
    run, result = executed(notebook_of(RUN, RESULT), tmp_path).cells
    assert {output.output_type for output in run.outputs} == {"stream"}
    lines = "".join(output.text for output in run.outputs).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "a line",
        "step 1/4",
        "printed by a reward",
    ]
    kept = (tmp_path / "run" / "run.log").read_text().splitlines()[1:]
    assert [line.split("  ")[0] for line in kept] == [
        "a line",
        "step 1/4",
        "printed by a reward",
    ]
    (shown,) = result.outputs
    assert shown.data == {"text/plain": "Result(folder='run', steps=4)"}
