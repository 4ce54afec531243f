"""A real engine: what it returns, what it refuses, and what becomes of its weights."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from controller.engines.engine_pool import RolloutBatch
from tests.end_to_end.processes import living
from tests.workers.rollout import tiny
from tests.workers.rollout.breakable import Breakable
from tests.workers.rollout.conftest import (
    PREFILL_TOKENS,
    Engines,
    largest_difference,
    requests_for,
    rows_of,
    start_engines,
)
from workers.config import ModelConfig, RolloutConfig, SamplingConfig
from workers.errors import RolloutError
from workers.rollout.cpu_kernels import PROVIDER
from workers.rollout.requests import ERROR, LENGTH, STOP, PartialResponse, SampleRequest, SampleResult
from workers.rollout.weight_transfer import pack_weights
from workers.rollout.worker import RolloutWorker

LOG_PROB_TOLERANCE = 3e-5  # float32, two implementations
LONG = SamplingConfig(max_new_tokens=200)


def test_rows_hold_prompt_and_response_and_say_which_is_which(engines: Engines) -> None:
    requests = requests_for(6, samples=2)
    finished = engines.sample(requests)
    assert [result.key for result in finished.results] == [request.key for request in requests]
    for request, (result, row) in zip(requests, rows_of(finished), strict=True):
        tokens = result.prompt_tokens + result.response_tokens
        assert {name: (column.dtype, len(column)) for name, column in row.items()} == {
            "input_ids": (np.int32, tokens),
            "loss_mask": (np.bool_, tokens),
            "rollout_log_probs": (np.float32, tokens),
            "weight_versions": (np.int32, tokens),
        }
        np.testing.assert_array_equal(row["input_ids"][~row["loss_mask"]], request.prompt_ids)
        assert row["loss_mask"].sum() == result.response_tokens > 0
        assert (row["rollout_log_probs"][: result.prompt_tokens] == 0).all()
        assert (row["rollout_log_probs"][result.prompt_tokens :] < 0).all()


def test_responses_end_at_the_end_of_sequence_or_at_the_longest_response(engines: Engines) -> None:
    finished = engines.sample(requests_for(16, samples=4), max_new_tokens=120)
    reasons = {result.finish_reason for result in finished.results}
    assert reasons == {STOP, LENGTH}
    for result, row in rows_of(finished):
        response = row["input_ids"][result.prompt_tokens :]
        assert (response[-1] == tiny.EOS) == (result.finish_reason == STOP)
        assert tiny.EOS not in response[:-1]
        assert (result.response_tokens == 120) or result.finish_reason == STOP


def test_seeds_repeat_a_round_exactly_and_another_step_differs(engines: Engines) -> None:
    first, second = (rows_of(engines.sample(requests_for(8, samples=4, step=3))) for _ in range(2))
    for (_, row), (_, again) in zip(first, second, strict=True):
        np.testing.assert_array_equal(row["input_ids"], again["input_ids"])
        np.testing.assert_allclose(row["rollout_log_probs"], again["rollout_log_probs"], atol=1e-5)
    other = rows_of(engines.sample(requests_for(8, samples=4, step=4)))
    same = [
        np.array_equal(row["input_ids"], again["input_ids"]) for (_, row), (_, again) in zip(first, other, strict=True)
    ]
    assert not any(same)


def test_the_samples_of_a_group_differ(engines: Engines) -> None:
    rows = rows_of(engines.sample(requests_for(1, samples=16)))
    assert len({row["input_ids"].tobytes() for _, row in rows}) == 16


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([5, tiny.VOCABULARY], "outside the model's vocabulary of 512"),
        ([5, -1], "token id -1"),
        ([2] * tiny.MAX_MODEL_TOKENS, "rollout.max_model_tokens"),
        ([], "empty"),
    ],
)
def test_a_prompt_that_the_engine_cannot_take_fails_alone(engines: Engines, prompt: list[int], reason: str) -> None:
    bad = SampleRequest("bad", 0, np.array(prompt, dtype=np.int32), seed=1)
    good = requests_for(3, samples=2)
    finished = engines.sample([*good[:3], bad, *good[3:]])
    assert [result.key for result in finished.results] == [request.key for request in good]
    assert [(result.uid, result.finish_reason, result.row) for result in finished.dropped] == [("bad", ERROR, -1)]
    assert reason in finished.dropped[0].error
    assert finished.retried == 1
    engines.call("health")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_the_trainers_after_an_update_with_tied_embeddings(
    engines: Engines, temperature: float
) -> None:
    old, new = tiny.random_model(0), tiny.random_model(1)
    version = engines.load(new)
    finished = engines.sample(requests_for(8, samples=4), temperature=temperature, max_new_tokens=64)
    assert {result.weight_version for result in finished.results} == {version}
    assert engines.call("weight_version") == version
    assert largest_difference(finished, new, temperature) < LOG_PROB_TOLERANCE
    assert largest_difference(finished, old, temperature) > 0.5  # the comparison can tell the two apart


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_an_update_that_leaves_out_a_weight_is_refused_by_name(engines: Engines, left_out: str) -> None:
    # Without lm_head.weight vLLM would go on sampling from the old output layer and never say so.
    engines.load(tiny.random_model(2))
    partial = pack_weights((n, w) for n, w in tiny.random_model(3).state_dict().items() if n != left_out)
    refused = engines.version + 1
    with pytest.raises(RolloutError, match=f"version {refused}: .*{left_out}"):
        engines.rollouts.update_weights(ray.put(partial), refused)
    assert engines.call("weight_version") == engines.version
    # The engine is well: the next complete update puts it right.
    new = tiny.random_model(4)
    engines.load(new)
    assert largest_difference(engines.sample(requests_for(4, samples=2)), new) < LOG_PROB_TOLERANCE


def test_an_update_without_the_output_layer_leaves_all_old_weights(engines: Engines) -> None:
    old = tiny.random_model(5)
    engines.load(old)
    untied = pack_weights((n, w) for n, w in tiny.random_model(6).state_dict().items() if n != "lm_head.weight")
    with pytest.raises(RolloutError, match="lm_head"):
        engines.rollouts.update_weights(ray.put(untied), engines.version + 1)
    requests = requests_for(4, samples=2)
    with pytest.raises(RolloutError, match=f"no rollout engine has the weights of version {engines.version + 1}"):
        engines.sample(requests)
    # Asked past the fleet, which gives no work to an engine without the current weights, it still has the old ones.
    generate = engines.rollouts.actors[0].generate.options(num_returns="streaming")
    stream = list(generate.remote(requests, SamplingConfig(max_new_tokens=16)))
    pairs = [
        (result, block) for block, found in zip(stream[::2], stream[1::2], strict=True) for result in ray.get(found)
    ]
    found = RolloutBatch([result for result, _ in pairs], [block for _, block in pairs], [], retried=0)
    assert largest_difference(found, old) < LOG_PROB_TOLERANCE


def test_a_part_of_a_fused_weight_is_missed_too(engines: Engines) -> None:
    """vLLM loads q, k and v into one parameter, and says that it loaded that."""
    left_out = "model.layers.0.self_attn.k_proj.weight"
    engines.load(tiny.random_model(2))
    partial = pack_weights((n, w) for n, w in tiny.random_model(3).state_dict().items() if n != left_out)
    with pytest.raises(RolloutError, match=r"a part of model\.layers\.0\.self_attn\.qkv_proj\.weight"):
        engines.rollouts.update_weights(ray.put(partial), engines.version + 1)
    engines.load(tiny.random_model(4))


def test_checksums_are_of_the_weights_that_were_sent(engines: Engines) -> None:
    seen = []
    for seed in (5, 6):
        model = tiny.random_model(seed)
        engines.load(model)
        found = engines.call("weight_checksums")
        seen.append(found)
        for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
            sent = hashlib.sha256(model.state_dict()[name].numpy()).hexdigest()
            assert [digest for key, digest in found.items() if key.endswith(f":{name}")] == [sent]
    embedding = next(name for name in found if name.endswith("embed_tokens.weight"))
    assert seen[0][embedding] != seen[1][embedding]


def test_an_argument_of_vllms_own_reaches_the_engine(engines: Engines) -> None:
    assert engines.call("prefill_tokens") == PREFILL_TOKENS


def test_an_engine_on_a_cpu_computes_norms_by_vllms_kernel(engines: Engines) -> None:
    assert engines.call("norm_kernel") == PROVIDER


def test_all_requests_of_a_round_are_in_its_first_step(engines: Engines) -> None:
    requests = requests_for(8, samples=8)
    engines.call("watch_steps")
    engines.sample(requests)
    assert engines.call("requests_of_steps")[0] == len(requests)


def test_a_command_that_nobody_waits_for_any_more_does_not_end_the_engine(engines: Engines) -> None:
    engines.call("give_up_a_command")
    assert {result.error for result in engines.sample(requests_for(1, samples=2)).results} == {""}


def test_more_prompt_tokens_than_one_forward_pass_takes_are_no_harm(engines: Engines) -> None:
    requests = requests_for(32, samples=2)
    assert sum(len(request.prompt_ids) for request in requests) > 2 * PREFILL_TOKENS
    finished = engines.sample(requests)
    assert len(finished.results) == len(requests) and not finished.dropped


def test_requests_in_flight_outlive_an_update_and_carry_the_version_that_they_began_with(engines: Engines) -> None:
    before = engines.load(tiny.random_model(7))
    requests = requests_for(32, samples=4)
    flushes: list[int] = []

    def update_after_the_first(results: list[SampleResult], _: object) -> None:
        flushes.append(len(results))
        if len(flushes) == 1:
            engines.load(tiny.random_model(8))

    finished = engines.rollouts.generate(requests, LONG, on_results=update_after_the_first)
    assert flushes[0] < sum(flushes) == len(requests)  # the others were in flight
    assert {result.weight_version for result in finished.results} == {before}
    afterwards = engines.sample(requests_for(4, samples=1))
    assert {result.weight_version for result in afterwards.results} == {engines.version}


def test_every_token_has_the_log_prob_of_the_weights_that_sampled_it(engines: Engines) -> None:
    """A sample goes on through two updates: its earlier tokens are read again by the new weights, and not changed."""
    models = {engines.load(tiny.random_model(seed)): tiny.random_model(seed) for seed in (7,)}
    waiting = [8, 9]

    def update(results: list[SampleResult], _: object) -> None:
        if waiting:
            seed = waiting.pop(0)
            models[engines.load(tiny.random_model(seed))] = tiny.random_model(seed)

    finished = engines.rollouts.generate(requests_for(32, samples=4), LONG, on_results=update)
    assert max(len(result.version_tokens) for result in finished.results) == 3
    for result, row in rows_of(finished):
        versions = row["weight_versions"][row["loss_mask"]]
        assert tuple(zip(*map(np.ndarray.tolist, np.unique(versions, return_counts=True)), strict=True)) == (
            result.version_tokens
        )
        for version, _ in result.version_tokens:
            sampled = row["weight_versions"] == version
            expected = tiny.log_probs(models[version], row["input_ids"], 1.0)[sampled]
            np.testing.assert_allclose(row["rollout_log_probs"][sampled], expected, atol=LOG_PROB_TOLERANCE)


def test_a_response_that_was_begun_goes_on_after_its_first_tokens(engines: Engines) -> None:
    old, new = tiny.random_model(7), tiny.random_model(8)
    before = engines.load(old)
    parts: dict[int, PartialResponse] = {}

    def look(results: list[SampleResult], _: object) -> None:
        parts.update(parts or engines.call("partial_responses"))

    requests = requests_for(32, samples=4)
    engines.rollouts.generate(requests, LONG, on_results=look)
    assert parts and all(len(part.ids) == len(part.log_probs) == len(part.versions) for part in parts.values())
    after = engines.load(new)
    begun = [replace(request, begun=parts[request.seed]) for request in requests if request.seed in parts]
    by_key = {request.key: parts[request.seed] for request in begun}
    for result, row in rows_of(engines.rollouts.generate(begun, LONG)):
        part = by_key[result.key]
        response = {name: column[result.prompt_tokens :] for name, column in row.items()}
        np.testing.assert_array_equal(response["input_ids"][: len(part.ids)], part.ids)
        np.testing.assert_array_equal(response["rollout_log_probs"][: len(part.ids)], part.log_probs)
        assert result.version_tokens == ((before, len(part.ids)), (after, result.response_tokens - len(part.ids)))
        assert result.response_tokens <= LONG.max_new_tokens
        expected = tiny.log_probs(new, row["input_ids"], 1.0)[result.prompt_tokens + len(part.ids) :]
        np.testing.assert_allclose(response["rollout_log_probs"][len(part.ids) :], expected, atol=LOG_PROB_TOLERANCE)


def test_an_engine_whose_step_raises_is_replaced_and_no_sample_lost(
    ray_session: None, tiny_model_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engines = Engines(start_engines(tiny_model_path, restarts=1, worker=Breakable))
    version = engines.load(tiny.random_model(3))
    engines.call("break_after", 5)
    requests = requests_for(16, samples=4)
    finished = engines.rollouts.generate(requests, LONG)
    assert [result.key for result in finished.results] == [request.key for request in requests]
    assert {result.weight_version for result in finished.results} == {version}
    assert {result.error for result in finished.results} == {""}
    assert "rollout replica 0 died: RuntimeError: out of luck; starting a new one" in capfd.readouterr().out
    engines.rollouts.stop()


@pytest.mark.slow
def test_the_death_of_every_engine_is_told_with_its_cause(ray_session: None, tmp_path: Path) -> None:
    """vLLM on CPUs has no kernel for heads of 16, and says so in the first step."""
    engines = Engines(start_engines(tiny.save_model(tmp_path / "small", heads=8), restarts=9))
    with pytest.raises(RolloutError, match=r"died: \w+Error: .*2 engines in a row died before they finished a sample"):
        engines.sample(requests_for(2, samples=1))
    assert engines.rollouts.fleet.budget.engines == 1
    engines.rollouts.stop()


@pytest.mark.slow
def test_a_dying_engine_loses_nothing_and_stop_leaves_no_process(ray_session: None, tiny_model_path) -> None:
    """Its requests go to the other engine; the one in its place comes up with the weights that were sent last.

    The engines are processes of their own, as on GPUs.
    """
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    engines = Engines(
        start_engines(tiny_model_path, replicas=2, restarts=1, max_concurrent=64, environment_variables=apart)
    )
    version = engines.load(tiny.random_model(3))
    pids = [engines.call("pids", replica=replica) for replica in (0, 1)]
    doomed = list(pids[0])
    requests = requests_for(16, samples=4)

    def kill_engine_once(*_: object) -> None:
        for process in map(psutil.Process, pids[0][1:]):
            process.kill()
        pids[0].clear()

    finished = engines.rollouts.generate(requests, LONG, on_results=kill_engine_once)
    assert [result.key for result in finished.results] == [request.key for request in requests]
    assert engines.rollouts.fleet.serving == [1]
    while 0 not in engines.rollouts.fleet.serving:
        engines.sample(requests_for(1, samples=1))
    assert engines.call("weight_version", replica=0) == version
    assert living(doomed) == []
    engines.call("stop", replica=1)
    assert not [pid for pid in pids[1][1:] if psutil.pid_exists(pid)]
    with pytest.raises(RolloutError, match="replica 1 has no engine"):
        engines.call("health", replica=1)
    engines.rollouts.stop()


@pytest.mark.parametrize(("placement", "way"), [("colocated", "ipc"), ("apart", "nccl")])
def test_a_placement_that_needs_gpus_is_refused_before_an_engine_starts(
    ray_session: None, tiny_model_path, placement: str, way: str
) -> None:
    if ray.cluster_resources().get("GPU"):
        pytest.skip("this machine has a GPU")
    actor = ray.remote(RolloutWorker).options(num_cpus=1)
    worker = actor.remote(
        ModelConfig(path=str(tiny_model_path)),
        RolloutConfig(),
        index=0,
        placement=placement,
        max_model_tokens=64,
        seed=0,
    )
    with pytest.raises(ray.exceptions.RayTaskError, match=f"rollout.placement={placement} sends weights by {way}"):
        ray.get(worker.start.remote())
    assert len(ray.get(worker.pids.remote())) == 1
    ray.kill(worker)


@pytest.mark.slow
def test_two_processes_share_an_engine_and_take_new_weights(ray_session: None, tiny_model_path) -> None:
    engines = Engines(start_engines(tiny_model_path, tensor_parallel=2))
    assert len(engines.call("pids")) >= 4  # the actor, the scheduler, two ranks
    new = tiny.random_model(1)
    engines.load(new)
    assert largest_difference(engines.sample(requests_for(8, samples=2)), new) < LOG_PROB_TOLERANCE
    engines.rollouts.stop()
