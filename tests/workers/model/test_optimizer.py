import pytest
import torch

from tests.refusals import refused
from workers.config import OptimizerConfig
from workers.model.optimizer import make_optimizer, make_schedule, resume_schedule


def factors(config: OptimizerConfig, total_steps: int) -> list[float]:
    """Share of the peak learning rate used at each step, as torch's scheduler applies it."""
    optimizer = make_optimizer([torch.nn.Parameter(torch.ones(2, 2))], config)
    schedule = make_schedule(optimizer, config, total_steps)
    used = []
    for _ in range(total_steps):
        used.append(optimizer.param_groups[0]["lr"] / config.learning_rate)
        optimizer.step()
        schedule.step()
    return used


ENDS_HIGH = {"final_learning_rate_ratio": 0.2, "total_steps": 4}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizerConfig(warmup_steps=3), [0.25, 0.5, 0.75, 1, 1, 1]),
        (OptimizerConfig(schedule="linear"), [1, 0.75, 0.5, 0.25]),
        (OptimizerConfig(schedule="cosine"), [1, 0.853553, 0.5, 0.146447]),
        (OptimizerConfig(schedule="linear", **ENDS_HIGH), [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (OptimizerConfig(schedule="cosine", **ENDS_HIGH), [1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2]),
        (OptimizerConfig(schedule="linear", total_steps=2), [1, 0.5, 0, 0]),  # wins over the length of the run
    ],
)
def test_schedules_warm_up_and_fall_to_their_final_ratio(config, expected):
    assert factors(config, len(expected)) == pytest.approx(expected, abs=1e-6)


def test_a_schedule_resumes_where_it_was_and_goes_on_as_if_it_had_never_stopped():
    config = OptimizerConfig(schedule="cosine", warmup_steps=2)
    optimizer = make_optimizer([torch.nn.Parameter(torch.ones(2, 2))], config)
    schedule = make_schedule(optimizer, config, 8)
    resume_schedule(schedule, 3)
    used = []
    for _ in range(5):
        used.append(optimizer.param_groups[0]["lr"] / config.learning_rate)
        optimizer.step()
        schedule.step()
    assert used == factors(config, 8)[3:]


def test_a_schedule_that_ends_within_its_warm_up_is_refused():
    with refused("policy.optimizer.warmup_steps"):
        factors(OptimizerConfig(schedule="cosine", warmup_steps=5), 5)


def test_only_matrices_decay():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([matrix, vector], OptimizerConfig(learning_rate=0.1, weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(vector.detach(), torch.ones(2))


def test_frozen_parameters_are_left_out():
    trainable, frozen = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = make_optimizer([trainable, frozen], OptimizerConfig())
    assert [parameter for group in optimizer.param_groups for parameter in group["params"]] == [trainable]
