"""The memory estimate: its counts against transformers' own, its activations against what autograd keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig

from controller.config import Config
from controller.fit import main
from controller.preflight.memory import GIB, check_host, check_memory, gpu_memory, host_memory, trained_parameters
from controller.preflight.model_shape import model_shape
from tests.controller.config_workspace import write_model
from tests.controller.qwen import PARAMETERS, qwen_description
from tests.refusals import refused
from tests.workers.model.tiny import tiny_config
from workers.config import LoraConfig, ModelConfig
from workers.dataproto import DataProto
from workers.model.attention.attention import packed_attention
from workers.model.checkpoint.lora import add_adapters
from workers.model.model import packed_causal_lm
from workers.model.rows.packing import pack

SIZES = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, head_dim=8),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts_per_tok=2
    ),
}


def configuration(name: str) -> PreTrainedConfig:
    return MIXTURES.get(name) or tiny_config(name)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral", "qwen2_moe"])
def test_parameters_are_those_that_transformers_makes(family: str) -> None:
    config = configuration(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(json.loads(config.to_json_string(use_diff=False)))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", PARAMETERS)
def test_parameters_are_those_published(size: str) -> None:
    assert model_shape(qwen_description(size)).parameters == PARAMETERS[size]


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_adapters_are_those_that_peft_makes(targets: str) -> None:
    config = Config()
    config.model.lora = LoraConfig(rank=4, target_modules=targets)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    add_adapters(model, config.model.lora)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shape = model_shape(json.loads(tiny_config("qwen2").to_json_string(use_diff=False)))
    assert trained_parameters(config, shape) == trained


def kept_bytes(layers: int, *, checkpointing: bool, tokens: int = 512) -> tuple[int, PreTrainedConfig]:
    """Bytes that autograd keeps of a packed row of two sequences in bfloat16, parameters left out."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "max_position_embeddings": tokens}
    config = tiny_config("qwen2", num_hidden_layers=layers, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module = packed_causal_lm(model, ModelConfig(gradient_checkpointing=checkpointing))
    rows = [{"input_ids": torch.zeros(tokens // 2, dtype=torch.long)} for _ in range(2)]
    for row in rows:
        row["loss_mask"] = torch.arange(tokens // 2) > 0
    packed = pack(DataProto.from_list(rows, {}), 1)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    attention = packed_attention("sdpa", packed, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module.hidden_states(replace(packed, attention=attention))
    bytes_kept = (tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in parameters)
    return sum(bytes_kept), config


def test_a_layers_activations_are_what_autograd_keeps() -> None:
    """Within a tenth: the kernel of the CPU keeps a copy of its output that those of GPUs do not."""
    (more, config), (fewer, _) = (kept_bytes(layers, checkpointing=False) for layers in (4, 2))
    shape = model_shape(json.loads(config.to_json_string(use_diff=False)))
    assert (more - fewer) / 2 / 512 == pytest.approx(shape.activation_bytes_per_token(), rel=0.1)


def test_with_checkpointing_a_layer_keeps_its_input() -> None:
    (more, config), (fewer, _) = (kept_bytes(layers, checkpointing=True) for layers in (4, 2))
    assert (more - fewer) / 2 / 512 == 2 * config.hidden_size


def eight_gpus(**changes: float) -> Config:
    config = Config()
    config.resources.device = "cuda"
    config.policy.data_parallel, config.rollout.replicas = 8, 8
    config.model.gradient_checkpointing = True
    for key, value in changes.items():
        setattr(config.policy, key, value)
    return config


def test_the_parts_of_seven_billion_on_eight_gpus() -> None:
    """The formulas of controller.preflight.memory, worked by hand: P = 7,615,616,512, s = 8."""
    shape = model_shape(qwen_description("7B"))
    memory = gpu_memory(eight_gpus(), shape, 80.0)
    eighth = 7_615_616_512 / 8 / GIB
    assert memory.training["weights"] == memory.training["gradients"] == pytest.approx(4 * eighth)
    assert memory.training["AdamW"] == pytest.approx(8 * eighth)
    layer = 2 * 3584 * (3584 + 512) + 3 * 3584 * 18_944 + (3584 + 2 * 512) + 2 * 3584
    root = 2 * 152_064 * 3584 + 3584
    head = 152_064 * 3584
    assert memory.training["gathered"] == pytest.approx((2 * (root + 4 * layer) + 2 * (head + layer) + 8 * layer) / GIB)
    token = 16 * 3584 + 4 * 3584 + 4 * 512 + 8 * 18_944
    assert memory.training["activations"] == pytest.approx(
        16_384 * (28 * 2 * 3584 + token + 2 * 2 * (2 * 3584 + 18_944)) / GIB
    )
    assert [phase.name for phase in memory.phases] == ["policy update", "policy log probs"]
    forward = memory.phases[1].parts
    assert forward["gathered"] == pytest.approx(2 * (root + layer) / GIB)
    assert forward["log-probs"] == pytest.approx(12 * 2048 * 152_064 / GIB)
    assert "gradients" not in forward
    assert memory.generating == pytest.approx(
        {name: memory.training[name] for name in ("weights", "AdamW")} | {"engine": 40.0}
    )
    assert memory.kv_tokens == int((40 * GIB - 2 * 7_615_616_512) / (4 * 512 * 28))
    assert host_memory(eight_gpus(), shape, ranks=8) == pytest.approx({"model as it is read": 32 * eighth})


def test_offload_adapters_and_sharing_take_their_parts_away() -> None:
    shape = model_shape(qwen_description("7B"))
    plain = gpu_memory(eight_gpus(), shape, 80.0).training
    offloaded = gpu_memory(eight_gpus(cpu_offload=True), shape, 80.0).training
    assert set(plain) - set(offloaded) == {"weights", "gradients", "AdamW"}
    on_host = host_memory(eight_gpus(cpu_offload=True), shape, ranks=8)
    assert on_host["policy"] == pytest.approx(16 * shape.parameters / GIB)
    adapted = eight_gpus()
    adapted.model.lora.rank = 16
    assert gpu_memory(adapted, shape, 80.0).training["AdamW"] < plain["AdamW"] / 50
    shared = eight_gpus()
    shared.policy.data_parallel, shared.policy.parallel.tensor_parallel = 4, 2
    halves = gpu_memory(shared, shape, 80.0).training
    assert halves["weights"] == plain["weights"]
    assert halves["gathered"] == plain["gathered"] / 2
    actor_critic = eight_gpus()
    actor_critic.algorithm.advantage, actor_critic.critic.max_tokens_per_micro_batch = "gae", 32_768
    with_critic = gpu_memory(actor_critic, shape, 80.0, {"critic": shape}).training
    assert with_critic["critic"] == pytest.approx(12 * shape.parameters / 8 / GIB)
    actor_critic.critic.cpu_offload = True
    on_node = host_memory(actor_critic, shape, ranks=8, others={"critic": shape})
    assert on_node["critic"] == pytest.approx(16 * shape.parameters / GIB)
    assert with_critic["activations"] == pytest.approx(2 * plain["activations"])
    apart = eight_gpus()
    apart.rollout.placement = "apart"
    assert gpu_memory(apart, shape, 80.0).generating == {"engine": 40.0}


def test_a_rank_gathers_its_own_experts_alone() -> None:
    """By hand: of 60 experts of 3 x 1024 x 512 weights, 15 are gathered, and wait for a reduction that is put off."""
    config = Qwen2MoeConfig(
        vocab_size=1024,  # so that the last layer is the fullest moment
        hidden_size=1024,
        moe_intermediate_size=512,
        num_experts=60,
        num_experts_per_tok=4,
        num_hidden_layers=8,
    )
    shape = model_shape(json.loads(config.to_json_string(use_diff=False)))
    whole, shared = eight_gpus(), eight_gpus()
    whole.policy.parallel.defer_gradient_reduction = shared.policy.parallel.defer_gradient_reduction = True
    shared.policy.parallel.expert_parallel = 4
    (before, *_), (after, *_) = gpu_memory(whole, shape, 80.0).phases, gpu_memory(shared, shape, 80.0).phases
    elsewhere = 45 * 3 * 1024 * 512
    assert after.parts["weights"] == before.parts["weights"]
    assert before.parts["gradients"] - after.parts["gradients"] == pytest.approx(4 * 8 * elsewhere / GIB)
    saved = before.parts["gathered"] - after.parts["gathered"]
    assert saved == pytest.approx((2 * 4 + 2 + 8) * elsewhere / GIB)  # four layers', and a gradient in both types
    travelling = (6 - 3) * 2 * shared.policy.max_tokens_per_micro_batch * 4 * 1024 / GIB
    assert after.parts["activations"] - before.parts["activations"] == pytest.approx(travelling)


def test_stages_take_most_of_what_is_gathered_and_kept_away_and_no_state() -> None:
    """7B, 28 layers, an output layer of 4 V h beside layers of 4 L with checkpointing: 14.6, 7.5 + 7.3, ... layers."""
    shape = model_shape(qwen_description("7B"))
    staged = eight_gpus()
    staged.policy.data_parallel, staged.policy.parallel.pipeline_parallel = 2, 4
    assert [shape.of_fullest_stage(count, 1, checkpointing=True).layers for count in (1, 2, 4)] == [28, 15, 8]
    plain, found = (gpu_memory(config, shape, 80.0).training for config in (eight_gpus(), staged))
    assert plain["weights"] < found["weights"] < 2 * plain["weights"]
    interleaved = eight_gpus()
    interleaved.policy.data_parallel, interleaved.policy.parallel.pipeline_parallel = 2, 4
    interleaved.policy.parallel.virtual_stages = 2
    assert gpu_memory(interleaved, shape, 80.0).training["activations"] > found["activations"]


def test_a_larger_reward_model_takes_its_weights_and_what_its_pass_needs() -> None:
    """By hand: P without the output layer, 4 P / 8 of it; 2 (2 L + R) gathered, T 2 (5 h + 3 f) of the layer."""
    small, scorer = model_shape(qwen_description("0.5B")), model_shape(qwen_description("32B")).with_value_head()
    config = eight_gpus(max_tokens_per_micro_batch=64)
    config.reward.model.path, config.reward.model.max_tokens_per_micro_batch = "scorer", 16_384
    memory = gpu_memory(config, small, 80.0, {"reward_model": scorer})
    layer = 2 * 5120 * (5120 + 1024) + 3 * 5120 * 27_648 + (5120 + 2 * 1024) + 2 * 5120
    root = 152_064 * 5120 + 5120
    weights = 4 * (64 * layer + root) / 8 / GIB
    assert memory.training["reward_model"] == memory.generating["reward_model"] == pytest.approx(weights)
    assert memory.training["gathered"] == pytest.approx(2 * (2 * layer + root) / GIB)
    assert memory.training["activations"] == pytest.approx(16_384 * 2 * (5 * 5120 + 3 * 27_648) / GIB)
    assert memory.training["weights"] == gpu_memory(config, small, 80.0).training["weights"]
    with refused("reward.model.cpu_offload=true"):
        check_memory(config, memory, 20.0)
    config.reward.model.cpu_offload = True
    assert memory.cap == "reward.model.max_tokens_per_micro_batch"
    assert "reward_model" not in gpu_memory(config, small, 80.0, {"reward_model": scorer}).training
    host = host_memory(config, small, ranks=8, others={"reward_model": scorer})
    assert host["reward_model"] == pytest.approx(8 * weights)
    assert host["model as it is read"] == pytest.approx(8 * weights)


def test_a_dry_run_counts_every_model_of_the_run(
    documentation_workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = documentation_workspace / "scorer"
    write_model(scorer, **qwen_description("1.5B"), architectures=["Qwen2ForSequenceClassification"])
    overrides = ["model.path=Qwen/Qwen2.5-0.5B-Instruct", "algorithm.advantage=gae", "reward.model.path=scorer"]
    cluster = ["--dry-run", "--cluster", "nodes=1,gpus=8,gpu_gib=80,cpus=64"]
    assert main(["--config", "examples/launch/eight_gpus.yaml", *cluster, *overrides]) == 0, capsys.readouterr().err
    page = capsys.readouterr().out
    counts = "494,032,768 parameters, reference 494,032,768, critic 494,032,768, reward_model 1,543,714,304"
    assert counts in page
    assert "+ reference 0.2 + critic 0.7 + reward_model 0.7 + gradients 0.2 + gathered" in page
    assert "model as it is read 5.8" in page


@pytest.mark.parametrize(
    ("size", "ranks", "checkpointing", "fraction", "advised"),
    [
        ("7B", 8, False, 0.5, "model.gradient_checkpointing=true"),
        ("7B", 1, True, 0.5, "policy.cpu_offload=true"),
        ("32B", 64, True, 0.5, "rollout.gpu_memory_utilization=0.5"),
        ("7B", 4, True, 0.8, "generation needs 64.0 GiB"),
    ],
)
def test_what_does_not_fit_says_what_to_change(
    size: str, ranks: int, checkpointing: bool, fraction: float, advised: str
) -> None:
    config = eight_gpus(data_parallel=ranks, max_tokens_per_micro_batch=4096 if checkpointing else 16_384)
    config.model.gradient_checkpointing, config.rollout.gpu_memory_utilization = checkpointing, fraction
    with refused(advised):
        check_memory(config, gpu_memory(config, model_shape(qwen_description(size)), 80.0), 80.0)


def test_what_a_checkpoint_copies_is_in_host_memory() -> None:
    """12 bytes a trained parameter over all ranks, and a file of 1 GiB that each writes."""
    config, shape = eight_gpus(), model_shape(qwen_description("7B"))
    assert "checkpoint" not in host_memory(config, shape, ranks=8)
    config.run.checkpoint_every = 10
    copied = host_memory(config, shape, ranks=8)["checkpoint"]
    assert copied == pytest.approx(12 * shape.parameters / GIB + 8)
    config.model.lora.rank = 16
    assert host_memory(config, shape, ranks=8)["checkpoint"] < 9
    config.model.lora.rank, config.algorithm.advantage = 0, "gae"
    both = host_memory(config, shape, ranks=8, others={"critic": shape})["checkpoint"]
    assert both == pytest.approx(24 * shape.parameters / GIB + 8)


def test_gradients_that_wait_are_whole_or_on_the_gpu() -> None:
    shape = model_shape(qwen_description("7B"))
    deferred = eight_gpus()
    deferred.policy.parallel.defer_gradient_reduction = True
    assert gpu_memory(deferred, shape, 80.0).training["gradients"] == pytest.approx(4 * shape.parameters / GIB)
    copies = eight_gpus(cpu_offload=True)
    copies.policy.parallel.replicate = 2
    assert gpu_memory(copies, shape, 80.0).training["gradients"] == pytest.approx(shape.parameters / GIB)


def test_host_memory_is_held_against_that_of_a_node() -> None:
    check_host({"model as it is read": 30.0, "engines asleep": 20.0}, 50.0)
    check_host({"model as it is read": 30.0}, 0.0)
    with refused("node 0"):
        check_host({"model as it is read": 30.0, "engines asleep": 20.0}, 49.0)


def test_other_families_are_not_guessed_at() -> None:
    with refused("model.path is of type gemma2"):
        model_shape({"model_type": "gemma2"})
    with refused("hidden_size"):
        model_shape({"model_type": "llama"})
