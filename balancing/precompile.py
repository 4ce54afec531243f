"""Compile the loops of every kind of plan, for new installations and images: `python -m
balancing.precompile`.

The machine code is cached next to the sources. Without it, the first plan takes half a minute longer. A run
without it starts `python -m balancing.precompile plans`, for the plans that nearly all runs make.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from balancing.basics.compiled import COMPILED
from balancing.pipelines.pipeline import Pipeline
from balancing.plan import plan_batch
from balancing.search.exchange import exchange_until_even
from balancing.search.packing import pack
from balancing.search.partition import partition

SEQUENCES, RANKS, GROUP, LONGEST = 128, 4, 8, 200


def is_compiled() -> bool:
    """Return whether an earlier process has left the code of plans on disk, or nothing can be kept there."""
    loop: Any = exchange_until_even  # of every plan, and the longest to compile
    folder = loop.stats.cache_path if COMPILED else ""
    return not folder or any(Path(folder).glob(f"*.{loop.__name__}-*.nbi"))


def random_lengths() -> tuple[np.random.Generator, np.ndarray, dict[str, Any]]:
    """Return the generator, lengths, and groups of them with a common prefix."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(20, LONGEST, SEQUENCES)
    groups = np.arange(SEQUENCES) // GROUP
    return (
        generator,
        lengths,
        {"prefix_groups": groups, "prefix_lengths": np.full(SEQUENCES, 16)},
    )


def compile_plans(pipeline: Pipeline | None = None) -> None:
    _, lengths, shared = random_lengths()
    for options in (shared, {}):
        for max_tokens in (LONGEST, 5 * LONGEST):
            plan_batch(
                lengths, ranks=RANKS, max_tokens=max_tokens, pipeline=pipeline, **options
            )


def main(arguments: Sequence[str] = ()) -> None:
    compile_plans()
    if "plans" in arguments:
        return
    compile_plans(Pipeline(2))
    generator, lengths, _ = random_lengths()
    pack(lengths, LONGEST, layout="padded")
    for count in (48, 64, SEQUENCES):
        pack(generator.integers(990, 1011, count), 3000)  # only some triples fit together
    partition(generator.lognormal(size=32), 4, equal_size=True)


if __name__ == "__main__":
    main(sys.argv[1:])
