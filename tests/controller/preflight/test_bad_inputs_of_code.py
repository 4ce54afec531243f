"""Users' code and chat templates that hang, exit, raise or cannot be sent on: one line, and never in the
driver.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.controller.bad_inputs import BadInput, check_refused, rows
from tests.controller.preflight.test_bad_inputs import DATA, MACHINE

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
        (folder / "model" / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": text, "eos_token": "#"})
        )
        record = {"prompt": [{"role": "user", "content": "1+1="}], "solution": "2"}
        for name in ("train", "validation"):
            (folder / f"{name}.jsonl").write_text(json.dumps(record))

    return write


def loss(what: str, body: str, words: str) -> BadInput:
    """A custom loss of the predictions `p`, where `L` is REINFORCE's."""
    lines = (
        "from workers.model.losses import mean, policy_loss",
        "",
        "",
        "@policy_loss('mine', aggregation='token_mean')",
    )
    lines += (
        "def mine(p, config):",
        "    L = -p['advantages'] * p.log_probs",
        f"    {body}",
        "",
    )
    overrides = [
        "algorithm.loss.name=custom",
        "algorithm.loss.function=mine.py:mine",
        "algorithm.loss.columns=solution",
    ]
    told = ["algorithm.loss.function='mine.py:mine'", words]
    return BadInput(f"a loss {what}", told, overrides, file("mine.py", "\n".join(lines)))


def function(
    what: str, top: str, body: str, *words: str, overrides: Sequence[str] = ()
) -> BadInput:
    """A reward function of which `top` runs at its import and `body` at its call."""
    return BadInput(f"a reward that {what}", words, overrides, reward(top, body))


IMPORTS = (
    function(
        "raises at its import",
        "raise RuntimeError('no')",
        "...",
        "reward.function",
        "RuntimeError: no",
    ),
    function(
        "hangs at its import",
        "import subprocess\nsubprocess.run(['sleep', '1000'])",
        "...",
        *("reward.function", "resources.user_code_timeout_s=1", "__main__"),
        overrides=["resources.user_code_timeout_s=1"],
    ),
    function(
        "exits at its import with a word",
        "import sys\nsys.exit('no key')",
        "...",
        "exit code 1: no key",
    ),
    function(
        "holds a thread pool",
        "from concurrent.futures import ThreadPoolExecutor\nPOOL = ThreadPoolExecutor()",
        "return POOL.submit(float, 0).result()",
        "POOL (ThreadPoolExecutor)",
    ),
    BadInput(
        "a reward that is no Python", ["reward.py"], write=file("reward.py", "def reward(:")
    ),
    BadInput(
        "a reward without its column",
        ["'target'"],
        write=file("reward.py", "def reward(response, target): ..."),
    ),
)
CALLS = (
    function("ends its process", "import os", "os._exit(5)", "exit code 5"),
    function(
        "hangs",
        "import time",
        "time.sleep(99)",
        "reward.timeout_s=0.2",
        overrides=["reward.timeout_s=0.2"],
    ),
    function(
        "is noisy and raises",
        "import sys",
        "print('x', file=sys.stderr); raise ValueError('no')",
        "ValueError: no",
    ),
    function(
        "raises in lines", "", "raise ValueError('first\\nsecond')", "ValueError: first"
    ),
)

ENVIRONMENT = "class Guess:\n    def reset(self, record):\n        {body}\n    def step(self, response): ...\n"


def environment(what: str, text: str, *words: str) -> BadInput:
    overrides = [
        "rollout.environment=guess.py:Guess",
        "policy.max_tokens_per_micro_batch=9999",
        "rollout.max_turns=1",
    ]
    return BadInput(
        f"an environment that {what}",
        ["rollout.environment", *words],
        overrides,
        file("guess.py", text),
    )


def tools(
    what: str,
    text: str,
    *words: str,
    shown: str = "<tool_call>",
    overrides: Sequence[str] = (),
) -> BadInput:
    """Tools for a chat template that shows `shown`, or for prompts that are texts."""

    def write(folder: Path) -> None:
        (folder / "tools.py").write_text(text)
        if shown:
            template("{{ tools }}{{ messages[0].content }}" + shown)(folder)

    set_to = [
        "rollout.tools=tools.py",
        "policy.max_tokens_per_micro_batch=9999",
        "rollout.max_turns=1",
    ]
    return BadInput(
        f"tools {what}", ["rollout.tools", *words], [*set_to, *overrides], write
    )


def curriculum(what: str, body: str, *words: str) -> BadInput:
    text = f"import time\n\n\ndef order(records, epoch):\n    {body}\n"
    # The imports before it, which end, must keep the limit on a busy machine too.
    overrides = ["data.curriculum=order.py:order", "resources.user_code_timeout_s=6"]
    return BadInput(
        f"a curriculum that {what}",
        ["data.curriculum", *words],
        overrides,
        file("order.py", text),
    )


OTHERS = (
    environment(
        "exits", "import sys\nsys.exit(3)\n" + ENVIRONMENT.format(body="..."), "exit code 3"
    ),
    environment(
        "exits when it is reset",
        ENVIRONMENT.format(body="raise SystemExit(3)"),
        "SystemExit: 3",
    ),
    curriculum("hangs", "time.sleep(99)", "resources.user_code_timeout_s=6"),
    curriculum("names no record", "return [1]", "record 1", "of 1 records"),
    curriculum("exits", "raise SystemExit(2)", "SystemExit: 2"),
)

TOOL = "def add(a: int) -> int:\n    'Adds.\\n\\n    Args:\\n        a: Number.\\n'\n    return a\n"
TOOLS = (
    tools("without type hints", TOOL.replace(": int)", ")"), "add", "type hint"),
    tools("without a docstring", "def add(a: int): ...\n", "add", "docstring"),
    tools("that exit at their import", "import sys\nsys.exit(3)\n" + TOOL, "exit code 3"),
    tools("without functions", "x = 1\n", "no public function"),
    tools("for prompts that are texts", TOOL, "texts", shown=""),
    tools(
        "that no parser is known for",
        TOOL,
        "rollout.tool_parser",
        "hermes",
        "qwen3_coder",
        shown=".",
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
        "with a tensor as statistic",
        "return L, {'kl': L.mean()}",
        "gave the statistic 'kl' as Tensor. Wrap it by mean",
    ),
    loss(
        "with a number as statistic",
        "return L, {'kl': 1.0}",
        "gave the statistic 'kl' as float",
    ),
    loss("without statistics", "return L", "the loss returned a Tensor. Return"),
    loss("without a result", "pass", "the loss returned None. Return"),
    loss(
        "with statistics in a list",
        "return L, [1]",
        "the loss returned a pair of Tensor and list",
    ),
    loss(
        "in NumPy",
        "return L.detach().numpy(), {}",
        "the loss returned a pair of ndarray and dict",
    ),
    loss("of three values", "return L, {}, 1", "the loss returned a tuple"),
    loss(
        "with a statistic of a reserved name",
        "return L, {'loss': mean(L)}",
        "gave the statistic 'loss'",
    ),
    loss(
        "with a statistic of the optimiser's name",
        "return L, {'grad_norm': mean(L)}",
        "the statistic 'grad_norm'",
    ),
    loss(
        "with a number as a statistic's name",
        "return L, {1: mean(L)}",
        "gave a statistic named 1",
    ),
    loss("that is not finite", "return L / 0, {}", "tried on two sequences: the loss is"),
    loss(
        "whose gradient is not finite",
        "return (p.log_probs + 1) ** 0.5, {}",
        "the gradient of the loss",
    ),
    loss(
        "of a misspelt column",
        "return L * p['advantage'], {}",
        "Did you mean 'advantages'?",
    ),
    loss("of another shape", "return L.mean(), {}", "gave losses of shape () for 5 tokens"),
    loss(
        "without gradient",
        "return L.detach(), {}",
        "tried on two sequences: the losses have no gradient",
    ),
    loss(
        "of no sequence",
        "return L / L.max(), {}",
        "tried on no sequence, raised RuntimeError",
    ),
    loss(
        "of a column that is not there",
        "return L * p['old_entropies'], {}",
        "needs the column 'old_entropies'",
    ),
    loss(
        "of a column that is an object",
        "return L * p['solution'], {}",
        "finds it in predictions.objects['solution']",
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
        [
            "chat template of model.path=model took more than resources.user_code_timeout_s=6 s"
        ],
        ["resources.user_code_timeout_s=6"],
        template(ENDLESS),
        told=[
            "waiting for the chat template of model.path=model (at most resources.user_code_timeout_s=6 s)\n"
        ],
    ),
)


@pytest.mark.drawn(8)
@rows(*IMPORTS, *CALLS, *OTHERS, *TOOLS, *LOSSES, *TEMPLATES)
def test_code_and_templates_that_fail_when_they_are_tried_are_refused(
    case: BadInput,
    workspace: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_refused(case, workspace, capfd, monkeypatch, "--dry-run")


@rows(IMPORTS[0], DATA[0], MACHINE[0])
def test_a_run_refuses_what_a_dry_run_refuses(
    case: BadInput,
    workspace: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_refused(case, workspace, capfd, monkeypatch)
