"""Which tokens of a conversation are learned, with every stock chat template: turns, thoughts and calls of
tools.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from controller.config import load_as
from controller.offline.examples import sft_examples, with_options
from controller.offline.offline_training import read_inputs
from controller.offline.tokenized import Row, example_row
from examples.addition.data import write_records
from examples.addition.warm_start import tokenizer as characters
from tests.controller.offline.local_run import OF_COMMAND, SCHEMAS, SETTINGS
from workers.chat_templates import variables_of
from workers.errors import DataError
from workers.model.pretrained import load_tokenizer
from workers.rendering import Renderer

STOCK = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
TEMPLATES = {path.stem: path.read_text() for path in sorted(STOCK.glob("*.jinja"))}
MARKED = [name for name in TEMPLATES if name.endswith("_training")]
UNMARKED = [name for name in TEMPLATES if name not in MARKED]
SPECIAL = re.compile(
    r"<[|｜][^<>{}%]*?[|｜]?>|<eos>|</s>|<(?:start|end)_of_(?:turn|utterance)>|<turn\|>"
)
TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def call(value: int) -> dict[str, Any]:
    return {
        "type": "function",
        "id": f"call0000{value - 70}",
        "function": {"name": "add", "arguments": {"a": value}},
    }


def turn(text: str = "", thought: str = "", calls: tuple[int, ...] = ()) -> dict[str, Any]:
    thoughts = {"reasoning_content": thought} if thought else {}
    return (
        {"role": "assistant", "content": text}
        | thoughts
        | ({"tool_calls": [*map(call, calls)]} if calls else {})
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str, number: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "content": text,
        "tool_call_id": f"call0000{number}",
        "name": "add",
    }


CONVERSATIONS = {
    "plain": [
        user("ask1"),
        turn("say1"),
        user("ask2"),
        turn("say2"),
        user("ask3"),
        turn("say3"),
    ],
    "thoughts": [
        user("ask1"),
        turn("say1", "think1"),
        user("ask2"),
        turn("say2", "think2"),
    ],
    "calls": [
        user("ask1"),
        turn(calls=(71,)),
        tool("got1", 1),
        turn("say1"),
        user("ask2"),
        turn("say2"),
    ],
    "both": [
        *(
            user("ask1"),
            turn("", "think1", (71, 72)),
            tool("got1", 1),
            tool("got2", 2),
            turn("say1", "think2"),
        ),
        *(user("ask2"), turn("", "think3", (73,)), tool("got3", 3), turn("say2", "think4")),
    ],
}
"""Contents `ask` and `got` are others', `say`, `think` and the arguments 71 to 73 the assistant's."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "", "parameters": {"properties": {}}},
    }
]
WITHOUT_TOOLS = {
    # The template refuses tools' answers.
    *("cohere", "cohere2", "gemma", "gemma3", "llava_next"),
    # Or leaves out calls.
    *("idefics3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}
# gpt-oss shows the first call of a message alone.
ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}
WORDS = re.compile(r"(?:ask|got|say|think)\d|7\d")
GIVEN = {
    "",
    "<｜Assistant｜>",
    "<｜tool▁outputs▁end｜>",
    "<|start|>assistant",
    "<think>",
    "<think></think>",
}
"""What marks hold and the policy is given: generation prompts, and thoughts that are dropped."""


def renderer(template: str) -> Renderer:
    made = characters("".join(map(chr, range(32, 127))) + "\n｜▁")
    made.backend_tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    made.add_tokens(sorted({*SPECIAL.findall(template)}), special_tokens=True)
    made.bos_token, made.chat_template, made.model_max_length = "<s>", template, 10_000
    return Renderer(made)


def row(made: Renderer, kind: str, train_on: str = "all") -> Row:
    messages, tools = CONVERSATIONS[kind], kind in ("calls", "both")
    # Some ask for arguments as a text.
    if "+ tool['function']['arguments'] +" in made.tokenizer.chat_template:
        messages = json.loads(json.dumps(messages), object_hook=with_text)
    record = {"messages": messages} | (
        {"tools": TOOLS}
        if tools and "tools" in variables_of(made.tokenizer.chat_template).read
        else {}
    )
    (example,) = with_options(
        sft_examples(record, ("messages", "prompt", "response"), kind), record, {}, kind
    )
    return example_row(made, example, kind, train_on)


def with_text(found: dict[str, Any]) -> dict[str, Any]:
    return (
        found | {"arguments": json.dumps(found["arguments"])}
        if "arguments" in found
        else found
    )


def runs(made: Renderer, ids: Any, mask: Any) -> list[str]:
    """The text of each run of tokens in the mask."""
    parts = np.split(ids, np.flatnonzero(np.diff(mask)) + 1)
    return [made.tokenizer.decode(part) for part in parts[0 if mask[0] else 1 :: 2]]


@pytest.mark.drawn(48, covers=True)
@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", UNMARKED)
def test_the_assistants_words_are_learned_with_their_end(name: str, kind: str) -> None:
    made = renderer(TEMPLATES[name])
    if (name in WITHOUT_TOOLS and kind in ("calls", "both")) or (
        name in ONE_CALL and kind == "both"
    ):
        with pytest.raises(DataError):
            row(made, kind)
        return
    found, last = row(made, kind), row(made, kind, "last")
    whole = WORDS.findall(made.tokenizer.decode(found["input_ids"]))
    turns = runs(made, found["input_ids"], found["loss_mask"])
    assert WORDS.findall("".join(turns)) == [
        word for word in whole if word[:3] not in ("ask", "got")
    ]
    assert {"say1", "say2"} <= {*whole}
    # Whose end is the next message's role.
    for text in turns[:-1] if name == "glm4moe" else turns:
        assert text.rstrip().endswith(SPECIAL.findall(text)[-1])
    (text,) = runs(made, last["input_ids"], last["loss_mask"])
    assert turns[-1].endswith(text)
    assert "think4" in text if "think4" in whole else text.count("say") == 1
    assert np.array_equal(found["input_ids"], last["input_ids"])


@pytest.mark.parametrize("name", MARKED)
def test_marks_and_rendering_agree(name: str) -> None:
    """They differ in what the generation prompt gives, which the rendering leaves out and some
    marks do not.
    """
    for kind in CONVERSATIONS:
        marked, plain = renderer(TEMPLATES[name]), renderer(TAGS.sub("", TEMPLATES[name]))
        try:
            by_marks, found = row(marked, kind), row(plain, kind)
        except DataError:
            stock = name.removesuffix("_training")
            assert (stock in WITHOUT_TOOLS and kind in ("calls", "both")) or (
                stock in ONE_CALL and kind == "both"
            )
            continue
        ids, marks, mask = found["input_ids"], by_marks["loss_mask"], found["loss_mask"]
        assert np.array_equal(ids, by_marks["input_ids"])
        assert {"".join(text.split()) for text in runs(plain, ids, marks & ~mask)} <= GIVEN
        more = (
            {"<|tool_response>", "<|turn>model"}
            if name.startswith("diffusion_gemma")
            else set()
        )
        assert {"".join(text.split()) for text in runs(plain, ids, mask & ~marks)} <= {
            "",
            *more,
        }
        assert WORDS.findall("".join(runs(plain, ids, marks))) == WORDS.findall(
            "".join(runs(plain, ids, mask))
        )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("command", ["sft", "preferences"])
def test_a_configuration_chooses_the_turns(run: Any, command: str) -> None:
    """`run` has made the workspace. Thoughts that stock Qwen3 drops are not learned."""
    made, config = (
        renderer(TEMPLATES["qwen3"]).tokenizer,
        json.loads(Path("model/config.json").read_text()),
    )
    made.save_pretrained("model")
    Path("model/config.json").write_text(json.dumps(config | {"vocab_size": len(made)}))
    messages = CONVERSATIONS["both"]
    pair = {
        "prompt": messages[:1],
        "chosen": messages[1:],
        "rejected": [*messages[1:-1], turn("say0")],
    }
    record = {"messages": messages} if command == "sft" else pair
    write_records(Path("chats.jsonl"), [record | {"tools": TOOLS}])
    settings = [
        *SETTINGS,
        *OF_COMMAND[command],
        "data.train=chats.jsonl",
        "data.max_tokens=4096",
    ]
    found = {
        turns: read_inputs(
            load_as(SCHEMAS[command], None, [*settings, f"data.train_on={turns}"])
        ).train.first(0)
        for turns in ("all", "last")
    }
    said = len(
        load_tokenizer("model")("<think>\nthink4\n</think>\n\nsay2<|im_end|>\n").input_ids
    )
    assert found["last"]["response_tokens"].tolist() == (
        [said] if command == "sft" else [said, said - len("think4")]
    )
    assert found["all"]["response_tokens"][0] > 3 * said
    assert found["all"]["length"].tolist() == found["last"]["length"].tolist()


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen2_5_training", "qwen3_training"])
def test_a_turn_of_weight_zero_is_not_learned(name: str, mark: dict[str, Any]) -> None:
    made, messages = (
        renderer(TEMPLATES[name]),
        [dict(message) for message in CONVERSATIONS["plain"]],
    )
    messages[3] |= mark
    (example,) = sft_examples(
        {"messages": json.dumps(messages)}, ("messages", "prompt", "response"), "x"
    )
    found = example_row(made, example, "x")
    assert WORDS.findall("".join(runs(made, found["input_ids"], found["loss_mask"]))) == [
        "say1",
        "say3",
    ]


@pytest.mark.parametrize(
    ("place", "mark"), [(1, {"weight": 0.5}), (1, {"train": "no"}), (0, {"weight": 1})]
)
def test_a_weight_that_cannot_be_honoured_is_refused(
    place: int, mark: dict[str, Any]
) -> None:
    made, messages = (
        renderer(TEMPLATES["qwen2_5"]),
        [dict(message) for message in CONVERSATIONS["plain"]],
    )
    messages[place] |= mark
    (example,) = sft_examples(
        {"messages": messages}, ("messages", "prompt", "response"), "x"
    )
    with pytest.raises(DataError, match=rf"message {place + 1}"):
        example_row(made, example, "x")
