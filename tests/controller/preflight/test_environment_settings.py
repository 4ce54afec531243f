"""rollout.environment: what is refused before anything starts, and the example of docs/environments.md,
played.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from controller.config import load
from controller.data.prompts import Prompt
from controller.preflight.checks import check
from controller.rollout.buffer import sample_requests
from tests.controller.config_workspace import write_workspace
from tests.refusals import refused, refused_rows
from workers.environment import Observation
from workers.user_code.environments import EnvironmentPool, try_environment
from workers.user_code.functions import find_class

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
ENVIRONMENT = [
    "rollout.environment=guess.py:Guess",
    "rollout.max_turns=2",
    'reward.function=""',
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """config.yaml of a workspace with the page's example as guess.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess.py").write_text(
        re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    )
    return write_workspace(tmp_path)


def pack_environment(name: str) -> bytes:
    return find_class("rollout.environment", name, ("reset", "step"), timeout_s=20.0)


def play(packed: bytes, record: dict[str, Any], *turns: str) -> list[Any]:
    async def episode() -> list[Any]:
        pool = EnvironmentPool(packed, timeout_s=10.0)
        try:
            async with pool.episode() as environment:
                return [
                    await environment.reset(record),
                    *[await environment.step(turn) for turn in turns],
                ]
        finally:
            await pool.stop()

    return asyncio.run(episode())


def test_the_pages_example_plays(file: Path) -> None:
    packed = pack_environment("guess.py:Guess")
    answered = try_environment(packed, {"number": 40}, 10.0)
    assert (answered.opening, answered.observation.reward) == (
        "Find a number below 100. ",
        -1.0,
    )
    opening, first, second, last = play(packed, {"number": 40}, "10", " 50", "40")
    assert opening == "Find a number below 100. "
    assert [first.text, second.text] == ["more", "less"]
    assert last == Observation(reward=1.0, done=True, parts={"found": 1.0})


def test_the_pages_settings_are_settings(file: Path) -> None:
    (file.parent / "page.yaml").write_text(
        re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    )
    assert load(file.parent / "page.yaml", ["model.path=model"]).longest_response == 256


def test_an_environment_needs_no_reward_function(file: Path) -> None:
    config = load(file, [*ENVIRONMENT, "rollout.sampling.max_new_tokens=40"])
    check(config)
    assert config.reward.weights == {}
    assert config.longest_sequence == 32 + 2 * 40
    with refused("reward.function"):
        check(load(file, ['reward.function=""']))


@refused_rows("""
rollout.environment=guess.py:Gues
data.continue_last_message=true
rollout.max_episode_tokens=60
policy.max_tokens_per_micro_batch=159
reward.overlong_tokens=128
rollout.max_model_tokens=159
rollout.tools=guess.py
rollout.reasoning_parser=mine
""")
def test_impossible_limits_are_refused(
    file: Path, named: str, overrides: list[str]
) -> None:
    with refused(named):
        check(load(file, [*ENVIRONMENT, *overrides]))


ONE_ROW = [
    "algorithm.advantage=gae",
    "algorithm.loss.name=gspo",
    "algorithm.loss.rollout_correction.weights=sequence",
]


@pytest.mark.parametrize("needs", ONE_ROW)
def test_what_needs_a_sample_in_one_row_keeps_it_so_or_is_refused(
    file: Path, needs: str
) -> None:
    assert load(file, ENVIRONMENT).history == "template"
    assert load(file, [*ENVIRONMENT, needs]).history == "keep"
    with refused("rollout.history=template"):
        check(load(file, [*ENVIRONMENT, needs, "rollout.history=template"]))
    with refused("rollout.history=keep"):
        check(load(file, ["rollout.history=keep"]))  # without turns it has no effect


@pytest.mark.parametrize(
    "source", ["def Guess(): pass", "class Guess:\n    def reset(self, record): pass"]
)
def test_what_is_no_environment_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "guess.py").write_text(source)
    with refused("rollout.environment"):
        pack_environment(f"{tmp_path / 'guess.py'}:Guess")


def test_one_that_fails_on_the_first_record_is_refused(file: Path) -> None:
    with refused("KeyError: 'number'"):
        try_environment(pack_environment("guess.py:Guess"), {"prompt": "x"}, 10.0)


def test_requests_carry_the_record_and_the_prompt_as_it_was_tokenized(file: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    prompt = Prompt("7", [1, 2], {"prompt": chat, "number": 3})
    config = load(file, [*ENVIRONMENT, "data.system_prompt=be brief"])
    first, second = sample_requests(config, [prompt], samples=2, step=1)
    assert first.start.record == prompt.columns
    assert first.start.prompt == [{"role": "system", "content": "be brief"}, *chat]
    assert (first.key, second.key) == (("7", 0), ("7", 1)) and first.seed != second.seed
    assert sample_requests(load(file), [prompt], samples=1, step=1)[0].start is None
