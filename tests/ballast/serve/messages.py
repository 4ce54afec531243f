"""Requests as the SDK sends them."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

TYPES = {np.dtype(np.float32): pb.DTYPE_FLOAT32, np.dtype(np.int64): pb.DTYPE_INT64}


def datum(ids: Sequence[int], **inputs: Any) -> pb.Datum:
    """A datum that predicts each of `ids` but the first. inputs: of the loss, as long as its predictions."""
    found = pb.Datum()
    found.model_input.add().encoded_text.tokens = np.array(ids[:-1], np.int32).tobytes()
    arrays = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    for name, values in ({"target_tokens": np.array(ids[1:], np.int64)} | arrays).items():
        tensor = found.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), TYPES[values.dtype]
        tensor.shape.append(len(values))
    return found


def passes(
    data: Sequence[pb.Datum],
    loss: str = "cross_entropy",
    *,
    model_id: str = "",
    seq_id: int = 0,
    forward: bool = False,
) -> pb.ForwardBackwardRequest:
    found = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward
    )
    found.data.extend(data)
    return found


def body(**content: Any) -> bytes:
    return json.dumps(content).encode()


def adam(**changed: float) -> dict[str, float]:
    usual = {
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    return usual | changed
