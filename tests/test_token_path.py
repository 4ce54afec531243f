"""A sample's way from vLLM's output to the optimiser, through every form that CONTRIBUTING.md names."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from balancing import plan_batch
from controller.rollout.samples import assemble
from tests.workers.model.tiny import save_tiny_model
from workers.batch.dispatch import (
    DispatchMode,
    Join,
    RankCoordinates,
    Split,
    join_tokens,
    split_arguments,
)
from workers.batch.score import Score
from workers.config.roles import LossConfig, ModelConfig, OptimizerConfig
from workers.engine.requests import SampleRequest
from workers.engine.vllm_interface import as_response
from workers.episodes.episode import Episode
from workers.model.layout import RowLayout
from workers.model.losses import Predictions
from workers.roles.policy import PolicyWorker
from workers.rollout.results import finish_sample, flush

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (`.*) \| (`.*) \| .* \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
)


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def test_the_page_names_forms_and_files_that_are_there() -> None:
    forms = [form for cell, _ in ROWS for form in names(cell)]
    files = [file for _, cell in ROWS for file in names(cell)]
    assert 0 < len(forms) == len(set(forms)) <= 7
    assert len(forms) < len(files) == len(set(files)) <= 18
    for cell, where in ROWS:
        text = "".join((ROOT / file).read_text() for file in names(where))
        assert [form for form in names(cell) if f"class {form}" not in text] == []


def test_a_sample_keeps_its_tokens_and_log_probs_through_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: dict[str, Any] = {}
    monkeypatch.setattr(ray, "get", lambda refs: [store[ref] for ref in refs])
    prompt, responses = [3, 4, 5], {0: [6, 7], 1: [8, 9, 10]}

    samples = []
    for sample, ids in responses.items():
        request = SampleRequest("a", sample, np.array(prompt, np.int32), seed=sample)
        episode = Episode(request.prompt_ids, max_turns=1, max_tokens=8)
        turn = as_response(output(prompt, ids))
        assert (turn.ids.tolist(), turn.log_probs.tolist()) == (
            ids,
            [-float(id) for id in ids],
        )
        episode.add(turn)
        samples.append(finish_sample(request, episode, turn.finish_reason))
    store["block"], results = flush(samples)
    assert [(result.sample, result.row, result.length) for result in results] == [
        (0, 0, 5),
        (1, 1, 6),
    ]
    assert [store["block"].row(row)["input_ids"].tolist() for row in range(2)] == [
        prompt + ids for ids in responses.values()
    ]

    scores = {result.key: Score(float(result.sample), "") for result in results}
    rollout = assemble([(result, "block") for result in results], scores)
    batch = rollout.batch.with_columns(advantages=rollout.batch["reward"] - 0.5)
    assert [(ref, row) for ref, _, row in batch.tokens["input_ids"]] == [
        ("block", 0),
        ("block", 1),
    ]

    plan = plan_batch(
        batch["length"], ranks=1, max_tokens=16, loss_tokens=batch["response_tokens"]
    )
    ranks = [RankCoordinates(index=0, dp=0)]
    laid_out, predictions = recorded(monkeypatch)
    worker = policy(save_tiny_model(tmp_path))
    laid_out.clear()
    by_tokens = DispatchMode(Split.PLAN, Join.TOKENS, ("log_probs",))
    ((arguments, _),) = split_arguments(
        by_tokens, ranks, (batch, plan), {}, put=lambda share: share
    )
    store["log_probs"], metrics = worker.log_probs(*arguments)
    batch = batch.with_tokens(
        old_log_probs=join_tokens(by_tokens, plan, 2, ["log_probs"], [metrics]).tokens[
            "log_probs"
        ]
    )

    order = plan.for_rank(0).rows.tolist()
    gathered = batch.select(order).gather()
    predicted = [id for row in order for id in responses[row]]
    assert gathered.tokens["input_ids"][gathered.tokens["loss_mask"]].tolist() == predicted

    before = {name: weight.clone() for name, weight in worker.engine.named_weights()}
    laid_out.clear()
    predictions.clear()
    ((arguments, _),) = split_arguments(
        by_tokens, ranks, (batch, plan), {}, put=lambda share: share
    )
    updated = (
        worker.forward_backward(*arguments, LossConfig(name="reinforce"))
        | worker.optimizer_step()
    )
    (found,), (read,) = laid_out, predictions
    assert found.targets.tolist() == predicted
    assert found.input_ids[0, found.predicting].tolist() == [
        id for row in order for id in [prompt[-1], *responses[row][:-1]]
    ]
    assert read["rollout_log_probs"].tolist() == [-float(id) for id in predicted]
    assert read["advantages"].tolist() == [
        row - 0.5 for row in order for _ in responses[row]
    ]
    torch.testing.assert_close(read.log_probs, read["old_log_probs"])  # of the same weights
    assert updated["grad_norm"].result() > 0
    assert any(
        not torch.equal(before[name], weight)
        for name, weight in worker.engine.named_weights()
    )


def output(prompt: list[int], ids: list[int]) -> Any:
    """vLLM's output of a request; the log-prob of a token is minus its id."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

    logprobs, spans = (
        FlatLogprobs(logprobs=[-float(id) for id in ids]),
        [WeightVersionSpan("0", 0, len(ids))],
    )
    completion = CompletionOutput(
        0, "", ids, None, logprobs, finish_reason="stop", weight_versions=spans
    )
    return RequestOutput("a/0/1", None, prompt, None, [completion], finished=True)


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """What micro-batches are laid out as, and what a loss reads, as they come."""
    laid_out: list[Any] = []
    predictions: list[Any] = []
    lay_out, gather = RowLayout.lay_out, Predictions.gather.__func__

    def keep(*arguments: Any, **named: Any) -> Any:
        laid_out.append(lay_out(*arguments, **named))
        return laid_out[-1]

    def kept(*arguments: Any) -> Any:
        predictions.append(gather(*arguments))
        return predictions[-1]

    monkeypatch.setattr(RowLayout, "lay_out", keep)
    monkeypatch.setattr(Predictions, "gather", classmethod(kept))
    return laid_out, predictions


def policy(path: str) -> PolicyWorker:
    """The only rank of a policy."""
    worker = PolicyWorker(
        "policy",
        RankCoordinates(index=0, dp=0),
        1,
        model=ModelConfig(path=path, dtype="float32"),
        device="cpu",
        temperature=1.0,
        threads=1,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        total_steps=1,
    )
    worker.build()
    return worker
