"""The two ways in which transformers' own packing goes wrong in silence, and what the registered function refuses."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.model.tiny import random_sequences, relative_error, save_tiny_model, tiny_config, unpacked_log_probs
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.attention import ATTENTION_NAME, choose_backend, packed_attention
from workers.model.packing import pack

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_tiny_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


@pytest.fixture(scope="module")
def row():
    return pack(random_sequences())


@pytest.fixture(scope="module")
def expected(model):
    """Log-probs of the packed row's next tokens, every sequence run alone."""
    with torch.no_grad():
        return torch.cat([log_probs for log_probs, _ in unpacked_log_probs(model, random_sequences())])


def next_token_log_probs(model, row, **arguments) -> torch.Tensor:
    """Through the whole row; the first token of every sequence, which nothing predicts, holds 0."""
    with torch.no_grad():
        logits = model(input_ids=row.input_ids, position_ids=row.position_ids, **arguments).logits[0]
    log_probs = logits.log_softmax(-1)[:-1].gather(-1, row.input_ids[0, 1:, None]).squeeze(-1)
    log_probs = torch.cat([log_probs.new_zeros(1), log_probs])
    log_probs[row.cu_seqlens[:-1]] = 0
    return log_probs


TRAPS = {
    "a cache is made": {"use_cache": True},
    "an all-ones mask is passed": {"attention_mask": "ones"},
    "both": {"use_cache": True, "attention_mask": "ones"},
}


@pytest.mark.parametrize("trap", TRAPS)
def test_packing_is_exact_even_where_transformers_would_not_notice_it(model, row, expected, trap):
    arguments = dict(TRAPS[trap])
    if "attention_mask" in arguments:
        arguments["attention_mask"] = torch.ones_like(row.input_ids)
    model.set_attn_implementation("sdpa")
    assert relative_error(next_token_log_probs(model, row, **arguments), expected) > 0.05, "no trap any more"
    model.set_attn_implementation(ATTENTION_NAME)
    arguments["packed_attention"] = packed_attention("sdpa", row, CPU)
    assert relative_error(next_token_log_probs(model, row, **arguments), expected) < 1e-9


def test_a_pass_that_does_not_say_what_is_packed_is_refused(model, row):
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(UnsupportedModelError, match="Qwen2Attention was called without packed_attention"):
        next_token_log_probs(model, row)


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"dropout": 0.1}, "dropout"),
        ({"key": torch.zeros(1, 2, 7, 8)}, "past_key_values"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(arguments, feature):
    from workers.model.attention import ballast_packed

    tensors = {name: torch.zeros(1, 2, 4, 8) for name in ("query", "key", "value")}
    call = {**tensors, "attention_mask": None, "packed_attention": lambda *_: None, **arguments}
    with pytest.raises(UnsupportedModelError, match=f"Linear uses {feature}"):
        ballast_packed(torch.nn.Linear(1, 1), **call)


def test_a_cache_that_holds_tokens_is_refused(model, row):
    model.set_attn_implementation(ATTENTION_NAME)
    attention = packed_attention("sdpa", row, CPU)
    with torch.no_grad():
        first = model(input_ids=row.input_ids, use_cache=True, packed_attention=attention)
        with pytest.raises(UnsupportedModelError, match="past_key_values"):
            model(input_ids=row.input_ids, past_key_values=first.past_key_values, packed_attention=attention)


def test_backend_follows_the_device_and_is_never_swapped_in_silence():
    cuda = torch.device("cuda")
    assert choose_backend("auto", CPU, torch.float32) == "sdpa"
    assert choose_backend("auto", cuda, torch.bfloat16) == "varlen"
    assert choose_backend("auto", cuda, torch.float32) == "sdpa"
    assert choose_backend("sdpa", cuda, torch.bfloat16) == "sdpa"
    with pytest.raises(ConfigError, match=r"model\.attention=varlen needs a CUDA device"):
        choose_backend("varlen", CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="half precision"):
        choose_backend("varlen", cuda, torch.float32)


def test_tiny_config_is_grouped_query():
    """Key-value heads fewer than query heads, so that the tests above cover their repetition."""
    config = tiny_config()
    assert config.num_key_value_heads < config.num_attention_heads
