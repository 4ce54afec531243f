"""Send the changes of an update: positions and new values, in words of two bytes.

    policy rank 0: its file of weights --compared with the new ones--> WeightDelta, or the file if smaller
    driver:        references to [whole file, delta, delta, ...]
    engine:        its own file <--written-- those after its version; vLLM then loads the file as a whole one

Rank 0 and every engine keep the file in host memory: the model's bytes in the engines' dtype. An engine that
starts late or missed a version begins with the whole file. Words are compared, not numbers: NaN and signs of
zeros travel too. vLLM's own sparse patches are not used: they cannot write weights that a kernel has packed
or quantized.
"""

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workers.batch.metrics import Metric, Metrics
from workers.engine.weights.weight_transfer import pack_weights, private_file
from workers.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

DENSE = 0.2  # share of changed words above which the whole file is sent
CHECK_EVERY = 10  # updates between checksums of the whole file
BLOCK_BITS = 16  # a position is a block of 65,536 words and an offset in it
PIECE_BYTES = 2**26


def checksum(file: np.ndarray) -> int:
    """Return a CRC-32 over the CRC-32 of the file's pieces, computed by threads."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pieces = pool.map(
            zlib.crc32, np.split(file, range(PIECE_BYTES, len(file), PIECE_BYTES))
        )
        return zlib.crc32(b"".join(piece.to_bytes(4) for piece in pieces))


@dataclass(frozen=True)
class WeightDelta:
    """The words of a file that an update changed, in the file's order.

    counts: uint32 [blocks], of changed words. offsets, values: uint16 [changed]. checksum: of the new file,
    or None.
    """

    counts: np.ndarray
    offsets: np.ndarray
    values: np.ndarray
    checksum: int | None

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.offsets.nbytes + self.values.nbytes

    def write_into(self, file: np.ndarray) -> None:
        """Write into uint8 [bytes]. Raises RolloutError if the result is not the sender's file."""
        blocks = np.arange(len(self.counts)) << BLOCK_BITS
        file.view(np.uint16)[np.repeat(blocks, self.counts) + self.offsets] = self.values
        if self.checksum not in (None, checksum(file)):
            raise RolloutError(
                "rollout.weight_sync=delta: an engine's weights differ from the policy's. Set "
                "rollout.weight_sync=full."
            )


class DeltaPacker:
    """The sender's file, and what of it the engines lack."""

    def __init__(self) -> None:
        self._file = np.empty(0, np.uint8)
        self._updates = self._sent_bytes = 0  # since the last whole file

    def pack(
        self, weights: "Iterable[tuple[str, Tensor]]", check: bool = False
    ) -> tuple["Payload", Metrics]:
        """Return the weights for engines that have those of the last call, valid until the next one, and
        metrics.

        The file is whole at first, if it is smaller than the deltas since the last whole one, and if more
        than `DENSE` of the words changed. check: whether a delta has a checksum, as every `CHECK_EVERY`th
        has.
        """
        if not len(self._file):
            self._file = pack_weights(weights).copy()
            return self._pack(None, 1.0)
        counts, changes, share = self._compare(weights)
        if share > DENSE:
            return self._pack(None, share)
        self._updates += 1
        check = check or self._updates % CHECK_EVERY == 0
        parts = [changes[begin] for begin in sorted(changes)]
        nothing = [np.empty(0, np.uint16)]
        offsets = np.concatenate([part[0] for part in parts] or nothing)
        values = np.concatenate([part[1] for part in parts] or nothing)
        delta = WeightDelta(
            counts, offsets, values, checksum(self._file) if check else None
        )
        self._sent_bytes += delta.nbytes
        return self._pack(delta if self._sent_bytes <= len(self._file) else None, share)

    def _pack(self, delta: WeightDelta | None, share: float) -> tuple["Payload", Metrics]:
        payload = self._file if delta is None else delta
        if delta is None:
            self._updates = self._sent_bytes = 0
        values = {
            "weights_changed": share,
            "weights_mib": payload.nbytes / 2**20,
            "weights_whole": float(delta is None),
        }
        return payload, {name: Metric.max(value) for name, value in values.items()}

    def _compare(
        self, weights: "Iterable[tuple[str, Tensor]]"
    ) -> tuple[np.ndarray, dict[int, tuple[np.ndarray, np.ndarray]], float]:
        """Write the weights into the file.

        Returns the changed words by block, offsets and values by the tensor's place unless they are dense,
        and the share of changed words.
        """
        import torch

        words = torch.from_numpy(self._file).view(torch.int16)
        places = self._places()
        counts = np.zeros((len(words) >> BLOCK_BITS) + 1, np.uint32)
        changes: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        total = 0
        for name, tensor in weights:
            begin, end = places[name]
            old = words[begin:end]
            new = tensor.detach().flatten().view(torch.int16)
            # Where the weights are, so that few words cross the bus.
            at = (old.to(new.device) != new).nonzero().squeeze(1)
            values = new[at].cpu()
            at = at.cpu()
            old[at] = values
            total += len(at)
            if total <= DENSE * len(words):
                positions = at.numpy() + begin
                block_counts = np.bincount(
                    (positions >> BLOCK_BITS) - (begin >> BLOCK_BITS)
                )
                counts[begin >> BLOCK_BITS :][: len(block_counts)] += block_counts.astype(
                    np.uint32
                )
                changes[begin] = positions.astype(np.uint16), values.numpy().view(np.uint16)
        return counts, changes, total / len(words)

    def _places(self) -> dict[str, tuple[int, int]]:
        """Return the words of each tensor, from the file's header."""
        header = int.from_bytes(self._file[:8].tobytes(), "little")
        described = json.loads(self._file[8 : 8 + header].tobytes())
        begin = 8 + header
        return {
            name: (
                (begin + facts["data_offsets"][0]) // 2,
                (begin + facts["data_offsets"][1]) // 2,
            )
            for name, facts in described.items()
        }


Payload = np.ndarray | WeightDelta
"""A whole file of weights, uint8 [bytes], or its changed words."""


class WeightFile:
    """An engine's weights as a file in memory, into which deltas are written. version: of the weights, at
    first -1.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self.version = -1
        self.path = ""

    def take(self, payload: Payload, version: int) -> None:
        """Raises RolloutError if the checksum is wrong."""
        if isinstance(payload, WeightDelta):
            payload.write_into(np.memmap(self.path, np.uint8, "r+"))
        else:
            self._opened.close()
            self.path = self._opened.enter_context(private_file(payload))
        self.version = version
