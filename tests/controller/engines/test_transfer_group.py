"""Groups of sender and engines, over drawn histories of losses."""

from hypothesis import given
from hypothesis import strategies as st

from controller.engines.transfer_group import Member, TransferGroup

MEMBERS = st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1)
HISTORIES = st.lists(st.tuples(MEMBERS, MEMBERS), max_size=6)


@given(st.sampled_from(["colocated", "apart"]), HISTORIES)
def test_an_epoch_names_one_group_and_a_broadcast_serves_all_or_none(
    placement: str, history: list[tuple[set[Member], set[Member]]]
) -> None:
    group = TransferGroup(placement)
    members_of_epoch: dict[int, tuple[Member, ...]] = {}
    for present, dying in history:
        was_broken = group.broken
        epoch = group.epoch
        group = group.next_group(present)
        assert set(group.members) == present and not group.broken
        assert members_of_epoch.setdefault(group.epoch, group.members) == group.members
        assert group.epoch > epoch or not was_broken
        lost = present & dying
        receivers = set(group.receivers(lost))
        assert receivers == (set() if lost and placement == "apart" else present - lost)
        group = group.after(lost)
        assert group.broken == bool(lost)


def test_a_replacement_is_another_member() -> None:
    group = TransferGroup("apart").next_group([(0, 0), (1, 0)])
    assert group.next_group([(1, 0), (0, 0)]) is group
    assert group.next_group([(0, 0), (1, 1)]).epoch == group.epoch + 1
