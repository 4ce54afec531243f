"""Run a user's curriculum in a separate process each epoch, so that it cannot block or end the driver."""

from typing import Any

import numpy as np

from controller.data.records import Record
from workers.errors import DataError, quoted
from workers.user_code.functions import call


def isolated_order(packed: bytes, timeout_s: float, records: list[Record], epoch: int) -> np.ndarray:
    """Return record numbers by data.curriculum, `packed` by `find_function`: int64 [prompts of the epoch].

    Raises ConfigError if it fails, DataError for other values.
    """
    order = call(packed, records, epoch, key=f"data.curriculum for epoch {epoch}", timeout_s=timeout_s)
    return checked_order(order, len(records), epoch)


def checked_order(order: Any, records: int, epoch: int) -> np.ndarray:
    """Return `order` as int64 [prompts]. Raises DataError if it is empty or has numbers outside `records`."""
    numbers = np.asarray(order) if isinstance(order, (list, tuple, range, np.ndarray)) else np.empty(0)
    if numbers.ndim != 1 or len(numbers) == 0 or not np.issubdtype(numbers.dtype, np.integer):
        raise DataError(f"data.curriculum must return record numbers for epoch {epoch}, it returned {quoted(order)}.")
    outside = numbers[(numbers < 0) | (numbers >= records)]
    if len(outside):
        raise DataError(f"data.curriculum returned record {outside[0]} for epoch {epoch}, of {records} records.")
    return numbers.astype(np.int64)
