"""Agents' sessions in whole runs in this process: what is trained of their trees. Gateway and agent are
stand-ins.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from balancing import plan_batch
from controller import step
from controller.planning.planner import prefix_columns
from controller.rollout.batch_rows import BRANCH_COLUMNS
from tests.controller.stand_ins.run import StandIns, write_stand_in_workspace
from tests.workers.model.exact import whole_gradients
from tests.workers.model.tiny import compute_in_float64, relative_error
from tests.workers.rollout.sessions import response
from workers.agents.gateway import Access
from workers.agents.session import Session, SessionPrompt
from workers.batch.dataproto import DataProto
from workers.batch.remote_batch import RemoteBatch
from workers.batch.score import Score
from workers.engine.branches import branches_of
from workers.engine.requests import SampleRequest
from workers.engine.session_record import Node
from workers.model.engine import TrainingEngine
from workers.model.rows.prefix_rows import pack_shared
from workers.roles import model_worker
from workers.rollout.players import AgentPlayer

# Of each turn: the turn that it extends, or -1, and its reward. 1, 2 or 4 leaves, so that means are exact in
# float32.
TREES: list[list[tuple[int, float | None]]] = [
    [(-1, None), (0, None), (1, None)],
    [(-1, None), (0, 0.5), (0, None)],
    [(-1, None), (0, 2.0), (0, None), (1, None), (1, -1.0), (2, None), (2, 0.25)],
    [(-1, None), (-1, None), (1, 0.75)],  # a sub-agent
]
DROPPED = (0, 9.0)
"""A last turn that no client received."""


class StandInGateway:
    def __init__(self, *_: Any) -> None:
        pass

    async def start(self, *_: Any) -> None:
        pass

    async def stop(self) -> None:
        pass

    def open(self, *_: Any, **__: Any) -> Access:
        return Access("", "", "")

    async def close(self, session: Session) -> None:
        pass


Run = Callable[
    ..., tuple[list[Session], list[dict[str, Tensor]], list[RemoteBatch], dict[str, float]]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sessions")
    write_stand_in_workspace(path)
    (path / "agent.py").write_text("def run(record, base_url, api_key):\n    pass\n")
    return path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Make a step, and return its sessions, the gradients of its update, the trained batch and
    the metrics.
    """
    monkeypatch.chdir(folder)
    stand_ins = StandIns(monkeypatch)
    stand_ins.compute("float64")
    sessions: dict[tuple[str, int], Session] = {}
    gradients: list[dict[str, Tensor]] = []
    batches: list[RemoteBatch] = []

    async def grow(player: AgentPlayer, request: SampleRequest, *_: Any) -> Score:
        session = sessions[request.key] = player._sessions[request.attempt]
        place = 2 * int(request.uid) % 4 + request.sample
        rng, nodes = np.random.default_rng(place), list[Node]()
        for extended, reward in [*TREES[place], DROPPED]:
            parent = nodes[extended] if extended >= 0 else None
            begun = (
                session.ids(parent)
                if parent
                else request.prompt_ids
                if not nodes
                else np.array([3], np.int32)
            )
            prompt = np.concatenate([begun, rng.integers(3, 12, 2, np.int32)])
            with session.sampling() as number:
                answer = response(rng.integers(3, 12, rng.integers(1, 5)).tolist())
                node = session.add(
                    SessionPrompt([], parent=parent),
                    prompt,
                    answer,
                    number=number,
                    name=str(number),
                )
            node.received = len(nodes) < len(TREES[place])
            nodes.append(node)
            if reward is not None:
                session.reward(reward, str(number))
        return Score(place / 4, "")

    def exact(*arguments: Any, **settings: Any) -> TrainingEngine:
        engine = make(*arguments, **settings)
        compute_in_float64(engine.module.model)
        return engine

    def keep(engine: TrainingEngine, *_: Any) -> Any:
        gradients.append(whole_gradients(engine))
        return optimizer_step(engine, *_)

    make, optimizer_step = model_worker.TrainingEngine, TrainingEngine.optimizer_step
    trained = step.update_policy
    monkeypatch.setattr(model_worker, "TrainingEngine", exact)
    monkeypatch.setattr("workers.rollout.engine_actor.Gateway", StandInGateway)
    monkeypatch.setattr(AgentPlayer, "_run_agent", grow)
    monkeypatch.setattr(TrainingEngine, "optimizer_step", keep)
    monkeypatch.setattr(
        step,
        "update_policy",
        lambda run, batch, *others: batches.append(batch) or trained(run, batch, *others),
    )
    settings = [
        f"run.dir={tmp_path}",
        "policy.data_parallel=1",
        "data.validation=''",
        "rollout.placement=colocated",
    ]
    settings += [
        "policy.max_tokens_per_micro_batch=72",
        "run.steps=1",
        "rollout.agent=agent.py:run",
        "reward.function=''",
        "rollout.max_model_tokens=72",
    ]

    def made(
        *overrides: str,
    ) -> tuple[list[Session], list[dict[str, Tensor]], list[RemoteBatch], dict[str, float]]:
        outcome = stand_ins.run([*settings, *overrides]).outcome
        return (
            [sessions[key] for key in sorted(sessions)],
            gradients,
            batches,
            outcome.steps[0],
        )

    return made


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("aggregation", "sharing", "cap"),
    [
        ("token_mean", "always", 72),
        ("sequence_mean_token_mean", "always", 512),
        ("sequence_mean_token_mean", "never", 72),
        ("sequence_mean_token_sum", "never", 512),
    ],
)
def test_the_gradient_is_that_of_every_path_by_itself(
    run: Run, aggregation: str, sharing: str, cap: int
) -> None:
    """A token weighs 1 / the leaves below it in each path that holds it, with the advantage of the path's
    leaf.
    """
    sessions, gradients, batches, metrics = run(
        "algorithm.advantage=dr_grpo",
        f"algorithm.loss.aggregation={aggregation}",
        f"model.share_prefixes={sharing}",
        *(["model.min_shared_tokens=1"] if sharing == "always" else []),
        f"policy.max_tokens_per_micro_batch={cap}",
    )
    assert [len(session.leaves) for session in sessions] == [1, 2, 4, 2]
    assert len(batches[0]) == 9 and np.bincount(batches[0]["sample_number"]).tolist() == [
        1,
        2,
        4,
        2,
    ]
    first = np.unique(batches[0]["sample_number"], return_index=True)[1]
    values = batches[0]["reward"][first].tolist()
    added = [
        value - (session.value or 0.0)
        for value, session in zip(values, sessions, strict=True)
    ]
    assert added == [0.0, 1.0, 0.0, 1.0]  # by reward functions, to each leaf
    sampled = [session.response_tokens for session in sessions]
    weights = {"token_mean": [1 / sum(sampled)] * 4, "sequence_mean_token_sum": [1 / 4] * 4}
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float64)
    compute_in_float64(model)
    for number, session in enumerate(sessions):
        weight = weights.get(aggregation, [1 / (4 * tokens) for tokens in sampled])[number]
        below = [node for leaf in session.leaves for node in session.path(leaf)]
        for leaf in session.leaves:
            path = session.path(leaf)
            own = [session._rewards.get(node.names[0]) for node in path]
            reward = ([number / 4] + [each for each in own if each is not None])[-1]
            advantage = (
                reward
                + added[number]
                - np.mean(values[number // 2 * 2 : number // 2 * 2 + 2])
            )
            ids, end = torch.tensor(session.ids(leaf)), 0
            log_probs = (
                model(ids[None])
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, ids[1:, None])[:, 0]
            )
            for node in path:
                start = end + len(node.given)
                end = start + len(node.response.ids)
                share = weight * advantage / below.count(node)
                (-share * log_probs[start - 1 : end - 1].sum()).backward(retain_graph=True)
    expected = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert gradients[0].keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(gradients[0][name], gradient) < 1e-9, name
    assert metrics["rollout/rows_per_sample"] == 9 / 4 and metrics["rollout/samples"] == 4
    assert metrics["reward/mean"] == pytest.approx(np.mean(values))


def test_a_plan_knows_that_shared_turns_are_computed_once() -> None:
    """Up to the 16th between hashes of prefixes. A sub-agent has a prompt of its own."""
    session, rng = Session("s", max_turns=20), np.random.default_rng(0)
    nodes: list[Node] = []
    for extended in (-1, 0, 1, 2, 1, 0, -1, 6, 6):
        parent = nodes[extended] if extended >= 0 else None
        begun = session.ids(parent) if parent else np.full(300, 5 + len(nodes), np.int32)
        prompt = np.concatenate([begun, rng.integers(3, 1_000, 40, np.int32)])
        answer = response(rng.integers(3, 1_000, 60).tolist())
        nodes.append(
            session.add(SessionPrompt([], parent=parent), prompt, answer, number=len(nodes))
        )
        nodes[-1].received = True
    rows = session.rows()[1:]
    branches = branches_of(session.rows(), session.prompt_tokens)
    columns = {
        name: np.array([getattr(each, name) for each in branches], object)
        for name in BRANCH_COLUMNS
    }
    numbers = [
        columns[name].astype(np.int64)
        for name in ("prompt_hash", "prompt_tokens", "length")
    ]
    shared = prefix_columns(*numbers, columns["prefix_hashes"], minimum=1)
    tree = sum(len(node.ids) for node in nodes)
    assert (len(rows), tree, numbers[-1].sum()) == (5, 1_500, 2_800)
    plan = plan_batch(numbers[-1], ranks=1, max_tokens=tree * 17 // 16, **shared)
    assert len(plan.mini_batches[0].micro_steps) == 1
    found = [{name: row[name] for name in ("input_ids", "loss_mask")} for row in rows]
    assert pack_shared(DataProto.from_rows(found).as_tensors()).lengths == (tree,)
