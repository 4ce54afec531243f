"""Messages of Tinker's SDK: token rows, prompts and settings from requests, and answers from results.

    Datum     model_input 5 7 9        target_tokens 7 9 2      weights 0 1 1
    row       input_ids   5 7 9 2      loss_mask   . x x x      weights . 0 1 1

JSON, but for `forward_backward`'s requests and the answers with arrays, which are protobuf
(`tinker_public.proto`).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as messages

from controller.primitives import SampledSequence
from workers.config.loss import SUM_LOSS_NAMES, SumLossConfig
from workers.config.roles import SamplingConfig
from workers.errors import BallastError

DTYPES = {
    messages.DTYPE_FLOAT32: np.float32,
    messages.DTYPE_INT64: np.int64,
    messages.DTYPE_INT32: np.int32,
}
COLUMNS = {
    "weights": "weights",
    "logprobs": "rollout_log_probs",
    "advantages": "advantages",
    "mask": "mask",
}
"""Inputs of a loss, and our names of their token columns."""
CLIPS = {"clip_low_threshold": "ratio_low", "clip_high_threshold": "ratio_high"}
LOSS_SETTINGS = {"ppo": CLIPS, "cispo": CLIPS, "gspo": CLIPS, "dro": {"beta": "beta"}}
STEP_SETTINGS = {
    "learning_rate": "learning_rate",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "epsilon",
}
STEP_SETTINGS |= {"weight_decay": "weight_decay"}
UNSUPPORTED = [
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
]
UNSUPPORTED += ["record_stability_info", "prompt_logprobs_last_n"]
SAMPLING = {"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}
MOST_STOPS = 256  # which the engine looks for after every token
LONGEST_TEXT = 1000  # characters of a name, a path or a stop
LARGEST = 2**53  # whole number that every JSON reader takes exactly
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class RefusedError(BallastError):
    """A request that the server does not take. The client shows the message."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """Content of an answer: a protobuf message, or JSON."""

    body: bytes
    protobuf: bool = False


Rows = list[dict[str, np.ndarray]]


def json_answer(**content: Any) -> Answer:
    return Answer(json.dumps(content).encode())


def failure(error: BaseException) -> Answer:
    """An error of a call that was accepted, which its future raises in the client."""
    ours = isinstance(error, (BallastError, ValueError))
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    return json_answer(error=text, category="user" if ours else "server")


def read_json(body: bytes) -> dict[str, Any]:
    try:
        # Of bytes, `loads` takes half characters.
        content = json.loads(body.decode() or "{}")
        if SURROGATE.search(body):  # half a character, which no file takes
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise RefusedError("body: not a JSON object in UTF-8. Use the `tinker` SDK.")
    return content


def read_message(body: bytes) -> Any:
    """Read a `ForwardBackwardRequest`."""
    try:
        return messages.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise RefusedError(
            "body: not a ForwardBackwardRequest. Use the `tinker` SDK of docs/serve.md."
        ) from None


def read_pass(request: Any, *, vocabulary: int, longest: int) -> tuple[Rows, SumLossConfig]:
    """Return rows as `OpenRun.batch` takes them, and the loss. longest: sequence that the model takes, in
    tokens.

    Raises RefusedError for what the loss cannot mean.
    """
    loss = _loss(request)
    if not request.data:
        raise RefusedError("data: empty. Pass at least one Datum.")
    rows = [_row(datum, loss.name, vocabulary, longest) for datum in request.data]
    names = {name for row in rows for name in row}
    whole_rows = []
    for row in rows:
        ones = np.ones(len(row["input_ids"]), np.float32)
        whole_rows.append({name: row.get(name, ones) for name in names})
    return whole_rows, loss


def _loss(request: Any) -> SumLossConfig:
    if request.loss_fn not in SUM_LOSS_NAMES:
        raise RefusedError(
            f"loss_fn={request.loss_fn}: not supported. Choose one of {', '.join(SUM_LOSS_NAMES)}."
        )
    allowed = LOSS_SETTINGS.get(request.loss_fn, {})
    settings = dict[str, float]()
    for name, value in request.loss_fn_config_v2.items():
        if name not in allowed or not value.HasField("number"):
            choices = ", ".join(allowed) or "none"
            raise RefusedError(
                f"loss_fn_config: {request.loss_fn} has no number {name!r}. It has {choices}."
            )
        settings[allowed[name]] = value.number
    return SumLossConfig(request.loss_fn, **settings)


def _row(datum: Any, loss: str, vocabulary: int, longest: int) -> dict[str, np.ndarray]:
    ids = _checked_ids(_tokens(datum.model_input), vocabulary, longest - 1)
    inputs = {
        name: _dense(name, tensor, len(ids))
        for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = inputs.pop("target_tokens", None)
    if targets is None or not np.array_equal(targets[:-1], ids[1:]):
        raise RefusedError(
            "target_tokens: not the tokens that follow model_input's. Shift model_input by one token."
        )
    needed = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    if loss == "cross_entropy":
        inputs.setdefault("weights", np.ones(len(ids), np.float32))
    if missing := [name for name in needed if name not in inputs]:
        raise RefusedError(f"loss_fn_inputs: {loss} needs {missing[0]!r}. Add it.")
    if unknown := sorted(inputs.keys() - {*needed, "mask"}):
        raise RefusedError(
            f"loss_fn_inputs: {loss} does not read {unknown[0]!r}. Remove it."
        )
    last = _checked_ids(targets[-1:], vocabulary, 1)
    learns = np.ones(len(ids), bool)
    # A mean over the response: sampled tokens have log-probs or advantages.
    if loss == "gspo":
        learns = inputs.get(
            "mask", (inputs["logprobs"] != 0) | (inputs["advantages"] != 0)
        ).astype(bool)
    row = {
        "input_ids": np.concatenate([ids, last]),
        "loss_mask": np.concatenate([[False], learns]),
    }
    padding = np.zeros(1, np.float32)
    return row | {
        COLUMNS[name]: np.concatenate([padding, values]) for name, values in inputs.items()
    }


def _tokens(chunks: Sequence[Any]) -> np.ndarray:
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in chunks):
        raise RefusedError("model_input: only text is supported. Remove images and audio.")
    parts = [_numbers(chunk.encoded_text.tokens, np.int32) for chunk in chunks]
    return np.concatenate([np.empty(0, np.int32), *parts])


def _numbers(data: bytes, dtype: Any) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise RefusedError(
            "tensor: its bytes are not a whole number of elements. Use the `tinker` SDK."
        )
    return np.frombuffer(data, dtype)


def _dense(name: str, tensor: Any, length: int) -> np.ndarray:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise RefusedError(
            f"{name}: sparse tensors are not supported. Pass one number a token."
        )
    if tensor.dtype not in DTYPES:
        raise RefusedError(f"{name}: its type is not supported. Pass float32 or int64.")
    values = _numbers(tensor.dense, DTYPES[tensor.dtype])
    if len(values) != length:
        raise RefusedError(
            f"{name}: it has {len(values)} numbers for {length} tokens of model_input. Pass one each."
        )
    if name != "target_tokens" and not np.isfinite(values).all():
        raise RefusedError(f"{name}: NaN or infinite. Pass finite numbers.")
    return values if name == "target_tokens" else values.astype(np.float32)


def _checked_ids(ids: np.ndarray, vocabulary: int, longest: int) -> np.ndarray:
    _check_count(len(ids), longest)
    _check_range("tokens", (int(ids.min()), int(ids.max())), vocabulary)
    return ids.astype(np.int32)


def _check_count(tokens: int, longest: int) -> None:
    if not 1 <= tokens <= longest:
        raise RefusedError(
            f"tokens: {tokens}, where the server takes 1 to {longest}. Shorten them."
        )


def pass_answer(log_probs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> Answer:
    """log_probs: float32, as long as each row. metrics: named as in the SDK, such as `loss:sum`."""
    output = messages.ForwardBackwardOutput(
        loss_fn_output_type="TorchLossReturn", metrics=metrics
    )
    values = [row[1:].astype(np.float32) for row in log_probs]
    field = output.loss_fn_outputs.add(num_datums=len(values)).fields["logprobs"]
    field.dtype = messages.DTYPE_FLOAT32
    field.data = b"".join(row.tobytes() for row in values)
    field.offsets = (
        np.cumsum([0] + [row.nbytes for row in values]).astype(np.int64).tobytes()
    )
    return Answer(output.SerializeToString(), protobuf=True)


def read_prompt(request: Mapping[str, Any], *, vocabulary: int, longest: int) -> list[int]:
    """Read the prompt of a sampling request. longest: prompt, in tokens."""
    chunks = mapping(request, "prompt").get("chunks", [])
    if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
        raise RefusedError(
            "prompt: its chunks are not a list of objects. Use the `tinker` SDK."
        )
    if any(
        "tokens" not in chunk or chunk.get("type", "encoded_text") != "encoded_text"
        for chunk in chunks
    ):
        raise RefusedError("prompt: only text is supported. Remove images and audio.")
    ids = list[int]()
    for chunk in chunks:
        ids += _whole_numbers("prompt: tokens", chunk["tokens"])
    _check_count(len(ids), longest)
    _check_range("tokens", ids, vocabulary)
    return ids


def read_sampling(
    request: Mapping[str, Any], usual: SamplingConfig, vocabulary: int
) -> SamplingConfig:
    """Read `sampling_params`. usual: its `max_new_tokens` is the default.

    Raises RefusedError for what engines would refuse: they answer only after retries, as if they had failed.
    """
    if names := [name for name in UNSUPPORTED if request.get(name)]:
        raise RefusedError(f"{names[0]}: not supported. Leave it out.")
    params = mapping(request, "sampling_params")
    if unknown := sorted(params.keys() - SAMPLING):
        raise RefusedError(
            f"sampling_params: {unknown[0]!r:.80} is not supported. Leave it out."
        )
    texts, ids = _stops(params.get("stop"), vocabulary)
    return SamplingConfig(
        temperature=number(params, "temperature", 1.0, 0, 2),
        top_p=number(params, "top_p", 1.0, 1e-9, 1),
        top_k=max(0, whole(params, "top_k", 0, -1, 2**31 - 1)),
        max_new_tokens=whole(params, "max_tokens", usual.max_new_tokens, 1, 2**31 - 1),
        stop=texts,
        stop_token_ids=ids,
    )


def read_seed(request: Mapping[str, Any]) -> int | None:
    """Read the seed of `sampling_params`."""
    params = mapping(request, "sampling_params")
    return (
        None if params.get("seed") is None else whole(params, "seed", 0, -LARGEST, LARGEST)
    )


def _stops(stop: Any, vocabulary: int) -> tuple[list[str], list[int]]:
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if len(stops) > MOST_STOPS:
        raise RefusedError(
            f"stop: {len(stops)} of them, where the server takes {MOST_STOPS}. Pass fewer."
        )
    if stops and all(isinstance(word, str) for word in stops):
        if not all(1 <= len(word) <= LONGEST_TEXT for word in stops):
            raise RefusedError(
                f"stop: a text is empty or above {LONGEST_TEXT} characters. Change it."
            )
        return list(stops), []
    ids = _whole_numbers("stop", stops)
    _check_range("stop", ids, vocabulary)
    return [], ids


def _whole_numbers(name: str, values: Any) -> list[int]:
    # True is an int too.
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise RefusedError(f"{name}: not a list of whole numbers. Use the `tinker` SDK.")
    return list(values)


def _check_range(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """An id outside the model would end a rank or an engine."""
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise RefusedError(
            f"{name}: an id is outside the model's vocabulary of {vocabulary}. Use its tokenizer."
        )


def read_step(request: Mapping[str, Any]) -> dict[str, Any]:
    """Read `adam_params` as arguments of `OpenRun.step`. A `grad_clip_norm` of 0 does not clip."""
    params = mapping(request, "adam_params")
    if unknown := sorted(params.keys() - STEP_SETTINGS.keys() - {"grad_clip_norm"}):
        raise RefusedError(
            f"adam_params: {unknown[0]!r:.80} is not supported. Leave it out."
        )
    if params.get("learning_rate") is None:
        raise RefusedError("learning_rate: missing. Pass it in adam_params.")
    settings = dict[str, Any]()
    for name, ours in STEP_SETTINGS.items():
        if params.get(name) is not None:
            settings[ours] = number(params, name, 0, 0, 1e9)
    if wrong := [name for name in ("beta1", "beta2") if settings.get(name, 0) >= 1]:
        raise RefusedError(f"{wrong[0]}={settings[wrong[0]]:g}: not below 1. Change it.")
    return settings | {
        "max_grad_norm": number(params, "grad_clip_norm", 0, 0, 1e30) or math.inf
    }


def number(
    fields: Mapping[str, Any], name: str, default: float, low: float, high: float
) -> float:
    """Read a number within bounds, which may be missing or null."""
    value = default if fields.get(name) is None else fields[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not low <= value <= high
    ):
        raise RefusedError(
            f"{name}={value!r:.40}: not a number from {low:g} to {high:g}. Change it."
        )
    return value


def whole(fields: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """Read a whole number within bounds, which may be missing or null."""
    value = default if fields.get(name) is None else fields[name]
    if type(value) is not int or not low <= value <= high:
        raise RefusedError(
            f"{name}={value!r:.40}: not a whole number from {low} to {high}. Change it."
        )
    return value


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """Read true or false, which may be missing or null."""
    value = fields.get(name)
    if not (value is None or isinstance(value, bool)):
        raise RefusedError(f"{name}={value!r:.40}: neither true nor false. Change it.")
    return bool(value)


def text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_TEXT:
        raise RefusedError(
            f"{name}={value!r:.40}: not a text of 1 to {LONGEST_TEXT} characters. Use the `tinker` SDK."
        )
    return value


def optional_text(fields: Mapping[str, Any], name: str) -> str:
    """Read a text that may be missing, null or empty."""
    return "" if fields.get(name) in (None, "") else text(fields, name)


def mapping(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise RefusedError(f"{name}: not an object. Use the `tinker` SDK.")
    return value


def sample_answer(
    sequences: Sequence[SampledSequence], prompt_log_probs: np.ndarray | None
) -> Answer:
    """prompt_log_probs: float32 [P - 1], after the first token, or None."""
    response = messages.SampleResponse()
    if prompt_log_probs is not None:
        response.prompt_logprobs = (
            np.append(np.nan, prompt_log_probs).astype(np.float32).tobytes()
        )
    for sequence in sequences:
        cut = sequence.finish_reason == "length"
        response.sequences.add(
            stop_reason=messages.STOP_REASON_LENGTH if cut else messages.STOP_REASON_STOP,
            tokens=sequence.ids.astype(np.int32).tobytes(),
            logprobs=sequence.log_probs.astype(np.float32).tobytes(),
        )
    return Answer(response.SerializeToString(), protobuf=True)
