"""Named batches: seeded, within their bounds, and shaped as they say."""

import numpy as np
import pytest

from balancing.analysis.distributions import ADVERSARIAL, DEFAULT_CAP, DISTRIBUTIONS, draw
from balancing.errors import OptionError

REALISTIC = {"lognormal", "reasoning", "agentic", "uniform", "grouped", "equal"}


def test_every_promised_name_is_there():
    assert {"geometric", "thirds", "above_half", "one_huge"} == ADVERSARIAL
    assert set(DISTRIBUTIONS) == REALISTIC | ADVERSARIAL


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_are_seeded_positive_and_within_the_cap(name):
    lengths = draw(name, 1000, 3)
    assert lengths.shape == (1000,)
    assert lengths.dtype == np.int64
    assert lengths.min() >= 1
    assert lengths.max() <= DEFAULT_CAP
    assert lengths.tolist() == draw(name, 1000, 3).tolist()
    if name not in ("equal", "geometric"):
        assert lengths.tolist() != draw(name, 1000, 4).tolist()


@pytest.mark.parametrize("name", sorted(ADVERSARIAL))
@pytest.mark.parametrize("cap", [1, 7, 8192])
def test_adversarial_draws_stay_within_the_cap_they_are_given(name, cap):
    lengths = draw(name, 200, 0, cap=cap)
    assert lengths.min() >= 1
    assert lengths.max() <= cap


def test_realistic_shapes_are_as_documented():
    chat = draw("lognormal", 20_000, 0)
    assert np.median(chat) == pytest.approx(600, rel=0.03)
    assert (chat.min(), chat.max()) == (16, 8192)
    assert (draw("reasoning", 20_000, 0) == 32_768).mean() == pytest.approx(0.2, abs=0.02)
    groups = np.log(draw("grouped", 16 * 500, 0)).reshape(500, 16)
    assert groups.std(axis=1).mean() < groups.mean(axis=1).std()
    assert (draw("agentic", 20_000, 0) > 4_000).mean() == pytest.approx(0.3, abs=0.02)


def test_adversarial_shapes_are_as_documented():
    assert (draw("above_half", 500, 0, cap=1000) > 500).all()
    thirds = draw("thirds", 500, 0, cap=30_000)
    assert ((thirds >= 9_900) & (thirds <= 10_100)).all()
    assert (thirds > 10_000).any()
    assert (thirds < 10_000).any()
    assert set(draw("geometric", 100, 0, cap=16).tolist()) == {16, 8, 4, 2, 1}
    assert (draw("one_huge", 500, 0, cap=9000) == 9000).sum() == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("normal", 5, 0), "name='normal'"),
        (("equal", 0, 0), "count=0"),
        (("equal", 2.5, 0), "count=2.5"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(OptionError, match=words):
        draw(*arguments)
