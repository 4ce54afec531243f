"""The first hour with the repository, by the commands of README.md and docs/, and what somebody sees of each.

    clone, make setup, make test, make fit --> report, timeline, balance --> own data, reward, what is typed wrong
    --> own environment, evaluate, generate, given sequences --> a Ray job, make docs

With BALLAST_INSTALL=1 `make setup` installs every package. Without the quickstart's model in
examples/addition/cache of this repository, `make fit` makes it, which takes minutes.
"""

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.addition import data
from tests.documentation.blocks import blocks_of
from tests.end_to_end.checkout import Checkout, Said
from tests.end_to_end.processes import ROOT, ports
from tests.json_lines import read_lines

pytestmark = pytest.mark.slow
STEPS = 3
STEP = r"step +{}/{}  .*reward -?\d\.\d{{3}}  .*s \d"
CACHE = Path("examples/addition/cache")
SMALL = "batch.prompts_per_step=8 policy.optimizer.warmup_steps=0"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A clone in which `make setup` has been run."""
    made = Checkout(tmp_path_factory.mktemp("newcomer") / "ballast")
    said = made.run("make setup", seconds=1800)
    assert said.lines[0] == "installing into .venv: some minutes, 4 GB of disk"
    yield made
    made.left(0)


@pytest.fixture(scope="module")
def addition(checkout: Checkout) -> Said:
    """What `make fit` says, for a few steps."""
    if (ROOT / CACHE / "model" / "config.json").exists():
        shutil.copytree(ROOT / CACHE, checkout.folder / CACHE)
    return checkout.run(
        f'make fit ARGS="run.steps={STEPS} validation.prompts=64"', seconds=1800
    )


@pytest.fixture(scope="module")
def mine(checkout: Checkout, addition: Said) -> str:
    """mine.yaml as the README says: a copy of configs/grpo.yaml with the lines marked "yours" changed; its
    name.
    """
    problems = [(a, b) for a in range(10, 20) for b in range(11, 95, 7)]
    records = [
        {"prompt": data.prompt(a, b), "answer": data.ones_first(a + b)} for a, b in problems
    ]
    for name, part in (("train", records[8:]), ("test", records[:8])):
        checkout.write(
            f"data/{name}.jsonl", "".join(json.dumps(record) + "\n" for record in part)
        )
    (code,) = [
        block.body for block in blocks_of(ROOT / "README.md") if block.language == "python"
    ]
    checkout.write("reward.py", code)
    copied = (ROOT / "configs" / "grpo.yaml").read_text()
    changes = {
        "models/policy ": f"{CACHE}/model ",
        "max_prompt_tokens: 512": "max_prompt_tokens: 26",
    }
    for ours, theirs in (changes | {"max_new_tokens: 1024": "max_new_tokens: 64"}).items():
        assert copied.count(ours) == 1
        copied = copied.replace(ours, theirs)
    checkout.write("mine.yaml", copied)
    return "mine.yaml"


@pytest.fixture(scope="module")
def quickstart(checkout: Checkout, addition: Said) -> str:
    """The three files of docs/index.md in mine/; the settings' name."""
    names = {"json": "train.jsonl", "python": "reward.py", "yaml": "config.yaml"}
    for block in blocks_of(ROOT / "docs" / "index.md"):
        if block.language in names:
            checkout.write(f"mine/{names[block.language]}", block.body)
    return "mine/config.yaml"


def rows(checkout: Checkout, name: str) -> list[dict[str, Any]]:
    """metrics.jsonl of a run: valid JSON, a line a step, in order."""
    found = read_lines(checkout.folder / "runs" / name / "metrics.jsonl")
    steps = [row["step"] for row in found]
    assert steps == list(range(steps[0], steps[-1] + 1))
    return found


def shows_steps(said: Said, name: str, steps: int) -> None:
    """A line a step, with its reward, and at the end what is in the run's folder."""
    for step in range(1, steps + 1):
        assert re.search(STEP.format(step, steps), said.out), said.out
    assert f"the run is written to runs/{name}" in said.lines
    assert said.lines[-1].startswith(f"runs/{name}: model, ")


def test_a_second_setup_has_nothing_to_do(checkout: Checkout) -> None:
    assert checkout.run("make setup").lines == ["make: Nothing to be done for 'setup'."]


def test_make_test_runs_what_it_is_asked_to(checkout: Checkout) -> None:
    """Before there are files of somebody's own, which `make lint` would read too."""
    said = checkout.run("make test ARGS=tests/balancing/test_plan.py", seconds=1200)
    assert "Contracts: 8 kept, 0 broken." in said.out
    assert re.search(r"^\d+ passed", said.out, re.M), said.out


def test_make_fit_shows_every_step_and_leaves_the_files_that_the_quickstart_names(
    checkout: Checkout, addition: Said
) -> None:
    warm_start = addition.lines_with("warm start: ")
    assert warm_start and str(CACHE / "model") in warm_start[-1]
    shows_steps(addition, "addition", STEPS)
    assert len(addition.lines_with("validation at step ")) == 2
    folder = checkout.folder / "runs" / "addition"
    page = (ROOT / "docs" / "index.md").read_text().partition("## What a run leaves")[2]
    named = re.findall(r"^\| `([\w.]+)/?` \| (?!with )", page, re.M)
    assert len(named) > 8
    assert [name for name in named if not (folder / name).exists()] == []
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 0.2 < summary["validation"]["before"]["exact_match"] < 0.5
    assert [row["step"] for row in rows(checkout, "addition")] == [0, 1, 2, 3]
    log = (folder / "run.log").read_text()
    assert all(line.partition("  left")[0] in log for line in addition.lines_with("step "))


def test_a_run_is_looked_at_afterwards(checkout: Checkout, addition: Said) -> None:
    folder = checkout.folder / "runs" / "addition"
    for file in ("report.html", "trace.json"):
        (folder / file).unlink(missing_ok=True)
    assert checkout.run("python -m ballast report runs/addition").lines == [
        "runs/addition/report.html"
    ]
    page = (folder / "report.html").read_text()
    assert "<h1>addition" in page and not re.search(r"""(?:src|href)=["']?https?:""", page)
    said = checkout.run("python -m ballast timeline runs/addition")
    assert said.out.startswith("runs/addition/trace.json: ")
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    said = checkout.run("python -m balancing runs/addition")
    assert said.out.startswith(f"Step {STEPS} of runs/addition, as the run planned it.")
    assert {"verl", "Ballast"} <= {line.split()[0] for line in said.lines if line.strip()}


def test_tensorboard_has_the_runs(checkout: Checkout, addition: Said) -> None:
    board = checkout.start("exec tensorboard --logdir runs --port 0")
    assert board.stderr is not None
    address = next(
        found[0]
        for line in board.stderr
        if (found := re.search(r"http://localhost:\d+/", line))
    )
    deadline, found = time.monotonic() + 60, []
    while not found and time.monotonic() < deadline:
        found = json.load(urllib.request.urlopen(f"{address}data/runs"))
        time.sleep(1)
    board.terminate()
    board.communicate()
    assert any(name.startswith("addition") for name in found), found


def test_own_data_and_an_own_reward_train_as_the_quickstart_says(
    checkout: Checkout, quickstart: str
) -> None:
    tried = checkout.run(f"python -m controller.fit --config {quickstart} --dry-run")
    assert "mine/train.jsonl: 3 records" in tried.lines
    assert (
        "mine/reward.py:reward: tried on the first record and an empty response"
        in tried.lines
    )
    assert "    85+76=" in tried.lines
    assert len(tried.lines) < 70 and not (checkout.folder / "runs" / "mine").exists()
    said = checkout.run(f"python -m ballast fit --config {quickstart} run.steps=10")
    shows_steps(said, "mine", 10)
    rewards = [row["reward/mean"] for row in rows(checkout, "mine")[1:]]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    answers = {"85+76=": "521", "9+4=": "31", "21+33=": "54"}
    for sample in read_lines(checkout.folder / "runs" / "mine" / "samples.jsonl"):
        assert sample["reward"] == float(
            sample["response"].partition("#")[2] == answers[sample["prompt"]]
        )


def test_a_recipe_with_the_lines_marked_yours_changed_runs(
    checkout: Checkout, mine: str
) -> None:
    tried = checkout.run(f"python -m controller.fit --config {mine} --dry-run")
    assert (
        "reward.py:reward: tried on the first record and an empty response" in tried.lines
    )
    said = checkout.run(
        f"python -m controller.fit --config {mine} policy.max_tokens_per_micro_batch=16384 run.steps=2 "
        f"run.name=recipe {SMALL}"
    )
    shows_steps(said, "recipe", 2)
    # The recipe's setting.
    assert (
        said.out.count("│ reward │ advantage │") == 0 and said.out.count("completions") == 2
    )
    recorded = yaml.safe_load(
        (checkout.folder / "runs" / "recipe" / "config.yaml").read_text()
    )
    assert recorded["policy"]["max_tokens_per_micro_batch"] == 16384
    settings = checkout.run("python -m controller.fit --settings")
    assert "policy.max_tokens_per_micro_batch" in settings.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "policy.max_tokens_per_micro_batc=16384",
            "policy.max_tokens_per_micro_batc is not a setting; did you mean "
            "policy.max_tokens_per_micro_batch?",
        ),
        (
            "reward.function=rewards.py:reward",
            "reward.function='rewards.py:reward': there is no file rewards.py.",
        ),
    ],
)
def test_what_is_typed_wrong_is_told_in_one_line(
    checkout: Checkout, mine: str, arguments: str, message: str
) -> None:
    began = set((checkout.folder / "runs").iterdir())
    said = checkout.run(f"python -m controller.fit --config {mine} {arguments}", code=2)
    assert said.errors.startswith(f"error: {message}") and said.errors.count("\n") == 1, (
        said.errors
    )
    assert said.out == ""
    assert set((checkout.folder / "runs").iterdir()) == began


def test_an_own_environment_plays(checkout: Checkout, mine: str) -> None:
    code, settings = (
        next(
            block.body
            for block in blocks_of(ROOT / "docs" / "environments.md")
            if block.language == language
        )
        for language in ("python", "yaml")
    )
    checkout.write("my/guess.py", code)
    checkout.write(
        "my/train.jsonl",
        '{"prompt": "1+1=", "number": 2}\n{"prompt": "9+4=", "number": 31}\n',
    )
    checkout.write(
        "my/config.yaml",
        f"model: {{path: {CACHE}/model}}\n"
        "data: {train: my/train.jsonl, max_prompt_tokens: 26}\n"
        f"{settings.replace('max_episode_tokens: 256', 'max_episode_tokens: 96')}",
    )
    tried = checkout.run("python -m controller.fit --config my/config.yaml --dry-run")
    first = tried.lines.index("the environment adds to the first prompt:")
    assert tried.lines[first + 1 : first + 3] == [
        "    Find a number below 100. ",
        "the environment's reward of an empty response: -1, which ends the episode",
    ]
    said = checkout.run(
        f"python -m controller.fit --config my/config.yaml run.steps=2 {SMALL}"
    )
    shows_steps(said, "my", 2)
    samples = read_lines(checkout.folder / "runs" / "my" / "samples.jsonl")
    assert samples
    for sample in samples:
        assert sample["turns"][0] == {"environment": "Find a number below 100. "}
        assert "policy" in sample["turns"][1]
        assert sample["record"].startswith("number: ")
        assert sample["reward"] <= 1.0


def test_a_trained_model_is_evaluated_and_sampled_from(
    checkout: Checkout, mine: str
) -> None:
    said = checkout.run(
        f"python -m ballast evaluate --config {mine} --model runs/addition validation.samples=2"
    )
    folder = checkout.folder / "runs" / "addition"
    metrics = json.loads((folder / "evaluate" / "model" / "metrics.json").read_text())
    assert re.search(r"^reward +0\.\d+ +0\.\d+ to [01]\.\d+", said.out, re.M), said.out
    assert (
        said.lines[-1]
        == "runs/addition/evaluate/model/metrics.json: 16 samples of 8 prompts"
    )
    assert "pass@2" in json.dumps(metrics)
    again = checkout.run(
        f"python -m ballast evaluate --config {mine} --model runs/addition validation.samples=2"
    )
    assert "runs/addition/evaluate/model: 16 of 16 samples are there" in again.lines
    assert again.lines_with("reward") == said.lines_with("reward")

    said = checkout.run(
        f"python -m ballast generate --config {mine} --model runs/addition --prompts 3"
    )
    assert said.lines[-1] == "runs/addition/generate/model/samples.jsonl: 24 samples"
    lines = read_lines(folder / "generate" / "model" / "samples.jsonl")
    assert len(lines) == 24
    for line in lines:
        assert (
            len(line["log_probs"])
            == len(line["response_ids"])
            == line["response_tokens"]
            > 0
        )
        assert max(line["log_probs"]) <= 0
        assert line["reward"] == float(
            line["response"].strip().endswith(line["record"]["answer"])
        )


def test_given_responses_and_pairs_train(checkout: Checkout, addition: Said) -> None:
    said = checkout.run(
        "python -m controller.sft --config examples/addition/sft.yaml run.dir=runs run.name=sft run.steps=3 "
        "policy.optimizer.warmup_steps=0"
    )
    assert said.lines[-1].startswith("runs/sft: model, report.html")
    said = checkout.run(
        "python -m controller.preferences --config examples/addition/preferences.yaml run.steps=2"
    )
    assert len(re.findall(r"^step +\d/2  .*accuracy \d", said.out, re.M)) == 2
    assert said.lines[-1].startswith("runs/preferences: model, report.html")
    said = checkout.run(
        "python -m controller.reward_model --config examples/addition/reward_model.yaml run.steps=2 "
        "policy.optimizer.warmup_steps=0"
    )
    assert said.lines[-1].startswith("runs/reward_model: model, report.html")


def test_the_same_command_is_a_ray_job(
    checkout: Checkout, mine: str, tmp_path: Path
) -> None:
    """The README's lines, with ports that nothing else here has."""
    home = f"export RAY_AUTH_MODE=token RAY_API_SERVER_ADDRESS=http://127.0.0.1:28465 HOME={tmp_path}; "
    checkout.run(f"{home} ray get-auth-token --generate")
    checkout.run(f"{home} ray start --head --num-cpus=4 {' '.join(ports(200))}")
    shared = f"model.path=$PWD/{CACHE}/model data.train=$PWD/data/train.jsonl data.validation=$PWD/data/test.jsonl"
    fit = f"python -m controller.fit --config {mine} run.dir={tmp_path} run.name=job run.steps=2 {SMALL} {shared}"
    job = checkout.run(f"{home} ray job submit --working-dir . -- {fit}")
    assert re.search(STEP.format(2, 2), job.out), job.out
    assert json.loads((tmp_path / "job" / "summary.json").read_text())["steps"] == 2
    checkout.left(0)


def test_make_docs_builds_the_pages_and_changes_none(checkout: Checkout) -> None:
    checkout.run("make docs")
    assert "Quickstart" in (checkout.folder / "site" / "index.html").read_text()
    assert checkout.run("git diff --stat").out == ""


def test_nothing_is_left_running(checkout: Checkout) -> None:
    assert checkout.left() == []
