"""The stock SDK of Tinker, its cookbook's arithmetic recipe, and kills, against `ballast serve` with real
engines.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from examples.addition import warm_start
from examples.addition.warm_start import CACHE, create_model
from tests.end_to_end.conftest import SETTINGS
from tests.end_to_end.served import KEY, Served

pytestmark = pytest.mark.slow
OWN = [
    each
    for each in SETTINGS
    if not each.startswith(("reward.", "policy.data_parallel", "run.steps"))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served model")
    create_model(folder, seed=0, deviation=0.1, vocabulary=18)  # each id has a text
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    overrides = [
        *OWN,
        f"model.path={model}",
        f"run.dir={folder}",
        "run.name=one",
        "policy.data_parallel=2",
    ]
    with Served(overrides, folder) as found:
        yield found
        assert found.stop() == 1  # interrupted


@pytest.fixture(scope="module")
def service(server: Served) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=KEY)


def started(service: tinker.ServiceClient, model: Path) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=str(model), rank=32).result()


def datum(ids: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:]} | inputs,
    )


def problem(
    client: tinker.TrainingClient, prompt: str = "21+43=", response: str = "246.134.#64"
) -> types.Datum:
    tokenizer = client.get_tokenizer()
    first, rest = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (prompt, response)
    )
    weights = [0.0] * (len(first) - 1) + [1.0] * (len(rest) + 1)
    return datum([*first, *rest, tokenizer.eos_token_id], weights=weights)


def log_probs(found: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [output["logprobs"].to_numpy() for output in found.loss_fn_outputs]


def test_the_stock_client_trains_and_samples(
    service: tinker.ServiceClient, model: Path
) -> None:
    training = started(service, model)
    assert service.get_server_capabilities().supported_models[0].model_name == str(model)
    assert training.get_info().model_data.tokenizer_id == str(model)
    data = [problem(training), problem(training, "5+7=", "572^#21")]
    losses = []
    for _ in range(4):
        passed, stepped = (
            training.forward_backward(data, "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=1e-3)),
        )
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    assert losses[-1] < losses[0], losses
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(data[0].model_input.to_ints()[:6])
    parameters = types.SamplingParams(max_tokens=8, temperature=1.0)
    found = sampler.sample(prompt, num_samples=4, sampling_params=parameters).result()
    assert len({each.sequence_id for each in found.sequences}) == 4
    for each in found.sequences:
        whole = [*prompt.to_ints(), *each.tokens]
        again = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
        assert again[0] is None
        np.testing.assert_allclose(again[6:], each.logprobs, atol=3e-5)
    for loss, config in (
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}),
        ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ("dro", {"beta": 0.05}),
    ):
        rows = [
            datum(
                [*prompt.to_ints(), *each.tokens],
                logprobs=[0.0] * 5 + list(each.logprobs),
                advantages=[0.0] * 5 + [sign] * len(each.tokens),
            )
            for each, sign in zip(found.sequences, (1.0, -1.0, 0.5, -0.5), strict=True)
        ]
        outputs = training.forward_backward(rows, loss, loss_fn_config=config).result()
        for output, each in zip(log_probs(outputs), found.sequences, strict=True):
            np.testing.assert_allclose(output[5:], each.logprobs, atol=3e-5)
        assert np.isfinite(outputs.metrics["loss:sum"])
    assert (
        training.optim_step(types.AdamParams(learning_rate=1e-4))
        .result()
        .metrics["grad_norm"]
        > 0
    )


def test_a_custom_loss_equals_the_built_in_one(
    service: tinker.ServiceClient, model: Path
) -> None:
    training = started(service, model)
    data = [problem(training), problem(training, "5+7=", "572^#21")]

    def cross_entropy(
        data: list[types.Datum], found: list[Any]
    ) -> tuple[Any, dict[str, float]]:
        weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
        loss = sum(
            -(row * weight).sum() for row, weight in zip(found, weights, strict=True)
        )
        return loss, {"mine": float(loss)}

    known = training.forward_backward(data, "cross_entropy").result()
    norm = (
        training.optim_step(types.AdamParams(learning_rate=1e-12))
        .result()
        .metrics["grad_norm"]
    )
    found = training.forward_backward_custom(data, cross_entropy).result()
    assert found.metrics["mine"] == pytest.approx(known.metrics["loss:sum"], rel=1e-5)
    assert training.optim_step(types.AdamParams(learning_rate=1e-12)).result().metrics[
        "grad_norm"
    ] == pytest.approx(norm, rel=1e-4)
    for first, second in zip(log_probs(found), log_probs(known), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)


def test_a_state_comes_back_to_this_client_and_to_a_new_one(
    service: tinker.ServiceClient, model: Path
) -> None:
    training = started(service, model)
    data = [problem(training)]
    first = training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3))
    path = training.save_state("one").result().path
    saved = log_probs(training.forward(data, "cross_entropy").result())
    assert not np.allclose(saved, log_probs(first.result()))
    training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    training.load_state(path).result()
    np.testing.assert_array_equal(
        log_probs(training.forward(data, "cross_entropy").result()), saved
    )
    for again in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        newer = again(path).result()
        np.testing.assert_array_equal(
            log_probs(newer.forward(data, "cross_entropy").result()), saved
        )
    with pytest.raises(Exception, match="replaced"):
        training.forward(data, "cross_entropy").result()


def test_samples_have_stops_seeds_and_log_probs_of_their_prompt(
    service: tinker.ServiceClient, model: Path
) -> None:
    training = started(service, model)
    sampler, tokenizer = (
        service.create_sampling_client(base_model=str(model)).result(),
        training.get_tokenizer(),
    )
    prompt = types.ModelInput.from_ints(
        tokenizer("21+43=", add_special_tokens=False)["input_ids"]
    )

    def sample(n: int = 1, **changed: Any) -> list[list[int]]:
        parameters = types.SamplingParams(
            **({"temperature": 1.0, "max_tokens": 12, "seed": 42} | changed)
        )
        return [
            list(each.tokens)
            for each in sampler.sample(prompt, n, parameters).result().sequences
        ]

    assert sample(3) == sample(3) and len({tuple(each) for each in sample(3)}) > 1
    assert sample(3, seed=999) != sample(3)
    (whole,) = sample(temperature=0.0)
    text = tokenizer.decode(whole)
    stopped = (
        sampler.sample(
            prompt,
            1,
            types.SamplingParams(temperature=0.0, max_tokens=12, stop=[text[4:6]]),
        )
        .result()
        .sequences[0]
    )
    assert (
        stopped.stop_reason == "stop"
        and tokenizer.decode(stopped.tokens) == text[: text.index(text[4:6]) + 2]
    )
    (by_id,) = sample(temperature=0.0, stop=[whole[2]])
    assert by_id == whole[: whole.index(whole[2]) + 1]
    # Engines refuse these, and the server goes on.
    for stop in ([-1], [1_000_000], [10**30], [""]):
        with pytest.raises(Exception, match="stop"):
            sample(stop=stop)
    found = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True
    ).result()
    assert found.prompt_logprobs[0] is None and all(
        value < 0 for value in found.prompt_logprobs[1:]
    )
    with pytest.raises(Exception, match="topk_prompt_logprobs"):
        sampler.sample(
            prompt,
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=4,
        ).result()
    training.forward_backward([problem(training)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3))
    newest = training.save_weights_for_sampler("new").result().path
    with pytest.raises(Exception, match="newer weights"):
        sample()
    again = service.create_sampling_client(model_path=newest).result()
    assert again.sample(prompt, 2, types.SamplingParams(max_tokens=4)).result().sequences


def test_what_is_not_supported_is_said_in_a_sentence(
    service: tinker.ServiceClient, model: Path
) -> None:
    training = started(service, model)
    for wrong, message in (
        (datum([3, 4, 99]), "vocabulary"),
        (
            types.Datum(
                model_input=types.ModelInput.from_ints([3, 4]),
                loss_fn_inputs={"target_tokens": [5, 6]},
            ),
            "target_tokens",
        ),
    ):
        with pytest.raises(Exception, match=message):
            training.forward_backward([wrong], "cross_entropy").result()
    assert training.forward([problem(training)], "cross_entropy").result()
    with pytest.raises(Exception, match="base_model"):
        service.create_lora_training_client(base_model="Qwen/Qwen3-8B").result()


def learned(training: tinker.TrainingClient, response: str) -> list[np.ndarray]:
    """Log-probs of three steps on a response, and after them."""
    data, found = [problem(training, "21+43=", response)], []
    for _ in range(3):
        passed = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        found += log_probs(passed.result())
    return [*found, *log_probs(training.forward(data, "cross_entropy").result())]


def test_two_policies_side_by_side_equal_each_alone_and_are_sampled_by_name(
    model: Path, tmp_path: Path
) -> None:
    usual = [
        *OWN,
        f"model.path={model}",
        f"run.dir={tmp_path}",
        "policy.data_parallel=1",
        "model.lora.rank=8",
    ]
    responses, alone = ("246.134.#64", "572^#21"), []

    def create(service: tinker.ServiceClient) -> tinker.TrainingClient:
        return service.create_lora_training_client(base_model=str(model), rank=8).result()

    with Served([*usual, "run.name=alone"], tmp_path) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        for response in responses:
            alone.append(learned(create(service), response))
        server.stop()
    with Served([*usual, "run.name=both", "model.lora.policies=2"], tmp_path) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        both = [create(service) for _ in responses]
        with ThreadPoolExecutor(2) as threads:
            together = list(threads.map(learned, both, responses))
        for found, known in zip(together, alone, strict=True):
            for first, second in zip(found, known, strict=True):
                np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)
        assert not np.allclose(together[0][-1][:5], together[1][-1][:5], atol=1e-3)
        with pytest.raises(Exception, match="in training"):
            create(service)
        samplers = [each.save_weights_and_get_sampling_client().result() for each in both]
        samplers.append(service.create_sampling_client(base_model=str(model)).result())
        prompt = types.ModelInput.from_ints(problem(both[0]).model_input.to_ints()[:6])
        asked = [
            each.sample(prompt, 4, types.SamplingParams(max_tokens=8, seed=1))
            for each in samplers
        ]
        means = []
        for sampler, future in zip(samplers, asked, strict=True):
            for each in future.result().sequences:
                again = sampler.compute_logprobs(
                    types.ModelInput.from_ints([*prompt.to_ints(), *each.tokens])
                ).result()
                np.testing.assert_allclose(again[6:], each.logprobs, atol=3e-5)
            means.append(float(np.mean(again[1:6])))
        assert len({round(mean, 4) for mean in means}) == 3, means
        settings, known = (
            types.SamplingParams(max_tokens=8, seed=1),
            asked[0].result().sequences,
        )
        for served in (True, False):  # engines keep two versions
            learned(both[0], responses[1])
            newer = both[0].save_weights_and_get_sampling_client().result()
            changed = newer.sample(prompt, 4, settings).result().sequences
            assert [each.tokens for each in changed] != [each.tokens for each in known]
            if served:
                again = samplers[0].sample(prompt, 4, settings).result().sequences
                assert [each.tokens for each in again] == [each.tokens for each in known]
                for one, other in zip(again, known, strict=True):
                    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=3e-5)
        with pytest.raises(Exception, match="newer weights"):
            samplers[0].sample(prompt, 4, settings).result()
        assert server.stop() == 1


def test_checkpoints_are_listed_and_deleted_also_after_a_kill(
    model: Path, tmp_path: Path
) -> None:
    usual = [
        *OWN,
        f"model.path={model}",
        f"run.dir={tmp_path}",
        "run.name=listed",
        "policy.data_parallel=1",
    ]
    with Served(
        [*usual, "run.checkpoint_every=1", "run.keep_checkpoints=2"], tmp_path
    ) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training, rest = started(service, model), service.create_rest_client()

        def step() -> None:
            training.forward_backward([problem(training)], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result()

        step()
        one, two = (training.save_state(name).result().path for name in ("one", "two"))
        sampled = training.save_weights_for_sampler("sampled").result().path
        (run,) = rest.list_training_runs().result().training_runs
        assert run == rest.get_training_run_by_tinker_path(one).result() and not run.is_lora
        assert run.training_run_id == training.model_id and run.base_model == str(model)
        listed = rest.list_checkpoints(training.model_id).result().checkpoints
        assert [each.tinker_path for each in listed] == [sampled, two, one]
        assert [each.checkpoint_type for each in listed] == [
            "sampler",
            "training",
            "training",
        ]
        assert all(each.size_bytes > 10**5 for each in listed[1:])
        pages = [
            rest.list_user_checkpoints(limit=2, offset=offset).result() for offset in (0, 2)
        ]
        assert [*pages[0].checkpoints, *pages[1].checkpoints] == listed and pages[
            1
        ].cursor.total_count == 3
        training.load_state(two).result()
        with pytest.raises(Exception, match="restart may load"):
            rest.delete_checkpoint_from_tinker_path(two).result()
        rest.delete_checkpoint_from_tinker_path(one).result()
        with pytest.raises(Exception, match="no such state"):
            training.load_state(one).result()
        server.kill()
        server.start()
        paths = [
            each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints
        ]
        assert sorted(paths) == sorted([two, sampled])
        with pytest.raises(Exception, match="saved once"):
            training.save_state("one").result()
        for _ in range(3):  # the last checkpoint may still be being written
            step()
        for path in (two, sampled):
            rest.delete_checkpoint_from_tinker_path(path).result()
        assert rest.list_checkpoints(training.model_id).result().checkpoints == []
        for wrong in (
            rest.publish_checkpoint_from_tinker_path(two),
            rest.set_checkpoint_ttl_from_tinker_path(two, 60),
        ):
            with pytest.raises(Exception, match="not supported"):
                wrong.result()
        server.stop()


def kill_twice(server: Served) -> None:
    for _ in range(2):
        server.kill()
        server.start()
        time.sleep(3)


def test_a_killed_server_makes_each_step_once(model: Path, tmp_path: Path) -> None:
    def steps(server: Served, start_kills: Callable[[], object] = bool) -> list[np.ndarray]:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        training = started(service, model)
        data, found = [problem(training), problem(training, "5+7=", "572^#21")], []
        for number in range(12):
            if number == 4:
                start_kills()
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
            found += log_probs(passed.result())
            assert stepped.result() is not None
        return [*found, *log_probs(training.forward(data, "cross_entropy").result())]

    usual = [
        *OWN,
        f"model.path={model}",
        f"run.dir={tmp_path}",
        "policy.data_parallel=1",
        "run.checkpoint_every=3",
    ]
    (tmp_path / "a").mkdir()
    with Served([*usual, "run.name=known"], tmp_path / "a") as server:
        known = steps(server)
        server.stop()
    with Served([*usual, "run.name=killed"], tmp_path) as server:
        with ThreadPoolExecutor(1) as thread:
            found = steps(server, lambda: thread.submit(kill_twice, server))
        server.stop()
    metrics = [
        json.loads(line)
        for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [each["step"] for each in metrics][-1] == 12
    for first, second in zip(found, known, strict=True):
        np.testing.assert_array_equal(first, second)  # one rank: to the bit


def arithmetic(
    tmp_path: Path, server_settings: list[str], recipe_settings: list[str]
) -> list[dict[str, float]]:
    """Run the cookbook's recipe against a server with the quickstart's model. Returns its metrics by step."""
    assert warm_start.main() == 0
    overrides = [
        *(
            "data.max_prompt_tokens=26",
            "rollout.sampling.max_new_tokens=32",
            "rollout.cpu_kv_cache_gib=0.5",
        ),
        *(f"model.path={CACHE / 'model'}", f"run.dir={tmp_path}", "run.name=recipe"),
        *("policy.max_tokens_per_micro_batch=2048", "resources.dashboard=false"),
        *server_settings,
    ]
    command = [sys.executable, "-m", "tests.end_to_end.arithmetic_recipe"]
    with Served(overrides, tmp_path) as server:
        found = subprocess.run(
            [*command, server.url, str(CACHE / "model"), str(tmp_path), *recipe_settings],
            capture_output=True,
            text=True,
            timeout=1800,
            env=os.environ | {"TINKER_API_KEY": KEY},
        )
        server.stop()
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    rows = [
        json.loads(line)
        for line in (tmp_path / "recipe-log" / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if "env/all/reward/total" in row]


def test_the_cookbooks_arithmetic_recipe_learns(tmp_path: Path) -> None:
    rows = arithmetic(tmp_path, [], ["max_steps=12"])
    rewards = [row["env/all/reward/total"] for row in rows]
    assert np.mean(rewards[-3:]) - np.mean(rewards[:1]) >= 0.2, rewards


def test_the_cookbooks_asynchronous_recipe_samples_earlier_weights(tmp_path: Path) -> None:
    several = ["model.lora.rank=32", "model.lora.policies=2", "model.lora.versions=4"]
    rows = arithmetic(
        tmp_path, several, ["max_steps=6", "max_steps_off_policy=1", "learning_rate=0.002"]
    )
    behind = [row["training_client/step"] - row["sampling_client/step_min"] for row in rows]
    assert len(rows) == 6 and max(behind) >= 1, behind  # slow samples are more steps behind
