"""The recorder of verl's actor writes what its loss read, with verl's own loss where verl is installed."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from ballast.audit import read_bundle
from ballast.audit.checks import check_step
from ballast.audit.finding import Verdict
from ballast.audit.recorders.verl import record_steps

PROMPTS = [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
RESPONSES = [[3, 4, 1], [4, 1], [3, 3, 3, 1], [2, 1]]
REWARDS = [1.0, 0.0, 0.25, 0.5]
ADVANTAGES = [0.5, -0.5, -0.125, 0.125]


class Config(SimpleNamespace):
    """The fields of verl 0.9.1's ActorConfig that ppo_loss reads."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def make_config(**settings: Any) -> Config:
    fields = {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "use_kl_loss": False,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl",
        "entropy_coeff": 0.0,
        "policy_loss": {"loss_mode": "vanilla"},
        "global_batch_info": {},
        "rollout_correction": None,
    }
    return Config(**(fields | settings))


def stand_in_loss(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Compute verl's vanilla loss with token-mean, without verl."""
    total = torch.zeros(())
    end = 0
    for number in range(len(data)):
        prompt = data["prompts"].unbind()[number]
        response = data["responses"].unbind()[number]
        end += len(prompt) + len(response)
        new = model_output["log_probs"].values()[end - len(response) - 1 : end - 1]
        ratio = (new - data["old_log_probs"].unbind()[number]).exp()
        advantages = data["advantages"].unbind()[number]
        losses = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.28) * advantages)
        total = total + losses.sum()
    return total / data["batch_num_tokens"], {}


def real_loss() -> Any:
    return pytest.importorskip("verl.workers.utils.losses").ppo_loss


def jagged(rows: list[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def make_micro_batch(
    numbers: list[int], tokens: int
) -> tuple[TensorDict, dict[str, torch.Tensor]]:
    """Return a micro-batch of the actor, and the model's output for it: log-probs stand one place early."""
    generator = torch.Generator().manual_seed(numbers[0])
    responses = [RESPONSES[number] for number in numbers]
    old = [
        (-torch.rand(len(response), generator=generator) - 0.1).tolist()
        for response in responses
    ]
    output = []
    for number, values in zip(numbers, old, strict=True):
        moved = [value - 0.3 * (place % 2) for place, value in enumerate(values)]
        output.append([-1.0] * (len(PROMPTS[number]) - 1) + moved + [-9.0])
    columns = {
        "prompts": jagged([PROMPTS[number] for number in numbers], torch.int64),
        "responses": jagged(responses, torch.int64),
        "response_mask": jagged(
            [[1] * len(response) for response in responses], torch.int64
        ),
        "old_log_probs": jagged(old),
        "rollout_log_probs": jagged(old),
        "advantages": jagged(
            [[ADVANTAGES[number]] * len(RESPONSES[number]) for number in numbers]
        ),
        "token_level_scores": jagged(
            [[0.0] * (len(RESPONSES[number]) - 1) + [REWARDS[number]] for number in numbers]
        ),
    }
    data = TensorDict(columns, batch_size=[len(numbers)])
    data["uid"] = NonTensorStack(
        *[NonTensorData(str(PROMPTS[number])) for number in numbers]
    )
    for name, value in {
        "dp_size": 1,
        "batch_num_tokens": tokens,
        "global_batch_size": 4,
    }.items():
        data[name] = NonTensorData(value)
    return data, {"log_probs": jagged(output)}


def run_update(folder: Path, loss: Any) -> list[float]:
    """Run one update as verl's worker does: loss after loss, then the end of update_actor."""
    config = make_config()

    class ActorRolloutRefWorker:
        def update_actor(self, data: Any) -> list[float]:
            losses = []
            tokens = sum(map(len, RESPONSES))
            for numbers in ([0, 1], [2, 3]):
                micro_batch, output = make_micro_batch(numbers, tokens)
                value, _ = workers.ppo_loss(config, output, micro_batch)
                losses.append(float(value))
            return losses

    ActorRolloutRefWorker.update_actor.attrs_of_verl = "dispatch"  # type: ignore[attr-defined]
    workers = SimpleNamespace(ppo_loss=loss, ActorRolloutRefWorker=ActorRolloutRefWorker)
    record_steps(workers, folder, algorithm={"estimator": "dr_grpo"})
    assert workers.ActorRolloutRefWorker.update_actor.attrs_of_verl == "dispatch"  # type: ignore[attr-defined]
    return workers.ActorRolloutRefWorker().update_actor(None)


@pytest.mark.parametrize("source", ["stand-in", "verl"])
def test_a_bundle_holds_what_the_loss_read(source: str, tmp_path: Path) -> None:
    loss = stand_in_loss if source == "stand-in" else real_loss()
    losses = run_update(tmp_path, loss)
    bundle = read_bundle(tmp_path / "step-1")
    assert bundle.lengths.tolist() == [5, 4, 7, 5]
    assert bundle.row_column("rewards").tolist() == REWARDS
    assert bundle.row_column("group").tolist() == [0, 0, 1, 1]
    assert bundle.row_column("micro_batch").tolist() == [0, 0, 1, 1]
    trained = bundle.token_column("loss_mask").astype(bool)
    moved = (
        bundle.token_column("new_logprobs")[trained]
        - bundle.token_column("old_logprobs")[trained]
    )
    expected = [
        -0.3 * (place % 2) for response in RESPONSES for place in range(len(response))
    ]
    np.testing.assert_allclose(moved, expected, atol=1e-6)
    assert bundle.facts.loss == pytest.approx([sum(losses)])
    findings = {finding.name: finding for finding in check_step(bundle)}
    assert findings["loss.value"].verdict is Verdict.PASSED
    assert findings["advantages.estimator"].verdict is Verdict.PASSED
    assert "reference_logprobs" in bundle.missing


def test_the_stand_in_has_the_parameters_of_verl() -> None:
    assert list(inspect.signature(stand_in_loss).parameters) == list(
        inspect.signature(real_loss()).parameters
    )
