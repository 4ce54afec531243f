"""TokenBlock, TokenColumn and RemoteBatch: a batch whose tokens stay where they were made.

    rollout actor --TokenBlock--> object store <--(reference, row)-- RemoteBatch on the driver
                                       |
    policy worker <---- gather() ------+         (zero-copy on one node, only the rows it needs)

T tokens of all rows of a block, B rows.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenBlock:
    """Ragged per-token columns of B rows, made by one actor in one call, as NumPy buffers.

    offsets: int64 [B + 1], row i is `values[offsets[i]:offsets[i + 1]]` of every column.
    columns: name -> array [T]; `input_ids` int32, `loss_mask` bool, log-probs float32.
    """

    offsets: np.ndarray
    columns: dict[str, np.ndarray]

    @classmethod
    def from_rows(cls, rows: list[dict[str, np.ndarray]]) -> "TokenBlock":
        """Concatenate rows that have the same columns, each of one length within a row."""
        names = list(rows[0]) if rows else []
        lengths = [len(row[names[0]]) for row in rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(offsets, {name: np.concatenate([row[name] for row in rows]) for name in names})

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Row `index` as views."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        return {name: values[start:stop] for name, values in self.columns.items()}
