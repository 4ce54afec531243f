import numpy as np
import psutil
import ray

from balancing import plan_batch
from tests.benchmarks.dispatch import Consumer, dispatch_by_reference, produce


def test_a_step_of_2048_sequences_of_4096_tokens_does_not_grow_the_driver(ray_session) -> None:
    consumers = [Consumer.remote() for _ in range(4)]
    small = np.full(8, 16)
    assert dispatch_by_reference(produce(small), consumers) == small.sum()  # imports and pools are warm
    plan_batch(np.full(2048, 4096), ranks=4, mini_batches=[np.arange(2048)], max_tokens=8192)
    process = psutil.Process()
    before = process.memory_info().rss

    lengths = np.full(2048, 4096)
    batch = produce(lengths)
    assert dispatch_by_reference(batch, consumers) == lengths.sum()
    assert process.memory_info().rss - before < 50e6
    for consumer in consumers:
        ray.kill(consumer)
