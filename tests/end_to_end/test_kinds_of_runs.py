"""Runs with other parts than `test_whole_loop.py` has: stages, PPO with a reward model, episodes, experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from examples.addition.warm_start import create_model
from examples.tools import data as tools_data
from examples.tools import warm_start as tools
from tests.end_to_end.test_whole_loop import Run, assert_engine_equals_saved_model, run_loop
from workers.errors import RolloutError

pytestmark = pytest.mark.usefixtures("ray_session")
RATE = "policy.optimizer.learning_rate=1e-3"
UNVALIDATED = ("data.validation=''", "validation.prompts=0")


def test_a_run_in_stages_hands_on_its_weights_and_goes_on_without_stages(
    settings: list[str],
) -> None:
    """Two stages of two parts each, and ReMax: a greedy response to each prompt is its baseline.

    The mismatch of each step is that between the engine's weights of this version and the stages' own.
    """
    common = [
        *settings,
        *UNVALIDATED,
        RATE,
        "batch.mini_batches=2",
        "algorithm.loss.kl_coefficient=0.1",
        "run.steps=2",
    ]
    common += ["run.checkpoint_every=1", "algorithm.advantage=remax"]
    cut = [
        "policy.data_parallel=1",
        "policy.parallel.pipeline_parallel=2",
        "policy.parallel.virtual_stages=2",
    ]
    staged = run_loop([*common, "run.name=staged", *cut])
    steps = staged.outcome.steps
    assert [step["rollout/weight_version"] for step in steps] == [1.0, 2.0]
    assert all(step["policy/rollout_mismatch_max"] <= 3e-5 for step in steps)
    assert 0 < steps[0]["policy/reference_kl"] < steps[1]["policy/reference_kl"]
    assert all(
        0 <= step["reward/greedy"] <= 1 and step["rollout/samples"] == 15 for step in steps
    )
    assert any(step["reward/greedy"] != step["reward/mean"] for step in steps)
    begin = staged.folder / "checkpoints"
    again = run_loop(
        [*common, "run.name=whole", f"run.resume={begin / 'policy' / 'step-1'}"]
    )
    (second,) = again.outcome.steps
    for name in (
        "policy/loss",
        "policy/grad_norm",
        "policy/reference_kl",
        "reward/mean",
        "reward/greedy",
    ):
        assert second[name] == pytest.approx(steps[1][name], abs=1e-6), name
    first, last = (
        load_file(run.folder / "model" / "model.safetensors") for run in (staged, again)
    )
    assert first.keys() == last.keys()
    for name, weight in first.items():
        torch.testing.assert_close(last[name], weight, rtol=0, atol=1e-5)


PPO = (
    *UNVALIDATED,
    "run.steps=2",
    "policy.data_parallel=1",  # two ranks are those of `tests/workers/roles/test_critic.py`
    "batch.mini_batches=2",
    "algorithm.advantage=gae",
    "critic.warmup_steps=1",
    "critic.optimizer.learning_rate=1e-3",
    RATE,
    "algorithm.kl_in_reward.coefficient=0.1",
    "algorithm.kl_in_reward.target=1",
    "algorithm.kl_in_reward.horizon=100",
    "run.checkpoint_every=1",
    "reward.function=''",
    "reward.model.weight=2",
    "reward.model.max_tokens_per_micro_batch=64",
)


@pytest.fixture(scope="module")
def judge(workspace: Path) -> PreTrainedModel:
    """A reward model, in the workspace as `judge`."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        workspace / "model", num_labels=1
    )
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(workspace / "judge")
    AutoTokenizer.from_pretrained(workspace / "model").save_pretrained(workspace / "judge")
    return model


@pytest.fixture(scope="module")
def ppo(judge: PreTrainedModel, settings: list[str], workspace: Path) -> list[str]:
    """Settings of PPO whose rewards are a model's scores alone."""
    return [*settings, *PPO, "run.name=ppo", f"reward.model.path={workspace / 'judge'}"]


@pytest.fixture(scope="module")
def judged(ppo: list[str]) -> Run:
    return run_loop(ppo)


@pytest.mark.slow
def test_rewards_are_the_scores_of_transformers_own_forward_pass(
    judged: Run, judge: PreTrainedModel
) -> None:
    for step in judged.outcome.steps:
        assert step["reward/mean"] == pytest.approx(2 * step["reward/model"])
    for row, reward in enumerate(judged.rollout.batch["reward"]):
        ids = judged.proto.row(row)["input_ids"]
        with torch.no_grad():
            hidden = judge.base_model(input_ids=ids[None]).last_hidden_state[0, -1]
            assert reward == pytest.approx(
                2 * judge.score(hidden).item(), rel=1e-3, abs=1e-4
            )
    timeline = [
        json.loads(line)
        for line in (judged.folder / "timeline.jsonl").read_text().splitlines()
    ]
    assert any(
        "scores" in {row[0] for row in line["micro_steps"].get("reward_model dp=0", ())}
        for line in timeline
    )


@pytest.mark.slow
def test_a_resumed_run_has_the_same_critic(judged: Run, ppo: list[str]) -> None:
    """Step 2 again, from the checkpoint after step 1, and a torn critic is passed over together with its
    policy.
    """
    critic = judged.folder / "checkpoints" / "critic" / "step-2"
    next(critic.glob("*.safetensors")).write_bytes(b"torn")
    (step,) = run_loop([*ppo, "run.resume=auto"]).outcome.steps
    for name in ("reward/mean", "rollout/response_tokens_mean", "rollout/weight_version"):
        assert step[name] == judged.outcome.steps[1][name]
    for name in (
        "critic/loss",
        "critic/values",
        "critic/explained_variance",
        "policy/loss",
        "reward/kl_coefficient",
    ):
        assert step[name] == pytest.approx(judged.outcome.steps[1][name], abs=1e-5)
    assert Path(critic / "manifest.json").is_file()


ENVIRONMENT = '''
import os

from workers.environment import Observation


class Halves:
    """Wants two turns; the second is rewarded for its length. Dies on one problem in four."""

    def reset(self, record):
        self.turns = 0
        self.fatal = len(record["prompt"]) % 4 == 0

    def step(self, response):
        self.turns += 1
        if response and self.fatal:
            os._exit(1)
        return Observation("+1=", reward=len(response) / 16, done=self.turns == 2, parts={"turns": self.turns})
'''


@pytest.mark.slow
def test_a_run_of_episodes_trains_adapters_on_what_was_sampled(
    settings: list[str], workspace: Path
) -> None:
    """With adapters the policy is its own reference. Of some episodes the environment dies."""
    file = workspace / "halves.py"
    file.write_text(ENVIRONMENT)
    overrides = [
        *settings,
        "run.name=episodes",
        "run.steps=2",
        "rollout.max_turns=2",
        "rollout.max_episode_tokens=24",
    ]
    overrides += ["reward.function=''", f"rollout.environment={file}:Halves", RATE]
    overrides += [
        "model.lora.rank=4",
        "algorithm.loss.kl_coefficient=0.1",
        "batch.mini_batches=2",
    ]
    run = run_loop(overrides)
    assert not run.config.starts("reference")
    steps = run.outcome.steps
    assert 0 < steps[0]["policy/reference_kl"] < steps[1]["policy/reference_kl"]
    for step in steps:
        assert step["policy/rollout_mismatch_max"] < 1e-4
        assert step["rollout/samples"] == 15
        assert 1 < step["rollout/turns_mean"] <= 2
        assert step["rollout/observation_tokens_mean"] > 0
        assert "reward/turns" in step
    assert sum(step["reward/failures"] for step in steps) > 0
    check_episodes_are_masked_and_recorded(run)


def check_episodes_are_masked_and_recorded(run: Run) -> None:
    masks = []
    for row in range(len(run.proto)):
        ids, mask, sampled = (
            run.proto.row(row)[name]
            for name in ("input_ids", "loss_mask", "rollout_log_probs")
        )
        masks.append(mask)
        assert (sampled[~mask] == 0).all() and (sampled[mask] < 0).all()
        assert len(ids) <= 26 + 24
    assert run.proto.columns["response_tokens"].tolist() == [
        int(mask.sum()) for mask in masks
    ]
    turns = run.rollout.batch["turns"].tolist()
    two = [
        score
        for score, count in zip(run.rollout.by_sample.values(), turns, strict=True)
        if count == 2
    ]
    assert two and all("+1=" in score.response for score in two)
    assert all(
        [list(turn) for turn in score.turns] == [["policy"], ["environment"], ["policy"]]
        for score in two
    )
    assert all(score.turns[1] == {"environment": "+1="} for score in two)


CALL = """<tool_call>\\n\\{"name": "(add|divide)", "arguments": \\{"a": [1-9], "b": 2\\}\\}\\n</tool_call>"""


def test_a_run_with_tools_calls_them_and_trains_on_the_calls_alone(
    settings: list[str], tmp_path: Path
) -> None:
    """Each turn is made a call of a tool, or of one that is not there, so that each of the two turns is
    answered.
    """
    model = tmp_path / "model"
    create_model(
        model,
        0,
        tools.tokenizer(),
        width=128,
        layers=1,
        vocabulary=tools.VOCABULARY,
        positions=512,
    )
    tools_data.write(tmp_path / "train.jsonl", 8, seed=0, held_out=False)
    overrides = [
        *settings,
        *UNVALIDATED,
        "run.name=tools",
        "run.steps=1",
        f"model.path={model}",
        RATE,
    ]
    overrides += [
        "data.max_prompt_tokens=64",
        f"data.train={tmp_path / 'train.jsonl'}",
        "policy.data_parallel=1",
    ]
    overrides += [
        "rollout.tools=examples/tools/tools.py",
        "rollout.max_turns=2",
        "rollout.max_episode_tokens=300",
    ]
    overrides += [
        "rollout.sampling.max_new_tokens=99",
        "policy.max_tokens_per_micro_batch=512",
    ]
    overrides += [f"rollout.sampling.structured_outputs={json.dumps({'regex': CALL})}"]
    overrides += [
        "algorithm.loss.rollout_correction.weights=token",
        "policy.max_mismatch=99",
    ]
    run = run_loop([*overrides, "reward.function=examples.tools.reward:exact_match"])
    (step,) = run.outcome.steps
    assert (step["rollout/turns_mean"], step["reward/called"], step["reward/failures"]) == (
        2,
        1,
        0,
    )
    assert (
        step["tools/calls"] == 2
        and 0 < step["tools/failed"] < 2
        and step["tools/seconds"] > 0
    )
    tokens = AutoTokenizer.from_pretrained(model)
    scores = run.rollout.by_sample.values()
    for row, score in enumerate(scores):
        ids, mask = (run.proto.row(row)[name] for name in ("input_ids", "loss_mask"))
        assert tokens.decode(ids[mask]).count(
            "<tool_call>"
        ) == 2 and "<tool_response>" not in tokens.decode(ids[mask])
        assert [list(turn) for turn in score.turns] == [
            ["policy"],
            ["environment"],
            ["policy"],
        ]
        called = (
            "subtract" not in score.turns[0]["policy"] and "add" in score.turns[0]["policy"]
        )
        assert ("Error: there is no tool divide" in score.turns[1]["environment"]) == (
            not called
        )


@pytest.mark.slow
def test_an_update_that_leaves_a_weight_out_stops_the_run_and_is_named(
    settings: list[str],
) -> None:
    """No engine samples with old and new weights mixed. A custom loss's module changes the policy's own
    process.
    """
    overrides = [*settings, *UNVALIDATED, "run.name=dropped", "policy.data_parallel=1"]
    overrides += [
        "algorithm.loss.name=custom",
        "algorithm.loss.function=tests.end_to_end.dropping:loss",
    ]
    # It imports all that a policy's actor does.
    overrides += ["resources.user_code_timeout_s=300"]
    with pytest.raises(
        RolloutError, match=r"model\.layers\.1\.self_attn\.qkv_proj\.weight"
    ):
        run_loop(overrides)


FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "olmoe": (OlmoeConfig, {"intermediate_size": 64}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32},
    ),
}
EXPERT_PARALLEL = [
    "policy.parallel.expert_parallel=2",
    "model.router_aux_loss_coefficient=0.1",
]


def create_experts(family: str, folder: Path, tokenizer: Path) -> None:
    """A small random model whose experts matter: without them the log-probs move by nats."""
    torch.manual_seed(0)
    characters = AutoTokenizer.from_pretrained(tokenizer)
    config_class, sizes = FAMILIES[family]
    config = config_class(
        vocab_size=32,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=characters.eos_token_id,
        pad_token_id=characters.pad_token_id,
        dtype="float32",
        **sizes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    characters.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sharing"),
    [
        ("olmoe", ["policy.data_parallel=1"]),
        ("qwen3_moe", [*EXPERT_PARALLEL, "policy.data_parallel=2"]),
        (
            "qwen3_moe",
            [
                *EXPERT_PARALLEL,
                "policy.data_parallel=1",
                "policy.parallel.tensor_parallel=2",
            ],
        ),
    ],
    ids=["one rank", "expert parallel", "expert and tensor parallel"],
)
def test_samples_come_from_the_experts_that_were_trained(
    settings: list[str], workspace: Path, family: str, sharing: list[str]
) -> None:
    create_experts(family, workspace / family, workspace / "model")
    overrides = [*settings, f"run.name={family}-{len(sharing)}", "run.steps=2", *sharing]
    overrides += [f"model.path={workspace / family}"]
    overrides += [
        "policy.optimizer.learning_rate=1e-2",
        "algorithm.advantage=reinforce_plus_plus",
    ]
    overrides += [*UNVALIDATED, "batch.mini_batches=2", "run.checkpoint_every=1"]
    run = run_loop(overrides)
    first, second = run.outcome.steps
    assert [first["rollout/weight_version"], second["rollout/weight_version"]] == [1.0, 2.0]
    assert abs(first["policy/approximate_kl"]) > 1e-3, (
        "an update that changes nothing would not show old experts"
    )
    for step in (first, second):
        assert step["policy/rollout_mismatch_max"] < 3e-5
    assert set(run.versions) == {2}
    assert_engine_equals_saved_model(run)
    assert_every_weight_changed(workspace / family, run.folder / "model")
    assert_goes_on_with_two_ranks(run, overrides)


def assert_goes_on_with_two_ranks(run: Run, overrides: list[str]) -> None:
    """From its first checkpoint, each rank with all experts, the second step is the same."""
    others = [
        "policy.data_parallel=2",
        "policy.parallel.expert_parallel=1",
        "policy.parallel.tensor_parallel=1",
    ]
    others += [f"run.name={run.folder.name}-again"]
    begin = run.folder / "checkpoints" / "policy" / "step-1"
    (second,) = run_loop([*overrides, *others, f"run.resume={begin}"]).outcome.steps
    names = ["policy/loss", "policy/grad_norm", "reward/mean"]
    for name in (*names, *({"policy/router_aux_loss"} & second.keys())):
        assert second[name] == pytest.approx(run.outcome.steps[1][name], rel=1e-4), name


def assert_every_weight_changed(before: Path, after: Path) -> None:
    """Of the saved model every parameter, each expert's by itself, differs from the first."""
    first, last = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (before, after)
    )
    assert first.keys() == last.keys()
    for name, weight in first.items():
        parts = (
            zip(weight, last[name], strict=True)
            if ".experts." in name
            else [(weight, last[name])]
        )
        assert not any(torch.equal(old, new) for old, new in parts), name
