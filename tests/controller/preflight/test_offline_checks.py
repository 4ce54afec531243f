"""Settings of training on given sequences that cannot be, or do nothing, are refused in one line."""

import json
from pathlib import Path

import pytest

from controller import preferences, reward_model, sft
from controller.config.offline import (
    OfflineConfig,
    PreferencesConfig,
    RewardTrainingConfig,
    SftConfig,
)
from controller.config.schema import load_as
from controller.lifecycle.model_checks import check_models
from controller.preflight.offline_checks import check_offline
from tests.controller.tokenizer_file import END
from tests.json_lines import write_lines
from tests.refusals import refused, refused_rows


@pytest.fixture(autouse=True)
def settings_file(workspace: Path) -> None:
    (workspace / "mine.yaml").write_text(
        "model: {path: model}\ndata: {train: train.jsonl, max_tokens: 96}\n"
    )


MAINS = {
    "sft": sft.main,
    "preferences": preferences.main,
    "reward_model": reward_model.main,
}
DRY_RUN = [
    "--config",
    "mine.yaml",
    "--dry-run",
    "policy.data_parallel=2",
    "resources.device=cpu",
]
GIVEN = [
    "model.path=model",
    "data.train=train.jsonl",
    "data.max_tokens=96",
    "resources.device=cpu",
]


def check_refused(schema: type[OfflineConfig], named: str, overrides: list[str]) -> None:
    with refused(named):
        config = load_as(schema, None, [*GIVEN, *overrides])
        check_offline(config)
        check_models(config)


@refused_rows("""
data.train=
data.train=none.jsonl
data.max_tokens=512
data.image_pixels.min=2 data.image_pixels.max=1
policy.max_tokens_per_micro_batch=64
policy.data_parallel=2 batch.sequences_per_step=1
policy.min_micro_batches=33
balance.count_multiple=64
model.lora.policies=2 model.lora.rank=8
model.lora.sync=adapters model.lora.rank=8
policy.optimizer.warmup_steps=4 run.steps=3
validation.every=3
loss.constant_length loss.aggregation=sequence_mean_token_sum_norm
rollout.replicas=1
""")
def test_what_sft_cannot_be_is_refused(
    workspace: Path, named: str, overrides: list[str]
) -> None:
    check_refused(SftConfig, named, overrides)


@refused_rows("""
policy.forward_min_micro_batches=65
reference.path=model loss.name=simpo
reference.forward_max_tokens_per_micro_batch=64
policy.parallel.context_parallel=3
""")
def test_what_preferences_cannot_be_is_refused(
    workspace: Path, named: str, overrides: list[str]
) -> None:
    check_refused(PreferencesConfig, named, overrides)


@refused_rows("""
loss.center_rewards_coefficient=0.1 loss.name=regression
data.margin_key=m loss.name=process
data.score_key=s
policy.forward_max_tokens_per_micro_batch=96 loss.name=regression
model.lora.rank=4
policy.parallel.tensor_parallel=2 policy.data_parallel=1
""")
def test_what_a_reward_model_cannot_be_is_refused(
    workspace: Path, named: str, overrides: list[str]
) -> None:
    check_refused(RewardTrainingConfig, named, overrides)


def test_a_reward_model_needs_a_pad_token_that_ends_no_response(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    (workspace / "given.jsonl").write_text(json.dumps(record) + "\n")
    settings = workspace / "model" / "tokenizer_config.json"
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    for pad, code, words in ((END, 0, "pads and ends"), (None, 2, "no pad token")):
        settings.write_text(json.dumps(known | {"pad_token": pad}))
        assert reward_model.main([*DRY_RUN, "data.train=given.jsonl"]) == code
        assert words in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", ["sft", "preferences", "reward_model"])
def test_a_dry_run_says_what_would_run_and_starts_nothing(
    workspace: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "given.jsonl").write_text(
        json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n"
    )
    column = ["data.response_key=chosen"] if command == "sft" else []
    assert MAINS[command]([*DRY_RUN, "data.train=given.jsonl", *column]) == 0
    page = capsys.readouterr().out
    assert "pool training: 2 x" in page
    assert ("reference: 2 actors" in page) == (command == "preferences")
    assert "rollout" not in page
    assert "given.jsonl: 1 record\n" in page
    sequences = "1 sequence of 6 to 6" if command == "sft" else "2 sequences of 6 to 6"
    assert f"    {sequences} tokens, 6 on average; 0 above data.max_tokens dropped" in page
    assert not (workspace / "runs").exists()


@pytest.mark.parametrize("command", ["sft", "preferences", "reward_model"])
def test_a_dry_run_looks_into_every_record(
    workspace: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1="},
    ]
    write_lines(workspace / "given.jsonl", records)
    assert MAINS[command]([*DRY_RUN, "data.train=given.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: given.jsonl record 2 has ")


@pytest.mark.parametrize("command", ["sft", "preferences"])
def test_settings_and_wrong_options_of_the_command(
    workspace: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        MAINS[command](["--settings"])
    assert "loss." in capsys.readouterr().out
    assert MAINS[command](["--cluster", "2x8"]) == 2
    assert f"usage: python -m controller.{command} --config FILE" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sft", "preferences"])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no user may speak') }}", "no user may speak"),
        ("", "has no chat template"),
    ],
    ids=["raises", "none"],
)
def test_a_dry_run_tries_the_chat_template_on_whole_conversations(
    workspace: Path,
    command: str,
    template: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workspace / "model" / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template})
    )
    record = {
        "prompt": [{"role": "user", "content": "1+1="}],
        "response": "2",
        "chosen": "2",
        "rejected": "3",
    }
    (workspace / "train.jsonl").write_text(json.dumps(record))
    (workspace / "mine.yaml").write_text(
        "model: {path: model}\ndata: {train: train.jsonl, max_tokens: 96}\n"
    )
    assert (
        MAINS[command](["--config", "mine.yaml", "--dry-run", "resources.device=cpu"]) == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
