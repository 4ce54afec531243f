"""Compile the loops of every kind of plan, for new installations and images: `python -m
balancing.precompile`.

The machine code is cached next to the sources. Without it, the first plan of a kind takes 10 to 25 seconds
longer.
"""

from typing import Any

import numpy as np

from balancing.pipelines.pipeline import Pipeline
from balancing.plan import plan_batch
from balancing.search.packing import pack
from balancing.search.partition import partition

SEQUENCES, RANKS, GROUP, LONGEST = 128, 4, 8, 200


def main() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(20, LONGEST, SEQUENCES)
    shared: dict[str, Any] = {
        "prefix_groups": np.arange(SEQUENCES) // GROUP,
        "prefix_lengths": np.full(SEQUENCES, 16),
    }
    for options in ({}, shared):
        for pipeline in (None, Pipeline(2)):
            for max_tokens in (LONGEST, 5 * LONGEST):
                plan_batch(lengths, ranks=RANKS, max_tokens=max_tokens, pipeline=pipeline, **options)
    pack(lengths, LONGEST, layout="padded")
    for count in (48, 64, SEQUENCES):
        pack(generator.integers(990, 1011, count), 3000)  # only some triples fit together
    partition(generator.lognormal(size=32), 4, equal_size=True)


if __name__ == "__main__":
    main()
