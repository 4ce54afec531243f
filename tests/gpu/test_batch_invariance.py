"""`model.batch_invariant` on a card: log-probs of engine and trainer are equal bit for bit, before and after
updates, so that all ratios of a first update are exactly 1.

It has never run on a card. On a CPU the same runs go without the setting, and the two differ by rounding.
"""

import pytest

from tests.gpu.conftest import NEEDS_CUDA
from tests.gpu.prove.workloads import make_qwen3

pytest.importorskip("ray", reason="Ray is not installed: the loop is not run")
pytest.importorskip("vllm", reason="vLLM is not installed: nothing samples")

IN_BFLOAT16 = 0.1
"""Mean nats between engine and trainer on a CPU, whose roundings differ."""
COMMON = (
    "run.name=invariant",
    "run.steps=3",
    "batch.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.sampling.max_new_tokens=48",
    "rollout.sampling.temperature=0.7",
    "data.max_prompt_tokens=128",
    "policy.data_parallel=1",
    "rollout.replicas=1",
    "policy.max_tokens_per_micro_batch=1024",
    "batch.mini_batches=2",
    "policy.optimizer.learning_rate=1e-3",
    "resources.dashboard=false",
    "model.dtype=bfloat16",
)
ON_A_CARD = (
    "resources.device=cuda",
    "rollout.placement=colocated",
    "rollout.gpu_memory_utilization=0.3",
    "model.batch_invariant=true",
)
ON_A_CPU = ("resources.device=cpu", "rollout.cpu_kv_cache_gib=0.25")


def run_steps(folder, device, *overrides):
    from tests.end_to_end.test_whole_loop import run_loop

    make_qwen3(folder, "tiny", device)
    files = [
        f"run.dir={folder / 'runs'}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"reward.function={folder / 'reward.py'}:reward",
    ]
    return run_loop([*COMMON, *files, *overrides]).outcome.steps


@pytest.mark.parametrize(
    "eager", [pytest.param(eager, marks=NEEDS_CUDA) for eager in ("false", "true")]
)
def test_ratios_are_exactly_one_on_a_card(ray_session, tmp_path, eager):
    """In each of three steps, with weights of the last update, decoded in CUDA graphs and eagerly."""
    steps = run_steps(tmp_path, "cuda", *ON_A_CARD, f"rollout.enforce_eager={eager}")
    assert [step["rollout/weight_version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["policy/rollout_mismatch_max"] == 0.0


@pytest.mark.slow
def test_the_same_run_on_a_cpu_differs_by_rounding(ray_session, tmp_path):
    steps = run_steps(tmp_path, "cpu", *ON_A_CPU)
    assert [step["rollout/weight_version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert 0.0 < step["policy/rollout_mismatch_mean"] < IN_BFLOAT16
