"""Users' code and chat templates that hang, exit, raise or cannot be sent on: one line, and never in the driver."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.controller.bad_inputs import BadInput, check_refused, rows

SHORT = "resources.user_code_timeout_s=1"
REWARD = "\n\ndef reward(response, solution):\n    {body}\n"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def reward(top: str = "", body: str = "return 0.0") -> Callable[[Path], object]:
    """Writes reward.py: `top` runs when it is imported, `body` when it is called."""
    return lambda folder: (folder / "reward.py").write_text(top + REWARD.format(body=body))


def file(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def template(text: str) -> Callable[[Path], object]:
    """A chat template, and data that need it."""

    def write(folder: Path) -> None:
        (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": text, "eos_token": "#"}))
        record = {"prompt": [{"role": "user", "content": "1+1="}], "solution": "2"}
        for name in ("train", "validation"):
            (folder / f"{name}.jsonl").write_text(json.dumps(record))

    return write


def loss(what: str, body: str, words: str) -> BadInput:
    """A custom loss of the predictions `p`, where `L` is REINFORCE's."""
    lines = ("from workers.model.losses import policy_loss", "", "", "@policy_loss('mine', aggregation='token_mean')")
    lines += ("def mine(p, config):", "    L = -p['advantages'] * p.log_probs", f"    {body}", "")
    overrides = [
        "algorithm.loss.name=custom",
        "algorithm.loss.function=mine.py:mine",
        "algorithm.loss.columns=solution",
    ]
    told = ["algorithm.loss.function='mine.py:mine'", words]
    return BadInput(f"a loss {what}", told, overrides, file("mine.py", "\n".join(lines)))


IMPORTS = (
    BadInput(
        "an import that raises",
        ["reward.function", "reward.py", "RuntimeError: no"],
        write=reward("raise RuntimeError('no')"),
    ),
    BadInput("an import that is no Python", ["reward.py is not valid Python"], write=file("reward.py", "def reward(:")),
    BadInput(
        "an import that hangs",
        ["reward.function", "took more than resources.user_code_timeout_s=1 s", "__main__"],
        [SHORT],
        reward("import subprocess\nsubprocess.run(['sleep', '1000'])"),
    ),
    BadInput(
        "an import that exits with a word", ["exit code 1: no key"], write=reward("import sys\nsys.exit('no key')")
    ),
    BadInput(
        "an import that holds a thread pool",
        ["reward.py", "POOL (ThreadPoolExecutor)", "make it inside the function"],
        write=reward(
            "from concurrent.futures import ThreadPoolExecutor\nPOOL = ThreadPoolExecutor()",
            "return POOL.submit(float, 0).result()",
        ),
    ),
    BadInput(
        "a reward that asks for a column",
        ["asks for ['target']"],
        write=file("reward.py", "def reward(response, target): ..."),
    ),
)

CALLS = (
    BadInput("a reward that ends its process", ["exit code 5"], write=reward("import os", "os._exit(5)")),
    BadInput(
        "a reward that hangs",
        ["took more than reward.timeout_s=0.2 s"],
        ["reward.timeout_s=0.2"],
        reward("import time", "time.sleep(99)"),
    ),
    BadInput(
        "a reward that is noisy and raises",
        ["ValueError: no"],
        write=reward("import sys", "print('x', file=sys.stderr); raise ValueError('no')"),
    ),
    BadInput(
        "a reward that raises in lines", ["ValueError: first"], write=reward(body="raise ValueError('first\\nsecond')")
    ),
)

ENVIRONMENT = "class Guess:\n    def reset(self, record):\n        {body}\n    def step(self, response): ...\n"
OTHERS = (
    BadInput(
        "an environment that exits",
        ["rollout.environment", "exit code 3"],
        ["rollout.environment=guess.py:Guess", "policy.max_tokens=9999", "rollout.max_turns=1"],
        file("guess.py", "import sys\nsys.exit(3)\n" + ENVIRONMENT.format(body="...")),
    ),
    BadInput(
        "an environment whose reset exits",
        ["rollout.environment failed", "SystemExit: 3"],
        ["rollout.environment=guess.py:Guess", "policy.max_tokens=9999", "rollout.max_turns=1"],
        file("guess.py", ENVIRONMENT.format(body="raise SystemExit(3)")),
    ),
    BadInput(
        "a curriculum that hangs",
        ["data.curriculum for epoch 0 took more than resources.user_code_timeout_s=6 s"],
        # Not SHORT: the imports before it, which end, must keep the limit on a busy machine too.
        ["data.curriculum=order.py:order", "resources.user_code_timeout_s=6"],
        file("order.py", "import time\n\n\ndef order(records, epoch):\n    time.sleep(99)\n"),
    ),
    BadInput(
        "a curriculum that names no record",
        ["returned record 1 for epoch 0, of 1 records"],
        ["data.curriculum=order.py:order"],
        file("order.py", "def order(records, epoch):\n    return [1]\n"),
    ),
    BadInput(
        "a curriculum that exits",
        ["data.curriculum for epoch 0 raised SystemExit: 2"],
        ["data.curriculum=order.py:order"],
        file("order.py", "def order(records, epoch):\n    raise SystemExit(2)\n"),
    ),
)

LOSSES = (
    BadInput(
        "a loss that is not decorated",
        ["algorithm.loss.function='losses:mine'", "does not state its normaliser"],
        ["algorithm.loss.name=custom", "algorithm.loss.function=losses:mine"],
        file("losses.py", "def mine(predictions, config): ...\n"),
    ),
    BadInput(
        "a loss that exits",
        ["algorithm.loss.function='lost:mine'", "exit code 9"],
        ["algorithm.loss.name=custom", "algorithm.loss.function=lost:mine"],
        file("lost.py", "import os\nos._exit(9)\n\n\ndef mine(predictions, config): ...\n"),
    ),
    loss(
        "with a tensor as statistic", "return L, {'kl': L.mean()}", "gave the statistic 'kl' as Tensor; wrap it by mean"
    ),
    loss("with a number as statistic", "return L, {'kl': 1.0}", "gave the statistic 'kl' as float"),
    loss("without statistics", "return L", "tried on two sequences, raised ValueError"),
    loss("of another shape", "return L.mean(), {}", "gave losses of shape () for 5 tokens"),
    loss("without gradient", "return L.detach(), {}", "tried on two sequences, raised RuntimeError"),
    loss("of no sequence", "return L / L.max(), {}", "tried on no sequence, raised RuntimeError"),
    loss("of a column that is not there", "return L * p['old_entropies'], {}", "needs the column 'old_entropies'"),
    loss(
        "of a column that is an object", "return L * p['solution'], {}", "finds it in predictions.objects['solution']"
    ),
)

TEMPLATES = (
    BadInput(
        "a broken template",
        ["chat template of model.path=model", "TemplateSyntaxError", "line 2"],
        write=template("x\n{% if %}"),
    ),
    BadInput(
        "a template that raises",
        ["chat template", "no user may speak"],
        write=template("{{ raise_exception('no user may speak') }}"),
    ),
    BadInput(
        "a template that never ends",
        ["chat template of model.path=model took more than resources.user_code_timeout_s=6 s"],
        ["resources.user_code_timeout_s=6"],
        template(ENDLESS),
        told=["waiting for the chat template of model.path=model (at most resources.user_code_timeout_s=6 s)\n"],
    ),
)


@rows(*IMPORTS, *CALLS, *OTHERS, *LOSSES, *TEMPLATES)
def test_code_and_templates_that_fail_when_they_are_tried_are_refused(
    case: BadInput, workspace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(case, workspace, capfd, monkeypatch, "--dry-run")


@rows(IMPORTS[0])
def test_a_run_refuses_what_a_dry_run_refuses(
    case: BadInput, workspace: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(case, workspace, capfd, monkeypatch)
