"""Sampling that leaves tokens out, and every reader of the engines' log-probs: ratios are 1 at
equal weights.
"""

from dataclasses import fields
from pathlib import Path

import pytest

from ballast.replay.__main__ import settings
from controller.algorithm.logprob_check import compares_exactly
from controller.config import Config, load
from controller.preflight.checks import check, check_layout
from controller.preflight.engine_checks import COLDEST
from tests.controller.config_workspace import refusal
from tests.refusals import refused, refused_rows
from workers.config.roles import SamplingConfig
from workers.engine.vllm_interface import engine_arguments, sampling_parameters

CUTS = {"top_k": "150", "top_p": "0.9", "min_p": "0.1"}
CHANGES = {
    "min_new_tokens": "3",
    "repetition_penalty": "1.1",
    "presence_penalty": "0.5",
    "frequency_penalty": "-0.5",
    "logit_bias": "{5: -2}",
    "bad_words": "[a, b c]",
    "structured_outputs": "{regex: a+}",
}
EXACT = {
    "temperature",
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "max_thinking_tokens",
    "end_of_thinking",
}
CORRECTION = "algorithm.loss.rollout_correction"
READERS = (
    "rollout.max_staleness=1",
    *(
        f"{CORRECTION}.{kind}={over}"
        for kind in ("weights", "rejection")
        for over in ("token", "sequence")
    ),
)


def test_every_setting_of_sampling_is_tried_here() -> None:
    assert {field.name for field in fields(SamplingConfig)} == {*EXACT, *CUTS, *CHANGES}


def log_probs_of(config: Config) -> str:
    return str(
        engine_arguments(
            config.model,
            config.rollout,
            placement="apart",
            max_model_tokens=config.max_model_tokens,
            seed=0,
        ).logprobs_mode
    )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("reader", READERS)
def test_ratios_to_engines_log_probs_are_1_at_equal_weights_or_refused(
    workspace: Path, cut: str, reader: str
) -> None:
    """vLLM has log-probs before temperature and cut, and after both: the first are the trainer's at
    temperature 1.
    """
    changes = [f"rollout.sampling.{cut}={CUTS[cut]}", reader]
    config = load("config.yaml", changes)
    check(config)
    assert (log_probs_of(config), compares_exactly(config)) == ("raw_logprobs", True)
    colder = [*changes, "rollout.sampling.temperature=0.7"]
    assert refusal(*colder).startswith(f"rollout.sampling.{cut}={CUTS[cut]}: ")
    assert reader.rpartition(".")[0] in refusal(*colder)
    with refused(f"rollout.sampling.{cut}="):  # a replay with other settings
        check_layout(load("config.yaml", colder))


@pytest.mark.parametrize(
    "cut", [f"rollout.sampling.{name}={value}" for name, value in CUTS.items()]
)
def test_where_nothing_reads_them_a_cut_goes_with_every_temperature(
    workspace: Path, cut: str
) -> None:
    config = load("config.yaml", [cut, "rollout.sampling.temperature=0.7"])
    check(config)
    assert (log_probs_of(config), compares_exactly(config)) == ("processed_logprobs", False)


def test_without_a_cut_log_probs_have_the_temperature(workspace: Path) -> None:
    config = load("config.yaml", ["rollout.sampling.temperature=0.7", *READERS[1:2]])
    check(config)
    assert (log_probs_of(config), compares_exactly(config)) == ("processed_logprobs", True)


@pytest.mark.parametrize("name", CHANGES)
def test_another_distribution_is_trained_with_importance_weights_alone(
    workspace: Path, name: str
) -> None:
    change, weights = (
        f"rollout.sampling.{name}={CHANGES[name]}",
        f"{CORRECTION}.weights=token",
    )
    for others in ([], ["rollout.max_staleness=1"], [READERS[-1]], [weights, READERS[-1]]):
        assert refusal(change, *others).startswith(f"rollout.sampling.{name}=")
    for others in (
        [weights],
        [weights, "rollout.max_staleness=1", "rollout.sampling.top_p=0.9"],
    ):
        config = load("config.yaml", [change, *others])
        check(config)
        assert (log_probs_of(config), compares_exactly(config)) == (
            "processed_logprobs",
            False,
        )
    check(load("config.yaml", [change.replace("rollout", "validation")]))


def test_responses_of_validation_end_as_those_of_training(workspace: Path) -> None:
    config = load(
        "config.yaml",
        ["rollout.sampling.stop=['</a>', 'b c']", "rollout.sampling.stop_token_ids=[7]"],
    )
    check(config)
    assert (log_probs_of(config), compares_exactly(config)) == ("processed_logprobs", True)
    assert config.validation.sampling == config.rollout.sampling
    parameters = sampling_parameters(config.validation.sampling, seed=1)
    assert (parameters.stop, parameters.stop_token_ids, parameters.detokenize) == (
        ["</a>", "b c"],
        [7],
        True,
    )


@refused_rows(
    """
    rollout.sampling.min_new_tokens=65
    validation.sampling.stop="['', a]"
    rollout.sampling.bad_words="['']"
    validation.sampling.structured_outputs="{regex: a, choice: [b]}"
    validation.sampling.structured_outputs="{regexp: a}"
    rollout.sampling.max_thinking_tokens=64
    validation.sampling.bad_words=[a] rollout.sampling.max_thinking_tokens=8
    rollout.sampling.end_of_thinking=a
    rollout.reasoning_parser=qwen3
    rollout.sampling.stop_token_ids=[a]
    rollout.sampling.logit_bias="{a: 1}"
    rollout.sampling.temperature=2.5
    rollout.sampling.stop_token_ids=[32]
    validation.sampling.logit_bias="{-1: 2}"
    """
)
def test_samplings_that_vllm_would_refuse_are_refused(
    workspace: Path, named: str, overrides: list[str]
) -> None:
    assert refusal(*overrides).startswith(named)


@pytest.mark.parametrize("section", ["rollout", "validation"])
def test_a_temperature_that_vllm_would_raise_is_refused(
    workspace: Path, section: str
) -> None:
    colder = f"{section}.sampling.temperature={COLDEST / 2}"
    assert refusal(colder).startswith(f"{colder}: ")
    assert (
        sampling_parameters(SamplingConfig(temperature=COLDEST / 2), seed=1).temperature
        == COLDEST
    )


def test_a_replay_does_not_take_another_sampling(workspace: Path) -> None:
    """Its samples, and their log-probs, are those of the run."""
    with refused("rollout.sampling.temperature=0.7"):
        settings(workspace, ("rollout.sampling.temperature=0.7",))
