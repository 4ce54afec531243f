"""Model folders that cannot be trained, given to the command: refused by their headers, before anything is imported."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from controller.config import load
from controller.config.model_files import read_model_files
from controller.fit import main
from controller.preflight.checks import check
from controller.preflight.model_shape import FAMILIES
from controller.preflight.weights import HEAD, check_weights
from tests.controller.config_workspace import MODEL, write_model
from tests.controller.weight_files import qwen2_weights, write_weight_file

WEIGHTS, INDEX = Path("model/model.safetensors"), Path("model/model.safetensors.index.json")
Break = Callable[[], object]


def cut(count: int) -> Break:
    return lambda: WEIGHTS.write_bytes(WEIGHTS.read_bytes()[:count])


def weights_of(**changes: object) -> Break:
    """The files of another model beside the config.json of this one."""
    return lambda: write_weight_file(WEIGHTS, qwen2_weights(MODEL | changes))


def without(*names: str) -> Break:
    kept = {name: shape for name, shape in qwen2_weights(MODEL).items() if not name.startswith(names)}
    return lambda: write_weight_file(WEIGHTS, kept)


def reshaped(name: str, *shape: int) -> Break:
    return lambda: write_weight_file(WEIGHTS, qwen2_weights(MODEL) | {name: shape})


def described(**changes: object) -> Break:
    return lambda: Path("model/config.json").write_text(json.dumps(MODEL | changes))


def of_another_family() -> None:
    """A family whose sizes are not known by name: its embedding alone is compared."""
    described(model_type="gpt_neox")()
    write_weight_file(WEIGHTS, {"gpt_neox.embed_in.weight": (32, 128)})


def pickled() -> None:
    WEIGHTS.rename("model/pytorch_model.bin")


def pointer() -> None:
    WEIGHTS.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


def under_another_name() -> None:
    WEIGHTS.rename("model/adapter_model.safetensors")


def with_more(*names: str) -> Break:
    return lambda: write_weight_file(WEIGHTS, qwen2_weights(MODEL) | dict.fromkeys(names, (64,)))


def sharded(listed: dict[str, str], *written: str) -> Break:
    def write() -> None:
        WEIGHTS.unlink()
        INDEX.write_text(json.dumps({"weight_map": listed}))
        for name in written:
            write_weight_file(WEIGHTS.with_name(name), {"model.norm.weight": (256,)})

    return write


CASES = {
    "empty": (cut(0), "model/model.safetensors is not a whole safetensors file: header too small (0 bytes); fetch it"),
    "header cut": (cut(99), "is not a whole safetensors file: invalid header length (99 bytes); fetch it again."),
    "cut": (cut(99_999), "incomplete metadata, file not fully covered (99,999 bytes); fetch it again."),
    "LFS pointer": (pointer, "it is a pointer of Git LFS, fetch its contents by `git lfs pull`."),
    "not JSON": (lambda: WEIGHTS.write_bytes(bytes(64)), "is not a whole safetensors file: invalid JSON in header"),
    "other hidden size": (
        weights_of(hidden_size=128),
        "model.path=model: embed_tokens.weight is 32 x 128 in the weight files and 32 x 256 by config.json; put",
    ),
    "other vocabulary": (weights_of(vocab_size=33), "embed_tokens.weight is 33 x 256 in the weight files and 32 x 256"),
    "other width": (weights_of(intermediate_size=512), "layers.0.mlp.gate_proj.weight is 512 x 256 in the weight"),
    "other heads": (weights_of(num_key_value_heads=1), "layers.0.self_attn.k_proj.weight is 64 x 256 in the weight"),
    "other output": (reshaped("lm_head.weight", 31, 256), "lm_head.weight is 31 x 256 in the weight files and 32 x"),
    "fewer layers": (weights_of(num_hidden_layers=3), "lack layers.3.self_attn.q_proj.weight, which config.json asks"),
    "more layers": (weights_of(num_hidden_layers=6), "hold 6 layers and config.json says 4, so that the others would"),
    "no output layer": (without("lm_head"), "model.path=model: the weight files have no lm_head.weight; take a folder"),
    "no last norm": (without("model.norm"), "the weight files lack norm.weight, which config.json asks for"),
    "other family": (of_another_family, "gpt_neox.embed_in.weight is 32 x 128 in the weight files and 32 x 256 by"),
    "pickle": (pickled, "; pytorch_model.bin is a pickle, which may run code and is never read: save the model with"),
    "adapter": (under_another_name, "model has neither model.safetensors nor model.safetensors.index.json; save"),
    "file missing": (sharded({"a": "1.safetensors"}), "model lacks 1.safetensors, which model.safetensors.index.json"),
    "weight missing": (
        sharded({"a": "1.safetensors"}, "1.safetensors"),
        "model/1.safetensors does not hold a, which model.safetensors.index.json says; fetch the model again.",
    ),
    "no map": (lambda: (WEIGHTS.unlink(), INDEX.write_text("{}")), "model.safetensors.index.json has no weight_map."),
    "index out of the folder": (sharded({"a": "../1.safetensors"}), "names '../1.safetensors', which is not a file of"),
    "index of lists": (sharded({"a": [1]}), "names [1], which is not a file of its folder"),
    "biases": (described(model_type="llama"), "has no layers."),
    "norms of heads": (with_more("model.layers.0.self_attn.q_norm.weight"), "has no layers.0.self_attn.q_norm.weight,"),
    "text": (described(num_hidden_layers="four"), "says num_hidden_layers='four', which is not a whole number above 0"),
    "huge": (described(hidden_size=10**30), "hidden_size=1000000000000000000000000000000, which is not a whole"),
    "list": (described(text_config=[1]), "says text_config=[1], which is not an object"),
    "inside": (described(text_config=MODEL | {"vocab_size": True}), "says vocab_size=True, which is not a whole"),
    "no factor": (described(rope_scaling={"factor": "x"}), "says factor='x', which is not a number above 0"),
    "no names": (described(architectures=[1]), "says architectures=[1], which is not a list of names"),
    "deep": (
        lambda: Path("model/config.json").write_text('{"a":' * 100_000),
        "config.json is not valid JSON: maximum recursion depth exceeded",
    ),
    "digits": (lambda: Path("model/config.json").write_text(f'{{"a": {"1" * 5001}}}'), "config.json is not valid JSON"),
    "unknown type": (described(model_type="qwen9"), "the installed transformers knows no model of type qwen9; take"),
    "no type": (described(model_type=None), "model.path=model: config.json names no model_type; put the config.json"),
    "remote code": (
        described(model_type="own", auto_map={"AutoModelForCausalLM": "own.Model"}),
        "model.path=model: a model of type own needs code from its own folder (auto_map in config.json), which is nev",
    ),
    "BERT": (
        described(model_type="bert", architectures=["BertForMaskedLM"]),
        "model.path=model is BertForMaskedLM, not a causal language model; take another model.",
    ),
    "vision": (described(model_type="vit"), "model.path=model is of type vit, not a causal language model; take"),
    "judge as policy": (
        described(architectures=["Qwen2ForSequenceClassification"]),
        "model.path=model is Qwen2ForSequenceClassification, not a causal language model",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "message"), CASES.values(), ids=CASES)
def test_a_folder_that_cannot_be_trained_is_refused_in_one_line(
    workspace: Path, capsys: pytest.CaptureFixture[str], broken: Break, message: str
) -> None:
    broken()
    assert main(["--config", "config.yaml"]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and len(shown.err.splitlines()) == 1
    assert shown.out == "" and not Path("runs").exists()


def test_a_family_may_store_its_output_layer_under_another_name(workspace: Path) -> None:
    described(model_type="gpt_neox", tie_word_embeddings=False)()
    write_weight_file(WEIGHTS, {"gpt_neox.embed_in.weight": (32, 256), "embed_out.weight": (32, 256)})
    check(load("config.yaml", []))


def test_a_model_in_several_files_is_read_as_one(workspace: Path) -> None:
    weights = qwen2_weights(MODEL)
    files = {name: f"{number % 2}.safetensors" for number, name in enumerate(weights)}
    INDEX.write_text(json.dumps({"weight_map": files}))
    WEIGHTS.unlink()
    for file in ("0.safetensors", "1.safetensors"):
        write_weight_file(WEIGHTS.with_name(file), {n: shape for n, shape in weights.items() if files[n] == file})
    check(load("config.yaml", []))


@pytest.mark.parametrize("changes", [{"auto_map": {"AutoModel": "own.Model"}}, {"architectures": ["Qwen2ForCausalLM"]}])
def test_a_known_family_is_taken_whatever_code_lies_beside_it(workspace: Path, changes: dict[str, object]) -> None:
    described(**changes)()
    check(load("config.yaml", []))


def test_every_model_is_looked_at(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference, the critic and the reward model, too; a critic may be either kind."""
    write_model(workspace / "other")
    (workspace / "other" / "model.safetensors").write_bytes(b"")
    judge = {"architectures": ["Qwen2ForSequenceClassification"]}
    for overrides, key in (
        (["algorithm.loss.kl_coefficient=0.1", "reference.path=other"], "reference.path"),
        (["algorithm.advantage=gae", "critic.path=other"], "critic.path"),
        (["reward.model.path=other"], "reward.model.path"),
    ):
        (workspace / "other" / "config.json").write_text(json.dumps(MODEL | (judge if key != "reference.path" else {})))
        assert main(["--config", "config.yaml", *overrides]) == 2
        assert f"error: {key}: other/model.safetensors is not a whole safetensors file" in capsys.readouterr().err
    write_model(workspace / "other")
    (workspace / "other" / "config.json").write_text(json.dumps(MODEL | judge))
    assert main(["--config", "config.yaml", "reward.model.path=other"]) == 2
    assert "reward.model.path=other: the weight files have no score.weight" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_what_is_expected(tmp_path: Path, family: str) -> None:
    """Names and shapes of every family that is compared weight by weight, as the installed transformers writes them."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 32, "pad_token_id": None, "moe_intermediate_size": 8}
    sizes |= {"num_local_experts" if family == "mixtral" else "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"shared_expert_intermediate_size": 8}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_weights(read_model_files(str(tmp_path), "model.path"), "model.path", family, output=HEAD)
