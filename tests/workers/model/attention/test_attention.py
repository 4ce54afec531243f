"""The two ways in which transformers' own packing goes wrong in silence, and what the registered function
refuses.
"""

import itertools
import sys
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl
from transformers import AutoModelForCausalLM

from tests.refusals import refused
from tests.workers.model.tiny import (
    random_sequences,
    relative_error,
    save_tiny_model,
    unpacked_log_probs,
)
from workers.batch.dataproto import DataProto
from workers.config.roles import ModelConfig
from workers.errors import UnsupportedModelError
from workers.model import layout
from workers.model.attention import flash4
from workers.model.attention.attention import (
    ATTENTION_NAME,
    Installed,
    ballast_packed,
    choose_backend,
    flash_implementation,
    is_installed,
    packed_attention,
)
from workers.model.attention.flash4 import uses_flash4
from workers.model.layout import RowLayout
from workers.model.model import load_model
from workers.model.rows.packing import pack
from workers.model.rows.prefix_rows import SharedRow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_tiny_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


@pytest.fixture(scope="module")
def row():
    return pack(random_sequences())


@pytest.fixture(scope="module")
def expected(model):
    model.set_attn_implementation("sdpa")  # whatever the tests before it left
    with torch.no_grad():
        return torch.cat(
            [log_probs for log_probs, _ in unpacked_log_probs(model, random_sequences())]
        )


def next_token_log_probs(model, row, **arguments) -> torch.Tensor:
    """Through the whole row; the first token of every sequence, which nothing predicts, holds 0."""
    with torch.no_grad():
        logits = model(
            input_ids=row.input_ids, position_ids=row.position_ids, **arguments
        ).logits[0]
    log_probs = (
        logits.log_softmax(-1)[:-1].gather(-1, row.input_ids[0, 1:, None]).squeeze(-1)
    )
    log_probs = torch.cat([log_probs.new_zeros(1), log_probs])
    log_probs[row.position_ids[0] == 0] = 0
    return log_probs


@pytest.mark.parametrize(
    "trap", ["use_cache", "attention_mask", "use_cache, attention_mask"]
)
def test_packing_is_exact_even_where_transformers_would_not_notice_it(
    model, row, expected, trap
):
    arguments = {"use_cache": True, "attention_mask": torch.ones_like(row.input_ids)}
    arguments = {name: value for name, value in arguments.items() if name in trap}
    model.set_attn_implementation("sdpa")
    assert relative_error(next_token_log_probs(model, row, **arguments), expected) > 0.05, (
        "no trap any more"
    )
    model.set_attn_implementation(ATTENTION_NAME)
    arguments["packed_attention"] = packed_attention("sdpa", row, CPU)
    assert relative_error(next_token_log_probs(model, row, **arguments), expected) < 1e-9


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask"),
        ({"position_bias": torch.zeros(1, 2, 4, 4)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"key": torch.zeros(1, 2, 7, 8)}, "past_key_values"),
        ({"packed_attention": None}, "packed_attention"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(arguments, feature):
    tensors = {name: torch.zeros(1, 2, 4, 8) for name in ("query", "key", "value")}
    call = {
        **tensors,
        "attention_mask": None,
        "packed_attention": lambda *_: None,
        **arguments,
    }
    with refused(feature, UnsupportedModelError):
        ballast_packed(torch.nn.Linear(1, 1), **call)


def test_a_cache_that_holds_tokens_is_refused(model, row):
    model.set_attn_implementation(ATTENTION_NAME)
    attention = packed_attention("sdpa", row, CPU)
    with torch.no_grad():
        first = model(input_ids=row.input_ids, use_cache=True, packed_attention=attention)
        with refused("past_key_values", UnsupportedModelError):
            model(
                input_ids=row.input_ids,
                past_key_values=first.past_key_values,
                packed_attention=attention,
            )


HALF = torch.bfloat16
FLASH3 = {"flash_attn_interface"}
BOTH = FLASH3 | {"flash_attn.cute"}
HOPPER, AMPERE, BLACKWELL, CONSUMER_BLACKWELL = 9, 8, 10, 12


@pytest.mark.parametrize(
    ("generation", "packages", "features", "chosen"),
    [
        (AMPERE, set(), set(), "varlen"),
        (AMPERE, {"flash_attn_interface"}, set(), "varlen"),
        (HOPPER, set(), set(), "varlen"),
        (HOPPER, {"flash_attn_interface", "flash_attn"}, set(), "flash3"),
        (
            HOPPER,
            {"flash_attn_interface", "flash_attn"},
            {"sliding_window", "sinks"},
            "flash3",
        ),
        (HOPPER, {"flash_attn_interface", "flash_attn"}, {"softcap"}, "flash"),
        (HOPPER, {"flash_attn_interface"}, {"softcap"}, "sdpa"),
        (AMPERE, {"flash_attn"}, {"sliding_window", "softcap"}, "flash"),
        (AMPERE, set(), {"sliding_window", "sinks"}, "varlen"),
        (AMPERE, {"flash_attn"}, {"softcap", "sinks"}, "sdpa"),
        (HOPPER, {"flash_attn.cute"}, set(), "flash4"),
        (
            BLACKWELL,
            {"flash_attn.cute", "flash_attn_interface"},
            {"sliding_window", "sinks"},
            "flash4",
        ),
        (
            HOPPER,
            {"flash_attn.cute", "flash_attn_interface", "flash_attn"},
            set(),
            "flash4",
        ),
        (HOPPER, {"flash_attn.cute", "flash_attn"}, {"softcap"}, "flash"),
        (AMPERE, {"flash_attn.cute"}, set(), "varlen"),
        (CONSUMER_BLACKWELL, {"flash_attn.cute"}, set(), "varlen"),
    ],
)
def test_backend_follows_card_packages_and_model(generation, packages, features, chosen):
    installed = Installed(generation, frozenset(packages))
    assert choose_backend("auto", CUDA, HALF, frozenset(features), installed) == chosen
    assert (
        choose_backend("auto", CUDA, torch.float32, frozenset(features), installed)
        == "sdpa"
    )
    assert choose_backend("auto", CPU, HALF, frozenset(features), installed) == "sdpa"


def test_the_machine_is_looked_at_when_nothing_is_said_of_it():
    assert choose_backend("auto", CPU, torch.float32) == "sdpa"
    assert Installed.here(CPU).generation == 0
    assert ("flash_attn" in Installed.here(CPU).packages) == is_installed("flash_attn")


def test_the_folder_that_one_package_shares_with_another_is_not_that_other_one(
    tmp_path, monkeypatch
):
    """flash-attn-4 installs `flash_attn/cute` and no `flash_attn/__init__.py`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("shared_folder", "shared_folder.cute")
    assert [is_installed(name) for name in names] == [False, False]
    (tmp_path / "shared_folder" / "cute").mkdir(parents=True)
    (tmp_path / "shared_folder" / "cute" / "__init__.py").write_text("")
    invalidate_caches()
    assert [is_installed(name) for name in names] == [False, True]


@pytest.mark.parametrize(
    ("generation", "sizes", "chosen"),
    [
        (HOPPER, {256}, "flash4"),
        (HOPPER, {192}, "flash4"),
        (HOPPER, {64, 512}, "varlen"),
        (HOPPER, {20}, "varlen"),
        (BLACKWELL, {128}, "flash4"),
        (BLACKWELL, {256}, "flash4"),
        (BLACKWELL, {192}, "varlen"),
        (BLACKWELL, {80, 96}, "flash4"),
    ],
)
def test_heads_of_a_size_that_a_kernel_does_not_take_fall_to_the_next_kernel(
    generation, sizes, chosen
):
    installed = Installed(generation, frozenset({"flash_attn.cute"}))
    sizes = frozenset(sizes)
    assert (
        choose_backend("auto", CUDA, HALF, installed=installed, head_sizes=sizes) == chosen
    )
    implementation = flash_implementation("auto", CUDA, HALF, installed, sizes)
    assert implementation == ("FA4" if chosen == "flash4" else None)
    if chosen != "flash4":
        with refused(f"model.attention=flash4 does not take heads of {max(sizes)}"):
            choose_backend("flash4", CUDA, HALF, installed=installed, head_sizes=sizes)


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "installed", "named"),
    [
        ("varlen", CPU, HALF, (HOPPER, ()), "CUDA"),
        ("varlen", CUDA, torch.float32, (HOPPER, ()), "half precision"),
        ("flash", CPU, HALF, (HOPPER, ("flash_attn",)), "CUDA"),
        ("flash", CUDA, HALF, (HOPPER, ()), "flash-attn"),
        (
            "flash3",
            CUDA,
            HALF,
            (AMPERE, ("flash_attn_interface",)),
            "compute capability 9, and this one has 8",
        ),
        ("flash3", CUDA, HALF, (HOPPER, ()), "flash-attn-interface"),
        ("flash4", CPU, HALF, (HOPPER, ("flash_attn.cute",)), "CUDA"),
        ("flash4", CUDA, torch.float32, (HOPPER, ("flash_attn.cute",)), "half precision"),
        (
            "flash4",
            CUDA,
            HALF,
            (AMPERE, ("flash_attn.cute",)),
            "capability 9 or 10, and this one has 8",
        ),
        ("flash4", CUDA, HALF, (HOPPER, ("flash_attn",)), "the package flash-attn-4"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_not_swapped(
    setting, device, dtype, installed, named
):
    generation, packages = installed
    with refused(named):
        choose_backend(
            setting, device, dtype, installed=Installed(generation, frozenset(packages))
        )


@pytest.mark.parametrize(
    ("backend", "feature"),
    [
        ("varlen", "softcap"),
        ("flash", "sinks"),
        ("flash3", "softcap"),
        ("flash4", "softcap"),
    ],
)
def test_a_backend_that_leaves_out_what_the_model_needs_is_refused_by_name(
    backend, feature
):
    installed = Installed(
        HOPPER, frozenset({"flash_attn", "flash_attn_interface", "flash_attn.cute"})
    )
    with pytest.raises(
        UnsupportedModelError, match=rf"{feature}.*model\.attention={backend}"
    ):
        choose_backend(
            backend, CUDA, HALF, frozenset({"sliding_window", feature}), installed
        )


def test_all_rows_of_an_engine_use_its_flash_implementation(tmp_path, monkeypatch):
    """With a module in the place of the package, which registers what torch looks for."""
    package = ModuleType("flash_attn_interface")
    package.__spec__ = ModuleSpec(package.__name__, None)
    package.library = torch.library.Library("flash_attn_3", "DEF")
    package.library.define("fwd(Tensor q) -> Tensor")
    package.library.define("bwd(Tensor q) -> Tensor")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    config = ModelConfig(path=save_tiny_model(tmp_path, "qwen2"))
    model = load_model(config, torch.float32)
    group = DataProto.from_list(
        [
            {"input_ids": [*range(20), 21 + i], "loss_mask": [False] * 20 + [True]}
            for i in range(2)
        ]
    )
    monkeypatch.setattr(flash4, "load_package", lambda: None)
    chosen = (None, "FA3", "FA4", "FA3", "FA4", None)
    for implementation, batch in itertools.product(chosen, (group, group.slice(0, 1))):
        monkeypatch.setattr(
            layout, "flash_implementation", lambda *_, found=implementation, **__: found
        )
        row = RowLayout(config, None, model, CPU, torch.float32).lay_out(batch)
        assert isinstance(row, SharedRow) == (len(batch) == 2)
        assert uses_flash4() == (implementation == "FA4")
        assert current_flash_attention_impl() == (None if uses_flash4() else implementation)


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "generation", "packages", "chosen"),
    [
        ("auto", CUDA, HALF, HOPPER, FLASH3, "FA3"),
        ("auto", CUDA, HALF, HOPPER, set(), None),
        ("auto", CUDA, HALF, AMPERE, FLASH3, None),
        ("auto", CUDA, torch.float32, HOPPER, FLASH3, None),
        ("auto", CPU, HALF, HOPPER, FLASH3, None),
        ("auto", CUDA, HALF, HOPPER, BOTH, "FA4"),
        ("auto", CUDA, HALF, BLACKWELL, BOTH, "FA4"),
        ("flash4", CUDA, HALF, HOPPER, BOTH, "FA4"),
        ("flash3", CUDA, HALF, HOPPER, BOTH, "FA3"),
        ("varlen", CUDA, HALF, HOPPER, BOTH, None),
    ],
)
def test_flash_implementation_follows_card_and_package(
    setting, device, dtype, generation, packages, chosen
):
    installed = Installed(generation, frozenset(packages))
    assert flash_implementation(setting, device, dtype, installed) == chosen
