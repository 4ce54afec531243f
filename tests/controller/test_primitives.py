"""A loop of one's own: what the configured loop computes, whatever the split, and refusals. Engines are
stand-ins.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ballast
from ballast.loop.open_run import OpenRun
from controller.observability.run_folder import RunFolder
from controller.primitives import Samples
from tests.benchmarks.own_loop import grpo
from tests.controller.stand_ins.run import StandIns
from tests.documentation.blocks import ROOT, blocks_of
from tests.refusals import refused
from tests.workers.model.cases import Case
from tests.workers.model.ranks import gloo_loops
from tests.workers.model.reference import keep_float64
from workers.errors import CheckpointError

Open = Callable[..., AbstractContextManager[OpenRun]]
ONE_RANK = ["policy.data_parallel=1", "data.validation=''", "rollout.placement=apart"]
LEARNING = "policy.optimizer.learning_rate=1e-3"


@pytest.fixture
def stand_ins(stand_ins: StandIns) -> StandIns:
    stand_ins.compute()
    return stand_ins


@pytest.fixture
def opened(stand_ins: StandIns, tmp_path: Path) -> Open:
    return lambda *overrides: stand_ins.open(
        [f"run.dir={tmp_path}/own", *ONE_RANK, *overrides]
    )


def weights(stand_ins: StandIns) -> dict[str, torch.Tensor]:
    engine = stand_ins.world.ray.actors["policy dp=0"].instance.engine
    return {name: weight.clone() for name, weight in engine.named_weights()}


def keep_whole_numbers(stand_ins: StandIns) -> None:
    """Norms that transformers computes in float32 are computed in float64."""
    keep_float64(
        Case(share_prefixes="always"),
        stand_ins.world.ray.actors["policy dp=0"].instance.engine.module.model,
    )


def gradients(stand_ins: StandIns) -> dict[str, torch.Tensor]:
    engine = stand_ins.world.ray.actors["policy dp=0"].instance.engine
    return {
        name: each.grad.full_tensor().clone()
        for name, each in engine.module.model.named_parameters()
    }


@pytest.mark.parametrize(
    "settings", [(), ("policy.max_tokens_per_micro_batch=24", "model.lora.rank=2")]
)
def test_a_loop_of_ones_own_equals_the_configured_one_to_the_bit(
    stand_ins: StandIns, opened: Open, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    known = stand_ins.run(
        [f"run.dir={tmp_path}/configured", *ONE_RANK, LEARNING, *settings]
    )
    expected, rows = weights(stand_ins), known.outcome.steps
    with opened(LEARNING, *settings) as run:
        grpo(run, prompts=2, samples=2)
        found, folder = weights(stand_ins), run.folder
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    own = RunFolder(folder).metrics
    for name in (
        "policy/loss",
        "policy/grad_norm",
        "policy/learning_rate",
        "reward/mean",
        "tokens/update",
    ):
        assert [row[name] for row in own] == [row[name] for row in rows], name
    assert (folder / "samples.jsonl").read_text().count("\n") > 2


@pytest.mark.parametrize("loss", [None, "importance_sampling", "gspo"])
def test_a_batch_in_calls_has_the_gradient_of_one_call(
    stand_ins: StandIns, opened: Open, loss: str | None
) -> None:
    stand_ins.compute("float64")
    with opened(
        "model.share_prefixes=always", "policy.max_tokens_per_micro_batch=24"
    ) as run:
        keep_whole_numbers(stand_ins)
        batch = run.sample(run.prompts(3), n=3).result().batch
        columns = {"advantages": np.linspace(-1, 1, len(batch))}
        passed = run.forward_backward(batch, loss, columns=columns).result()
        whole = gradients(stand_ins)
        run.step(learning_rate=1e-30).result()
        parts = [
            run.forward_backward(batch, loss, rows=rows, columns=columns).result()
            for rows in np.array_split(np.random.default_rng(0).permutation(len(batch)), 3)
        ]
        for name, gradient in gradients(stand_ins).items():
            assert float((gradient - whole[name]).norm() / whole[name].norm()) < 1e-9, name
    assert sum(part.metrics["loss"] for part in parts) == pytest.approx(
        passed.metrics["loss"], rel=1e-9
    )


def test_runs_that_are_closed_leave_no_threads_of_process_groups(opened: Open) -> None:
    found = []
    for number in range(3):
        with opened(
            f"run.name={number}", "algorithm.loss.kl_coefficient=0.1", "run.steps=1"
        ) as run:
            grpo(run, prompts=2, samples=2)
            run.save("one").result()
        found.append(gloo_loops())
    assert found[0] > 0 and len({*found}) == 1


def responses(samples: Samples) -> list[list[int]]:
    return [sequence.ids.tolist() for sequence in samples.sequences]


def test_prompts_that_are_sampled_again_in_a_step_get_other_samples(opened: Open) -> None:
    """The same calls have the same samples in another run, and a seed gives the same in each call."""
    runs = []
    for name in ("one", "other"):
        with opened(f"run.name={name}") as run:
            prompts = run.prompts(2)
            calls = [run.sample(prompts, n=2, seed=seed) for seed in (None, None, 5, 5)]
            runs.append([responses(call.result()) for call in calls])
    assert runs[0] == runs[1]
    first, second, seeded, again = runs[0]
    assert first != second
    assert seeded == again
    assert seeded not in (first, second)


def test_means_of_two_batches_and_rows_given_twice_are_refused(opened: Open) -> None:
    with opened() as run:
        first, second = (run.sample(run.prompts(2), n=2).result().batch for _ in range(2))
        columns = {"advantages": np.ones(4)}
        run.forward_backward(first, rows=np.array([0, 1]), columns=columns)
        with refused("loss=LossConfig"):
            run.forward_backward(second, columns=columns)
        with refused("rows: some were computed"):
            run.forward_backward(first, rows=np.array([1, 2]), columns=columns)
        run.forward_backward(second, "importance_sampling", columns=columns)
        run.step()
        run.forward_backward(second, columns=columns).result()


def test_own_sequences_have_log_probs_and_learn_by_weights(
    stand_ins: StandIns, opened: Open
) -> None:
    stand_ins.compute("float64")
    ids = [np.arange(3, 3 + length) for length in (5, 9, 2)]
    rows = [
        {
            "input_ids": each,
            "loss_mask": np.arange(len(each)) > 0,
            "weights": np.ones(len(each)),
        }
        for each in ids
    ]
    with opened("data.train=''", "reward.function=''") as run:
        batch = run.batch(rows)
        before = run.forward(batch).result().log_probs
        passed = run.forward_backward(batch, "cross_entropy").result()
        assert [len(row) for row in before] == [5, 9, 2] and not any(
            row[0] for row in before
        )
        assert passed.metrics["loss"] == pytest.approx(
            -sum(float(row.sum()) for row in before), rel=1e-6
        )
        for found, known in zip(passed.log_probs, before, strict=True):
            np.testing.assert_allclose(found, known, rtol=1e-6)
        run.step(learning_rate=1e-2).result()
        assert sum(row.sum() for row in run.forward(batch).result().log_probs) > sum(
            row.sum() for row in before
        )
        with refused("data.train is empty"):
            run.prompts(1)


def test_a_saved_state_comes_back_with_or_without_its_optimiser(
    stand_ins: StandIns, opened: Open
) -> None:
    def learn(run: OpenRun) -> dict[str, torch.Tensor]:
        batch = run.batch(
            [{"input_ids": np.arange(3, 9), "loss_mask": np.arange(6) > 0}], weights=[1.0]
        )
        run.forward_backward(batch, "cross_entropy")
        run.step(learning_rate=1e-2).result()
        return weights(stand_ins)

    with opened() as run:
        first = learn(run)
        assert run.save("one").result() == run.folder / "states" / "one"
        second = learn(run)
        run.load("one").result()
        assert all(
            torch.equal(weight, first[name]) for name, weight in weights(stand_ins).items()
        )
        assert all(torch.equal(weight, second[name]) for name, weight in learn(run).items())
        run.load("one", optimizer=False).result()
        assert not all(
            torch.equal(weight, second[name]) for name, weight in learn(run).items()
        )
        assert run.steps == 4
        for name in ("../one", "", ".hidden"):
            with refused("name="):
                run.save(name)


POLICIES = ("model.lora.rank=2", "model.lora.policies=2", LEARNING)


def learn_in_turns(run: OpenRun, policies: str) -> None:
    """A step of each policy: all samples, then all gradients, then all steps."""
    for policy in policies:
        run.publish(adapter=policy)
    for number in range(2):
        prompts = ["1+1=", f"1+{number}="]
        asked = {
            policy: run.sample(prompts, n=2, seed=number, adapter=policy)
            for policy in policies
        }
        for policy, samples in asked.items():
            batch = samples.result().batch
            advantages = {"advantages": np.linspace(-1, ord(policy) - ord("a"), len(batch))}
            run.forward_backward(batch, columns=advantages, adapter=policy)
        for policy in policies:
            run.step(adapter=policy)
            run.publish(adapter=policy)


def test_lora_policies_in_turns_equal_each_alone_and_all_are_saved(
    stand_ins: StandIns, opened: Open, tmp_path: Path
) -> None:
    def exported(run: OpenRun, name: str, policy: str) -> dict[str, torch.Tensor]:
        folder = run.export(f"{name}-{policy}", adapter=policy).result()
        return load_file(folder / "model.safetensors")

    alone = {}
    for policy in "ab":
        with opened(*POLICIES, f"run.name={policy}") as run:
            learn_in_turns(run, policy)
            alone[policy] = exported(run, "alone", policy)
    with opened(*POLICIES, "run.name=both") as run:
        learn_in_turns(run, "ab")
        for policy, known in alone.items():
            found = exported(run, "both", policy)
            assert all(torch.equal(found[name], weight) for name, weight in known.items())
        assert not all(
            torch.equal(alone["b"][name], weight) for name, weight in alone["a"].items()
        )
        run.save("both")
        run.save("one", adapter="a")
        with pytest.raises(CheckpointError):
            run.load("both", adapter="a").result()
        learn_in_turns(run, "ba")
        second = exported(run, "second", "b")
        run.load("one", adapter="a")  # of one alone
        for policy, known in (("a", alone["a"]), ("b", second)):
            found = exported(run, "one", policy)
            assert all(torch.equal(found[name], weight) for name, weight in known.items())
        run.load("one", adapter="b")
        taken = exported(run, "taken", "b")
        assert all(torch.equal(taken[name], weight) for name, weight in alone["a"].items())
        run.load("both")
        for policy, known in alone.items():
            found = exported(run, "loaded", policy)
            assert all(torch.equal(found[name], weight) for name, weight in known.items())


def test_a_policy_of_several_is_named_and_published_before_it_is_sampled(
    opened: Open,
) -> None:
    with opened(*POLICIES) as run:
        batch = run.sample(["1+1="]).result().batch  # of the base model
        with refused("adapter='a'"):
            run.sample(["1+1="], adapter="a")
        for call in (
            run.step,
            run.publish,
            run.export,
            lambda: run.forward_backward(batch, "gspo"),
        ):
            with refused("adapter=''"):
                call()
        with refused("name="):
            run.publish(adapter="../a")
    with opened("run.name=one") as run, refused("model.lora.policies=1"):
        run.step(adapter="a")


def test_earlier_versions_of_a_policy_are_sampled_while_engines_keep_them(
    opened: Open,
) -> None:
    with opened(*POLICIES, "model.lora.versions=2") as run:
        first, other, second = (run.publish(adapter=policy).result() for policy in "aba")

        def sampled(version: int | None, policy: str = "a") -> set[int]:
            batch = (
                run.sample(["1+1=", "1+2="], n=2, adapter=policy, version=version)
                .result()
                .batch
            )
            return set(batch["weight_version"].tolist())

        assert sampled(first) == {first} and sampled(second) == sampled(None) == {second}
        assert sampled(None, "b") == {other}
        with refused(f"version={other}"):
            sampled(other)
        third = run.publish(adapter="a").result()
        assert sampled(third) == {third} and sampled(second) == {second}
        with refused(f"version={first}"):
            sampled(first)
        with refused(f"version={first}"):
            run.sample(["1+1="], version=first)


def test_what_an_open_run_cannot_do_is_refused(opened: Open) -> None:
    with opened() as run:
        batch = run.sample(["1+1="]).result().batch
        with refused("role='critic'"):
            run.forward(batch, role="critic")
        with refused("loss=dpo"):
            run.forward_backward(batch, "dpo").result()


LOOPS = {
    "A loop of your own": (LEARNING,),
    "REINFORCE with a learned baseline": (),
    "Best-of-n distillation": (),
    "DPO": ("algorithm.loss.kl_coefficient=0.1",),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("title", LOOPS)
def test_the_loops_of_the_page_run(
    stand_ins: StandIns, opened: Open, monkeypatch: Any, title: str
) -> None:
    page = ROOT / "docs" / "primitives.md"
    section = re.search(rf"^#+ {title}$(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert section is not None
    code = [
        block.body
        for block in blocks_of(page)
        if block.language == "python" and block.body in section[1]
    ]
    learned = []

    def open_with(config: Any = None, *, overrides: Any = (), reward: Any = None) -> Any:
        named = [f"{key}={value}" for key, value in dict(overrides).items()]
        return opened("run.steps=1", *LOOPS[title], *named)

    monkeypatch.setattr(ballast, "open", open_with, raising=False)
    usual = OpenRun.step
    monkeypatch.setattr(
        OpenRun, "step", lambda *a, **k: learned.append(k) or usual(*a, **k)
    )
    exec("\n".join(code), {"__name__": "page"})
    assert learned
