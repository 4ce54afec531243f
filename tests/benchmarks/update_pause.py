"""What an update of weights costs the requests that an engine has in flight.

    python -m tests.benchmarks.update_pause [--rounds 5]        its table is part of docs/step-benchmark.md

    the same requests, seeds and weights:   |---- sample -------------------------------------| without updates
                                            |- sample -||- sample -||- sample -||- sample ----| with some
                                                      held      held      held
    lost by an update = (seconds with - seconds without) / updates: held, and keys and values made again

The updates bring the weights that the engine has, so that all runs sample the same tokens. The model is
random, of the quickstart's size, and ends a response one time in 64.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM

from tests.benchmarks.command import read_options
from workers.config.roles import ModelConfig, RolloutConfig, SamplingConfig
from workers.engine.requests import SampleRequest, SampleResult, sample_seed
from workers.engine.weights.weight_transfer import pack_weights
from workers.rollout.engine_actor import VllmEngineActor

LONGEST, PROMPT_TOKENS, IN_FLIGHT = 256, 26, (32, 256)
UPDATES = 3
KEPT = ("recompute", "keep")
HEADER = """## Cost of an update for requests in flight

Written by `python -m tests.benchmarks.update_pause` (part of `tests.benchmarks.step`): one engine on {cores} cores
with a random model of 3M parameters. Prompts of {prompt} tokens are sent at once. Responses have 64 tokens on average
and {longest} at most. {updates} updates, the last one half way, send the weights that the engine has already. `held`:
seconds for which an engine holds its requests. `lost`: extra seconds of the whole, per update. `tokens not sampled`:
tokens that the engine would have sampled in this time. Values are medians of {rounds} rounds in turns.

| requests | `rollout.kv_cache_after_update` | seconds without updates | held, s | lost, s | tokens not sampled |
| ---: | --- | ---: | ---: | ---: | ---: |
"""


@dataclass(frozen=True)
class Run:
    """seconds, tokens: of all responses. held: seconds of each update."""

    seconds: float
    tokens: int
    held: tuple[float, ...]


def requests(count: int) -> list[SampleRequest]:
    """One sample each of `count` prompts that nothing shares."""
    rng = np.random.default_rng(count)
    prompts = rng.integers(3, 64, (count, PROMPT_TOKENS)).astype(np.int32)
    return [
        SampleRequest(str(i), 0, ids, sample_seed(0, 0, str(i), 0))
        for i, ids in enumerate(prompts)
    ]


async def sample(worker: VllmEngineActor, count: int) -> int:
    """Sample all; returns the tokens of the responses."""
    tokens = 0
    async for part in worker.generate(
        requests(count), SamplingConfig(max_new_tokens=LONGEST)
    ):
        results: Sequence[SampleResult] = part if isinstance(part, list) else ()
        tokens += sum(result.response_tokens for result in results)
    return tokens


async def measured(
    worker: VllmEngineActor, count: int, payload: np.ndarray | None, every_s: float = 0.0
) -> Run:
    """One run, with updates while requests are in flight if there is a payload, so many seconds after each
    other.
    """
    await worker.take_weight_loads()
    start = time.perf_counter()
    sampling = asyncio.create_task(sample(worker, count))
    for _ in range(UPDATES if payload is not None else 0):
        await asyncio.sleep(every_s)
        if sampling.done():
            raise SystemExit("the responses ended before the last update; make them longer")
        await worker.update_weights(payload, 1)
    tokens = await sampling
    return Run(
        time.perf_counter() - start,
        tokens,
        tuple(load.seconds for load in await worker.take_weight_loads()),
    )


async def in_turns(
    worker: VllmEngineActor, payload: np.ndarray, rounds: int
) -> dict[int, list[tuple[Run, Run]]]:
    """By requests: (without, with updates), round by round."""
    await worker.start()
    found: dict[int, list[tuple[Run, Run]]] = {count: [] for count in IN_FLIGHT}
    try:
        for turn in range(rounds + 1):  # the first one is not counted
            for count in IN_FLIGHT:
                without = await measured(worker, count, None)
                pair = (
                    without,
                    await measured(worker, count, payload, without.seconds / (2 * UPDATES)),
                )
                found[count] += [pair] if turn else []
    finally:
        await worker.stop()
    return found


def row(count: int, kept: str, pairs: Sequence[tuple[Run, Run]]) -> str:
    """A line of the table."""
    without = statistics.median(one.seconds for one, _ in pairs)
    held = statistics.median(seconds for _, other in pairs for seconds in other.held)
    lost = statistics.median(
        (other.seconds - one.seconds) / len(other.held) for one, other in pairs
    )
    speed = statistics.median(one.tokens / one.seconds for one, _ in pairs)
    return f"| {count} | {kept} | {without:.2f} | {held:.3f} | {lost:.3f} | {max(0.0, lost) * speed:,.0f} |\n"


def table(rounds: int, cores: int) -> str:
    """Measure, and write the section of the page."""
    facts = {"prompt": PROMPT_TOKENS, "longest": LONGEST, "updates": UPDATES}
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # In a process of its own: an engine in a thread does not start where Numba has been imported.
        code = "import pathlib; from tests.benchmarks import asynchronous as a; "
        make = f"{code}a.make_model(pathlib.Path({temporary!r}))"
        subprocess.run([sys.executable, "-c", make], check=True)
        payload = pack_weights(
            AutoModelForCausalLM.from_pretrained(folder).state_dict().items()
        )
        for kept in KEPT:
            settings = RolloutConfig(max_staleness=1, kv_cache_after_update=kept)
            worker = VllmEngineActor(
                ModelConfig(path=str(folder)),
                settings,
                index=0,
                placement="shared_memory",
                max_model_tokens=PROMPT_TOKENS + LONGEST,
                seed=0,
            )
            found = asyncio.run(in_turns(worker, payload, rounds))
            lines += [row(count, kept, pairs) for count, pairs in found.items()]
    return HEADER.format(cores=cores, rounds=rounds, **facts) + "".join(lines)


def main() -> None:
    """Print the section."""
    arguments = read_options(__doc__, rounds=5)
    print(table(arguments.rounds, len(os.sched_getaffinity(0))))


if __name__ == "__main__":
    main()
