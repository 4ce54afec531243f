"""Messages of Tinker's SDK: rows, settings and prompts read from them, and answers that the SDK reads."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import response_conv
from tinker.proto import tinker_public_pb2 as pb

from ballast.serve import wire
from ballast.serve.wire import RefusedError
from controller.primitives import SampledSequence
from tests.ballast.serve.messages import adam, datum, passes
from tests.refusals import refused
from workers.config.loss import SumLossConfig
from workers.config.roles import SamplingConfig

LIMITS = {"vocabulary": 32, "longest": 16}
IDS = st.lists(st.integers(0, 31), min_size=2, max_size=16)


def read(message: pb.ForwardBackwardRequest) -> tuple[wire.Rows, SumLossConfig]:
    return wire.read_pass(wire.read_message(message.SerializeToString()), **LIMITS)


@given(st.lists(st.tuples(IDS, st.booleans()), min_size=1, max_size=4))
def test_a_row_is_the_input_and_its_last_target(data: list[tuple[list[int], bool]]) -> None:
    weights = [np.arange(len(ids) - 1, dtype=np.float32) - 1 for ids, _ in data]
    given_ = [
        datum(ids, **({"weights": w} if has else {}))
        for (ids, has), w in zip(data, weights, strict=True)
    ]
    rows, loss = read(passes(given_))
    assert loss == SumLossConfig("cross_entropy")
    for row, (ids, has), weight in zip(rows, data, weights, strict=True):
        np.testing.assert_array_equal(row["input_ids"], ids)
        np.testing.assert_array_equal(row["loss_mask"], np.arange(len(ids)) > 0)
        np.testing.assert_array_equal(
            row["weights"][1:], weight if has else np.ones(len(ids) - 1)
        )
        assert {len(column) for column in row.values()} == {len(ids)}


def test_a_datum_of_several_chunks_is_one_row() -> None:
    one = datum([1, 2, 3, 4, 5])
    del one.model_input[:]
    for part in ([1, 2], [3, 4]):
        one.model_input.add().encoded_text.tokens = np.array(part, np.int32).tobytes()
    ((row,), _) = read(passes([one]))
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5]


def test_losses_of_policies_have_their_columns_and_settings() -> None:
    columns = {"logprobs": [0, -1, -2], "advantages": [0, 1, 1]}
    message = passes(
        [datum([5, 6, 7, 8], **columns), datum([5, 6, 7, 8], **columns, mask=[0, 0, 1])],
        "ppo",
    )
    message.loss_fn_config_v2["clip_high_threshold"].number = 1.28
    rows, loss = read(message)
    assert loss == SumLossConfig("ppo", ratio_high=1.28)
    assert rows[0]["rollout_log_probs"].tolist() == [0, 0, -1, -2]
    assert [row["mask"][1:].tolist() for row in rows] == [[1, 1, 1], [0, 0, 1]]
    rows, _ = read(passes([datum([5, 6, 7, 8], **columns)], "gspo"))
    assert rows[0]["loss_mask"].tolist() == [False, False, True, True]


def without(name: str) -> pb.Datum:
    found = datum([1, 2, 3])
    del found.loss_fn_inputs[name]
    return found


def with_image() -> pb.Datum:
    found = datum([1, 2, 3])
    found.model_input.add().image.format = "png"
    return found


def sparse() -> pb.Datum:
    found = datum([1, 2, 3], weights=[1, 1])
    found.loss_fn_inputs["weights"].sparse_csr.values = b""
    return found


def other_targets() -> pb.Datum:
    found = datum([1, 2, 3])
    found.loss_fn_inputs["target_tokens"].dense = np.array([9, 3], np.int64).tobytes()
    return found


def torn() -> pb.Datum:
    found = datum([1, 2, 3])
    found.model_input[0].encoded_text.tokens = b"12345"
    return found


@pytest.mark.parametrize(
    ("named", "data", "loss"),
    [
        ("data", [], "cross_entropy"),
        ("loss_fn=stable_reinforce", [datum([1, 2])], "stable_reinforce"),
        ("target_tokens", [without("target_tokens")], "cross_entropy"),
        ("target_tokens", [other_targets()], "cross_entropy"),
        ("model_input", [with_image()], "cross_entropy"),
        ("weights", [sparse()], "cross_entropy"),
        ("weights", [datum([1, 2, 3], weights=[1])], "cross_entropy"),
        ("weights", [datum([1, 2, 3], weights=[1, np.nan])], "cross_entropy"),
        ("advantages", [datum([1, 2, 3], logprobs=[0, 0])], "ppo"),
        ("values", [datum([1, 2, 3], values=[0, 0])], "cross_entropy"),
        ("tokens", [datum(range(18))], "cross_entropy"),
        ("tokens", [datum([1, 40, 3])], "cross_entropy"),
        ("tokens", [datum([1, 2, -3])], "cross_entropy"),
        ("tensor", [torn()], "cross_entropy"),
    ],
)
def test_what_the_server_cannot_compute_is_refused(
    named: str, data: list[pb.Datum], loss: str
) -> None:
    with refused(named, RefusedError):
        read(passes(data, loss))


def test_settings_of_another_loss_and_bodies_of_another_kind_are_refused() -> None:
    message = passes([datum([1, 2])])
    message.loss_fn_config_v2["beta"].number = 0.1
    with refused("loss_fn_config", RefusedError):
        read(message)
    for broken in (b"\xff\xff", b"{}}"):
        with refused("body", RefusedError):
            wire.read_message(broken)
    for broken in (b"[1]", b"{", b"[" * 10**5):
        with refused("body", RefusedError):
            wire.read_json(broken)


def test_parameters_of_sampling_and_of_steps() -> None:
    usual = SamplingConfig(max_new_tokens=9)
    read = wire.read_sampling(
        {"sampling_params": {"temperature": 0.5, "top_k": -1, "stop": ["a"], "seed": 3}},
        usual,
        32,
    )
    assert (read.temperature, read.top_k, read.stop, read.max_new_tokens) == (
        0.5,
        0,
        ["a"],
        9,
    )
    read = wire.read_sampling(
        {"sampling_params": {"max_tokens": 4, "stop": [5], "top_p": 0.9}}, usual, 32
    )
    assert (read.stop_token_ids, read.stop, read.max_new_tokens, read.top_p) == (
        [5],
        [],
        4,
        0.9,
    )
    step = wire.read_step({"adam_params": adam(grad_clip_norm=0.0)})
    assert step == {
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-12,
        "weight_decay": 0.0,
    } | {"max_grad_norm": np.inf}
    assert wire.read_step({"adam_params": adam(grad_clip_norm=2.0)})["max_grad_norm"] == 2.0


def test_a_prompt_of_several_chunks_is_one() -> None:
    chunks = [{"tokens": [1, 2]}, {"tokens": [3]}]
    assert wire.read_prompt({"prompt": {"chunks": chunks}}, **LIMITS) == [1, 2, 3]


@given(
    st.lists(
        st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_the_sdk_reads_log_probs_as_they_were(values: list[list[float]]) -> None:
    rows = [np.array([0.0, *row], np.float32) for row in values]
    answer = wire.pass_answer(rows, {"loss:sum": 1.5})
    found = response_conv.deserialize_forward_backward_output(answer.body)
    assert answer.protobuf and found.metrics == {"loss:sum": 1.5}
    assert [
        output["logprobs"].to_numpy().tolist() for output in found.loss_fn_outputs
    ] == values


def test_the_sdk_reads_samples_as_they_were() -> None:
    ids, log_probs = np.array([4, 5], np.int32), np.array([-0.5, -1.0], np.float32)
    sequences = [
        SampledSequence(ids, ids + n, log_probs - n, reason, 0.0, "")
        for n, reason in enumerate(("stop", "length"))
    ]
    answer = wire.sample_answer(sequences, np.array([-2.0], np.float32))
    found = response_conv.deserialize_sample_response(answer.body)
    assert [each.stop_reason for each in found.sequences] == ["stop", "length"]
    assert [list(each.tokens) for each in found.sequences] == [[4, 5], [5, 6]]
    assert [list(each.logprobs) for each in found.sequences] == [[-0.5, -1.0], [-1.5, -2.0]]
    assert found.prompt_logprobs[1:] == [-2.0]
    assert json.loads(wire.failure(RefusedError("a=b: c. d.")).body) == {
        "error": "a=b: c. d.",
        "category": "user",
    }
