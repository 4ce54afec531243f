"""The states of an update of weights, which an engine may leave in the middle and begin anew."""

from enum import Enum


class Update(Enum):
    """How far an engine is with new weights."""

    NONE = "no update goes on"
    BEGUN = "vLLM's layers wait for weights"
    RECEIVED = "weights have arrived, and were not put in place"
