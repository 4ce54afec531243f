"""Branches: the rows of a sample behind its first, described for the driver, which never reads a token."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from workers.batch.placed_images import PlacedImage, keys
from workers.engine.prefix_hashes import prefix_hashes
from workers.engine.requests import Branch


def branches_of(
    rows: Sequence[Mapping[str, np.ndarray]],
    prompt_tokens: int,
    images: Sequence[tuple[PlacedImage, ...]] = (),
) -> tuple[Branch, ...]:
    """Describe the rows to train on behind the first of `Episode.rows`. prompt_tokens: of the sample. images:
    by row.

    A row that has little in common with the sample's prompt, such as a sub-agent's, has a prompt of its own.
    """
    images = images or [()] * len(rows)
    prompts = [keys(rows[0]["input_ids"], images[0])[:prompt_tokens]]
    branches = []
    for row, placed in zip(rows[1:], images[1:], strict=True):
        ids = keys(row["input_ids"], placed)
        shared = next(
            (
                len(prompt)
                for prompt in prompts
                if np.array_equal(prompt, ids[: len(prompt)])
            ),
            0,
        )
        if not shared:
            both = min(len(ids), prompt_tokens)
            start = int(np.argmax(row["loss_mask"]))
            shared = int(np.argmin(np.append(ids[:both] == prompts[0][:both], False)))
            if shared < start // 2:
                shared = start
                prompts.append(ids[:start])
        trained = int(row["loss_mask"].sum())
        branches.append(
            Branch(
                len(ids),
                trained,
                shared,
                hash_of(ids[:shared]),
                prefix_hashes(ids, shared),
                placed,
            )
        )
    return tuple(branches)


def hash_of(ids: np.ndarray) -> int:
    """Hash of ids, or of `workers.batch.placed_images.keys`, int64, the same in every process."""
    return int.from_bytes(
        hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), signed=True
    )
