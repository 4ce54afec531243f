import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.advantages import grpo, has_signal


def reference(rewards: np.ndarray, uids: np.ndarray, normalize_by_std: bool) -> np.ndarray:
    """DeepSeekMath, section 4.1.2, group by group."""
    advantages = np.zeros(len(rewards))
    for uid in set(uids.tolist()):
        group = rewards[uids == uid]
        scale = (np.std(group, ddof=1) if len(group) > 1 else 0.0) + 1e-6 if normalize_by_std else 1.0
        advantages[uids == uid] = (group - group.mean()) / scale
    return advantages


GROUPS = st.lists(st.tuples(st.integers(0, 5), st.floats(-10, 10)), min_size=1, max_size=60)


@given(GROUPS, st.booleans())
def test_grpo_equals_the_paper_group_by_group(rows: list[tuple[int, float]], by_std: bool) -> None:
    uids = np.array([str(uid) for uid, _ in rows])
    rewards = np.array([reward for _, reward in rows])
    np.testing.assert_allclose(
        grpo(rewards, uids, normalize_by_std=by_std), reference(rewards, uids, by_std), rtol=1e-6, atol=1e-6
    )


@given(GROUPS, st.randoms())
def test_row_order_carries_no_meaning(rows: list[tuple[int, float]], rng) -> None:
    order = list(range(len(rows)))
    rng.shuffle(order)
    uids = np.array([uid for uid, _ in rows])
    rewards = np.array([reward for _, reward in rows])
    np.testing.assert_allclose(grpo(rewards, uids)[order], grpo(rewards[order], uids[order]), rtol=1e-6, atol=1e-9)


def test_known_answer() -> None:
    advantages = grpo(np.array([1.0, 0.0, 1.0, 0.0]), np.array(["a", "a", "a", "a"]), epsilon=0.0)
    assert advantages == pytest.approx([0.8660254, -0.8660254, 0.8660254, -0.8660254])


def test_a_group_of_one_has_no_advantage() -> None:
    assert grpo(np.array([3.0]), np.array(["a"])) == pytest.approx([0.0])


def test_signal_is_a_property_of_the_group() -> None:
    signal = has_signal(np.array([1.0, 0.5, 1.0, 0.5, 0.5]), np.array(["a", "b", "a", "b", "c"]))
    assert signal.tolist() == [False] * 5
    signal = has_signal(np.array([1.0, 0.5, 0.0, 0.5, 0.5]), np.array(["a", "b", "a", "b", "c"]))
    assert signal.tolist() == [True, False, True, False, False]
