"""What Ray's dashboard and logs call the actors."""

import pytest
import torch

from workers.dispatch import RankCoordinates
from workers.roles.base import Worker
from workers.roles.critic import CriticWorker
from workers.roles.model_worker import ReferenceWorker, RewardModelWorker
from workers.roles.offline_policy import OfflinePolicyWorker
from workers.roles.policy import PolicyWorker
from workers.roles.reward import RewardWorker
from workers.rollout.engine_actor import VllmEngineActor

ACTORS = (
    PolicyWorker,
    OfflinePolicyWorker,
    CriticWorker,
    ReferenceWorker,
    RewardModelWorker,
    VllmEngineActor,
    RewardWorker,
)


@pytest.mark.parametrize("actor", ACTORS)
def test_every_actor_has_a_name(actor: type) -> None:
    assert actor.__repr__ is not object.__repr__


def test_a_training_actor_says_its_role_and_its_place() -> None:
    place = RankCoordinates(index=3, dp=1, cp=1, tp=0, pp=0)
    assert repr(Worker("critic", place, 4, threads=torch.get_num_threads())) == "critic dp=1 cp=1"
