from pathlib import Path

import cloudpickle
import pytest

from controller.config.functions import requested_columns
from workers.environment import Observation
from workers.errors import ConfigError, DataError
from workers.score import as_score
from workers.user_code.environments import try_environment
from workers.user_code.functions import load, signature_of
from workers.user_code.rewards import RewardFunction, try_rewards

RECORD = {"prompt": "1+1=", "answer": "2", "source": "x"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward", "must be module:function or path/file.py:function"),
        ("no.such.module:reward", "module 'no.such.module' cannot be imported"),
        ("no/such/file.py:reward", "there is no file no/such/file.py"),
        ("examples.addition.reward:grade", "has no function 'grade'"),
    ],
)
def test_what_is_missing_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data.curriculum.*{message}"):
        load("data.curriculum", name)


def test_a_function_gets_the_columns_that_it_names() -> None:
    assert requested_columns(signature_of(lambda response, answer: 0.0), RECORD, "f") == ("answer",)
    assert requested_columns(signature_of(lambda response, prompt, source="": 0.0), RECORD, "f") == ("prompt", "source")
    assert requested_columns(signature_of(lambda response, **columns: 0.0), RECORD, "f") == (
        "answer",
        "prompt",
        "source",
    )
    assert requested_columns(signature_of(lambda response, strict=True: 0.0), RECORD, "f") == ()


def test_a_column_that_the_data_lacks_is_named() -> None:
    message = r"'f' asks for \['solution'\], but the data has \['answer', 'prompt', 'source'\]"
    with pytest.raises(ConfigError, match=message):
        requested_columns(signature_of(lambda response, solution: 0.0), RECORD, "f")
    with pytest.raises(ConfigError, match="must take a parameter 'response'"):
        requested_columns(signature_of(lambda text: 0.0), {"text": "x"}, "f")


def test_a_reward_of_trl_is_answered_with_the_parameters_here() -> None:
    for reward in (lambda completions, **columns: [0.0], lambda prompts, completions: [0.0]):
        with pytest.raises(ConfigError, match="takes 'completions', as rewards of TRL do; here it takes 'responses'"):
            requested_columns(signature_of(reward), RECORD, "f")


def test_a_reward_is_a_number_or_a_mapping_with_one() -> None:
    assert as_score(1, "x").reward == 1.0
    score = as_score({"reward": 0.5, "exact": True}, "x")
    assert (score.reward, score.parts) == (0.5, {"exact": 1.0})
    assert [as_score({"reward": 1, "answer": answer}, "x").answer for answer in (None, "", 4)] == ["", "", "4"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "must return finite float32 numbers, it returned None for 'x'"),
        ("high", "must return finite float32 numbers"),
        ({"score": 1.0}, r"a mapping without 'reward': \['score'\]"),
        (float("nan"), "returned nan for 'x'"),
        (float("inf"), "returned inf"),
        ({"reward": 1.0, "exact": float("nan")}, "returned {'exact': nan, 'reward': 1.0}"),
    ],
)
def test_what_is_no_reward_is_refused(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_score(value, "x")


def test_a_module_that_fails_on_import_is_named_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import math\nmath.no_such_thing\n")
    with pytest.raises(ConfigError, match=r"broken\.py cannot be imported: AttributeError"):
        load("reward.function", f"{tmp_path / 'broken.py'}:reward")


def test_a_function_that_cannot_score_any_text_is_refused_before_the_run() -> None:
    def last_word(response: str, answer: str) -> float:
        return float(response.split()[-1] == answer)

    functions = [RewardFunction("last_word", 1.0, cloudpickle.dumps(last_word), ("answer",))]
    with pytest.raises(ConfigError, match="on the first record and an empty response: last_word: raised IndexError"):
        try_rewards(functions, RECORD, 5)


def test_half_a_character_of_an_environment_stays_in_its_process() -> None:
    class Halves:
        def reset(self, record: dict[str, object]) -> str:
            return "x\ud800"

        def step(self, response: str) -> Observation:
            return Observation("y\ud800", reward=0.0, parts={"z\ud800": 1.0})

    answered = try_environment(cloudpickle.dumps(Halves), RECORD, 5)
    assert (answered.opening, answered.observation) == ("x?", Observation("y?", reward=0.0, parts={"z?": 1.0}))
