"""What training ranks set of torch's CUDA allocator. The simulated transfers have more, see
`rollout.stand_ins`.
"""

import pytest

from workers import allocator


@pytest.mark.parametrize("name", allocator.VARIABLES)
def test_a_users_own_settings_win_and_all_but_one_stay_around_cuda_ipc(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    used: list[str] = []
    monkeypatch.setattr(allocator, "_set", used.append)
    for variable in allocator.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert allocator.settings() == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments:True")
    with allocator.fixed_segments():
        assert used == ["max_split_size_mb:512,expandable_segments:False"]
    assert used[-1] == "max_split_size_mb:512, expandable_segments:True"


def test_torch_takes_them() -> None:
    with allocator.fixed_segments():
        pass
