"""Copies between host and device: what arrives is what was sent, and the host waits for none within a
micro-batch.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from workers.model.copies import to_device

TINY = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


def test_tensors_of_all_types_arrive_as_they_were_sent():
    sent = [
        torch.tensor([True, False, True]),
        torch.arange(6).view(2, 3),
        torch.empty(0, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(5, dtype=torch.int16)[::2],
        torch.rand(3, 2).T,
    ]
    for tensor, found in zip(sent, to_device(torch.device("cpu"), *sent), strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def waits_and_copies() -> dict[str, tuple[float, float]]:
    """Of one more micro-batch on the simulated GPU, by pass. In a process that ends."""
    from tests.benchmarks.simulated_work import counting
    from workers.config.roles import LossConfig, ModelConfig, OptimizerConfig
    from workers.model.engine import TrainingEngine
    from workers.model.losses import Denominators, make_policy_loss
    from workers.model.memory import memory_trace
    from workers.model.memory.fake_gpu import DEVICE, fake_gpus

    loss, found = make_policy_loss(LossConfig(kl_coefficient=0.1)), {}
    with fake_gpus(2), memory_trace._folder(TINY) as path:
        model = ModelConfig(path=path, dtype="bfloat16", gradient_checkpointing="full")
        engine = TrainingEngine(
            model, optimizer=OptimizerConfig(), total_steps=1, device=f"{DEVICE}:0"
        )
        sequences, cuts = memory_trace.full_micro_batches(
            256, 64, engine.vocabulary, 3, padded=False
        )

        def update(count: int) -> None:
            engine.forward_backward(
                sequences, cuts[:count], loss, Denominators.of(sequences)
            )

        def log_probs(count: int) -> None:
            engine.log_probs_and_entropies(
                sequences.slice(0, cuts[count - 1][1]), cuts[:count]
            )

        for run in (update, log_probs):
            works = []
            for count in (1, 2, 3):
                with counting() as work:
                    run(count)
                works.append(work)
            more = works[2].plus(works[1], -1)
            found[run.__name__] = more.waits, more.copies
    return found


def test_the_host_does_not_wait_for_the_device_within_a_micro_batch():
    """It did at each of 15 copies. Now a copy brings the row, one its segments, and one the
    loss's columns.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(waits_and_copies).result() == {
            "update": (0, 3),
            "log_probs": (0, 3),
        }
