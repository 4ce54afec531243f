"""Seeds: stable, spread, one for each turn of each sample of each step of each run."""

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.requests import sample_seed, turn_seed


@given(st.integers(), st.integers(), st.text(), st.integers())
def test_a_seed_fits_into_63_bits(run_seed: int, step: int, uid: str, sample: int) -> None:
    assert 0 <= sample_seed(run_seed, step, uid, sample) < 2**63


def test_a_seed_is_the_same_in_every_process() -> None:
    assert sample_seed(1, 2, "p7", 3) == 4083726628987539310


def test_run_step_prompt_and_sample_each_change_the_seed() -> None:
    seeds = {
        sample_seed(r, t, u, s)
        for r in (0, 1)
        for t in (0, 1, 10)
        for u in ("1", "11", "0/1")
        for s in (0, 1, 11)
    }
    assert len(seeds) == 2 * 3 * 3 * 3


def test_every_turn_has_a_seed_of_its_own_and_the_first_that_of_the_sample() -> None:
    seeds = [turn_seed(77, number) for number in range(4)]
    assert seeds[0] == 77
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
