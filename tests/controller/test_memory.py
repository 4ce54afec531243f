"""The driver moves plans, not tokens: its memory does not grow with them."""

import numpy as np
import psutil
import ray

from balancing import Plan, plan_batch
from workers.batch.dataproto import DataProto
from workers.batch.remote_batch import RemoteBatch

COLUMNS = {"input_ids": np.int32, "loss_mask": np.bool_, "rollout_log_probs": np.float32}


@ray.remote(num_cpus=0)
class Producer:
    """In place of an engine's actor: makes a block of zeros."""

    def block(self, lengths: np.ndarray) -> DataProto:
        return DataProto(
            lengths,
            {name: np.zeros(lengths.sum(), dtype) for name, dtype in COLUMNS.items()},
        )


@ray.remote(num_cpus=0)
class Consumer:
    """In place of a policy rank: fetches its rows and answers how many tokens it holds."""

    def tokens(self, share: RemoteBatch) -> int:
        return share.gather().num_tokens


def produce(lengths: np.ndarray, producers: list) -> RemoteBatch:
    """A batch whose rows lie in one block for each producer."""
    parts = np.array_split(np.arange(len(lengths)), len(producers))
    refs = tuple(
        producer.block.remote(lengths[part])
        for producer, part in zip(producers, parts, strict=True)
    )
    ray.wait(list(refs), num_returns=len(refs), fetch_local=False)
    blocks = (
        RemoteBatch.of_block(ref, {"length": lengths[part]}, list(COLUMNS))
        for ref, part in zip(refs, parts, strict=True)
    )
    return RemoteBatch.concat(list(blocks))


def dispatch(batch: RemoteBatch, consumers: list) -> int:
    """Send handles under a plan and let the ranks fetch; returns the tokens that they hold together."""
    plan: Plan = plan_batch(
        batch["length"], ranks=len(consumers), max_tokens=int(2 * batch["length"].max())
    )
    shares = [batch.select(plan.for_rank(rank).rows) for rank in range(plan.ranks)]
    return sum(
        ray.get(
            [
                c.tokens.remote(ray.put(share))
                for c, share in zip(consumers, shares, strict=True)
            ]
        )
    )


def test_a_step_of_2048_sequences_of_4096_tokens_does_not_grow_the_driver(
    ray_session,
) -> None:
    producers, consumers = (
        [actor.remote() for _ in range(2)] for actor in (Producer, Consumer)
    )
    small, lengths = np.full(8, 16), np.full(2048, 4096)
    # Imports and pools are warm.
    assert dispatch(produce(small, producers), consumers) == small.sum()
    process = psutil.Process()
    before = process.memory_info().rss
    assert dispatch(produce(lengths, producers), consumers) == lengths.sum()
    assert process.memory_info().rss - before < 50e6
    for actor in (*producers, *consumers):
        ray.kill(actor)
