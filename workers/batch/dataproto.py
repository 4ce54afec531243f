"""DataProto: one form of a batch, from the engine's samples in the object store to the loss.

    rows --from_rows--> object store --RemoteBatch.gather--> rank --slice--> micro-batch --pack--> model
         (NumPy)                                        (torch, all tokens in one row)

    tokens    name -> [T, ...]          input_ids, loss_mask, log-probs. Row i is offsets[i] to offsets[i + 1]
    columns   name -> [B, ...]          numbers per sequence: reward, advantages
    objects   name -> object array [B]  anything else per sequence: uid
    meta      name -> anything          facts about the whole batch: step

B sequences, T tokens of all sequences. The object store holds NumPy arrays, which readers map without a copy.
Workers convert them to torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.errors import DataError

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

ROUTED_EXPERTS = "routed_experts"
"""Token column [T, L, k] of the experts that the engine chose in each layer. Only routers that replay them
read it.
"""
CONTEXT_DEGREE = "context_degree"
"""Column [B] of the ranks that share each sequence. Without it, all ranks of a context-parallel group do."""
Array = Any  # np.ndarray in the object store, torch.Tensor in a worker


@dataclass(frozen=True)
class DataProto:
    """B sequences. Methods return a new batch, whose arrays may be views.

    lengths: int64 [B], on the CPU. A batch for the engine has the token columns `input_ids`, int64, and
    `loss_mask`, bool, True where the policy produced the token. Raises DataError if a column has the wrong
    size.
    """

    lengths: Array
    tokens: dict[str, Array]
    columns: dict[str, Array] = field(default_factory=dict)
    objects: dict[str, np.ndarray] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_sizes(self.tokens, int(self.lengths.sum()), "tokens")
        _check_sizes({**self.columns, **self.objects}, len(self.lengths), "sequences")

    # --- construction

    @classmethod
    def from_list(
        cls, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any] | None = None
    ) -> "DataProto":
        """Concatenate rows of lists or CPU tensors, as tensors. Raises DataError if the rows'
        columns differ.
        """
        import torch

        if not rows:
            raise DataError("a batch needs at least one sequence")

        def as_arrays(row: Mapping[str, Any]) -> dict[str, np.ndarray]:
            return {name: torch.as_tensor(values).numpy() for name, values in row.items()}

        batch = cls.from_rows([as_arrays(row) for row in rows])
        return cls(batch.lengths, batch.tokens, as_arrays(columns or {})).as_tensors()

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, np.ndarray]]) -> "DataProto":
        """Concatenate rows of NumPy token columns. Raises DataError if the rows' columns differ."""
        names = list(rows[0]) if rows else []
        for index, row in enumerate(rows):
            if set(row) != set(names):
                raise DataError(
                    f"sequence {index} has columns {sorted(row)}, the first has {sorted(names)}"
                )
            sizes = {name: len(values) for name, values in row.items()}
            if wrong := wrong_length(sizes):
                raise DataError(
                    f"column {wrong[0]!r} has {sizes[wrong[0]]} tokens in sequence {index}, but "
                    f"{wrong[1]!r} has {sizes[wrong[1]]}."
                )
        lengths = np.array([len(row[names[0]]) for row in rows], dtype=np.int64)
        tokens = {}
        for name in names:
            tokens[name] = np.concatenate([row[name] for row in rows])
        return cls(lengths, tokens)

    def as_tensors(self) -> "DataProto":
        """Convert numeric columns to tensors. Others become objects."""
        import torch

        numbers = {
            name: values
            for name, values in self.columns.items()
            if values.dtype.kind in "biuf"
        }
        object_columns = {
            name: values.astype(object)
            for name, values in self.columns.items()
            if name not in numbers
        }
        return DataProto(
            torch.from_numpy(self.lengths),
            _cast_known(
                {name: torch.from_numpy(values) for name, values in self.tokens.items()}
            ),
            {name: torch.from_numpy(np.array(values)) for name, values in numbers.items()},
            self.objects | object_columns,
            self.meta,
        )

    @classmethod
    def from_tensordict(cls, tensor_dict: "TensorDict") -> "DataProto":
        """Reverse `to_tensordict`. Raises DataError unless jagged columns exist and agree on their rows'
        lengths.
        """
        from tensordict import NonTensorData, NonTensorStack

        jagged: dict[str, Any] = {}
        columns: dict[str, Any] = {}
        objects = {}
        meta = {}
        for name, value in tensor_dict.items():
            if isinstance(value, NonTensorStack):
                objects[name] = object_column([item.data for item in value.unbind(0)])
            elif isinstance(value, NonTensorData):
                meta[name] = value.data
            else:
                (jagged if value.is_nested else columns)[name] = value
        if not jagged:
            raise DataError(
                f"a batch needs a jagged column of tokens, it has {sorted(columns)}"
            )
        lengths = {
            name: value.offsets().diff().cpu().long() for name, value in jagged.items()
        }
        first = next(iter(lengths))
        for name, row_lengths in lengths.items():
            if not row_lengths.equal(lengths[first]):
                row = int((row_lengths != lengths[first]).nonzero()[0])
                sizes = int(row_lengths[row]), int(lengths[first][row])
                raise DataError(
                    f"column {name!r} has {sizes[0]} tokens in row {row}, but {first!r} has {sizes[1]}."
                )
        return cls(
            lengths[first],
            {name: value.values() for name, value in jagged.items()},
            columns,
            objects,
            meta,
        )

    def to_tensordict(self) -> "TensorDict":
        """Convert to jagged columns over one offsets tensor. Raises DataError if a meta key is a column's
        name, too.
        """
        import torch
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        offsets = torch.from_numpy(self.offsets)
        entries: dict[str, Any] = {
            name: torch.nested.nested_tensor_from_jagged(values, offsets)
            for name, values in self.tokens.items()
        }
        entries |= self.columns
        entries |= {
            name: NonTensorStack(*map(NonTensorData, values))
            for name, values in self.objects.items()
        }
        twice = sorted(entries.keys() & self.meta.keys())
        if twice:
            raise DataError(
                f"{twice[0]!r} names a column and a key of the meta data. Rename one."
            )
        return TensorDict(
            entries | {name: NonTensorData(value) for name, value in self.meta.items()},
            [len(self)],
        )

    # --- sizes

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> np.ndarray:
        """First token of each sequence, and T: int64 [B + 1], NumPy."""
        return np.concatenate([[0], np.cumsum(np.asarray(self.lengths))]).astype(np.int64)

    @cached_property
    def owner(self) -> Array:
        """Sequence of each token, int64 tensor [T]."""
        import torch

        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @cached_property
    def loss_token_counts(self) -> Array:
        """Tokens with `loss_mask` per sequence, int64 tensor [B]."""
        return self.owner[self.tokens["loss_mask"].cpu()].bincount(minlength=len(self))

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_loss_tokens(self) -> int:
        return int(self.tokens["loss_mask"].sum())

    # --- rows

    def row(self, index: int) -> dict[str, Array]:
        start = self.offsets[index]
        stop = self.offsets[index + 1]
        return {name: values[start:stop] for name, values in self.tokens.items()}

    def slice(self, start: int, stop: int) -> "DataProto":
        first = self.offsets[start]
        last = self.offsets[stop]
        return self._take(slice(start, stop), slice(first, last))

    def select_idxs(self, indices: Sequence[int] | np.ndarray) -> "DataProto":
        """Copy the sequences with these numbers, in this order."""
        rows = np.asarray(indices, dtype=np.int64)
        tokens = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return self._take(rows, np.concatenate([np.empty(0, np.int64), *tokens]))

    def _take(self, rows: Any, tokens: Any) -> "DataProto":
        return DataProto(
            self.lengths[rows],
            {name: values[tokens] for name, values in self.tokens.items()},
            {name: values[rows] for name, values in self.columns.items()},
            {name: values[rows] for name, values in self.objects.items()},
            self.meta,
        )

    def to(self, device: "torch.device | str") -> "DataProto":
        """Move tensors to `device`. `lengths` stay on the CPU."""
        return replace(
            self,
            tokens={name: values.to(device) for name, values in self.tokens.items()},
            columns={name: values.to(device) for name, values in self.columns.items()},
        )


def object_column(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def record_column(values: Sequence[Any]) -> np.ndarray:
    """Build a column of record values: float64 [B] if all are numbers, else objects [B]."""
    if all(isinstance(value, Real) for value in values):
        return np.array(values, dtype=np.float64)
    return object_column(values)


def wrong_length(sizes: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the column that differs in length from most others, and one of these. None if all are equal.

    Of two columns, the first is right: rows begin with the tokens themselves.
    """
    counts = Counter(sizes.values())
    if len(counts) < 2:
        return None
    usual = counts.most_common(1)[0][0]
    wrong = next(name for name, size in sizes.items() if size != usual)
    return wrong, next(name for name, size in sizes.items() if size == usual)


def _check_sizes(columns: Mapping[str, Array], size: int, unit: str) -> None:
    for name, values in columns.items():
        if len(values) != size:
            raise DataError(f"column {name!r} holds {len(values)} values for {size} {unit}")


def _cast_known(tokens: dict[str, Array]) -> dict[str, Array]:
    import torch  # the engine refuses fractions, which stay here

    types = {"input_ids": torch.int64, "loss_mask": torch.bool}
    integer_names = {
        name for name in types if name in tokens and not tokens[name].is_floating_point()
    }
    return {
        name: values.to(types[name]) if name in integer_names else values
        for name, values in tokens.items()
    }
