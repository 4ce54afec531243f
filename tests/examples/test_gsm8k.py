import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gsm8k.data import record
from examples.gsm8k.reward import reward

FOLDER = Path(__file__).parents[2] / "examples" / "gsm8k"


def test_the_shipped_sample_is_what_the_command_makes(tmp_path) -> None:
    output = tmp_path / "sample.jsonl"
    source = FOLDER / "sample_source.jsonl"
    command = [
        sys.executable,
        "-m",
        "examples.gsm8k.data",
        "--source",
        str(source),
        "--output",
        str(output),
    ]
    subprocess.run(command, check=True, cwd=FOLDER.parents[1], capture_output=True)
    assert output.read_text() == (FOLDER / "sample.jsonl").read_text()


def test_published_answers_score_one() -> None:
    for line in (FOLDER / "sample_source.jsonl").read_text().splitlines():
        row = json.loads(line)
        answer = record(row["question"], row["answer"])["answer"]
        assert reward(response=row["answer"], answer=answer)["reward"] == 1.0


@pytest.mark.parametrize(
    ("response", "score", "formatted"),
    [
        ("so #### 1,200", 1.0, 1.0),
        ("#### 1200.0", 1.0, 1.0),
        ("#### $1200.", 1.0, 1.0),
        ("#### 7 no: 1200", 1.0, 1.0),
        ("1200", 0.0, 0.0),
        ("#### many", 0.0, 0.0),
        ("#### 1201", 0.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_last_number_behind_the_marker_counts(
    response: str, score: float, formatted: float
) -> None:
    assert reward(response=response, answer="1200") == {
        "reward": score,
        "exact_match": score,
        "formatted": formatted,
    }
