"""Every command of README.md, in a block or in a sentence, is run by a test that is named here, or says why
not.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.documentation.blocks import FENCED, ROOT, blocks_of, commands

README = ROOT / "README.md"
PROGRAMS = ("python -m ", "make ", "ray ", "pip ", "tensorboard ", "source ", "controller.")
NEWCOMER = "tests/end_to_end/test_newcomer.py"
RUN = {
    f"{NEWCOMER}::checkout": ["make setup"],
    f"{NEWCOMER}::addition": ["make fit"],
    f"{NEWCOMER}::test_make_test_runs_what_it_is_asked_to": ["make test"],
    f"{NEWCOMER}::test_make_docs_builds_the_pages_and_changes_none": ["make docs"],
    "tests/end_to_end/checkout.py::start": ["source .venv/bin/activate"],
    f"{NEWCOMER}::test_a_recipe_with_the_lines_marked_yours_changed_runs": [
        "python -m controller.fit --config mine.yaml --dry-run",
        "python -m controller.fit --config mine.yaml policy.max_tokens_per_micro_batch=16384",
        "python -m controller.fit --settings",
    ],
    f"{NEWCOMER}::test_own_data_and_an_own_reward_train_as_the_quickstart_says": [
        "python -m ballast fit"
    ],
    f"{NEWCOMER}::test_given_responses_and_pairs_train": [
        "python -m controller.sft",
        "python -m controller.preferences",
        "python -m controller.reward_model",
    ],
    f"{NEWCOMER}::test_a_trained_model_is_evaluated_and_sampled_from": [
        "python -m ballast evaluate --config mine.yaml --model runs/NAME",
        "python -m ballast generate",
    ],
    f"{NEWCOMER}::test_a_run_is_looked_at_afterwards": [
        "python -m balancing runs/addition",
        "python -m ballast timeline runs/NAME",
    ],
    f"{NEWCOMER}::test_tensorboard_has_the_runs": ["tensorboard --logdir runs"],
    "tests/examples/test_launch.py::command_of": [
        "python -m controller.fit --config examples/launch/eight_gpus.yaml --dry-run "
        "--cluster nodes=1,gpus=8,gpu_gib=80,cpus=64",
        "python -m controller.fit --config examples/gsm8k/one_gpu.yaml --dry-run "
        "--cluster nodes=1,gpus=1,gpu_gib=24,cpus=8",
    ],
    f"{NEWCOMER}::test_the_same_command_is_a_ray_job": [
        "ray get-auth-token --generate",
        "export RAY_AUTH_MODE=token",
        "ray start --head",
        "ray job submit --working-dir . -- python -m controller.fit --config mine.yaml run.dir=/shared/runs",
    ],
    "tests/end_to_end/test_doctor.py::doctor": [
        "python -m ballast doctor --config mine.yaml"
    ],
}
NOT_RUN = {
    "git clone URL ballast": (
        "whoever reads it has an address; tests/end_to_end/checkout.py clones this repository"
    ),
    "cd ballast": "likewise",
    "pip install torch==2.13.0": "a CUDA build of gigabytes; requirements/gpu.txt pins what it brings",
    "pip install -e .[vllm,datasets]": "likewise; that there are such extras is shown below",
    **{
        f"python -m examples.gsm8k.data --split {split} --output data/gsm8k/{split}.jsonl": "needs the hub; "
        "tests/examples/test_gsm8k.py runs it on rows in a file"
        for split in ("train", "test")
    },
    "hf download Qwen/Qwen3-0.6B": "likewise",
    "python -m ballast doctor --config examples/gsm8k/one_gpu.yaml": "needs a GPU",
    "python -m controller.fit --config examples/gsm8k/one_gpu.yaml": "needs a GPU; its dry run is above",
    "ray up": "needs machines to log in to; tests/examples/test_launch.py gives its file to Ray's own check",
}


def commands_of_the_readme() -> set[str]:
    """Each as its words, with one space between them."""
    found = [
        words
        for block in blocks_of(README)
        if block.language == "bash"
        for words in commands(block.body)
    ]
    for span in re.findall(
        r"`([^`]+)`", FENCED.sub("", README.read_text(encoding="utf-8"))
    ):
        line = " ".join(span.split())
        found += commands(line) if line.startswith(PROGRAMS) else []
    return {" ".join(words) for words in found}


def told(command: str) -> str:
    """What of a command stands in the test that runs it: the program and its subcommand or module."""
    words = command.split()
    if words[0] == "python":
        return words[2]
    return " ".join(words[: 3 if words[:2] == ["ray", "job"] else 2])


def source_of(name: str) -> str:
    """The code of `file::function`."""
    file, _, function = name.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    (found,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return ast.get_source_segment(text, found) or ""


def test_every_command_is_run_by_a_test_or_says_why_not() -> None:
    assert commands_of_the_readme() == {
        command for listed in RUN.values() for command in listed
    } | set(NOT_RUN)


@pytest.mark.parametrize("test", RUN)
def test_the_tests_that_are_named_run_them(test: str) -> None:
    code = source_of(test)
    assert [command for command in RUN[test] if told(command) not in code] == []


def test_the_extra_that_gpu_machines_install_is_there() -> None:
    assert re.search(r"^vllm = \[\"vllm==", (ROOT / "pyproject.toml").read_text(), re.M)
    assert Path(ROOT / "requirements" / "gpu.txt").read_text().count("\ntorch==2.13.0") == 1


def test_agents_page_is_a_page_and_names_targets_that_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    targets = set(
        re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    )
    named = set(re.findall(r"\bmake ([\w-]+)", text))
    assert named
    assert named <= targets
    assert text.count("\n") <= 60
