"""A whole run on GPUs: engines asleep and awake, weights by ipc (colocated) and nccl (apart), log-probs of
both sides.

It needs everything: vLLM and Ray, one GPU for `colocated`, two for `apart`. On a CPU the same run goes
through shared memory.
"""

import pytest
import torch

from tests.end_to_end.conftest import settings, workspace  # noqa: F401

pytest.importorskip("ray", reason="Ray is not installed: the loop is not run")
pytest.importorskip("vllm", reason="vLLM is not installed: no weights are sent")

MOST_MISMATCH = 1e-3
"""Mean difference of log-probs, in nats and in float32 on both sides: 1e-6 on a CPU, while one optimiser step
at the learning rate below moves those of this model by tenths (0.66 with a supervised loss).
"""


def on_gpus(placement: str, gpus: int) -> object:
    reason = f"{gpus} GPUs are needed, {torch.cuda.device_count()} are here"
    marks = (
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < gpus, reason=reason),
    )
    return pytest.param(placement, marks=marks)


def overrides_of(placement: str) -> list[str]:
    """One rank and one engine; two mini-batches, so that the policy's own log-probs are computed and
    compared.
    """
    common = [
        f"run.name={placement}",
        "policy.data_parallel=1",
        "batch.mini_batches=2",
        "model.dtype=float32",
        "policy.optimizer.learning_rate=3e-3",
    ]
    if placement == "shared_memory":
        return [*common, "resources.device=cpu"]  # also on a machine with a GPU
    # Colocated, every step puts the engine to sleep (its memory is the policy's) and wakes it with new
    # weights.
    return [
        *common,
        "resources.device=cuda",
        f"rollout.placement={placement}",
        "rollout.gpu_memory_utilization=0.3",
    ]


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("shared_memory", marks=pytest.mark.slow),
        on_gpus("colocated", 1),
        on_gpus("apart", 2),
    ],
)
def test_engines_sample_with_the_weights_of_the_last_update(
    ray_session,
    settings,  # noqa: F811
    placement,
):
    from tests.end_to_end.test_whole_loop import run_loop

    cpu_only = "rollout.cpu_kv_cache_gib="
    shared = [
        value
        for value in settings
        if placement == "shared_memory" or not value.startswith(cpu_only)
    ]
    run = run_loop([*shared, *overrides_of(placement)])
    assert [step["rollout/weight_version"] for step in run.outcome.steps] == [1, 2, 3]
    assert [step["rollout/oldest_weight_version"] for step in run.outcome.steps] == [
        0,
        1,
        2,
    ]
    mismatches = [step["policy/rollout_mismatch_mean"] for step in run.outcome.steps]
    assert max(mismatches) < MOST_MISMATCH
