"""A real engine: what it returns and refuses, what becomes of its weights, and episodes."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import ray
import torch
from transformers import AutoTokenizer

from controller.engines.engine_pool import Sample
from tests.controller.engines.generation import generate
from tests.end_to_end.processes import living
from tests.workers.model.quantized_checkpoints import quantize_checkpoint
from tests.workers.rollout import changed_distributions, tiny
from tests.workers.rollout.engines import (
    LOG_PROB_TOLERANCE,
    PREFILL_TOKENS,
    Engines,
    actor_of,
    episodes,
    largest_difference,
    requests_for,
    rows_of,
    trainer_difference,
    trainer_of,
)
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.cpu_kernels import PROVIDER
from workers.engine.requests import (
    ERROR,
    INSERTED,
    LENGTH,
    STOP,
    EpisodeStart,
    Response,
    SampleRequest,
)
from workers.errors import RolloutError
from workers.model.model import load_model


@pytest.fixture(scope="module")
def quantized_model(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    shutil.copytree(tiny_model_path, folder / "model")
    quantize_checkpoint(folder / "model", folder / "plain", "fp8 blocks")
    return folder / "model"


@pytest.fixture(scope="module")
def engines(ray_session: None, quantized_model: Path) -> Iterator[Engines]:
    """Start one engine, which takes 20 seconds. A test that needs certain weights loads them first.

    The model's files are quantized. The engine computes with the plain weights that it gets.
    """
    found = Engines(
        quantized_model,
        restarts=1,
        environment=cloudpickle.dumps(tiny.Echo),
        max_turns=2,
        history="template",
        engine={"max_num_batched_tokens": PREFILL_TOKENS},
    )
    yield found
    found.pool.stop()


def test_rows_hold_prompt_and_response_which_ends_at_the_end_of_sequence_or_at_its_limit(
    engines: Engines,
) -> None:
    requests = requests_for(32, samples=4)
    # Several forward passes.
    assert sum(len(request.prompt_ids) for request in requests) > 2 * PREFILL_TOKENS
    finished = engines.sample(requests, max_new_tokens=120)
    assert {result.finish_reason for result, _ in finished} == {STOP, LENGTH}
    for request, (result, row) in zip(requests, rows_of(finished), strict=True):
        tokens = result.prompt_tokens + result.response_tokens
        assert {name: (column.dtype, len(column)) for name, column in row.items()} == {
            "input_ids": (np.int32, tokens),
            "loss_mask": (np.bool_, tokens),
            "rollout_log_probs": (np.float32, tokens),
            "weight_versions": (np.int32, tokens),
        }
        np.testing.assert_array_equal(
            row["input_ids"][~row["loss_mask"]], request.prompt_ids
        )
        assert row["loss_mask"].sum() == result.response_tokens > 0
        assert (row["rollout_log_probs"][~row["loss_mask"]] == 0).all()
        assert (row["rollout_log_probs"][row["loss_mask"]] < 0).all()
        response = row["input_ids"][result.prompt_tokens :]
        assert (response[-1] == tiny.EOS) == (result.finish_reason == STOP)
        assert tiny.EOS not in response[:-1]
        assert result.finish_reason == STOP or result.response_tokens == 120


def test_seeds_repeat_a_round_exactly_and_another_step_differs(engines: Engines) -> None:
    first, second, other = (
        rows_of(engines.sample(requests_for(8, samples=4, step=step))) for step in (3, 3, 4)
    )
    for (_, row), (_, again), (_, later) in zip(first, second, other, strict=True):
        np.testing.assert_array_equal(row["input_ids"], again["input_ids"])
        np.testing.assert_allclose(
            row["rollout_log_probs"], again["rollout_log_probs"], atol=1e-5
        )
        assert not np.array_equal(row["input_ids"], later["input_ids"])
    assert len({row["input_ids"].tobytes() for _, row in first}) == len(first)


def test_prompts_that_the_engine_cannot_take_fail_alone(engines: Engines) -> None:
    refused = {
        "outside the model's vocabulary of 512": [5, tiny.VOCABULARY],
        "token id -1": [5, -1],
        "rollout.max_model_tokens": [2] * tiny.MAX_MODEL_TOKENS,
        "empty": [],
    }
    bad = [
        SampleRequest(reason, 0, np.array(ids, np.int32), seed=1)
        for reason, ids in refused.items()
    ]
    bad.append(
        SampleRequest(
            "more than 0.001 s", 0, np.array([5, 6], np.int32), seed=1, timeout_s=0.001
        )
    )
    good = requests_for(3, samples=2)
    finished, router = generate(
        engines.pool, [*good[:3], *bad, *good[3:]], SamplingConfig(max_new_tokens=16)
    )
    assert [result.key for result, _ in finished] == [request.key for request in good]
    assert sorted(result.uid for result in router.dropped) == sorted(
        request.uid for request in bad
    )
    for result in router.dropped:
        assert (result.finish_reason, result.row) == (ERROR, -1)
        assert result.uid in result.error
    assert len(router.retried) == len(bad)
    engines.call("health")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_the_trainers_after_an_update_with_tied_embeddings(
    engines: Engines, temperature: float
) -> None:
    old, new = tiny.random_model(0), tiny.random_model(1)
    version = engines.load(new)
    finished = engines.sample(
        requests_for(8, samples=4), temperature=temperature, max_new_tokens=64
    )
    assert {result.weight_version for result, _ in finished} == {version}
    assert engines.call("weight_version") == version
    assert largest_difference(finished, new, temperature) < LOG_PROB_TOLERANCE
    # The comparison can tell the two apart.
    assert largest_difference(finished, old, temperature) > 0.5


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        # vLLM by itself goes on with the old output layer and never says so.
        ("lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
        # vLLM loads q, k and v into one parameter, and says that it loaded that.
        (
            "model.layers.0.self_attn.k_proj.weight",
            "a part of model.layers.0.self_attn.qkv_proj.weight",
        ),
    ],
)
def test_an_update_that_leaves_out_a_weight_is_refused_by_name(
    engines: Engines, left_out: str, named: str
) -> None:
    version = engines.load(tiny.random_model(2))
    with pytest.raises(RolloutError) as caught:
        engines.load(tiny.random_model(3), left_out)
    assert f"version {version + 1}: " in str(caught.value) and named in str(caught.value)
    assert engines.call("weight_version") == version
    with pytest.raises(RolloutError):  # it never samples with old weights
        engines.sample(requests_for(1, samples=1))
    new = tiny.random_model(4)
    engines.load(new)  # the engine is well: the next complete update puts it right
    assert (
        largest_difference(engines.sample(requests_for(4, samples=2)), new)
        < LOG_PROB_TOLERANCE
    )


def test_an_engine_on_a_cpu_has_the_users_arguments_and_vllms_kernels(
    engines: Engines,
) -> None:
    assert engines.call("prefill_tokens") == PREFILL_TOKENS
    assert engines.call("norm_kernel") == PROVIDER


def test_nothing_of_what_an_engine_imports_is_collected_while_it_is_built(
    engines: Engines,
) -> None:
    # vLLM asks for it once, at the end. Its imports alone would make some hundred.
    assert engines.call("collections_of_start") <= 1


def test_all_requests_of_a_round_are_in_its_first_step(engines: Engines) -> None:
    requests = requests_for(8, samples=8)
    engines.call("watch_steps")
    engines.sample(requests)
    assert engines.call("requests_of_steps")[0] == len(requests)


def test_a_command_that_nobody_waits_for_any_more_does_not_end_the_engine(
    engines: Engines,
) -> None:
    engines.call("give_up_a_command")
    engines.sample(requests_for(1, samples=2))


def sample_through_updates(
    engines: Engines, kept_updates: int = 0
) -> tuple[dict[int, Any], list[Sample]]:
    """Models by version, and a round during which two updates are sent.

    kept_updates: for how many of them the engine keeps its cache.
    """
    models = {engines.load(tiny.random_model(7)): tiny.random_model(7)}
    engines.call("keep_caches", kept_updates)
    seeds = [8, 9]

    def update(*_: object) -> None:
        if seeds:
            seed = seeds.pop(0)
            models[engines.load(tiny.random_model(seed))] = tiny.random_model(seed)

    engines.call("take_weight_loads")
    finished = engines.sample(requests_for(32, samples=4), update, max_new_tokens=200)
    assert max(len(result.version_tokens) for result, _ in finished) == 3
    return models, finished


def test_every_token_has_the_log_prob_of_the_weights_that_sampled_it(
    engines: Engines,
) -> None:
    """A sample goes on through two updates: its earlier tokens are read again by the new weights, and not
    changed.
    """
    models, finished = sample_through_updates(engines)
    assert {result.weight_version for result, _ in finished} == {min(models)}
    for result, row in rows_of(finished):
        versions = row["weight_versions"][row["loss_mask"]]
        assert tuple(
            zip(
                *map(np.ndarray.tolist, np.unique(versions, return_counts=True)),
                strict=True,
            )
        ) == (result.version_tokens)
        for version, _ in result.version_tokens:
            sampled = row["weight_versions"] == version
            expected = tiny.log_probs(models[version], row["input_ids"], 1.0)[sampled]
            np.testing.assert_allclose(
                row["rollout_log_probs"][sampled], expected, atol=LOG_PROB_TOLERANCE
            )


def test_a_kept_cache_is_read_with_new_weights_until_it_is_too_old(
    engines: Engines,
) -> None:
    """One update keeps it, the second computes it again. What begins later reads none of it."""
    models, finished = sample_through_updates(engines, kept_updates=1)
    first = min(models)
    for result, row in rows_of(finished):
        assert result.weight_version == first
        for version, _ in result.version_tokens:
            sampled = np.flatnonzero(row["weight_versions"] == version)
            kept = models[version - 1] if version == first + 1 else models[version]
            expected = tiny.log_probs_behind(
                kept, models[version], row["input_ids"], sampled
            )
            np.testing.assert_allclose(
                row["rollout_log_probs"][sampled], expected, atol=LOG_PROB_TOLERANCE
            )
    later = engines.sample(requests_for(32, samples=4, step=1))
    assert largest_difference(later, models[first + 2]) < LOG_PROB_TOLERANCE
    assert sum(result.cached_tokens for result, _ in later) > 0
    loads = engines.call("take_weight_loads")
    assert [load.recompute_seconds > 0 for load in loads] == [False, True]
    engines.call("keep_caches", 0)


def test_a_response_that_was_begun_goes_on_after_its_first_tokens(engines: Engines) -> None:
    new, before = tiny.random_model(8), engines.load(tiny.random_model(7))
    parts: dict[int, Response] = {}
    requests = requests_for(32, samples=4)

    def keep_once(*_: object) -> None:
        if not parts:
            (generation,) = engines.pool._generations
            begun = engines.call("partial_responses")
            for request in generation.router.unfinished:
                if request.attempt in begun:
                    parts[request.seed] = begun[request.attempt]

    engines.sample(requests, keep_once, max_new_tokens=200)
    assert parts and all(
        len(part.ids) == len(part.log_probs) == len(part.versions)
        for part in parts.values()
    )
    after = engines.load(new)
    begun = [
        replace(request, begun=parts[request.seed])
        for request in requests
        if request.seed in parts
    ]
    for request, (result, row) in zip(
        begun, rows_of(engines.sample(begun, max_new_tokens=200)), strict=True
    ):
        part, tokens = parts[request.seed], len(parts[request.seed].ids)
        response = {name: column[result.prompt_tokens :] for name, column in row.items()}
        np.testing.assert_array_equal(response["input_ids"][:tokens], part.ids)
        np.testing.assert_array_equal(
            response["rollout_log_probs"][:tokens], part.log_probs
        )
        assert result.version_tokens == (
            (before, tokens),
            (after, result.response_tokens - tokens),
        )
        assert result.read_tokens == result.prompt_tokens
        assert result.response_tokens <= 200
        expected = tiny.log_probs(new, row["input_ids"], 1.0)[
            result.prompt_tokens + tokens :
        ]
        np.testing.assert_allclose(
            response["rollout_log_probs"][tokens:], expected, atol=LOG_PROB_TOLERANCE
        )


CHANGED = (
    {"min_p": 0.02},
    {"min_new_tokens": 30, "stop_token_ids": [200, 201]},
    {"repetition_penalty": 1.3},
    {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logit_bias": {tiny.ID["a"]: 6.0, 300: -2.0},
    },
    {"bad_words": ["a", "bb"], "logit_bias": {tiny.ID["a"]: 9.0, tiny.ID["b"]: 9.0}},
    {"structured_outputs": {"regex": "[ab]{2,4}"}},
)


@pytest.mark.parametrize("changes", CHANGED, ids=lambda changes: "+".join(changes))
def test_log_probs_are_of_the_distribution_that_options_make(
    engines: Engines, changes: dict[str, Any]
) -> None:
    model = tiny.random_model(12)
    engines.load(model)
    for temperature in (1.0, 0.7):
        sampling = SamplingConfig(max_new_tokens=24, temperature=temperature, **changes)
        finished = engines.sample(requests_for(6, samples=2), **vars(sampling))
        # The comparison can tell the two apart.
        assert largest_difference(finished, model, temperature) > 0.01
        for result, row in rows_of(finished):
            expected = changed_distributions.log_probs(
                model, row["input_ids"], result.prompt_tokens, sampling
            )
            np.testing.assert_allclose(
                row["rollout_log_probs"][row["loss_mask"]],
                expected,
                atol=LOG_PROB_TOLERANCE,
            )


def test_a_stop_text_or_another_end_token_ends_a_response_whose_tokens_are_all_kept(
    engines: Engines,
) -> None:
    model = tiny.random_model(13)
    engines.load(model)
    tokenizer = engines.tokenizer
    ends = {
        # Within tokens "word12?", over two tokens, and an end token's text.
        "stop": ["ab", "d12", "d13", "9<eos>"],
        "stop_token_ids": [*range(150, 200)],
    }
    for name, values in ends.items():
        finished = engines.sample(
            requests_for(16, samples=4), max_new_tokens=150, **{name: values}
        )
        assert largest_difference(finished, model) < LOG_PROB_TOLERANCE
        stopped = 0
        for result, row in rows_of(finished):
            response = row["input_ids"][result.prompt_tokens :]
            whole, before = (tokenizer.decode(ids) for ids in (response, response[:-1]))
            assert row["loss_mask"].sum() == result.response_tokens == len(response)
            seen = [response[-1] in values, *np.isin(response[:-1], values)]
            if name == "stop":
                seen = [
                    any(text in whole for text in values),
                    any(text in before for text in values),
                ]
            assert not any(seen[1:])
            assert (result.finish_reason == STOP) == (seen[0] or response[-1] == tiny.EOS)
            stopped += seen[0]
        assert stopped > 20


def test_reasoning_that_is_open_at_its_budget_is_closed_and_the_answer_sampled(
    engines: Engines,
) -> None:
    """Inserted tokens are not trained."""
    model, budget, limit = tiny.random_model(14), 12, 40
    engines.load(model)
    opening, closing = (engines.ids(text) for text in ("<think>", "so</think>"))
    plain = requests_for(8, samples=8)
    thinking = [
        replace(r, uid=f"t{r.uid}", prompt_ids=np.append(r.prompt_ids, opening))
        for r in plain
    ]
    played = [
        replace(r, uid=f"e{r.uid}") for r in episodes(4, samples=2, opening="<think>")
    ]
    sampling = {
        "max_new_tokens": limit,
        "max_thinking_tokens": budget,
        "end_of_thinking": "so</think>",
    }
    finished = engines.sample([*plain, *thinking, *played], **sampling)
    assert largest_difference(finished, model) < LOG_PROB_TOLERANCE
    for result, row in rows_of(finished):
        response = row["input_ids"][result.prompt_tokens :]
        mask = row["loss_mask"][result.prompt_tokens :]
        if result.cut_thoughts:
            inserted = slice(budget, budget + len(closing))
            np.testing.assert_array_equal(response[inserted], closing)
            assert not mask[inserted].any() and mask[:budget].all() and mask[inserted.stop]
            assert set(row["weight_versions"][result.prompt_tokens :][inserted]) == {
                INSERTED
            }
        assert result.response_tokens == mask.sum() and result.version_tokens == (
            (engines.version, mask.sum()),
        )
        if result.uid.startswith("e"):
            assert (result.cut_thoughts, result.turns) in {(1, 1), (1, 2), (0, 1), (0, 2)}
        else:
            assert (
                len(response) <= limit
                and result.observation_tokens == len(closing) * result.cut_thoughts
            )
            assert result.cut_thoughts == (
                result.uid.startswith("t") and tiny.EOS not in response[:budget]
            )
    cut = [result for result, _ in finished if result.cut_thoughts]
    assert {result.uid[0] for result in cut} == {"t", "e"}
    assert {result.finish_reason for result in cut} == {STOP, LENGTH}


def test_a_stop_text_on_both_sides_of_a_thinking_budget_ends_the_turn(
    engines: Engines,
) -> None:
    engines.load(tiny.random_model(14))
    sampling: dict[str, Any] = {"max_new_tokens": 40, "max_thinking_tokens": 12}
    texts = set()
    for result, row in rows_of(engines.sample(requests_for(8, samples=8), **sampling)):
        response = row["input_ids"][result.prompt_tokens :]
        texts |= (
            {engines.tokenizer.decode(response[11:13])} if len(response) > 13 else set()
        )
    stopped = 0
    for result, row in rows_of(
        engines.sample(requests_for(8, samples=8), stop=sorted(texts), **sampling)
    ):
        response = row["input_ids"][result.prompt_tokens :]
        whole, before = (engines.tokenizer.decode(ids) for ids in (response, response[:-1]))
        assert not any(text in before for text in texts)
        assert (result.finish_reason == STOP) == (
            response[-1] == tiny.EOS or any(text in whole for text in texts)
        )
        stopped += len(response) == 13
    assert stopped > 20


# Episodes


def test_tokens_of_an_episode_are_those_sampled_and_the_environments_are_not_learned(
    engines: Engines, tmp_path: Path
) -> None:
    path = tiny.save_model(tmp_path, seed=11)
    engines.load(tiny.random_model(11))
    requests = {request.key: request for request in episodes(8, samples=8)}
    found, again = (
        rows_of(engines.sample(list(requests.values()), max_new_tokens=90))
        for _ in range(2)
    )
    rows = [row for _, row in found]
    assert trainer_difference(trainer_of(path), rows) < 1e-4
    assert {result.turns for result, _ in found} == {1, 2}
    tokenizer = AutoTokenizer.from_pretrained(path)
    for (result, row), (_, repeated) in zip(found, again, strict=True):
        np.testing.assert_array_equal(row["input_ids"], repeated["input_ids"])
        ids, begin, [opening] = (
            row["input_ids"].tolist(),
            result.prompt_tokens,
            tokenizer("(")["input_ids"],
        )
        assert ((row["rollout_log_probs"] < 0) == row["loss_mask"]).all()
        assert ids[:begin] == [*requests[result.key].prompt_ids.tolist(), opening]
        assert (result.length, result.response_tokens) == (len(ids), row["loss_mask"].sum())
        assert result.finish_reason in (STOP, LENGTH)
        if result.turns == 2:
            end = ids.index(tiny.EOS, begin) + 1
            text = tokenizer.decode(ids[begin:end], skip_special_tokens=True)
            observed = tokenizer(f"<{text[:1]}>")["input_ids"]
            assert ids[end : end + len(observed)] == observed
            later = [True] * (len(ids) - end - len(observed))
            expected = (
                [False] * begin + [True] * (end - begin) + [False] * len(observed) + later
            )
            assert row["loss_mask"].tolist() == expected
            assert (result.environment.reward, result.environment.parts) == (
                1.0,
                {"turn": 2.0},
            )


def test_a_turn_whose_past_the_template_changes_is_a_row_of_its_own(
    engines: Engines, tmp_path: Path
) -> None:
    """Each token has the log-prob of the context in which it is trained, and is trained once."""
    path = tiny.save_model(tmp_path, seed=11)
    engines.load(tiny.random_model(11))
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "hi"}]
    ids = np.array(tokenizer("#uhi<eos>#A")["input_ids"], np.int32)
    start = EpisodeStart({"opening": ""}, chat)
    requests = [
        replace(request, prompt_ids=ids, start=start)
        for request in requests_for(1, samples=128, step=6)
    ]
    finished = engines.sample(requests, max_new_tokens=90)
    branched = [(result, ray.get(block)) for result, block in finished if result.turns == 2]
    assert len(branched) > 4 and all(len(result.branches) == 2 for result, _ in branched)
    rows = [block.row(row) for result, block in branched for row in list(result.rows)[1:]]
    assert trainer_difference(trainer_of(path), rows) < 1e-4
    for (result, block), first, second in zip(branched, rows[::2], rows[1::2], strict=True):
        turn = first["input_ids"][len(ids) :].tolist()
        observed = f"<{tokenizer.decode(turn, skip_special_tokens=True)[:1]}>"
        before = [
            *tokenizer("#uhi<eos>#a")["input_ids"],
            *turn,
            *tokenizer(f"#u{observed}<eos>#A")["input_ids"],
        ]
        assert second["input_ids"][: len(before)].tolist() == before
        assert second["loss_mask"].tolist() == [
            place >= len(before) for place in range(len(second["loss_mask"]))
        ]
        assert [branch.response_tokens for branch in result.branches] == [
            sum(r["loss_mask"]) for r in (first, second)
        ]
        whole = block.row(result.row)
        assert whole["input_ids"][whole["loss_mask"]].tolist() == [
            *turn,
            *second["input_ids"][len(before) :].tolist(),
        ]


def test_a_failing_environment_costs_its_episode_alone_and_episodes_keep_to_their_tokens(
    engines: Engines,
) -> None:
    good = episodes(8, samples=2)
    bad = [
        replace(request, uid="bad") for request in episodes(1, samples=2, opening="raise")
    ]
    finished = engines.sample([*good[:2], *bad, *good[2:]], max_new_tokens=6)
    failures = {result.key: result.environment.failure for result, _ in finished}
    assert {key for key, failure in failures.items() if failure} == {("bad", 0), ("bad", 1)}
    assert "KeyError: 'no such record'" in failures["bad", 0]
    # max_turns * max_new_tokens.
    assert all(0 < result.response_tokens <= 2 * 6 for result, _ in finished)
    # The opening counts.
    assert all(result.length - result.prompt_tokens < 2 * 6 for result, _ in finished)


# Engines that end


def test_an_engine_whose_step_raises_is_replaced_and_no_sample_lost(
    engines: Engines, quantized_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file's last test of this engine: a new one starts in its place and gets the same weights."""
    model = load_model(
        ModelConfig(path=str(quantized_model), layout="padded"), torch.float32
    ).model
    version = engines.load(model)
    assert (
        largest_difference(engines.sample(requests_for(4, samples=1)), model)
        < LOG_PROB_TOLERANCE
    )
    engines.call("break_after", 5)
    finished = engines.sample(requests_for(16, samples=4), max_new_tokens=200)
    assert {result.weight_version for result, _ in finished} == {version}
    assert largest_difference(finished, model) < LOG_PROB_TOLERANCE
    assert (
        "rollout replica 0 died: RuntimeError: out of luck; starting a new one"
        in capfd.readouterr().out
    )


@pytest.mark.slow
def test_a_dying_engine_loses_nothing_and_stop_leaves_no_process(
    ray_session: None, tiny_model_path: Path
) -> None:
    """Its requests go to the other engine; the one in its place comes up with the weights that were sent
    last.

    The engines are processes of their own, as on GPUs.
    """
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    engines = Engines(
        tiny_model_path, replicas=2, restarts=1, max_concurrent=64, variables=apart
    )
    version = engines.load(tiny.random_model(3))
    pids = [engines.call("pids", replica=replica) for replica in (0, 1)]
    doomed = list(pids[0])

    def kill_engine_once(*_: object) -> None:
        for process in map(psutil.Process, pids[0][1:]):
            process.kill()
        pids[0].clear()

    engines.sample(requests_for(16, samples=4), kill_engine_once, max_new_tokens=200)
    assert engines.pool.fleet.serving == [1]
    while 0 not in engines.pool.fleet.serving:
        engines.sample(requests_for(1, samples=1))
    assert engines.call("weight_version", replica=0) == version
    assert living(doomed) == []
    engines.call("stop", replica=1)
    assert not [pid for pid in pids[1][1:] if psutil.pid_exists(pid)]
    with pytest.raises(RolloutError, match="replica 1 has no engine"):
        engines.call("health", replica=1)
    engines.pool.stop()


def test_a_placement_that_needs_gpus_is_refused_before_an_engine_starts(
    ray_session: None, tiny_model_path: Path
) -> None:
    if ray.cluster_resources().get("GPU"):
        pytest.skip("this machine has a GPU")
    model = ModelConfig(path=str(tiny_model_path))
    actor = actor_of(0, model, RolloutConfig(), {}, placement="apart")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"rollout\.placement=apart"):
        ray.get(actor.start.remote())
    assert len(ray.get(actor.pids.remote())) == 1
    ray.kill(actor)


@pytest.mark.slow
def test_two_processes_share_an_engine_and_take_new_weights(
    ray_session: None, tiny_model_path: Path
) -> None:
    engines = Engines(tiny_model_path, tensor_parallel=2)
    assert len(engines.call("pids")) >= 4  # the actor, the scheduler, two ranks
    new = tiny.random_model(1)
    engines.load(new)
    assert (
        largest_difference(engines.sample(requests_for(8, samples=2)), new)
        < LOG_PROB_TOLERANCE
    )
    engines.pool.stop()
