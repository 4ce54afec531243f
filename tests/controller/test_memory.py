import numpy as np
import psutil
import ray

from tests.benchmarks.dispatch import Consumer, dispatch_by_reference, plan_of, produce


def test_a_step_of_2048_sequences_of_4096_tokens_does_not_grow_the_driver(ray_session) -> None:
    consumers = [Consumer.remote() for _ in range(4)]
    small = np.full(8, 16)
    warm = produce(small)
    assert dispatch_by_reference(warm, plan_of(warm), consumers) == small.sum()  # imports and pools are warm
    process = psutil.Process()
    before = process.memory_info().rss

    lengths = np.full(2048, 4096)
    batch = produce(lengths)
    assert dispatch_by_reference(batch, plan_of(batch), consumers) == lengths.sum()
    assert process.memory_info().rss - before < 50e6
    for consumer in consumers:
        ray.kill(consumer)
