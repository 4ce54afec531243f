"""Users' code found in a process of its own: what comes back works elsewhere, and this process has not
imported it.
"""

import os
import sys
from pathlib import Path

import cloudpickle
import pytest

from tests.refusals import refused
from workers.user_code.functions import IsolatedFunction, Signature, find_function
from workers.user_code.rewards import RewardFunction, try_rewards

PARSING = """\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--rate", default=3)
ARGUMENTS = parser.parse_args()


def score(response):
    return ARGUMENTS.rate
"""


def test_a_function_of_a_file_works_without_the_file_and_is_not_imported_here(
    tmp_path: Path,
) -> None:
    before, file = set(sys.modules), tmp_path / "mine.py"
    file.write_text(
        "BONUS = 2\n\n\ndef score(response, *, scale=1):\n    return scale * (len(response) + BONUS)\n"
    )
    found = find_function("reward.function", f"{file}:score", timeout_s=20)
    file.unlink()
    assert found.signature == Signature(
        ("response", "scale"), ("response",), takes_all=False
    )
    assert not [name for name in set(sys.modules) - before if name.endswith("mine")]
    assert (
        IsolatedFunction("reward.function", found, 20, scale=3, other=0)("abc", more=1)
        == 15
    )


CALLED = """\
import os
from pathlib import Path


def called(how, numbers=(0,)):
    values = {"pid": os.getpid(), "tuple": (1, None), "keys": {1: 2}, "path": Path("x")}
    return {how: [len(numbers), values[how]]} if how in values else os._exit(4)
"""


def test_a_process_is_kept_until_its_function_fails_and_gives_plain_values(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(CALLED)
    found = find_function("run.metrics", f"{tmp_path / 'mine.py'}:called", timeout_s=20)
    function = IsolatedFunction("run.metrics", found, 20, numbers=[1, 2, 3])
    first = function("pid")
    assert first == function("pid") and first["pid"][1] != os.getpid()
    assert function("tuple") == {"tuple": [3, [1, None]]}
    for how, told in (("keys", "{1: 2}"), ("path", "PosixPath"), ("exit", "exit code 4")):
        with refused(told):
            function(how)
    assert function("pid") != first
    function.close()


def test_a_function_of_a_module_is_found_with_no_arguments_to_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parsing.py").write_text(PARSING)
    found = find_function("reward.function", "parsing:score", timeout_s=20)
    assert "parsing" not in sys.modules
    assert cloudpickle.loads(found.packed)("") == 3


def test_what_a_module_writes_when_it_is_imported_is_seen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "telling.py").write_text(
        "import sys\nprint('here I am')\nprint('and here', file=sys.stderr)\ndef score(response): ...\n"
    )
    find_function("reward.function", f"{tmp_path / 'telling.py'}:score", timeout_s=20)
    assert capfd.readouterr() == ("here I am\n", "and here\n")


def test_a_function_may_hold_much(tmp_path: Path) -> None:
    (tmp_path / "much.py").write_text(
        "TABLE = 'x' * 2**24\n\n\ndef reward(response):\n    return len(TABLE)\n"
    )
    found = find_function("reward.function", f"{tmp_path / 'much.py'}:reward", timeout_s=60)
    assert len(found.packed) > 2**24
    function = RewardFunction("reward", 1.0, found.packed, ())
    assert try_rewards([function], {}, 30).reward == 2**24


REQUIRES = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--rate', required=True)\np.parse_args()"


@pytest.mark.parametrize(
    ("top", "told"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os\nos._exit(7)", "exit code 7"),
        ("import sys\nsys.exit(3)", "exit code 3"),
        ("import os\nos.kill(os.getpid(), 9)", "killed by SIGKILL"),
        (REQUIRES, "the following arguments are required: --rate"),
        (
            "LOG = open(__file__ + '.log', 'w')\n\ndef read():\n    return LOG",
            "LOG (TextIOWrapper)",
        ),
    ],
)
def test_an_import_that_fails_is_told_in_one_line(
    tmp_path: Path, top: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(
        f"{top}\n\n\ndef score(response):\n    return read()\n"
    )
    with refused(told):
        find_function("reward.function", f"{tmp_path / 'mine.py'}:score", timeout_s=20)


@pytest.mark.parametrize(
    "line",
    ["from yaml import safe_load", "import yaml\nyaml.safe_load('1')", "import yaml.nodes"],
    ids=["name", "attribute", "module"],
)
def test_a_file_in_the_place_of_a_package_is_named(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yaml.py").write_text("# my notes on YAML\n")
    (tmp_path / "mine.py").write_text(
        f"import sys\nsys.modules.pop('yaml', None)\n{line}\n\n\ndef score(response):\n    return 1.0\n"
    )
    with refused("yaml.py shadows the package yaml. Rename it"):
        find_function("reward.function", f"{tmp_path / 'mine.py'}:score", timeout_s=20)
