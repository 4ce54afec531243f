"""Whole runs in this process, from a configuration: the real driver, dispatch and training engine of one
rank; vLLM and Ray are stand-ins.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ballast.audit.ballast_run import read_recorded_step, recorded_steps
from ballast.audit.checks import check_step
from ballast.audit.finding import Finding, Verdict
from ballast.replay.__main__ import Start, replay, replay_settings, start_before
from ballast.replay.__main__ import settings as settings_of
from controller.actors.launch import worker_arguments
from controller.algorithm.advantages import sequence_advantages
from controller.data.records import read_records
from controller.lifecycle.user_functions import loss_trial
from controller.observability.console import Console
from controller.planning.planner import draw_mini_batches
from controller.preflight.data_checks import RESERVED
from examples.addition.warm_start import tokenizer
from tests.controller.stand_ins.run import StandInRun, StandIns, write_stand_in_workspace
from tests.workers.model.tiny import files_beside, tiny_config, unpacked_log_probs
from tests.workers.rollout import stock_templates
from workers.batch.dataproto import DataProto
from workers.batch.remote_batch import RemoteBatch
from workers.engine.requests import sample_seed
from workers.errors import DataError, NonFiniteError, RolloutError
from workers.model.engine import TrainingEngine
from workers.model.optimizer.optimizer import optimizer_state

Run = Callable[..., StandInRun]

LOSSES = """
from workers.model.losses import per_sequence_loss, policy_loss

SEEN = []


@policy_loss("no_number", aggregation="token_mean")
def no_number(predictions, config):
    # Finite where a loss is tried before the run: log-probs of -1.
    return predictions.log_probs.where(predictions.log_probs == -1, float("nan")), {}


@policy_loss("looks", aggregation="token_mean")
@per_sequence_loss
def looks(sequence, config):
    SEEN.append(sequence)
    return -sequence["advantages"] * sequence.log_probs, {}
"""
OWN = """
import torch

def function(named_parameters, config):
    return torch.optim.Adagrad([parameter for _, parameter in named_parameters], lr=0.5)

def schedule_function(step, total_steps):
    return (step + 0.5) * total_steps / 2
"""
TWO_EPOCHS = (
    "batch.epochs=2",
    "batch.mini_batches=2",
    "policy.optimizer.learning_rate=1e-3",
)


@pytest.fixture(scope="module")
def stand_in_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("computing")
    write_stand_in_workspace(path)
    (path / "losses_of_a_user.py").write_text(LOSSES)
    return path


@pytest.fixture
def stand_ins(
    stand_ins: StandIns, stand_in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> StandIns:
    monkeypatch.syspath_prepend(stand_in_folder)
    stand_ins.compute()
    return stand_ins


@pytest.fixture
def run(stand_ins: StandIns, tmp_path: Path) -> Run:
    settings = [
        f"run.dir={tmp_path}",
        "policy.data_parallel=1",
        "data.validation=''",
        "rollout.placement=colocated",
    ]
    return lambda *overrides: stand_ins.run([*settings, *overrides])


def custom(name: str, place: str = "losses_of_a_user") -> tuple[str, str]:
    return "algorithm.loss.name=custom", f"algorithm.loss.function={place}:{name}"


def engine_of(finished: StandInRun):
    return finished.world.ray.actors["policy dp=0"].instance.engine


def weights_of(finished: StandInRun) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine_of(finished).named_weights()}


def test_too_many_skipped_steps_stop_the_run_with_the_names_of_its_sequences(
    run: Run,
) -> None:
    names = ", ".join(
        f"uid {prompt} sample {sample}" for prompt in (0, 1) for sample in (0, 1)
    )
    with pytest.raises(
        NonFiniteError, match=rf"the loss was NaN or infinite for rank 0: {names}\. Look"
    ):
        run(
            *custom("no_number", "losses_of_a_user.py"),
            "policy.optimizer.max_skipped_steps=1",
        )


def test_a_run_trains_by_an_optimizer_and_a_schedule_of_its_own(
    run: Run, stand_in_folder: Path
) -> None:
    """The file's path is relative to where the run was started. Workers have their own folders."""
    (stand_in_folder / "own.py").write_text(OWN)
    own = [
        f"policy.optimizer.{name}=own.py:{name}"
        for name in ("function", "schedule_function")
    ]
    finished = run("policy.optimizer.name=custom", "policy.optimizer.schedule=custom", *own)
    assert [
        step["policy/learning_rate"] for step in finished.outcome.steps
    ] == pytest.approx([0.25, 0.75])
    assert isinstance(engine_of(finished).optimizer, torch.optim.Adagrad)
    assert (
        worker_arguments(finished.config, "policy")["optimizer"].function
        == f"{stand_in_folder}/own.py:function"
    )


def test_a_run_with_adapters_saves_them_for_peft_beside_the_merged_model(
    run: Run, batches: list[RemoteBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = run(
        "run.steps=1",
        "model.lora.rank=2",
        "run.save_every=1",
        "policy.optimizer.learning_rate=1e-2",
    )
    # The stand-ins' GPUs are gone: peft would use them.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = finished.config.run_folder
    sequences = batches[0].gather()
    base = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    without = log_probs_by(base, sequences)
    merged = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    expected = log_probs_by(merged, sequences)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapters")
    assert (expected - without).abs().max() > 1e-3
    assert (log_probs_by(adapted, sequences) - expected).abs().max() < 1e-5
    weights = "adapter_model.safetensors"
    for name in ("model", "model-1"):
        assert files_beside(folder / name) == files_beside(Path("model"))
        assert (
            ModelCard.load(folder / name / "README.md").data.library_name == "transformers"
        )
    assert (folder / "adapters-1" / weights).read_bytes() == (
        folder / "adapters" / weights
    ).read_bytes()


LORA_RUN = ("model.lora.rank=2", "policy.optimizer.learning_rate=1e-7")
"""The adapters stay near zero, so that the weights of two runs differ by rounding alone."""


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        (("policy.optimizer.state_dtype=bfloat16",), {torch.bfloat16}),
        (("policy.optimizer.state_dtype=int8",), {torch.int8, torch.uint8, torch.float32}),
        ((*LORA_RUN, "model.base_dtype=int8"), {torch.int8}),
        (
            (*LORA_RUN, "model.base_dtype=nf4", "policy.optimizer.state_dtype=bfloat16"),
            {torch.uint8},
        ),
    ],
    ids=["bfloat16 states", "int8 states", "int8 base", "nf4 base and bfloat16 states"],
)
def test_a_run_trains_with_states_and_base_weights_of_few_bytes(
    run: Run, settings: tuple[str, ...], stored: set[torch.dtype]
) -> None:
    finished = run("policy.optimizer.learning_rate=1e-2", *settings)
    engine = engine_of(finished)
    assert all(step["policy/grad_norm"] > 0 for step in finished.outcome.steps)
    states = [
        part
        for state in optimizer_state(engine.optimizer).values()
        for part in state.values()
    ]
    codes = {
        weight.dtype
        for name, weight in engine.module.named_parameters()
        if name.endswith(".codes")
    }
    assert (codes or {part.dtype for part in states if part.ndim}) == stored
    if codes:
        name = "model.layers.0.mlp.down_proj.weight"
        rounded = weights_of(finished)[name]  # the next run has the engine's place
        plain = weights_of(run(*LORA_RUN, "run.name=plain"))[name]
        assert 1e-3 < (rounded - plain).norm() / plain.norm() < 0.15


def log_probs_by(module: torch.nn.Module, sequences: DataProto) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(
            [log_probs for log_probs, _ in unpacked_log_probs(module, sequences)]
        )


def test_p15_p16_a_custom_loss_sees_columns_of_its_records_meta_data_and_old_entropies(
    run: Run, batches: list[RemoteBatch]
) -> None:
    several_micro_batches = "policy.max_tokens_per_micro_batch=24"
    columns = ("algorithm.loss.columns=level, source", "algorithm.loss.old_entropies=true")
    finished = run(*custom("looks"), *columns, several_micro_batches)
    seen = sys.modules["losses_of_a_user"].SEEN
    assert [
        (sequence.meta["step"], sequence.meta["steps"], sequence.meta["epoch"])
        for sequence in seen
    ] == [(step, 2, 0) for step in (1, 2) for _ in range(4)]
    first = {
        (sequence.objects["uid"][0], int(sequence["sample"][0])): sequence
        for sequence in seen[:4]
    }
    rows = batches[0].gather()
    base = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    with torch.no_grad():
        expected = [entropies for _, entropies in unpacked_log_probs(base, rows)]
    for row, uid in enumerate(batches[0]["uid"].tolist()):
        sequence = first[uid, int(batches[0]["sample"][row])]
        level = int(sequence["level"][0])
        assert sequence.objects["source"].tolist() == [f"table {level}"]
        assert sequence["level"].tolist() == [level] * len(sequence)
        mask = rows.slice(row, row + 1).tokens["loss_mask"]
        assert (sequence["old_entropies"] - expected[row][mask]).abs().max() < 1e-5
    of_the_batch = (set(seen[0].columns) | set(seen[0].objects)) - {"level", "source"}
    assert of_the_batch <= RESERVED
    _, tried, tokens, _ = loss_trial(finished.config, read_records("prompts.jsonl"))
    always = {"input_ids", "loss_mask", "prefix_hashes", "level", "source"}
    assert of_the_batch | always == {*tried, *tokens} | always
    with pytest.raises(
        DataError,
        match=r"'source' holds no numbers. The loss finds it in predictions.objects",
    ):
        seen[0]["source"]


def test_m9_two_epochs_are_two_passes_of_a_plain_loop_over_the_same_mini_batches(
    run: Run, stand_ins: StandIns, batches: list[RemoteBatch]
) -> None:
    stand_ins.compute("float64")
    finished = run(*TWO_EPOCHS, "run.steps=1")
    (batch,) = batches
    rows = batch.gather()
    advantages = sequence_advantages(finished.config.algorithm, batch, batch["reward"])
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    with torch.no_grad():
        old = [log_probs.float() for log_probs, _ in unpacked_log_probs(model, rows)]
    ratios = []
    for epoch in (0, 1):
        for mini_batch in draw_mini_batches(len(batch), 2, seed=0, step=1, epoch=epoch):
            losses = []
            for row in mini_batch:
                one = rows.slice(row, row + 1)
                ((log_probs, _),) = unpacked_log_probs(model, one)
                ratio = (log_probs - old[row])[one.tokens["loss_mask"]].exp()
                advantage = float(advantages[row])
                losses.append(
                    -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                )
                ratios.append(ratio.detach())
            torch.cat(losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert (
        torch.cat(ratios[4:]) - 1
    ).abs().max() > 0.01  # the second pass starts from the log-probs before the first
    expected, found = dict(model.named_parameters()), weights_of(finished)
    assert (
        max(
            float((found[name] - weight.detach()).abs().max())
            for name, weight in expected.items()
        )
        < 1e-9
    )
    assert finished.outcome.steps[0]["tokens/update"] == 2 * batch["length"].sum()


AGGREGATIONS = {
    "token_mean": lambda tokens, groups: 1 / tokens.sum(),
    "sequence_mean_token_mean": lambda tokens, groups: 1 / (len(tokens) * tokens),
    "sequence_mean_token_sum": lambda tokens, groups: 1 / len(tokens),
    "sequence_mean_token_sum_norm": lambda tokens, groups: 1 / (len(tokens) * 8),
    "group_mean_token_mean": lambda tokens, groups: (
        1
        / (
            len(np.unique(groups))
            * np.array([tokens[groups == group].sum() for group in groups])
        )
    ),
}


def cut(seed: int) -> tuple[int, str]:
    """A response of 2 to 7 tokens, of which four in ten are cut off."""
    return 2 + seed % 6, "length" if seed // 6 % 10 < 4 else "stop"


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("rule", "aggregation"),
    [("drop", "token_mean"), *(("mask", name) for name in AGGREGATIONS)],
)
def test_the_loss_of_masked_samples_is_that_of_a_batch_without_them_and_their_rewards_count(
    run: Run, stand_ins: StandIns, batches: list[RemoteBatch], rule: str, aggregation: str
) -> None:
    stand_ins.compute("float64")
    stand_ins.world.answer = cut
    loss = [f"algorithm.loss.aggregation={aggregation}", "algorithm.loss.constant_length=8"]
    loss = loss[: 1 + aggregation.endswith("norm")]
    finished = run(
        f"reward.truncated={rule}", *loss, "run.steps=1", "rollout.samples_per_prompt=4"
    )
    (batch,) = batches
    metrics, kept = finished.outcome.steps[0], np.flatnonzero(~batch["truncated"])
    assert metrics["rollout/truncated_share"] * 8 == 8 - len(kept)
    assert len(batch) == (8 if rule == "mask" else len(kept)) and 2 < len(kept) < 7
    advantages = sequence_advantages(finished.config.algorithm, batch, batch["reward"])
    weights = AGGREGATIONS[aggregation](
        batch["response_tokens"][kept], batch["group_number"][kept]
    )
    rows, model = (
        batch.gather(),
        AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64),
    )
    total = 0.0
    for row, weight in zip(kept, np.broadcast_to(weights, kept.shape), strict=True):
        one = rows.slice(row, row + 1)
        ((log_probs, _),) = unpacked_log_probs(model, one)
        ratio = (log_probs - log_probs.detach())[one.tokens["loss_mask"]].exp()
        total = total - weight * advantages[row] * ratio.sum()
    total.backward()
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
    assert metrics["policy/loss"] == pytest.approx(total.item(), rel=1e-6, abs=1e-9)
    assert metrics["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-6)


def test_a_step_whose_samples_are_all_truncated_trains_nothing_or_ends_the_run(
    run: Run, stand_ins: StandIns, batches: list[RemoteBatch]
) -> None:
    whole = sample_seed(0, 1, "0", 1)  # of step 1
    stand_ins.world.answer = lambda seed: (3, "stop" if seed == whole else "length")
    finished = run("reward.truncated=mask", "algorithm.zero_variance_groups=drop")
    # The other group's rewards differ too.
    assert [batch["uid"].tolist() for batch in batches] == [["0", "0"]]
    assert [step["rollout/truncated_share"] for step in finished.outcome.steps] == [0.75, 1]
    with pytest.raises(RolloutError, match=r"reward\.truncated=drop"):
        run("reward.truncated=drop", "run.name=dropped")


def test_a_thinking_budget_inserts_an_end_that_is_counted_and_not_trained(
    run: Run,
    stand_ins: StandIns,
    batches: list[RemoteBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_ins.world.answer = lambda seed: (9, "length")
    # Prompts end with `=`.
    monkeypatch.setattr("workers.episodes.thinking.MARKS", ("=", "+"))
    settings = (
        "rollout.sampling.max_thinking_tokens=5",
        "rollout.sampling.end_of_thinking=9+",
    )
    finished = run(
        *settings,
        "run.steps=1",
        "rollout.samples_per_prompt=8",
        "policy.max_tokens_per_micro_batch=256",
    )
    (batch,) = batches
    rows, inserted, cut = batch.gather(), tokenizer()("9+")["input_ids"], 0
    for row in range(len(batch)):
        ids, mask = (
            rows.slice(row, row + 1).tokens[name][batch["prompt_tokens"][row] :]
            for name in ("input_ids", "loss_mask")
        )
        is_cut = inserted[1] not in ids[:5]
        assert (
            bool(batch["cut_thoughts"][row]) == is_cut
            and int(mask.sum()) == batch["response_tokens"][row]
        )
        assert mask.tolist() == [True] * 5 + [not is_cut] * 2 + [True]
        assert not is_cut or ids[5:7].tolist() == inserted
        cut += is_cut
    assert 0 < cut < len(batch)
    assert finished.outcome.steps[0]["rollout/cut_thoughts_share"] == cut / len(batch)


def test_a_run_of_two_epochs_goes_on_from_a_checkpoint_as_if_never_stopped(
    run: Run,
) -> None:
    straight = run(*TWO_EPOCHS, "run.name=straight")
    weights = weights_of(straight)
    run(*TWO_EPOCHS, "run.checkpoint_every=1", "run.steps=1")
    resumed = run(*TWO_EPOCHS, "run.checkpoint_every=1", "run.resume=auto")
    assert len(resumed.outcome.steps) == 1
    assert all(
        torch.equal(weight, weights[name]) for name, weight in weights_of(resumed).items()
    )
    assert (
        resumed.outcome.steps[-1]["policy/loss"]
        == straight.outcome.steps[-1]["policy/loss"]
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_a_checkpoint_before_the_first_update_changes_no_later_update(
    run: Run, stand_ins: StandIns, batches: list[RemoteBatch], optimizer: str
) -> None:
    """A first step without trained samples: its checkpoint makes the optimiser's state, which other runs make
    later.
    """
    whole = {sample_seed(0, 2, uid, sample) for uid in "23" for sample in (0, 1)}
    stand_ins.world.answer = lambda seed: (3, "stop" if seed in whole else "length")
    settings = (
        "reward.truncated=mask",
        "algorithm.zero_variance_groups=drop",
        f"policy.optimizer.name={optimizer}",
        "policy.optimizer.learning_rate=1e-2",
        "policy.optimizer.weight_decay=0.5",
    )
    weights = weights_of(run(*settings, "run.name=straight"))
    run(*settings, "run.checkpoint_every=1", "run.steps=1")
    assert [batch.meta["step"] for batch in batches] == [2]
    resumed = run(*settings, "run.checkpoint_every=1", "run.resume=auto")
    assert len(resumed.outcome.steps) == 1
    assert all(
        torch.equal(weight, weights[name]) for name, weight in weights_of(resumed).items()
    )


def test_the_learning_rate_falls_over_the_optimiser_steps_of_all_epochs(run: Run) -> None:
    finished = run(*TWO_EPOCHS, "policy.optimizer.schedule=linear")
    rates = [step["policy/learning_rate"] for step in finished.outcome.steps]
    assert rates == pytest.approx(
        [1e-3 / 8 * np.mean(part) for part in ([8, 7, 6, 5], [4, 3, 2, 1])]
    )
    assert engine_of(finished).states.current.schedule.get_last_lr()[0] == pytest.approx(
        0.0, abs=1e-12
    )


@pytest.fixture(scope="module")
def experts(stand_in_folder: Path) -> str:
    """A mixture of four experts, two a token, with the tokenizer of the other models."""
    config = tiny_config(
        "qwen3_moe", vocab_size=32, bos_token_id=None, eos_token_id=tokenizer().eos_token_id
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(stand_in_folder / "experts")
    tokenizer().save_pretrained(stand_in_folder / "experts")
    return "model.path=experts"


def test_updates_go_through_the_experts_that_the_sampler_chose(
    run: Run,
    stand_ins: StandIns,
    batches: list[RemoteBatch],
    experts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To compare changes nothing, to replay changes the update; both say how often the routers would choose
    others. The reference does not get the choices.
    """
    weights, mismatch, given, log_probs = {}, {}, set(), TrainingEngine.log_probs

    def watched(engine: TrainingEngine, sequences: DataProto, *rest: Any) -> Any:
        given.add((engine.model_config.router_replay, "routed_experts" in sequences.tokens))
        return log_probs(engine, sequences, *rest)

    monkeypatch.setattr(TrainingEngine, "log_probs", watched)
    for setting in ("none", "compare", "replay"):
        chosen = np.array([[0, 1], [2, 3]], dtype=np.int16)
        stand_ins.world.routed_experts = None if setting == "none" else chosen
        settings = (f"model.router_replay={setting}", f"run.name={setting}", "run.steps=1")
        finished = run(experts, "algorithm.loss.kl_coefficient=0.1", *settings)
        weights[setting] = torch.cat(
            [weight.flatten() for weight in weights_of(finished).values()]
        )
        mismatch[setting] = finished.outcome.steps[0].get("policy/router_mismatch")
        rows = batches.pop().gather()
        assert ("routed_experts" in rows.tokens) == (setting != "none")
    assert given == {("none", False), ("compare", True), ("replay", True)}
    read = int(rows.lengths[0]) - 1  # the engine never reads the last token
    assert rows.tokens["routed_experts"].dtype == torch.uint8
    assert torch.equal(
        rows.tokens["routed_experts"][:read], torch.from_numpy(chosen).expand(read, -1, -1)
    )
    assert torch.equal(weights["none"], weights["compare"])
    assert not torch.equal(weights["none"], weights["replay"])
    assert mismatch["none"] is None
    # Two of four by chance.
    assert 0.2 < mismatch["compare"] < 0.8 and 0.2 < mismatch["replay"] < 0.8


PPO = (
    "algorithm.advantage=gae",
    "algorithm.kl_in_reward.coefficient=0.1",
    "algorithm.kl_in_reward.target=1",
    "algorithm.kl_in_reward.horizon=100",
    "batch.mini_batches=2",
    "critic.warmup_steps=1",
    "critic.optimizer.learning_rate=1e-3",
    "policy.optimizer.learning_rate=1e-3",
    "run.checkpoint_every=1",
    "run.record_samples=true",
)


def test_ppo_warms_its_critic_up_adapts_the_kl_and_saves_both_models(
    run: Run, tmp_path: Path
) -> None:
    first, second = run(*PPO).outcome.steps
    assert "policy/loss" not in first and np.isfinite(second["policy/loss"])
    assert [first["rollout/weight_version"], second["rollout/weight_version"]] == [0.0, 1.0]
    assert first["critic/grad_norm"] > 0
    assert first["critic/values"] == 0.0 != second["critic/values"]
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    # The policy is still its reference.
    assert first["reward/kl"] == pytest.approx(0.0, abs=1e-3)
    assert first["reward/kl_coefficient"] == 0.1
    # 4 samples.
    assert second["reward/kl_coefficient"] == pytest.approx(0.1 * (1 - 0.2 * 4 / 100))
    assert first["critic/returns"] > 0
    critic = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "critic", dtype=torch.float32
    )
    assert critic.score.weight.shape[0] == 1
    assert critic.score.weight.abs().sum() > 0
    for role in ("policy", "critic"):
        found = sorted(
            path.name for path in (tmp_path / "run" / "checkpoints" / role).iterdir()
        )
        assert found == ["step-1", "step-2"]


def test_a_recorded_step_trained_again_comes_out_the_same_and_leaves_the_run_as_it_is(
    run: Run, tmp_path: Path
) -> None:
    """Step 2, with the adapted weight of the KL and the optimiser's state of the checkpoint of step 1."""
    recorded, folder = run(*PPO).outcome.steps[1], tmp_path / "run"
    config, files = settings_of(folder), times_of_change(folder)
    start = start_before(folder, 2, config.run.resume)
    assert start == Start(folder / "checkpoints" / "policy" / "step-1", range(2, 3))
    replayed = replay(replay_settings(config, start), folder, start.steps, Console())
    for name in (
        "policy/loss",
        "policy/grad_norm",
        "critic/loss",
        "critic/grad_norm",
        "reward/kl_coefficient",
    ):
        assert replayed[name] == pytest.approx(recorded[name], abs=1e-6), name
    assert times_of_change(folder) == files


AUDITED = (
    "algorithm.loss.kl_coefficient=0.1",
    "policy.optimizer.learning_rate=1e-2",
    "rollout.samples_per_prompt=4",
    "run.record_samples=true",
)
CLIPS = (
    "algorithm.loss.clip_low=0.01",
    "algorithm.loss.clip_high=0.03",
    "batch.mini_batches=2",
)
CHECKED = (
    "ratios.first_update",
    "ratios.later_updates",
    "loss.value",
    "loss.denominators",
    "metrics.values",
)


def findings_of_run(finished: StandInRun) -> dict[str, list[Finding]]:
    """Findings of CHECKED by name, one a step."""
    folder = finished.config.run_folder
    findings: dict[str, list[Finding]] = {name: [] for name in CHECKED}
    for step in recorded_steps(folder):
        for finding in check_step(read_recorded_step(folder, step)):
            if finding.name in CHECKED:
                findings[finding.name].append(finding)
    return findings


@pytest.mark.drawn(1, always=["clipped"])
@pytest.mark.parametrize(
    "settings",
    [
        CLIPS,
        (*CLIPS, "batch.epochs=2"),
        (),
        (*CLIPS, "algorithm.loss.name=gspo"),
        (
            *CLIPS,
            "algorithm.loss.name=cispo",
            "algorithm.loss.aggregation=sequence_mean_token_sum",
        ),
        (
            "algorithm.loss.name=reinforce",
            "algorithm.loss.rollout_correction.weights=token",
        ),
    ],
    ids=["clipped", "two_epochs", "one_update", "gspo", "cispo", "reinforce"],
)
def test_a_recorded_run_audits_its_own_loss(run: Run, settings: tuple[str, ...]) -> None:
    for name, findings in findings_of_run(run(*AUDITED, *settings)).items():
        assert len(findings) == 2, name
        for finding in findings:
            assert finding.verdict is Verdict.PASSED, finding


def sequence_counts(losses, predictions, denominators, aggregation, length):
    return losses.sum() / denominators.sequences


LOSS_FAULTS = {
    "ratio_of_itself": (
        "ratio_losses.log_ratio_to_old",
        lambda p: p.log_probs - p.log_probs.detach(),
    ),
    "clip_bounds_swapped": (
        "ratio_losses.clip",
        lambda ratio, config: ratio.clamp(1 - config.clip_high, 1 + config.clip_low),
    ),
    "old_is_sampler": (
        "ratio_losses.log_ratio_to_old",
        lambda p: p.log_probs - p["rollout_log_probs"],
    ),
    "kl_left_out": (
        "registry.kl_of_loss",
        lambda log_ratio, *_: torch.zeros_like(log_ratio),
    ),
    "aggregation:sequence_mean_token_sum": ("registry.aggregate", sequence_counts),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("cause", LOSS_FAULTS)
def test_a_fault_of_the_loss_is_named_by_the_audit(
    run: Run, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    place, function = LOSS_FAULTS[cause]
    monkeypatch.setattr(f"workers.model.losses.{place}", function)
    findings = findings_of_run(run(*AUDITED, *CLIPS))
    causes = [finding.cause for finding in findings["loss.value"]]
    assert causes[-1] == cause
    assert Verdict.FAILED in [finding.verdict for finding in findings["metrics.values"]]


def times_of_change(folder: Path) -> dict[Path, int]:
    """Of every file and folder, in ns."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


SUMS = """
from workers.environment import Observation


class Sums:
    def reset(self, record):
        self.turns = 0

    def step(self, response):
        self.turns += 1
        reward = len(response.reasoning) / 8 + int(response.content or 0)
        return Observation("Sure?", reward=reward, done=self.turns == 3)
"""


@pytest.fixture(scope="module")
def thinker(stand_in_folder: Path) -> tuple[str, ...]:
    """A model with Qwen3's stock template, which drops earlier thoughts, in conversations of three turns."""
    characters = stock_templates.tokenizer("qwen3")
    config = tiny_config(vocab_size=len(characters), max_position_embeddings=512)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(stand_in_folder / "thinker")
    characters.save_pretrained(stand_in_folder / "thinker")
    (stand_in_folder / "sums.py").write_text(SUMS)
    records = [
        json.dumps({"prompt": [{"role": "user", "content": f"{i}+{i}?"}]}) for i in range(8)
    ]
    (stand_in_folder / "chats.jsonl").write_text("\n".join(records))
    data = (
        "model.path=thinker",
        "data.train=chats.jsonl",
        "data.max_prompt_tokens=64",
        "reward.function=''",
    )
    lengths = (
        "rollout.sampling.max_new_tokens=64",
        "policy.max_tokens_per_micro_batch=512",
        "rollout.max_turns=3",
    )
    return (
        *data,
        *lengths,
        "rollout.environment=sums.py:Sums",
        "policy.optimizer.learning_rate=1e-3",
        "run.steps=1",
    )


def thought(seed: int) -> tuple[list[int], str]:
    text = f"<think>\n{'h' * (seed % 9)}m.\n</think>\n\n{seed % 7}<|im_end|>"
    return stock_templates.apart(stock_templates.tokenizer("qwen3"), text).tolist(), "stop"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]
)
def test_turns_of_a_rewritten_conversation_are_trained_as_each_was_sampled(
    run: Run,
    stand_ins: StandIns,
    batches: list[RemoteBatch],
    thinker: tuple[str, ...],
    aggregation: str,
) -> None:
    """As a plain loop does that trains each turn as a sequence of its own. A sample counts once."""
    stand_ins.compute("float64")
    stand_ins.world.answer = thought
    finished = run(
        *thinker, f"algorithm.loss.aggregation={aggregation}", "run.record_samples=true"
    )
    (batch,) = batches
    assert batch["sample_number"].tolist() == [n for n in range(4) for _ in range(3)]
    (metrics,) = finished.outcome.steps
    assert (
        metrics["rollout/samples"],
        metrics["rollout/rows_per_sample"],
        metrics["rollout/turns_mean"],
    ) == (4, 3, 3)
    assert (
        metrics["rollout/cut_tokens_mean"],
        metrics["rollout/history_refused_share"],
    ) == (0, 0)
    rewards = dict(
        zip(
            zip(batch["uid"].tolist(), batch["sample"].tolist(), strict=True),
            batch["reward"],
            strict=True,
        )
    )
    assert len({*rewards.values()}) > 2
    advantages = {}
    for (uid, sample), reward in rewards.items():
        group = np.array([found for (other, _), found in rewards.items() if other == uid])
        advantages[f"{uid}/{sample}"] = float(
            np.float32((reward - group.mean()) / (group.std(ddof=1) + 1e-6))
        )
    turns = [
        (name.rpartition("/")[0], prompt, tokens)
        for name, prompt, tokens in stand_ins.world.turns
    ]
    sampled = {
        name: sum(len(tokens) for other, _, tokens in turns if other == name)
        for name in advantages
    }
    assert len(turns) == 12
    model = AutoModelForCausalLM.from_pretrained("thinker", dtype=torch.float64)
    for name, prompt, tokens in turns:
        ids = torch.tensor([*prompt, *tokens])
        log_probs = (
            model(ids[None])
            .logits[0, len(prompt) - 1 : -1]
            .log_softmax(-1)
            .gather(-1, ids[len(prompt) :, None])
        )
        weight = {"token_mean": 1 / sum(sampled.values()), "sequence_mean_token_sum": 1 / 4}
        (
            -log_probs.sum()
            * advantages[name]
            * weight.get(aggregation, 1 / (4 * sampled[name]))
        ).backward()
    expected = torch.sqrt(
        sum(parameter.grad.square().sum() for parameter in model.parameters())
    )
    assert metrics["policy/grad_norm"] == pytest.approx(float(expected), rel=1e-7)
    loss = [
        -advantages[name] * len(t) * weight.get(aggregation, 1 / (4 * sampled[name]))
        for name, _, t in turns
    ]
    assert metrics["policy/loss"] == pytest.approx(sum(loss), rel=1e-6)
    folder = finished.config.run_folder
    replayed = replay(
        replay_settings(settings_of(folder), start_before(folder, 1, "never")),
        folder,
        range(1, 2),
        Console(),
    )
    assert replayed["policy/grad_norm"] == pytest.approx(float(expected), rel=1e-7)


def test_rewritten_conversations_made_ahead_are_trained_after_a_resumption_too(
    stand_ins: StandIns,
    batches: list[RemoteBatch],
    thinker: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """Groups that were made ahead come from the checkpoint's file with their branches."""
    stand_ins.world.answer = thought
    settings = [
        f"run.dir={tmp_path}",
        "policy.data_parallel=1",
        "data.validation=''",
        "rollout.placement=apart",
    ]
    settings += [
        *thinker,
        "rollout.max_staleness=1",
        "run.checkpoint_every=1",
        "batch.mini_batches=2",
    ]
    settings += ["run.steps=3", "run.keep_checkpoints=3"]
    first = stand_ins.run(settings).outcome.steps
    made, begin = (
        len(stand_ins.world.turns),
        tmp_path / "run" / "checkpoints" / "policy" / "step-1",
    )
    second = stand_ins.run(
        [*settings, "run.name=again", f"run.resume={begin}"]
    ).outcome.steps
    assert [step["rollout/rows_per_sample"] for step in (*first, *second)] == [3] * 5
    assert [len(batch) for batch in batches] == [12] * 5
    # Of steps 2 and 3 and a comparison of log-probs.
    assert len(stand_ins.world.turns) - made < 3 * 12
