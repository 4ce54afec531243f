"""What handles buy: dispatch of one global batch to 4 workers, by reference against by way of the driver.

    python -m tests.benchmarks.dispatch [--sequences 2048] [--repeats 5]                 or, with the others, make bench

Both ways start from the same blocks in the object store of 4 producers and end with every worker holding its tokens.
"""

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter

import numpy as np
import psutil
import ray

from balancing import Plan, plan_batch
from workers.dataproto import DataProto
from workers.remote_batch import RemoteBatch, TokenBlock, TokenColumn

COLUMNS = {"input_ids": np.int32, "loss_mask": np.bool_, "rollout_log_probs": np.float32}
WORKERS = 4


@ray.remote(num_cpus=0)
class Producer:
    """Stands where a rollout actor stands: makes a block of random tokens."""

    def block(self, lengths: np.ndarray, seed: int) -> TokenBlock:
        rng = np.random.default_rng(seed)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return TokenBlock(offsets, {name: rng.integers(0, 2, offsets[-1]).astype(t) for name, t in COLUMNS.items()})


@ray.remote(num_cpus=0)
class Consumer:
    """Stands where a policy rank stands: ends with its rows as tensors; answers how many tokens it holds."""

    def by_reference(self, share: RemoteBatch) -> int:
        return self._count(share.gather())

    def by_value(self, share: DataProto) -> int:
        return self._count(share)

    def _count(self, proto: DataProto) -> int:
        column = proto.batch["input_ids"]
        return (column.values() if column.is_nested else column).numel()


def produce(lengths: np.ndarray, producers: list) -> RemoteBatch:
    """A batch whose rows lie in one block for each producer."""
    parts = np.array_split(np.arange(len(lengths)), len(producers))
    refs = tuple(p.block.remote(lengths[part], i) for i, (p, part) in enumerate(zip(producers, parts, strict=True)))
    ray.wait(list(refs), num_returns=len(refs), fetch_local=False)
    block = np.concatenate([np.full(len(part), i, np.int32) for i, part in enumerate(parts)])
    row = np.concatenate([np.arange(len(part), dtype=np.int32) for part in parts])
    return RemoteBatch({"length": lengths}, {name: TokenColumn(name, refs, block, row) for name in COLUMNS})


def plan_of(batch: RemoteBatch, ranks: int) -> Plan:
    """One mini-batch of everything over the workers; made before dispatch, and not part of it."""
    lengths = batch["length"]
    return plan_batch(lengths, ranks=ranks, max_tokens=int(2 * lengths.max()))


def dispatch_by_reference(batch: RemoteBatch, plan: Plan, consumers: list) -> int:
    """Send handles under a plan, let the workers fetch."""
    shares = [batch.select(plan.for_rank(rank).rows) for rank in range(plan.ranks)]
    return sum(ray.get([c.by_reference.remote(ray.put(s)) for c, s in zip(consumers, shares, strict=True)]))


def dispatch_by_driver(batch: RemoteBatch, consumers: list, width: int) -> int:
    """Gather on the driver, pad to `width`, cut into equal parts, send: what single controllers commonly do."""
    padded = {
        name: column.to_padded_tensor(0, (len(batch), width))
        for name, column in batch.gather().batch.items()
        if column.is_nested
    }
    shares = DataProto.from_dict(padded).chunk(WORKERS)
    return sum(ray.get([c.by_value.remote(ray.put(s)) for c, s in zip(consumers, shares, strict=True)]))


def resident_growth(action: Callable[[], object]) -> float:
    """MB by which this process's resident memory, less shared memory, exceeds its start at the end of `action`."""
    process = psutil.Process()

    def private() -> int:
        info = process.memory_info()
        return info.rss - info.shared

    before = private()
    action()
    return (private() - before) / 1e6


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Median wall time of `repeats` calls after one that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=4 * 2**30)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(600), 0.9, options.sequences), 16, 4096).astype(np.int64)
    consumers = [Consumer.remote() for _ in range(WORKERS)]
    batch = produce(lengths, [Producer.remote() for _ in range(WORKERS)])
    plan = plan_of(batch, WORKERS)
    ways = {
        "references (Ballast)": lambda: dispatch_by_reference(batch, plan, consumers),
        "driver gathers, pads to 4096, sends": lambda: dispatch_by_driver(batch, consumers, 4096),
    }
    seconds = {name: median_seconds(way, options.repeats) for name, way in ways.items()}
    growth = {name: resident_growth(way) for name, way in ways.items()}
    fastest = seconds["references (Ballast)"]
    print(f"{options.sequences} sequences, {lengths.sum():,} tokens, {len(COLUMNS)} columns, {WORKERS} workers")
    print("| way | seconds (median) | ratio | driver grows by MB |\n| --- | --- | --- | --- |")
    for name, median in seconds.items():
        print(f"| {name} | {median:.3f} | {median / fastest:.1f}x | {growth[name]:.0f} |")
    ray.shutdown()


if __name__ == "__main__":
    main()
