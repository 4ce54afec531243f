"""LoRA policies in a real engine: each request is of its policy, by the trainer's log-probs, after every
update.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import ray
import torch
from vllm.config.lora import MaxLoRARanks

from controller.engines.engine_pool import Sample
from tests.controller.engines.generation import generate
from tests.refusals import refused
from tests.workers.rollout.engines import LOG_PROB_TOLERANCE, Engines, requests_for, rows_of
from workers.batch.dataproto import DataProto
from workers.config.roles import LoraConfig, ModelConfig, OptimizerConfig, SamplingConfig
from workers.engine.engine_options import LORA_RANKS
from workers.engine.requests import SampleRequest
from workers.model.engine import TrainingEngine

pytestmark = pytest.mark.slow
LORA = LoraConfig(rank=4, rslora=True, policies=2, versions=2)
PROMPT = np.arange(2, 102, dtype=np.int32)  # of three blocks of the prefix cache


@pytest.fixture(scope="module")
def engines(ray_session: None, tiny_model_path: Path) -> Iterator[Engines]:
    found = Engines(tiny_model_path, lora=LORA, restarts=2)
    yield found
    found.pool.stop()


@pytest.fixture(scope="module")
def trainer(tiny_model_path: Path) -> TrainingEngine:
    model = ModelConfig(path=str(tiny_model_path), dtype="float32", lora=LORA)
    return TrainingEngine(model, optimizer=OptimizerConfig(), total_steps=1, device="cpu")


def publish(trainer: TrainingEngine, engines: Engines, policy: str, seed: int) -> None:
    """Give the policy other adapters, and send them."""
    trainer.use_adapters(policy)
    torch.manual_seed(seed)
    for parameter in trainer.module.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    engines.version += 1
    engines.pool.update_adapters(
        {policy: ray.put(trainer.adapter_files())}, engines.version
    )


def of_policies(
    engines: Engines, policies: list[str], count: int = 6
) -> list[SampleRequest]:
    """The same prompts and seeds for every policy, in turn."""
    versions = {
        policy: engines.pool.adapter(policy) if policy else 0 for policy in policies
    }
    return [
        replace(request, uid=f"{policy}/{request.uid}", adapter=versions[policy])
        for request in requests_for(count, samples=2)
        for policy in policies
    ]


def versions_of(finished: list[Sample]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for result, _ in finished:
        found.setdefault(result.uid.split("/")[0], set()).update(
            (result.weight_version, result.newest_weight_version)
        )
    return found


def check_log_probs(
    trainer: TrainingEngine, finished: list[Sample], policies: list[str]
) -> None:
    responses = {}
    for policy in policies:
        rows = [
            row for result, row in rows_of(finished) if result.uid.startswith(f"{policy}/")
        ]
        columns = [{name: row[name] for name in ("input_ids", "loss_mask")} for row in rows]
        batch = DataProto.from_rows(columns).as_tensors()
        if policy:
            trainer.use_adapters(policy)
            expected = trainer.log_probs(batch, [(0, len(batch))])[0]
        else:
            with trainer.without_adapters():
                expected = trainer.log_probs(batch, [(0, len(batch))])[0]
        found = np.concatenate([row["rollout_log_probs"] for row in rows])
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=LOG_PROB_TOLERANCE)
        responses[policy] = np.concatenate([row["input_ids"] for row in rows]).tobytes()
    assert len(set(responses.values())) == len(policies)


def test_policies_and_the_base_model_are_sampled_side_by_side_and_a_new_engine_has_all(
    trainer: TrainingEngine, engines: Engines
) -> None:
    policies = ["a", "b", ""]
    for seed, policy in enumerate("ab"):
        publish(trainer, engines, policy, seed)
    check_log_probs(trainer, engines.sample(of_policies(engines, policies)), policies)
    publish(trainer, engines, "a", seed=2)
    newest = engines.version
    for killed in (False, True):
        if killed:
            ray.kill(engines.pool.actors[0])
        finished = engines.sample(of_policies(engines, policies))
        assert versions_of(finished) == {"a": {newest}, "b": {newest - 1}, "": {newest}}
        check_log_probs(trainer, finished, policies)


def test_an_earlier_version_is_sampled_as_it_was_also_by_a_new_engine(
    trainer: TrainingEngine, engines: Engines
) -> None:
    publish(trainer, engines, "a", seed=0)
    earlier = of_policies(engines, ["a"])
    known = engines.sample(earlier)
    check_log_probs(trainer, known, ["a"])
    publish(trainer, engines, "a", seed=1)
    for killed in (False, True):
        if killed:
            ray.kill(engines.pool.actors[0])
        newer = [
            replace(each, uid=f"{each.uid}-newer") for each in of_policies(engines, ["a"])
        ]
        both = engines.sample([*earlier, *newer])
        again, changed = both[: len(earlier)], both[len(earlier) :]
        assert versions_of(again) == versions_of(known) and versions_of(changed) == {
            "a": {engines.version}
        }
        for (_, row), (_, before) in zip(rows_of(again), rows_of(known), strict=True):
            assert np.array_equal(row["input_ids"], before["input_ids"])
            difference = np.abs(
                row["rollout_log_probs"] - before["rollout_log_probs"]
            ).max()
            assert difference < LOG_PROB_TOLERANCE
        check_log_probs(trainer, changed, ["a"])
    publish(trainer, engines, "a", seed=2)  # engines keep two
    with refused(f"version={earlier[0].adapter}"):
        engines.pool.adapter("a", earlier[0].adapter)


def test_a_policy_is_published_while_others_are_sampled(
    trainer: TrainingEngine, engines: Engines
) -> None:
    policies = ["b", ""]
    for seed, policy in enumerate("ab"):
        publish(trainer, engines, policy, seed)
    finished = list[Sample]()
    generation = engines.pool.begin(
        SamplingConfig(max_new_tokens=64),
        lambda results, block: finished.extend((result, block) for result in results),
    )
    generation.router.submit(of_policies(engines, policies))
    engines.pool.pump()
    publish(trainer, engines, "a", seed=4)
    while not generation.router.done:
        engines.pool.pump(1.0)
    engines.pool.end(generation)
    assert versions_of(finished)["b"] == {engines.version - 1}
    check_log_probs(trainer, finished, policies)


def test_prefixes_are_of_one_policy_and_one_version(
    trainer: TrainingEngine, engines: Engines
) -> None:
    def cached() -> dict[str, int]:
        versions = {"a": engines.pool.adapter("a"), "b": engines.pool.adapter("b"), "": 0}
        requests = [
            SampleRequest(f"{name}/", 0, PROMPT, seed=1, adapter=version)
            for name, version in versions.items()
        ]
        finished = engines.sample(requests)
        check_log_probs(trainer, finished, ["a", "b", ""])
        return {result.uid[:-1]: result.cached_tokens for result, _ in finished}

    for seed, policy in enumerate("ab"):
        publish(trainer, engines, policy, seed)
    assert cached() == {"a": 0, "b": 0, "": 0}
    assert cached() == {"a": 96, "b": 96, "": 96}
    publish(trainer, engines, "a", seed=3)
    assert cached() == {"a": 0, "b": 96, "": 96}


def test_a_version_that_was_not_published_fails_its_requests_alone(
    engines: Engines,
) -> None:
    (good, *_) = of_policies(engines, [""], count=1)
    bad = replace(good, uid="bad", adapter=10**6)
    finished, router = generate(engines.pool, [good, bad], SamplingConfig(max_new_tokens=4))
    assert [result.key for result, _ in finished] == [good.key]
    assert f"adapter={10**6}" in router.dropped[0].error
    with refused("version=None"):
        engines.pool.adapter("unknown")


def test_ranks_are_those_that_vllm_takes() -> None:
    assert get_args(MaxLoRARanks) == LORA_RANKS
