"""What a run reads and tries before it starts, with a real tokenizer: from a configuration to prompts."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.config import Config, load
from controller.lifecycle.input_lines import tried_lines
from controller.lifecycle.inputs import try_inputs
from controller.lifecycle.tokenized_inputs import Inputs, load_renderer, read_inputs
from tests.benchmarks.families.shrinking import tiny_config
from tests.controller.bad_inputs import BadInput, check_line
from tests.controller.stand_ins.run import SETTINGS
from tests.json_lines import write_lines
from tests.workers.rollout.stock_templates import FOLDER
from tests.workers.tokenizer_schemes import make_word_pieces
from tests.workers.vision_families import pictures
from workers.batch.dataproto import DataProto
from workers.errors import BallastError, DataError
from workers.model.rules.families import IMAGES_SEE_AHEAD
from workers.rendering import Renderer
from workers.roles.reward import RewardWorker, ScoreRequest

CHAT = "{% for m in messages %}{{ raise_exception('no x') if m.content == 'x' else m.content }}{% endfor %}"
TOLD = (
    "from workers.environment import Observation\n\n\n"
    "class Told:\n"
    "    def reset(self, record):\n        return ''\n\n"
    "    def step(self, response):\n        return Observation('2+2=')\n"
)
PLAIN_CHAT = "{% for m in messages %}{{ m.role + ' ' + m.content + eos_token }}{% endfor %}"
ENDLESS = (
    "{% for m in messages %}{% if m.content == 'x' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture
def workspace(stand_in_workspace: Path) -> Path:
    return stand_in_workspace


def config_of(*overrides: str) -> Config:
    return load(None, [*SETTINGS, "data.validation=''", *overrides])


def inputs_of(*overrides: str) -> Inputs:
    return read_inputs(config_of(*overrides))


def refusal(*overrides: str) -> str:
    with pytest.raises(BallastError) as caught:
        inputs_of(*overrides)
    return f"error: {caught.value}\n"


@pytest.mark.parametrize("history", ["auto", "template", "keep"])
def test_a_tokenizer_that_loses_blanks_is_named_and_plays_no_rewritten_history(
    workspace: Path, history: str
) -> None:
    make_word_pieces(PLAIN_CHAT).save_pretrained("model")
    (workspace / "chats.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "one"}]})
    )
    described = json.loads(Path("model/config.json").read_text()) | {"vocab_size": 256}
    Path("model/config.json").write_text(json.dumps(described))
    (workspace / "told.py").write_text(TOLD)
    played = [
        "rollout.environment=told.py:Told",
        "data.max_prompt_tokens=32",
        "rollout.max_turns=2",
        "reward.function=''",
    ]
    overrides = ["data.train=chats.jsonl", *played, f"rollout.history={history}"]
    if history == "keep":
        inputs = inputs_of(*overrides)
        assert sum("loses blanks" in line for line in inputs.warnings) == 1
    else:
        assert refusal(*overrides).startswith(f"error: rollout.history={history}: ")


def test_a_line_of_megabytes_is_left_out_without_being_tokenized(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"prompt": "1+" * 3_000_000}, {"prompt": "1+1="}]
    write_lines(workspace / "long.jsonl", records)
    tokenized: list[object] = []
    whole = Renderer.prompt_ids
    monkeypatch.setattr(
        Renderer,
        "prompt_ids",
        lambda self, prompt, *rest: tokenized.append(prompt) or whole(self, prompt, *rest),
    )
    (source,) = inputs_of("data.train=long.jsonl").sources
    assert (len(source), source.dropped, tokenized) == (1, 1, ["1+1="])


def test_a_cap_below_the_images_of_a_prompt_is_refused(
    workspace: Path, vision_model: Callable[[str], Path]
) -> None:
    pictures()[0].save("a.png")
    content = [{"type": "image"}, {"type": "text", "text": "1+1="}]
    (workspace / "seen.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": content}], "images": ["a.png"]})
    )
    given = [
        f"model.path={vision_model('qwen2_5_vl')}",
        "data.train=seen.jsonl",
        "data.max_prompt_tokens=64",
    ]
    cap = "policy.max_patches_per_micro_batch="
    assert f"{cap}23: the images of a prompt have 24 patches" in refusal(*given, f"{cap}23")
    inputs_of(*given, f"{cap}24")


MARKED = {
    "text": "<image>1+1=",
    "chat": [{"role": "user", "content": "<image>1+1="}],
    "part": [{"role": "user", "content": [{"type": "text", "text": "<image>1+1="}]}],
}
PICTURES = {
    "image": "a.png",
    "img_path": "a.png",
    "pictures": ["a.jpeg"],
    "photo": {"bytes": None, "path": "a.png"},
    "screenshots": [{"bytes": None, "path": "a.png"}],
}


@pytest.mark.parametrize("case", MARKED)
@pytest.mark.parametrize("column", ["", "image"])
def test_a_mark_without_an_image_is_refused(
    case: str, column: str, workspace: Path, vision_model: Callable[[str], Path]
) -> None:
    prompt = MARKED[case]
    record = {"prompt": prompt} | ({column: "a.png"} if column else {})
    (workspace / "marked.jsonl").write_text(json.dumps(record))
    given = ["data.train=marked.jsonl", "data.max_prompt_tokens=64"]
    line = refusal(f"model.path={vision_model('qwen2_5_vl')}", *given)
    assert (
        "marked.jsonl record 1" in line
        and "data.image_key" in line
        and (not column or "'image'" in line)
    )
    if isinstance(prompt, str):  # the mark is text for a model that reads none
        inputs_of(*given)


@pytest.mark.parametrize("column", PICTURES)
def test_a_column_of_images_that_nobody_reads_is_named(
    column: str, workspace: Path, vision_model: Callable[[str], Path]
) -> None:
    (workspace / "blind.jsonl").write_text(
        json.dumps({"prompt": "1+1=", column: PICTURES[column]})
    )
    given = ["data.train=blind.jsonl", "data.max_prompt_tokens=64"]
    (warning,) = inputs_of(*given, f"model.path={vision_model('qwen2_5_vl')}").warnings
    assert "data.image_key='images'" in warning and repr(column) in warning
    (unread,) = inputs_of(*given).warnings  # of a model that reads text alone
    assert repr(column) in unread and "data.image_key" not in unread


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("videos", ["a.mp4"]),
        ("video", "clips/a.webm"),
        ("audio_path", "a.wav"),
        ("audios", [{"path": "a.flac"}]),
    ],
)
def test_videos_and_sounds_beside_a_prompt_are_named(
    column: str, value: Any, workspace: Path, vision_model: Callable[[str], Path]
) -> None:
    (workspace / "films.jsonl").write_text(json.dumps({"prompt": "1+1=", column: value}))
    given = ["data.train=films.jsonl", "data.max_prompt_tokens=64"]
    for model in ([], [f"model.path={vision_model('qwen2_5_vl')}"]):
        (warning,) = inputs_of(*given, *model).warnings
        assert repr(column) in warning and "Videos and sounds are never read" in warning
        assert "data.image_key" not in warning


@pytest.mark.parametrize("family", IMAGES_SEE_AHEAD)
def test_images_whose_tokens_see_ahead_are_refused_before_the_run(
    family: str, workspace: Path, vision_model: Callable[[str], Path]
) -> None:
    """Rows and engines are causal: vLLM reads images of these causally on CPUs, too. Texts alone are trained."""
    folder = workspace / family
    shutil.copytree(vision_model("gemma3"), folder)
    (folder / "config.json").write_text(tiny_config(family).to_json_string(use_diff=False))
    pictures()[0].save("a.png")
    content = [{"type": "image"}, {"type": "text", "text": "1+1="}]
    given = [f"model.path={folder}", "data.train=seen.jsonl", "data.max_prompt_tokens=64"]
    record = {"prompt": [{"role": "user", "content": content}], "images": ["a.png"]}
    (workspace / "seen.jsonl").write_text(json.dumps(record))
    line = refusal(*given)
    assert (
        f"model.path={folder}" in line
        and "seen.jsonl record 1 has images" in line
        and f"({family})" in line
    )
    (workspace / "seen.jsonl").write_text(json.dumps({"prompt": "1+1="}))
    inputs_of(*given)


def test_a_template_that_raises_on_a_later_prompt_names_the_record(workspace: Path) -> None:
    (workspace / "model" / "chat_template.jinja").write_text(CHAT)
    contents = ["1+1="] * 40 + ["x"]
    records = [{"prompt": [{"role": "user", "content": content}]} for content in contents]
    write_lines(workspace / "chat.jsonl", records)
    line = refusal("data.train=chat.jsonl")
    check_line(
        BadInput("later", ["chat.jsonl record 41 is not rendered", "TemplateError: no x"]),
        2,
        line,
    )


def test_answers_that_the_math_reward_cannot_read_are_counted_before_a_run(
    workspace: Path,
) -> None:
    answers = ["72", None, "{{", ["1", "2"], 0.5]
    records = [{"prompt": "1+1=", "answer": answer} for answer in answers]
    write_lines(workspace / "math.jsonl", records)
    math = [
        "data.train=math.jsonl",
        "reward.function=workers.reward_functions:math",
        "data.validation=''",
    ]
    config = load(None, [*SETTINGS, *math])
    tried = try_inputs(config)
    refused, texts = tried.answer_warnings
    assert all(
        part in refused for part in ("math.jsonl", "2 of 5", "record 2", "answer=None")
    )
    assert all(part in texts for part in ("math.jsonl", "1 of 5", "record 3"))
    assert f"warning: {refused}" in tried_lines(config, tried)
    write_lines(workspace / "math.jsonl", records[:1])
    assert try_inputs(config).answer_warnings == ()


def test_an_environment_needs_a_template_that_shows_its_answers(workspace: Path) -> None:
    """Stock Qwen3's changes earlier turns, which does not matter."""
    (workspace / "chat.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "1+1="}]})
    )
    (workspace / "told.py").write_text(TOLD)
    template = workspace / "model" / "chat_template.jinja"
    overrides = [
        "data.train=chat.jsonl",
        "rollout.environment=told.py:Told",
        "rollout.max_turns=2",
        "reward.function=''",
    ]
    template.write_text((FOLDER / "qwen3.jinja").read_text())
    (source,) = inputs_of("data.max_prompt_tokens=80", *overrides).sources
    assert len(source) == 1
    template.write_text("{{ messages[0]['content'] }}")
    assert refusal(*overrides).startswith("error: rollout.environment")


def test_a_template_that_never_ends_on_a_later_prompt_is_ended(workspace: Path) -> None:
    (workspace / "model" / "chat_template.jinja").write_text(ENDLESS)
    renderer = load_renderer(load(None, [*SETTINGS, "resources.user_code_timeout_s=0.2"]))
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(
        DataError,
        match=r"record 41 is not rendered .* took more than resources.user_code_timeout_s=",
    ):
        renderer.text(messages, "chat.jsonl record 41")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_reward_sees_special_tokens_where_it_asks_for_the_raw_response(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "raw.py").write_text(
        "def one(response, response_raw):\n"
        "    return {'reward': float(response == '12'), 'ends': response_raw.count('<eos>')}\n\n\n"
        "def many(responses, response_raw, level=0):\n"
        "    return [len(raw) for raw in response_raw]\n"
    )
    functions = read_inputs(
        load(
            None,
            [
                *SETTINGS,
                "reward.function=''",
                "reward.functions={raw.py:one: 1, raw.py:many: 1}",
            ],
        )
    ).reward_functions
    worker = RewardWorker(functions, "model", timeout_s=5, concurrency=1)
    ids = worker._tokenizer.convert_tokens_to_ids(["1", "=", "1", "2", "<eos>"])
    versions = np.array([-1, -1, 0, 0, 0], np.int32)
    block = DataProto.from_rows(
        [{"input_ids": np.array(ids, np.int32), "weight_versions": versions}]
    )
    (score,) = worker.score(block, [ScoreRequest(0, 2, {"level": 1})])
    assert (score.response, score.failure) == ("12", "")
    assert (score.parts["one/ends"], score.reward) == (1.0, 1.0 + len("12<eos>"))
    monkeypatch.setattr("workers.roles.reward.LONGEST_SENT", 2)
    scores = worker.score(
        block, [ScoreRequest(0, start, {"level": 1}, texts=False) for start in (2, 3)]
    )
    assert [found.response for found in scores] == ["", "2"]
    assert scores[0].reward == score.reward and scores[0].parts == score.parts


def test_in_another_thread_prompts_are_rendered_without_a_limit(workspace: Path) -> None:
    (workspace / "model" / "chat_template.jinja").write_text(CHAT)
    renderer = load_renderer(load(None, SETTINGS))
    messages = [{"role": "user", "content": "12"}]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(renderer.text, messages, "chat.jsonl record 1").result() == "12"


def test_a_curriculum_orders_a_run_and_is_not_imported_by_it(workspace: Path) -> None:
    (workspace / "order.py").write_text(
        "import os\n"
        f"assert os.getpid() != {os.getpid()}\n\n\n"
        "def order(records, epoch):\n"
        "    by_length = sorted(range(len(records)), key=lambda i: -len(records[i]['prompt']))\n"
        "    return by_length[: 2 + epoch]\n"
    )
    prompts = inputs_of("data.curriculum=order.py:order").prompts
    assert [prompt.columns["prompt"] for prompt in prompts.take(0, 5)] == [
        "1+1=",
        "2+2=",
        "1+1=",
        "2+2=",
        "3+3=",
    ]


def test_a_judges_question_and_chat_template_are_tried_before_anything_starts(
    workspace: Path,
) -> None:
    config = config_of("reward.judge.model=model")
    assert "    </response>" in tried_lines(config, try_inputs(config))
    template = workspace / "model" / "chat_template.jinja"
    options = "reward.judge.chat_template_arguments={thinks: false}"
    assert refusal("reward.judge.model=model", options).startswith(
        "error: reward.judge.chat_template_arguments="
    )
    template.write_text(CHAT)
    read_inputs(config)
    assert "never reads 'thinks'" in refusal("reward.judge.model=model", options)
    template.write_text("{{ raise_exception('no') }}")
    assert refusal("reward.judge.model=model").startswith(
        "error: the chat template of reward.judge.model=model"
    )
    template.unlink()
    for prompt in ("{{ x }}", "Grade {{ prompt }}"):
        told = refusal("reward.judge.model=model", f"reward.judge.prompt='{prompt}'")
        assert told.startswith("error: reward.judge.prompt: ")
