import numpy as np
import psutil
import ray

from tests.benchmarks.dispatch import Consumer, Producer, dispatch_by_reference, plan_of, produce


def test_a_step_of_2048_sequences_of_4096_tokens_does_not_grow_the_driver(ray_session) -> None:
    producers, consumers = ([actor.remote() for _ in range(2)] for actor in (Producer, Consumer))
    small = np.full(8, 16)
    warm = produce(small, producers)
    assert dispatch_by_reference(warm, plan_of(warm, 2), consumers) == small.sum()  # imports and pools are warm
    process = psutil.Process()
    before = process.memory_info().rss

    lengths = np.full(2048, 4096)
    batch = produce(lengths, producers)
    assert dispatch_by_reference(batch, plan_of(batch, 2), consumers) == lengths.sum()
    assert process.memory_info().rss - before < 50e6
    for actor in (*producers, *consumers):
        ray.kill(actor)
