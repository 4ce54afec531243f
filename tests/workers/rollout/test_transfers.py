"""Our senders into vLLM's real models on a CPU: by file, and by vLLM's engines of `nccl` and `ipc`
(`stand_ins`).
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.benchmarks.families.measuring import Outcome
from tests.benchmarks.families.published import published
from tests.workers.model.ranks import RankPool
from tests.workers.model.tiny import FAMILIES, save_tiny_model
from tests.workers.rollout import stand_ins
from tests.workers.rollout.engines import NO_ADAPTERS
from tests.workers.rollout.stand_ins import (
    TIMEOUT_S,
    BareReplica,
    Communicator,
    LocalReplica,
    without_gpus,
)
from workers.batch.dataproto import DataProto
from workers.config.roles import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
)
from workers.engine.placement import BACKENDS
from workers.engine.requests import SampleRequest
from workers.engine.weights import weight_transfer
from workers.engine.weights.weight_transfer import pack_weights
from workers.errors import RolloutError
from workers.model.engine import TrainingEngine

LOG_PROB_TOLERANCE = 3e-5  # float32, two implementations
BUFFER_BYTES = 100_000  # several a model
CHANGE = 0.01  # deviation of what is added to weights, whose own is 0.2
BY_DEFAULT = [
    ("qwen2", "apart"),
    ("qwen2", "colocated"),
    ("olmoe", "shared_memory"),
    ("gemma2", "colocated"),
    ("deepseek_v3", "shared_memory"),
]
# vLLM does not tie the first two; a tied Gemma 3 without training only repeats itself.
UNTIED = ("olmoe", "gpt_oss", "gemma3", "deepseek_v3")
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
"""What vLLM's kernels for CPUs take."""
LATENT_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The only latents that they take."""


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    """Ranks for vLLM alone: it keeps state of its own in its process."""
    pool = RankPool(2)
    yield pool
    pool.stop()


def save_model(folder: Any, family: str, **overrides: object) -> str:
    """A model that vLLM takes on a CPU, with tied embeddings unless its family is one of UNTIED."""
    sizes = SIZES | ({"head_dim": 32} if "head_dim" in FAMILIES[family][1] else {})
    sizes |= {
        name: 64 for name in FAMILIES[family][1] if name.endswith("intermediate_size")
    }
    sizes |= LATENT_SIZES if "kv_lora_rank" in FAMILIES[family][1] else {}
    sizes |= {"tie_word_embeddings": family not in UNTIED}
    return save_tiny_model(folder, family, **(sizes | overrides))


def build_policy(
    path: str, lora: LoraConfig = NO_ADAPTERS, dtype: str = "float32"
) -> TrainingEngine:
    config = ModelConfig(path=path, dtype=dtype, lora=lora)
    return TrainingEngine(config, optimizer=OptimizerConfig(), total_steps=1, device="cpu")


def change_all(policy: TrainingEngine) -> None:
    """Every trained parameter becomes another one."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter.to_local().add_(torch.randn(parameter.shape) * CHANGE)


def start_replica(
    path: str, placement: str, dtype: str = "auto", lora: LoraConfig = NO_ADAPTERS
) -> LocalReplica:
    """A real vLLM engine, on a CPU, with the weight-transfer engine of a GPU's placement."""
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.model_executor.models import registry

    from workers.rollout.engine_actor import VllmEngineActor

    destroy_model_parallel()  # that of the model before
    of_gpu = weight_transfer.ENGINE_OF_BACKEND[BACKENDS[placement]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(weight_transfer.ENGINE_OF_BACKEND, "shared_memory", of_gpu)
        for name in [name for name in sys.modules if name.startswith("llvmlite")]:
            # Numba's, which the policy loads and vLLM stumbles over when it starts.
            patch.delitem(sys.modules, name)
        # On a machine that has not seen the family, vLLM starts a process that imports all of it, only to
        # look at it.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        config = RolloutConfig(threads=1, cpu_kv_cache_gib=0.125)
        model = ModelConfig(path=path, dtype=dtype, lora=lora)
        worker = VllmEngineActor(
            model, config, index=0, placement="shared_memory", max_model_tokens=128, seed=0
        )
        replica = LocalReplica(worker)
        replica.start()
    return replica


@contextmanager
def sending(
    policy: TrainingEngine,
    engines: list[Any],
    placement: str,
    communicator: Communicator,
    keep: Callable[[str], bool] = lambda name: True,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Callable[[int], Any]]:
    """As `PolicyWorker.connect_engines`, or the file of a CPU run. keep: of the weights' names, those that
    are sent. dtype: of the file.
    """
    if placement == "shared_memory":
        weights = partial(policy.named_weights, dtype, 0)
        yield lambda version: engines[0].update_weights(pack_weights(weights()), version)
        return
    from workers.engine.weights import gpu_transfer

    keeper = None if placement == "colocated" else 0
    metadata = policy.weights_metadata(torch.float32)
    with without_gpus(communicator, dist.get_rank()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_transfer, "call_replicas", stand_ins.call_local)
        patch.setattr(gpu_transfer, "tell_replicas", stand_ins.tell_local)
        sender = gpu_transfer.WeightSender(
            placement,
            engines,
            lambda: (
                (name, weight)
                for name, weight in policy.named_weights(torch.float32, keeper)
                if keep(name)
            ),
            {name: weight for name, weight in metadata.items() if keep(name)},
            rank=dist.get_rank(),
            tensor_parallel=1,
            address="127.0.0.1",
            port=1,
            buffer_bytes=BUFFER_BYTES,
        )
        yield sender.send
        sender.close()


def largest_difference(policy: TrainingEngine, replica: LocalReplica) -> float:
    """Of the log-probs of a few samples between the engine that drew them and the policy."""
    return float(differences(policy, replica).max())


def differences(policy: TrainingEngine, replica: LocalReplica) -> torch.Tensor:
    """Those of every sampled token, as `largest_difference`."""
    rng = np.random.default_rng(3)
    prompts = [
        rng.integers(2, SIZES["vocab_size"], size).astype(np.int32) for size in (3, 17, 40)
    ]
    requests = [
        SampleRequest(f"p{index}", 0, ids, seed=index) for index, ids in enumerate(prompts)
    ]
    rows = replica.rows(requests, SamplingConfig(max_new_tokens=24))
    assert len(rows) == len(prompts)
    sequences = DataProto.from_list(
        [
            {name: torch.from_numpy(values.copy()) for name, values in row.items()}
            for row in rows
        ]
    )
    log_probs, _ = policy.log_probs(sequences, [(0, len(rows))])
    return (log_probs - sequences.tokens["rollout_log_probs"]).abs()[
        sequences.tokens["loss_mask"]
    ]


def transfer(path: str, placement: str, lora: int) -> dict[str, Any]:
    """Two updates, each with other weights: differences of the log-probs before and after, and what
    travelled.
    """
    policy, replica, communicator = (
        build_policy(path, LoraConfig(rank=lora)),
        start_replica(path, placement),
        Communicator(1),
    )
    before = differences(policy, replica)
    found = {"before": float(before.max()), "before_mean": float(before.mean())}
    with sending(policy, [replica], placement, communicator) as send:
        for version in (1, 2):
            change_all(policy)
            found["changed"] = largest_difference(policy, replica)
            send(version)
        sent = differences(policy, replica)
        found |= {
            "sent": float(sent.max()),
            "sent_mean": float(sent.mean()),
            "version": replica.weight_version(),
        }
    replica.stop()
    return found | {"joined": communicator.joined, "chunks": len(communicator.sent)}


def check_transfer(
    processes: RankPool,
    folder: Any,
    family: str,
    placement: str,
    lora: int = 0,
    **sizes: Any,
) -> None:
    path = save_model(folder, family, **sizes)
    (found,) = processes.run(transfer, 1, path, placement, lora)
    assert found["before"] < LOG_PROB_TOLERANCE
    assert found["changed"] > 0.05, "the comparison cannot tell new weights from old ones"
    assert found["sent"] < LOG_PROB_TOLERANCE
    assert found["version"] == 2
    if placement == "apart":
        assert sorted(found["joined"]) == [0, 1]
        assert found["chunks"] > 4


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("family", "placement"), BY_DEFAULT)
def test_what_the_policy_learned_is_what_the_engine_samples_with(
    processes, tmp_path, family, placement
):
    check_transfer(processes, tmp_path / "model", family, placement)


PUBLISHED = [
    "ERNIE 4.5 MoE",
    "GLM 4.7 Flash",
    "Gemma 3 4B",
    "Gemma 4",
    "LFM2.5",
    "MiniMax M2",
    "gpt-oss",
]


def sample_published(name: str, folder: Path) -> Outcome:
    """Return what an engine makes of a tiny model with the fields of a published config.json."""
    from tests.benchmarks.families import whole  # which imports this module

    problem = whole.build_published(published()[name], folder)
    return (
        Outcome("not built", reason=problem)
        if problem
        else whole.sample_published(folder, "float32")
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_engine_takes_the_updates_of_a_model_as_it_is_published(
    processes, tmp_path, name
):
    """Only here has vLLM's model the layers and names of a published configuration."""
    (outcome,) = processes.run(sample_published, 1, name, tmp_path / "model")
    assert outcome.verdict == "exact", outcome


EXPERTS = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss"]
OTHERS = [
    *itertools.product(
        ["qwen3", "llama", "mistral", "gemma", "gemma3"], ["apart", "colocated"]
    ),
    *itertools.product(EXPERTS, ["apart", "colocated", "shared_memory"]),
]


def send_to_nobody(path: str, placement: str) -> None:
    policy = build_policy(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_ins, "call_local", lambda *_, **__: set())
        with sending(policy, [None], placement, Communicator(0)) as send:
            for version in (1, 2):
                change_all(policy)
                send(version)


@pytest.mark.parametrize("placement", ["apart", "colocated"])
def test_streams_wait_for_weights_that_another_stream_makes(processes, tmp_path, placement):
    """A layer's experts are gathered at once and read on two streams in turn. `without_gpus`
    looks for races.
    """
    processes.run(send_to_nobody, 1, save_model(tmp_path / "model", "qwen3_moe"), placement)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "placement"), [case for case in OTHERS if case not in BY_DEFAULT]
)
def test_every_family_takes_what_it_is_sent(processes, tmp_path, family, placement):
    check_transfer(processes, tmp_path / "model", family, placement)


@pytest.mark.slow
def test_adapters_arrive_merged(processes, tmp_path):
    check_transfer(processes, tmp_path / "model", "qwen3_moe", "apart", lora=4)


def send_adapters(path: str, parameters: str) -> dict[str, Any]:
    """Differences of log-probs after an update that sends A and B alone, and before."""
    lora = LoraConfig(rank=4, sync="adapters", target_parameters=parameters)
    policy = build_policy(path, lora)
    replica = start_replica(path, "shared_memory", lora=lora)
    change_all(policy)
    before = largest_difference(policy, replica)
    replica.update_adapters(policy.adapter_files(), 1)
    after = largest_difference(policy, replica)
    replica.stop()
    return {"changed": before, "sent": after}


BOTH = "experts.gate_up_proj,experts.down_proj"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parameters"), [("qwen2_moe", ""), ("qwen3_moe", BOTH), ("gpt_oss", BOTH)]
)
def test_adapters_of_a_mixture_of_experts_arrive_as_they_are(
    processes, tmp_path, family, parameters
):
    """vLLM's kernel for experts in an engine with adapters is of GPUs alone."""
    path = save_model(tmp_path / "model", family)
    (difference,) = processes.run(send_adapters, 1, path, parameters)
    assert difference["changed"] > 0.05, "the comparison cannot tell new adapters from none"
    # More products than with merged weights.
    assert difference["sent"] < 2 * LOG_PROB_TOLERANCE


@pytest.mark.slow
def test_an_output_layer_of_its_own_arrives(processes, tmp_path):
    check_transfer(
        processes, tmp_path / "model", "mixtral", "colocated", tie_word_embeddings=False
    )


def refused(path: str, placement: str, left_out: str) -> tuple[str, float]:
    """What an update without some weights raises, and the difference of log-probs after a complete one."""
    policy, replica = build_policy(path), start_replica(path, placement)
    left = Communicator(1), lambda name: not name.endswith(left_out)
    with (
        pytest.raises(RolloutError) as raised,
        sending(policy, [replica], placement, *left) as send,
    ):
        send(1)
    difference = 0.0
    if placement == "apart":  # it lives
        change_all(policy)
        with sending(policy, [replica], placement, Communicator(1)) as send:
            send(2)
        difference = largest_difference(policy, replica)
    replica.stop()
    return str(raised.value), difference


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("family", "placement", "left_out", "named"),
    [
        (
            "qwen2",
            "apart",
            "layers.1.self_attn.k_proj.weight",
            "a part of model.layers.1.self_attn.qkv_proj.weight",
        ),
        ("qwen2", "colocated", "lm_head.weight", "lm_head.weight"),
        (
            "mixtral",
            "apart",
            "layers.0.block_sparse_moe.experts.2.w3.weight",
            "routed_experts.w13_weight",
        ),
        ("gpt_oss", "colocated", "layers.1.self_attn.sinks", "model.layers.1.attn.sinks"),
    ],
)
def test_an_update_that_leaves_a_weight_out_is_refused_by_name(
    processes, tmp_path, family, placement, left_out, named
):
    path = save_model(tmp_path / "model", family)
    ((message, difference),) = processes.run(refused, 1, path, placement, left_out)
    assert "rollout replica 0 could not" in message
    assert named in message
    assert difference < LOG_PROB_TOLERANCE


def send_from_ranks(path: str, placement: str) -> dict[str, Any]:
    """Of two policy ranks and two replicas: what these were told and have, and on other ranks nothing."""
    policy, communicator = build_policy(path), Communicator(2)
    replicas = [BareReplica(BACKENDS[placement]) for _ in range(2)]
    with sending(policy, replicas, placement, communicator) as send:
        send(7)
    return {
        "heard": [replica.heard for replica in replicas],
        "loaded": [replica.loaded for replica in replicas],
        "joined": sorted(communicator.joined),
    }


@pytest.mark.parametrize("placement", ["apart", "colocated"])
def test_several_ranks_send_what_is_in_the_files_to_every_replica(
    processes, tmp_path, placement
):
    path = save_model(tmp_path / "model", "mixtral", tie_word_embeddings=False)
    first, second = processes.run(send_from_ranks, 2, path, placement)
    files = {
        name: weight.float()
        for name, weight in load_file(f"{path}/model.safetensors").items()
    }
    for heard, loaded in zip(first["heard"], first["loaded"], strict=True):
        assert (heard[0], heard[-1]) == ("begin", 7)
        assert loaded.keys() == files.keys()
        assert all(torch.equal(weight, files[name]) for name, weight in loaded.items())
        if placement == "colocated":
            assert len(heard) > 4, "one buffer was enough"
            assert all(handles == ["GPU-0", "GPU-1"] for handles in heard[1:-1])
    assert first["joined"] == ([0, 1, 2] if placement == "apart" else [])
    assert second == {"heard": [[], []], "loaded": [{}, {}], "joined": []}


def send_to_a_dying_replica(path: str, placement: str) -> dict[str, Any]:
    """Of two replicas the second dies. Returns who was lost, and what the first does in the next group."""
    policy = build_policy(path)
    communicator = Communicator(2)
    backend = BACKENDS[placement]
    survivor, dying = BareReplica(backend), BareReplica(backend, dies_at=2)
    with sending(policy, [survivor, dying], placement, communicator) as send:
        lost = send(1)
    versions = [word for word in survivor.heard if isinstance(word, int)]
    left = survivor.ends.get(timeout=TIMEOUT_S / 2) if placement == "apart" else None
    change_all(policy)
    with sending(policy, [survivor], placement, Communicator(1)) as send:
        send(2)
    current = dict(policy.named_weights(torch.float32))
    return {
        "lost": lost,
        "versions": versions,
        "left": str(left),
        "aborted": communicator.aborted,
        "differences": [
            name
            for name, weight in current.items()
            if not torch.equal(weight, survivor.loaded[name])
        ],
        "version": survivor.heard[-1],
    }


@pytest.mark.parametrize("placement", ["apart", "colocated"])
def test_an_engine_that_dies_in_a_transfer_ends_it_and_the_others_join_the_next(
    processes, tmp_path, placement
):
    path = save_model(tmp_path / "model", "qwen2")
    (result,) = processes.run(send_to_a_dying_replica, 1, path, placement)
    assert result["lost"] == [1]
    assert result["differences"] == [] and result["version"] == 2
    # Each reads memory by itself.
    assert result["versions"] == ([] if placement == "apart" else [1])
    if placement == "apart":
        # Nothing but its own abort ends its wait, and it does not wait for its time-out.
        assert result["left"] == "another member of the transfer group was lost."
        assert result["aborted"] == {0, 1}


def test_a_communicator_without_a_member_hangs_until_its_time_out() -> None:
    with pytest.raises(TimeoutError, match="member 0 waited"):
        Communicator(1, timeout_s=0.1).end(0)


def test_an_abort_releases_the_member_that_aborts_and_no_other() -> None:
    communicator = Communicator(2, timeout_s=1)
    with ThreadPoolExecutor(3) as pool:
        root, receiver, missing = pool.map(communicator.end, range(3))
        del missing
        waits = pool.submit(receiver.broadcast, torch.zeros(2), 0)
        sends = pool.submit(root.broadcast, torch.ones(2), 0)
        root.destroy()
        assert sends.result() is None
        with pytest.raises(TimeoutError, match="member 1 waited"):
            waits.result()
