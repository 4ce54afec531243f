"""Several LoRA policies of one engine: trained in turns as if alone, on any ranks, and back from a
checkpoint.
"""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

from tests.refusals import refused
from tests.workers.model.cpu_engine import assert_same, build_engine, weights
from tests.workers.model.ranks import RankPool, dp_rank
from tests.workers.model.tiny import random_sequences
from workers.config.roles import LoraConfig, OptimizerConfig
from workers.errors import NonFiniteError
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, sft

OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2,
    schedule="cosine",
    warmup_steps=2,
    weight_decay=0.1,
    max_grad_norm=0.1,
)
WORK = ("backward", "backward", "step", "backward", "step", "log_probs", "backward", "step")
"""Of each policy, in this order, between the other's."""
COUNT = 12
Trained = tuple[dict[str, Tensor], list[float]]


def build(model: str, policies: int, **settings: object) -> TrainingEngine:
    lora = LoraConfig(rank=2, policies=policies)
    return build_engine(model, lora=lora, **{"optimizer": OPTIMIZER} | settings)


def do(engine: TrainingEngine, policy: str, number: int) -> list[float]:
    """Do the policy's work of this number on its own data, and return what a step reports."""
    if WORK[number] == "step":
        return [metric.result() for _, metric in sorted(engine.optimizer_step().items())]
    whole = random_sequences(COUNT, seed=1000 * ord(policy) + number)
    share = COUNT // engine.parallel.dp
    mine = whole.slice(
        dp_rank(engine.parallel) * share, (dp_rank(engine.parallel) + 1) * share
    )
    if WORK[number] == "log_probs":
        return [float(engine.log_probs(mine, [(0, share)])[0].double().sum())]
    engine.forward_backward(
        mine, [(0, share // 2), (share // 2, share)], sft, Denominators.of(whole)
    )
    return []


def orders(count: int) -> list[str]:
    found = ["ab" * len(WORK), "a" * len(WORK) + "b" * len(WORK)]
    letters = random.Random(0)
    while len(found) < count:
        found.append("".join(letters.sample("ab" * len(WORK), 2 * len(WORK))))
    return found


def trained(
    model: str, order: str, settings: dict[str, object], policies: int = 2
) -> dict[str, Trained]:
    engine = build(model, policies, **settings)
    places, told = dict.fromkeys("ab", 0), dict[str, list[float]](a=[], b=[])
    for policy in order:
        engine.use_adapters(policy)
        told[policy] += do(engine, policy, places[policy])
        places[policy] += 1
    found = {}
    for policy in sorted(set(order)):
        engine.use_adapters(policy)
        found[policy] = weights(engine), told[policy]
    return found


def all_orders(model: str, settings: dict[str, object]) -> list[dict[str, Trained]]:
    alone = [trained(model, policy * len(WORK), settings, policies=1) for policy in "ab"]
    return [alone[0] | alone[1], *(trained(model, order, settings) for order in orders(4))]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (1, {}),
        (1, {"offload": True}),
        (2, {}),
        (2, {"context_parallel": 2}),
        (2, {"pipeline_parallel": 2}),
        (1, {"optimizer": OptimizerConfig(name="muon", learning_rate=1e-2)}),
        (
            1,
            {
                "optimizer": OptimizerConfig(learning_rate=1e-2, state_dtype="int8"),
                "dtype": "float32",
            },
        ),
    ],
    ids=[
        "1 rank",
        "state in host memory",
        "2 ranks",
        "cp 2",
        "pp 2",
        "muon",
        "int8 states",
    ],
)
def test_policies_trained_in_turns_equal_each_trained_alone_to_the_bit(
    model: str, ranks: RankPool, count: int, settings: dict[str, object]
) -> None:
    for alone, *together in ranks.run(all_orders, count, model, settings):
        assert not any(
            torch.equal(weight, alone["b"][0][name])
            for name, weight in changed(alone["a"][0]).items()
        )
        for found, policy in itertools.product(together, "ab"):
            assert found[policy][1] == alone[policy][1]
            assert_same(found[policy][0], alone[policy][0])


def changed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in found.items() if "_proj.weight" in name}


def saved_and_continued(model: str, folder: str) -> Trained:
    """Two policies are saved between two steps of `b`, while `a` is in use, and go on."""
    engine = build(model, 3)
    for policy, number in [("a", 0), ("a", 2), ("b", 0), ("b", 2), ("a", 1)]:
        engine.use_adapters(policy)
        do(engine, policy, number)
    engine.save_checkpoint(folder, step=2)
    engine.wait_for_checkpoint()
    do(engine, "a", 2)
    return continued(engine)


def continued(engine: TrainingEngine) -> Trained:
    told = []
    for policy in "ba":
        engine.use_adapters(policy)
        told += [do(engine, policy, number) for number in (3, 4)]
    return weights(engine), told


def loaded_and_continued(model: str, folder: str) -> Trained:
    engine = build(model, 2)
    for policy in "xa":  # of which one is not in the checkpoint
        engine.use_adapters(policy)
        do(engine, policy, 0)
    engine.load_checkpoint(folder)
    engine.use_adapters("a")
    do(engine, "a", 1)  # gradients are not saved
    do(engine, "a", 2)
    return continued(engine)


def test_a_checkpoint_holds_every_policy_for_any_number_of_ranks(
    model: str, ranks: RankPool, tmp_path: Path
) -> None:
    (expected,) = ranks.run(saved_and_continued, 1, model, str(tmp_path / "state"))
    for count in (1, 2):
        for found in ranks.run(loaded_and_continued, count, model, str(tmp_path / "state")):
            assert_same(found[0], expected[0], 0.0 if count == 1 else 1e-9)


def test_a_checkpoint_of_more_policies_than_model_lora_policies_is_refused(
    model: str, tmp_path: Path
) -> None:
    engine = build(model, 2)
    for policy in "ab":
        engine.use_adapters(policy)
    engine.save_checkpoint(tmp_path / "state", step=0)
    engine.wait_for_checkpoint()
    with refused("model.lora.policies=1"):
        build(model, 1).load_checkpoint(tmp_path / "state")


def test_the_only_policy_of_a_checkpoint_becomes_the_first_one_that_is_named(
    model: str, tmp_path: Path
) -> None:
    one = build(model, 1)
    do(one, "a", 0), do(one, "a", 2)
    one.save_checkpoint(tmp_path / "state", step=1)
    one.wait_for_checkpoint()
    several = build(model, 2)
    several.load_checkpoint(tmp_path / "state")
    several.use_adapters("first")
    assert_same(weights(several), weights(one))
    several.use_adapters("second")
    assert_same(weights(several), weights(build(model, 1)))


def test_one_policy_more_is_refused_and_an_engine_without_adapters_has_none(
    model: str,
) -> None:
    engine = build(model, 2)
    for policy in "ab":
        engine.use_adapters(policy)
    with refused("model.lora.policies=2"):
        engine.use_adapters("c")
    with refused("model.lora.rank"):
        build_engine(model).use_adapters("a")


def test_skipped_steps_count_for_their_policy_alone(model: str) -> None:
    engine = build(model, 2, optimizer=OptimizerConfig(max_skipped_steps=2))

    def skip(policy: str) -> None:
        engine.use_adapters(policy)
        do(engine, policy, 0)
        next(
            each for each in engine.module.parameters() if each.grad is not None
        ).grad.mul_(np.nan)
        engine.optimizer_step()

    skip("a")
    skip("b")
    with pytest.raises(NonFiniteError):
        skip("a")


def test_engines_get_the_adapters_of_the_policy_in_use(model: str, tmp_path: Path) -> None:
    engine = build(model, 2)
    sent = {}
    for policy in "ab":
        engine.use_adapters(policy)
        do(engine, policy, 0), do(engine, policy, 2)
        sent[policy] = engine.adapter_files()
        engine.save_adapters(tmp_path / policy)
    assert not dist.get_rank()
    for policy, files in sent.items():
        written = {
            file.name: file.read_bytes()
            for file in (tmp_path / policy).iterdir()
            if file.name in files
        }
        assert {name: data.tobytes() for name, data in files.items()} == written
    (first, second) = (
        load(files["adapter_model.safetensors"].tobytes()) for files in sent.values()
    )
    assert first.keys() == second.keys()
    assert not any(
        torch.equal(first[name], second[name]) for name in first if ".lora_B." in name
    )
