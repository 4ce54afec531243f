"""Rewards of turns, from the environment to the tokens' advantages, against loops in float64."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.algorithm.credit import has_offsets, session_advantages, turn_rewards
from controller.config import Config, load
from controller.preflight.checks import check
from tests.controller.stand_ins.gpus import StandInEngine
from tests.controller.stand_ins.run import SETTINGS, StandIns, write_stand_in_workspace
from tests.json_lines import read_lines, write_lines
from tests.refusals import refused, refused_rows
from tests.workers.rollout.sessions import TURNS, Agent
from workers.agents.session import Session
from workers.batch.dataproto import DataProto, object_column
from workers.batch.remote_batch import RemoteBatch
from workers.errors import DataError
from workers.model.losses.returns import discounts, gae, token_rewards

SAMPLES = st.lists(  # turns of each sample: tokens, reward, state, and whether a row ends behind it
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
            st.integers(0, 2),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=6,
)
EPISODE = [
    "rollout.environment=env.py:Scores",
    "rollout.max_turns=3",
    "algorithm.loss.name=reinforce",
]


def batch_of(
    samples: list[Any], rewards: list[float], *, branches: bool = False
) -> RemoteBatch:
    """Rows of samples, two of a group, cut behind the turns that say so if there are branches."""
    rows: list[tuple[int, int]] = []
    for number, turns in enumerate(samples):
        counts = [0]
        for tokens, _, _, ends in turns:
            counts[-1] += tokens
            counts += [0] * (branches and ends)
        rows += [(number, count) for count in counts if count]
    sample, tokens = np.array(rows).T
    credit = object_column([tuple(turn[:3] for turn in turns) for turns in samples])
    columns = {
        "sample_number": sample,
        "response_tokens": tokens,
        "group_number": sample // 2,
    }
    return RemoteBatch(
        columns | {"credit": credit[sample], "reward": np.array(rewards)[sample]}, {}
    )


def algorithm(**changes: Any) -> Any:
    found = Config().algorithm
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def tokens_of(turns: np.ndarray, reward: np.ndarray) -> DataProto:
    """One row of tokens for each row of turns: every second is the policy's."""
    counts = np.array([sum(tokens for tokens, _ in row) for row in turns])
    mask = np.arange(2 * counts.sum()) % 2 == 0
    return DataProto(
        2 * counts, {"loss_mask": mask}, {"reward": reward, "by_turn": turns}
    ).as_tensors()


@settings(deadline=None)
@given(
    SAMPLES,
    st.sampled_from(["turn", "episode"]),
    st.sampled_from(["token", "turn"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.floats(0.5, 1.0),
    st.data(),
)
def test_returns_and_gae_are_those_of_a_loop(
    samples: list[Any], credit: str, per: str, gamma: float, lam: float, data: Any
) -> None:
    """The rewards of an episode's turns, and the rest of its reward at its last token, or all of it there."""
    rewards = data.draw(
        st.lists(st.floats(-2, 2), min_size=len(samples), max_size=len(samples))
    )
    batch = batch_of(samples, rewards)
    turns = turn_rewards(algorithm(credit=credit, gamma_per=per), batch, batch["reward"])
    tokens = tokens_of(turns, batch["reward"])
    values = np.sin(np.arange(tokens.num_loss_tokens))
    lengths = tokens.loss_token_counts.numpy()
    found, _ = gae(
        token_rewards(tokens).numpy(),
        values,
        lengths,
        gamma=discounts(tokens, gamma, per),
        lam=lam,
    )
    expected: list[float] = []
    for turns_of_sample, reward in zip(samples, rewards, strict=True):
        own = values[
            len(expected) : len(expected) + sum(each[0] for each in turns_of_sample)
        ]
        earned, discount = [], []
        for count, turn_reward, _, _ in turns_of_sample:
            earned += [0.0] * (count - 1) + [turn_reward * (credit == "turn")]
            discount += [gamma if per == "token" else 1.0] * (count - 1) + [gamma]
        earned[-1] += reward - sum(earned)
        after, advantages = 0.0, [0.0] * (len(own) + 1)
        for t in reversed(range(len(own))):
            advantages[t] = (
                earned[t]
                + discount[t] * after
                - own[t]
                + discount[t] * lam * advantages[t + 1]
            )
            after = own[t]
        expected += advantages[:-1]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@settings(deadline=None)
@given(
    SAMPLES,
    st.booleans(),
    st.sampled_from(["turn", "episode"]),
    st.sampled_from(["observation", "number"]),
    st.data(),
)
def test_gigpo_is_the_papers_in_one_row_or_several(
    samples: list[Any], std: bool, credit: str, states: str, data: Any
) -> None:
    rewards = data.draw(
        st.lists(
            st.sampled_from([0.0, 1.0, 1.5]), min_size=len(samples), max_size=len(samples)
        )
    )
    chosen = algorithm(advantage="gigpo", credit=credit, gamma=0.9, normalize_by_std=std)
    chosen.gigpo.weight, chosen.gigpo.states = 0.5, states
    returns, groups = {}, defaultdict(list)
    for i, turns in enumerate(samples):
        earned = [each[1] * (credit == "turn") for each in turns]
        earned[-1] = rewards[i] - sum(earned[:-1])
        for k in range(len(turns)):
            returns[i, k] = sum(
                0.9 ** (later - k) * earned[later] for later in range(k, len(turns))
            )
            groups[i // 2, turns[k][2] if states == "observation" else k].append(
                returns[i, k]
            )

    def relative(value: float, group: list[float]) -> float:
        deviation = np.std(group, ddof=1) if len(group) > 1 else 1.0
        return float((value - np.mean(group)) / (deviation + 1e-6 if std else 1.0))

    expected = [
        [
            relative(
                rewards[i], [rewards[j] for j in range(len(samples)) if j // 2 == i // 2]
            )
            + 0.5
            * relative(
                returns[i, k], groups[i // 2, each[2] if states == "observation" else k]
            )
            for k, each in enumerate(turns)
        ]
        for i, turns in enumerate(samples)
    ]
    for branches in (False, True):
        batch = batch_of(samples, rewards, branches=branches)
        found = turn_rewards(chosen, batch, batch["reward"])
        assert [sum(tokens for tokens, _ in row) for row in found] == batch[
            "response_tokens"
        ].tolist()
        for i, turns in enumerate(samples):
            mine = [
                turn
                for row in np.flatnonzero(batch["sample_number"] == i)
                for turn in found[row]
            ]
            assert [tokens for tokens, _ in mine] == [each[0] for each in turns]
            np.testing.assert_allclose(
                [number for _, number in mine], expected[i], atol=1e-5
            )


def sessions_of(
    trees: list[Any], rewards: list[list[float | None]]
) -> tuple[list[Session], RemoteBatch]:
    """Sessions, two of a group, with rewards of their responses (None: the session's, 1), and their rows."""
    sessions, rows = [], []
    for number, (turns, own) in enumerate(zip(trees, rewards, strict=True)):
        session = Session("s", max_turns=20)
        nodes = [
            node
            for node, _ in Agent(session).play([(*turn[:3], True) for turn in turns]).turns
        ]
        session.reward(1.0)
        for node, reward in zip(nodes, own, strict=False):
            if reward is not None:
                session.reward(reward, node.names[0])
        sessions.append(session)
        found = session.rows()
        rows += [
            (number, int(row["loss_mask"].sum())) for row in found[-len(session.leaves) :]
        ]
    sample, tokens = np.array(rows).T
    columns = {
        "sample_number": sample,
        "response_tokens": tokens,
        "group_number": sample // 2,
    }
    columns |= {
        "greedy_reward": sample / 4,
        "reward": np.array([each.value for each in sessions])[sample],
    }
    return sessions, RemoteBatch(
        columns | {"offsets": object_column([e.credit() for e in sessions])[sample]}, {}
    )


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            TURNS,
            st.lists(st.sampled_from([None, 0.0, 0.5, 2.0]), min_size=10, max_size=10),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(
        ["grpo", "grpo without std", "dr_grpo", "rloo", "remax", "opo", "maxrl"]
    ),
)
def test_a_turn_has_the_mean_advantage_of_the_leaves_below_it(
    samples: list[Any], estimator: str
) -> None:
    """A leaf is compared with the sessions of its prompt, by the estimator's formula."""
    sessions, batch = sessions_of(
        [turns for turns, _ in samples], [own for _, own in samples]
    )
    values = [float(session.value or 0.0) for session in sessions]

    def advantage(number: int, reward: float) -> float:
        mine = [each for each in range(len(sessions)) if each // 2 == number // 2]
        group, lengths = (
            [values[each] for each in mine],
            [sessions[each].response_tokens for each in mine],
        )
        others = [values[each] for each in mine if each != number]
        deviation = np.std(group, ddof=1) if len(group) > 1 else 0.0
        return {
            "grpo": (reward - np.mean(group)) / (deviation + 1e-6)
            if deviation > 1e-6
            else 0.0,
            "rloo": reward - np.mean(others) if others else reward - values[number],
            "remax": reward - number / 4,
            "opo": reward - np.dot(group, lengths) / sum(lengths),
            "maxrl": (reward - np.mean(group)) / np.mean(group) if np.mean(group) else 0.0,
        }.get(estimator, reward - np.mean(group))

    chosen = algorithm(
        advantage=estimator.split()[0], normalize_by_std="without" not in estimator
    )
    found = session_advantages(chosen, batch, batch["reward"])
    assert has_offsets(batch) == any(
        offset for session in sessions for _, offset, _ in session.credit()
    )
    for number, session in enumerate(sessions):
        mine = [
            pair
            for row in np.flatnonzero(batch["sample_number"] == number)
            for pair in found[row]
        ]
        below: dict[int, list[float]] = {}
        order = []
        for leaf in session.leaves:
            for node in session.path(leaf):
                order += [node] * (node.number not in below)
                below.setdefault(node.number, []).append(
                    advantage(number, float(session._of_leaf(leaf) or 0.0))
                )
        assert [tokens for tokens, _ in mine] == [
            node.response.sampled_tokens for node in order
        ]
        expected = [np.mean(below[node.number]) for node in order]
        np.testing.assert_allclose([a for _, a in mine], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "estimator", ["pass_at_k", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_estimators_of_another_form_refuse_rewards_of_responses(estimator: str) -> None:
    _, batch = sessions_of(
        [[(-1, 1, 2, True), (0, 1, 2, True), (0, 1, 2, True)]] * 2, [[None, 0.5]] * 2
    )
    with refused(f"algorithm.advantage={estimator}", DataError):
        session_advantages(algorithm(advantage=estimator), batch, batch["reward"])


ENVIRONMENT = """
from workers.environment import Observation

class Scores:
    def reset(self, record):
        self.turn = 0

    def step(self, response):
        self.turn += 1
        score = sum(map(ord, response)) % 4
        return Observation("ab"[score % 2], reward=score / 4, done=self.turn == 3)
"""


@pytest.fixture
def learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[DataProto, dict[str, float]]]:
    """What the loss of a run's first step reads, and the step's metrics."""
    write_stand_in_workspace(tmp_path)
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    read: list[DataProto] = []
    update = StandInEngine.forward_backward

    def watched(engine: StandInEngine, sequences: DataProto, *others: Any) -> Any:
        if "advantages" in sequences.tokens:
            read.append(sequences)
        return update(engine, sequences, *others)

    monkeypatch.setattr(StandInEngine, "forward_backward", watched)

    def run(*overrides: str) -> tuple[DataProto, dict[str, float]]:
        found = StandIns(monkeypatch).run(
            [*EPISODE, "policy.data_parallel=1", "run.steps=1", *overrides]
        )
        return read[-1], found.outcome.steps[0]

    return run


def episodes(sequences: DataProto) -> list[tuple[list[int], list[float]]]:
    """Tokens and rewards of each sample's turns: what is not the environment's lies on the last."""
    found = []
    for credit, reward in zip(
        sequences.objects["credit"], sequences.columns["reward"].tolist(), strict=True
    ):
        earned = [each[1] for each in credit[:-1]]
        found.append(([each[0] for each in credit], [*earned, reward - sum(earned)]))
    return found


@pytest.mark.parametrize("per", ["token", "turn"])
@pytest.mark.parametrize("critic", [False, True])
def test_a_configuration_credits_turns(learned: Any, critic: bool, per: str) -> None:
    estimator = (
        ["gae", "algorithm.gae.gamma=0.5"]
        if critic
        else ["reinforce_plus_plus", "algorithm.gamma=0.5"]
    )
    sequences, metrics = learned(
        f"algorithm.advantage={estimator[0]}",
        estimator[1],
        f"algorithm.gamma_per={per}",
        "algorithm.credit=turn",
    )
    returns = []
    for counts, earned in episodes(sequences):
        assert counts == [3, 3, 3]
        for turn in range(3):
            for token in range(3):
                steps = [
                    k - turn if per == "turn" else 3 * (k - turn) + 2 - token
                    for k in range(3)
                ]
                returns.append(sum(0.5 ** steps[k] * earned[k] for k in range(turn, 3)))
    expected = (returns - np.mean(returns)) / np.std(returns)
    advantages = sequences.tokens["advantages"][sequences.tokens["loss_mask"]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-3, atol=1e-4)
    credit = [[earned for _, earned, _ in each] for each in sequences.objects["credit"]]
    for turn in range(3):
        assert metrics[f"turn/reward/{turn + 1}"] == pytest.approx(
            np.mean(credit, axis=0)[turn]
        )
        assert metrics[f"turn/samples/{turn + 1}"] == len(credit)


def test_a_configuration_compares_turns(learned: Any) -> None:
    """Turns of a sample have one advantage each, and a state that occurs once has the sample's."""
    sequences, _ = learned(
        "algorithm.advantage=gigpo", "algorithm.gigpo.weight=0", "algorithm.gamma=0.9"
    )
    advantages = sequences.tokens["advantages"][sequences.tokens["loss_mask"]].reshape(
        -1, 3, 3
    )
    assert torch.equal(advantages, advantages[:, :1, :1].expand_as(advantages))
    sequences, _ = learned(
        "run.name=second",
        "algorithm.advantage=gigpo",
        "algorithm.credit=turn",
        "algorithm.normalize_by_std=false",
    )
    found = sequences.tokens["advantages"][sequences.tokens["loss_mask"]].reshape(-1, 3, 3)
    assert torch.equal(found, found[..., :1].expand_as(found))
    assert not torch.equal(found, found[:, :1].expand_as(found))
    rewards, groups = sequences.columns["reward"], sequences.columns["group_number"]
    for group in groups.unique():
        mine = groups == group
        first = rewards[mine] - rewards[mine].mean()  # all begin in the same state
        torch.testing.assert_close(
            found[mine, 0, 0].double(), 2 * first.double(), atol=1e-5, rtol=1e-5
        )


def test_turns_in_rows_of_their_own_have_the_advantages_of_one_row(learned: Any) -> None:
    """The template changes how earlier turns begin, so that each turn is a row."""
    gigpo = [
        "algorithm.advantage=gigpo",
        "algorithm.credit=turn",
        "batch.epochs=2",
        "algorithm.loss.name=ppo_clip",
    ]
    Path("model/chat_template.jinja").write_text(
        "{% for m in messages %}{{ '=' if m.role == 'assistant' and not loop.last }}{{ m.content }}{% "
        "endfor %}"
    )
    records = read_lines(Path("prompts.jsonl"))
    chats = [
        record | {"prompt": [{"role": "user", "content": record["prompt"]}]}
        for record in records
    ]
    write_lines(Path("chats.jsonl"), chats)
    data = [
        "data.train=chats.jsonl",
        "data.validation=chats.jsonl",
        "rollout.history=template",
    ]
    rows, _ = learned(*gigpo, *data)
    number = rows.columns["sample_number"].numpy()
    first = np.unique(number, return_index=True)[1]
    assert len(rows) > 2 * len(first)
    columns = {
        name: rows.columns[name].numpy()[first] for name in ("reward", "group_number")
    }
    columns |= {
        "credit": rows.objects["credit"][first],
        "response_tokens": np.full(len(first), 9),
    }
    chosen = load(None, [*SETTINGS, *EPISODE, *gigpo]).algorithm
    expected = turn_rewards(chosen, RemoteBatch(columns, {}), columns["reward"])
    order = np.argsort(number, kind="stable").tolist()
    parts = [rows.slice(row, row + 1).tokens for row in order]
    found = torch.cat([part["advantages"][part["loss_mask"]] for part in parts])
    np.testing.assert_allclose(
        found,
        [a for turns in expected for count, a in turns for _ in range(count)],
        atol=1e-5,
    )


@refused_rows("""
algorithm.credit=turn algorithm.advantage=gae
algorithm.credit=turn rollout.environment=env.py:Scores
algorithm.credit=turn algorithm.advantage=gae rollout.environment=env.py:A rollout.max_turns=1
algorithm.gamma_per=turn algorithm.advantage=gae rollout.environment=env.py:Scores
algorithm.gamma_per=turn algorithm.advantage=gae algorithm.gae.gamma=0.5
algorithm.advantage=gigpo
algorithm.gigpo.weight=2.0
algorithm.zero_variance_groups=drop algorithm.advantage=gigpo rollout.environment=env.py:Scores
""")
def test_settings_without_effect_are_refused(
    learned: Any, named: str, overrides: list[str]
) -> None:
    with refused(named):
        check(load(None, [*SETTINGS, *overrides]))
