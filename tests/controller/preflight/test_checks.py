import json
from pathlib import Path

import pytest

from controller.config import Config, load
from controller.fit import main
from controller.preflight.checks import check
from controller.preflight.training_checks import check_parallel
from tests.controller.config_workspace import check_everything, refusal, write_model
from tests.refusals import refused, refused_rows, rows
from workers.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
SHORT = {
    "CUSTOM": (
        "algorithm.loss.name=custom",
        "algorithm.loss.function=workers.model.losses.ratio_losses:cispo",
    ),
    "PPO": ("algorithm.advantage=gae",),
    "KL": ("algorithm.loss.kl_coefficient=0.1",),
    "REWARD_KL": ("algorithm.kl_in_reward.coefficient=0.1",),
    "FLOAT32": ("model.dtype=float32",),
    "JUDGE": (
        "reward.judge.model=model",
        "reward.judge.max_prompt_tokens=64",
        "reward.judge.sampling.max_new_tokens=64",
    ),
}


@pytest.fixture
def workspace(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(workspace / "hub"))
    (workspace / "losses.py").write_text("def mine(predictions, config): ...")
    write_model(workspace / "judge", architectures=["Qwen2ForSequenceClassification"])
    return workspace


@pytest.mark.parametrize(
    "recipe", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_recipe_is_accepted(workspace: Path, recipe: Path) -> None:
    own = ["model.path=model", "data.train=train.jsonl", "data.validation=validation.jsonl"]
    small = [
        "data.max_prompt_tokens=32",
        "rollout.sampling.max_new_tokens=64",
        "policy.max_tokens_per_micro_batch=96",
    ]
    shaped = ["reward.overlong_tokens=16"] if recipe.stem == "dapo" else []
    config = load(recipe, [*own, *small, *shaped, "reward.function=reward.py:reward"])
    check(config)
    assert config.run.name == recipe.stem


ACCEPTED = r"""
model.dtype=bfloat16
"rollout.engine={block_size: 16, kv_cache_dtype: fp8}"
data.validation=
policy.optimizer.name=sgd policy.optimizer.schedule=wsd policy.optimizer.warmup_ratio=0.5
policy.optimizer.schedule=cosine policy.optimizer.total_steps=10 policy.optimizer.warmup_steps=9
algorithm.loss.kl_coefficient=0.1 reference.path=model reference.forward_max_tokens_per_micro_batch=96
policy.max_tokens_per_micro_batch=96 rollout.max_model_tokens=128
batch.mini_batches=16
batch.mini_batches=1 batch.epochs=2 algorithm.loss.clip_low=0.1 policy.forward_max_tokens_per_micro_batch=96
batch.mini_batches=1 batch.epochs=2 algorithm.loss.name=clip_cov
CUSTOM algorithm.loss.columns=solution algorithm.loss.old_entropies=true
CUSTOM batch.mini_batches=1 algorithm.loss.old_entropies=true policy.forward_max_tokens_per_micro_batch=96
resources.device=cuda policy.cpu_offload=all rollout.replicas=2
resources.device=cuda rollout.placement=apart rollout.replicas=3 rollout.tensor_parallel=4
validation.sampling.temperature=0
rollout.weight_sync=delta model.dtype=bfloat16 rollout.replicas=2
rollout.weight_sync=delta resources.device=cuda rollout.placement=apart rollout.replicas=2
rollout.max_staleness=1 batch.mini_batches=1 algorithm.loss.clip_high=0.3
rollout.max_staleness=1 algorithm.loss.name=reinforce algorithm.loss.rollout_correction.weights=token
policy.max_tokens_per_micro_batch=48 policy.parallel.context_parallel=2
policy.parallel.context_parallel=3 policy.parallel.context_parallel_method=ring
policy.parallel.tensor_parallel=2 policy.parallel.replicate=2
policy.parallel.replicate=2 policy.parallel.defer_gradient_reduction=true
policy.parallel.pipeline_parallel=2 balance.order=makespan
resources.device=cuda policy.parallel.tensor_parallel=2 rollout.replicas=4
resources.device=cuda model.batch_invariant=true
rollout.sampling.top_p=0.9 rollout.sampling.top_k=20
algorithm.advantage=pass_at_k algorithm.pass_k=1
algorithm.advantage=reinforce_plus_plus rollout.samples_per_prompt=1 batch.prompts_per_step=8
algorithm.loss.dual_clip=3 algorithm.loss.clip_high=0.28
algorithm.loss.name=kl_cov algorithm.loss.covariance_fraction=0.002
algorithm.loss.aggregation=sequence_mean_token_sum_norm algorithm.loss.constant_length=64
algorithm.loss.rollout_correction.weights=token algorithm.loss.rollout_correction.cap=3
algorithm.loss.name=custom algorithm.loss.function=losses:mine
algorithm.loss.name=custom algorithm.loss.function=losses.py:mine
PPO rollout.samples_per_prompt=1
PPO critic.warmup_steps=9 critic.loss.clip=0 critic.path=model
PPO batch.mini_batches=1 critic.loss.aggregation=sequence_mean_token_mean
PPO policy.parallel.context_parallel=2 critic.max_tokens_per_micro_batch=48
PPO critic.optimizer.schedule=cosine critic.optimizer.total_steps=9
PPO critic.optimizer.state_dtype=bfloat16 policy.optimizer.state_dtype=int8 policy.optimizer.name=muon
PPO model.lora.rank=8 model.layout=padded
reward.model.path=judge reward.model.weight=-0.5 reward.model.max_tokens_per_micro_batch=96
JUDGE reward.function= 'reward.judge.parser=Grade (\d)'
JUDGE reward.judge.form=pairwise reward.judge.parser=losses.py:mine
JUDGE reward.judge.samples=4 reward.judge.sampling.temperature=1
reward.judge.model=policy reward.judge.max_prompt_tokens=64 reward.judge.sampling.max_new_tokens=64
"""


@rows(ACCEPTED, **SHORT)
def test_unusual_but_meaningful_combinations_are_accepted(
    workspace: Path, overrides: list[str]
) -> None:
    check(load("config.yaml", overrides))


REFUSED = """
reference.path=model
algorithm.loss.kl_correction=straight_through KL algorithm.loss.kl_estimator=k2
algorithm.loss.kl_correction=importance KL algorithm.loss.kl_estimator=absolute
algorithm.loss.name=gmpo algorithm.advantage=reinforce_plus_plus algorithm.gamma=0.9
algorithm.pass_k algorithm.advantage=pass_at_k rollout.samples_per_prompt=4
rollout.samples_per_prompt=1
rollout.samples_per_prompt=1 algorithm.advantage=maxrl
algorithm.zero_variance_groups=drop algorithm.advantage=reinforce_plus_plus
algorithm.loss.columns=reward CUSTOM
"algorithm.loss.columns=solution, solution" CUSTOM
algorithm.loss.name=reinforce batch.epochs=2
policy.optimizer.warmup_steps=21
policy.optimizer.warmup_steps=41 batch.epochs=2
policy.optimizer.warmup_ratio=0.5 policy.optimizer.warmup_steps=1
policy.optimizer.function policy.optimizer.name=custom
policy.optimizer.function=losses.py:gone policy.optimizer.name=custom
policy.optimizer.schedule_function=losses.py:gone policy.optimizer.schedule=custom
policy.cpu_offload=optimizer policy.optimizer.name=sgd resources.device=cuda
critic.cpu_offload=all critic.optimizer.name=muon resources.device=cuda PPO
policy.optimizer.state_dtype=bfloat16 policy.cpu_offload=optimizer resources.device=cuda
critic.optimizer.state_dtype=int8 critic.cpu_offload=optimizer resources.device=cuda PPO
policy.optimizer.state_dtype=int8 policy.optimizer.name=sgd
policy.optimizer.state_dtype=bfloat16 policy.optimizer.name=custom policy.optimizer.function=math:fsum
algorithm.loss.function algorithm.loss.name=custom
algorithm.loss.function=gone.py:mine algorithm.loss.name=custom
algorithm.loss.function=losses:gone algorithm.loss.name=custom
algorithm.loss.aggregation=sequence_mean_token_sum_norm
algorithm.loss.name=clip_cov batch.mini_batches=1
algorithm.loss.dual_clip=1
algorithm.loss.clip_cov_low=5 algorithm.loss.name=clip_cov
batch.mini_batches=33
policy.data_parallel batch.mini_batches=17
rollout.sampling.temperature=0
validation.samples=4 validation.sampling.temperature=0
policy.max_tokens_per_micro_batch=95
policy.max_tokens_per_micro_batch=96 model.length_multiple=64
policy.max_tokens_per_micro_batch=47 policy.parallel.context_parallel=2
policy.max_patches_per_micro_batch=96
policy.parallel.replicate=3
policy.parallel.context_parallel_degree=auto policy.parallel.context_parallel=3
policy.parallel.context_parallel_degree=auto policy.parallel.context_parallel=2 policy.parallel.pipeline_parallel=2
policy.parallel.context_parallel_degree=auto policy.parallel.context_parallel=2 model.layout=padded
policy.parallel.context_parallel_degree=auto policy.parallel.context_parallel=2 balance.algorithm=verl
policy.parallel.context_parallel_degree=auto policy.parallel.context_parallel=2 balance.count_multiple=2
policy.parallel.context_parallel_degree=auto policy.parallel.context_parallel=2 model.router_z_loss_coefficient=0.1
policy.parallel.context_parallel_degree=auto policy.parallel.context_parallel=2 algorithm.loss.name=kl_cov
balance.order=makespan
model.compile=always
model.compile=never
model.attention=sdpa policy.parallel.context_parallel=2 policy.parallel.context_parallel_method=ring
policy.parallel.context_parallel_method=ring policy.parallel.context_parallel=2 resources.device=cuda FLOAT32
model.attention=eager policy.parallel.tensor_parallel=2 model.layout=padded
model.compile=always policy.parallel.tensor_parallel=2 resources.device=cuda
model.batch_invariant model.batch_invariant=true
model.lora.rank=8 model.batch_invariant=true resources.device=cuda
model.dtype=float32 model.batch_invariant=true resources.device=cuda
rollout.tensor_parallel=2 model.batch_invariant=true resources.device=cuda
policy.parallel.context_parallel=2 model.batch_invariant=true resources.device=cuda
rollout.engine.kv_cache_dtype=fp8 model.batch_invariant=true resources.device=cuda
model.lora.policies=2 model.lora.rank=8
model.lora.rank=513 model.lora.policies=2
model.lora.rank=513 model.lora.sync=adapters
model.lora.sync model.lora.sync=adapters
model.lora.target_parameters model.lora.target_parameters=experts.down_proj
model.lora.target_parameters=experts.down_proj model.lora.sync=adapters model.lora.rank=8
model.lora.rank=12 model.lora.target_parameters=experts.down_proj resources.device=cuda
model.base_dtype=nf4 model.lora.rank=8 model.lora.sync=adapters
model.base_dtype=int8 model.lora.rank=8 model.lora.policies=2
model.base_dtype model.base_dtype=int8
rollout.placement=colocated model.lora.sync=adapters model.lora.rank=8 resources.device=cuda
rollout.weight_sync=delta model.lora.sync=adapters model.lora.rank=8
rollout.placement=colocated model.lora.policies=2 model.lora.rank=8 resources.device=cuda
policy.forward_max_tokens_per_micro_batch=95
policy.forward_max_tokens_per_micro_batch model.forward_length_multiple=64 policy.max_tokens_per_micro_batch=96
reference.forward_max_tokens_per_micro_batch=95 KL
rollout.max_model_tokens=95
rollout.max_model_tokens=96 validation.sampling.max_new_tokens=65
rollout.max_staleness=1 resources.device=cuda
algorithm.zero_variance_groups=replace rollout.max_staleness=2 reward.model.path=model
algorithm.advantage=remax rollout.max_staleness=2
algorithm.loss.name=reinforce rollout.max_staleness=1
rollout.placement=colocated
rollout.placement=apart
rollout.weight_sync=delta resources.device=cuda rollout.replicas=2
rollout.weight_sync=delta FLOAT32 resources.device=cuda rollout.placement=apart rollout.replicas=2
rollout.weight_sync=delta
rollout.kv_cache_after_update=keep model.train_vision=true rollout.max_staleness=1
rollout.placement=shared_memory resources.device=cuda
rollout.replicas=3 resources.device=cuda
model.attention=varlen
model.attention=flash
model.attention=flash3
model.attention=flash4
model.attention=eager
model.attention=eager model.layout=padded model.forward_layout=packed
model.attention=varlen model.layout=padded
model.attention=varlen resources.device=cuda FLOAT32
run.name=a/b
run.dir=config.yaml
resources.ray_address=ray://head:10001
model.path=nowhere/at/all
model.path=Qwen/Nothing
data.train=gone.jsonl
data.image_pixels.min=2 data.image_pixels.max=1
data.validation=gone.jsonl
data.train=reward.py
data.train=model
data.prompt_key data.prompt_key=question
data.train data.train=
data.sources "data.sources={train.jsonl: 1}"
"data.sources={train.jsonl: 0}" data.train=
data.source_key data.source_key=kind
data.system_prompt data.system_prompt=Add.
reward.overlong_tokens=64
algorithm.advantage=maxrl reward.overlong_tokens=8
data.curriculum=gone.py:order
reward.function reward.function=
reward.functions reward.function= "reward.functions={reward.py:reward: 1, config.py:reward: 1}"
reward.function=reward
reward.function=reward.py:not-a-name
reward.function=gone.py:reward
reward.function=gone.sub:reward
reward.function=reward.py:rewards
reward.function=reward.py:RuntimeError
reward.function=config.yaml:reward
algorithm.zero_variance_groups=drop REWARD_KL
algorithm.advantage=maxrl REWARD_KL
algorithm.kl_in_reward.horizon=31 REWARD_KL algorithm.kl_in_reward.target=6
critic.warmup_steps=10 PPO
critic.optimizer.warmup_steps=21 PPO
policy.optimizer.warmup_steps=11 PPO critic.warmup_steps=5
critic.max_tokens_per_micro_batch=95 PPO
critic.forward_max_tokens_per_micro_batch=95 PPO
algorithm.loss.name=gmpo PPO
policy.parallel.tensor_parallel=2 PPO
algorithm.zero_variance_groups=drop PPO
reward.model.weight=0 reward.model.path=judge
reward.model.path=judge reward.model.paths.a=judge
reward.model.weights.b=2 reward.model.paths.a=judge
reward.model.weights.a=0 reward.model.paths.a=judge
reward.model.paths='{"a b": judge}'
reward.model.normalize=running
reward.model.max_tokens_per_micro_batch=95 reward.model.path=judge
reward.model.max_tokens_per_micro_batch=96 reward.model.path=judge validation.sampling.max_new_tokens=65
policy.parallel.tensor_parallel=2 reward.model.path=judge
reward.model.path=model
reward.judge.weight=2
reward.judge.model=gone
reward.judge.weight=0 JUDGE
'reward.judge.parser=[[7]]' JUDGE
'reward.judge.parser=(7' JUDGE
reward.judge.parser=losses.py:gone JUDGE
reward.judge.samples=2 JUDGE
reward.judge.min_grade=10 JUDGE
reward.judge.min_grade=0 JUDGE reward.judge.form=pairwise
reward.judge.opponents=3 JUDGE
reward.judge.opponents=8 JUDGE reward.judge.form=pairwise
reward.judge.form=pairwise JUDGE algorithm.advantage=remax
reward.judge.form JUDGE reward.judge.form=pairwise reward.function=
reward.judge.max_prompt_tokens JUDGE reward.judge.max_prompt_tokens=120
reward.judge.replicas=2 reward.judge.model=policy
reward.judge.sampling.min_new_tokens=65 JUDGE
rollout.engine JUDGE reward.judge.engine={model:x}
model.router_replay=replay resources.device=cuda
policy.parallel.context_parallel=8
policy.parallel.tensor_parallel=4
policy.parallel.expert_parallel=2
policy.parallel.virtual_stages=40 policy.parallel.pipeline_parallel=2
model.lora.target_modules=q_proj,c_attn model.lora.rank=4
model.base_dtype=bfloat16 model.lora.rank=4
policy.parallel.tensor_parallel=2 model.base_dtype=nf4 model.lora.rank=4
rollout.tensor_parallel=3
data.max_prompt_tokens=65
rollout.max_model_tokens=129
rollout.cpu_kv_cache_gib=3.6e-4
rollout.cpu_kv_cache_gib=3e-4 rollout.max_model_tokens=97
"""


@refused_rows(REFUSED, **SHORT)
def test_what_cannot_work_is_refused(
    workspace: Path, named: str, overrides: list[str]
) -> None:
    with refused(named):
        check_everything(*overrides)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "model/config.json",
            None,
            "model.path: folder model holds no model, it has no config.json.",
        ),
        ("model/config.json", "{", "model.path: model/config.json is not valid JSON: "),
        ("model/config.json", "[]", "model.path: model/config.json is not a JSON object."),
        ("model/model.safetensors", None, "model.path=model: model has no weights "),
        ("model/tokenizer.json", None, "model.path=model: model has no tokenizer "),
        ("train.jsonl", "", "data.train: train.jsonl has no records."),
        (
            "train.jsonl",
            '[{"prompt": "1"}]',
            "data.train: train.jsonl:1 is a list in place of a record a line.",
        ),
        (
            "train.jsonl",
            '{"prompt": 3}',
            "data.train: train.jsonl:1 has a prompt of type int",
        ),
        (
            "validation.jsonl",
            '{\n"prompt": "1"}',
            "data.validation: validation.jsonl:1 is not JSON: ",
        ),
        (
            "reward.py",
            "def reward(:",
            "reward.function='reward.py:reward': reward.py is not valid Python: ",
        ),
        (
            "reward.py",
            "print(reward)",
            "reward.function='reward.py:reward': reward.py defines no reward.",
        ),
    ],
)
def test_a_file_that_is_gone_or_broken_is_named(
    workspace: Path, file: str, content: str | None, message: str
) -> None:
    if content is None:
        (workspace / file).unlink()
    else:
        (workspace / file).write_text(content)
    assert refusal().startswith(message)


def test_a_folder_of_adapters_is_no_model(workspace: Path) -> None:
    (workspace / "model/config.json").rename(workspace / "model/adapter_config.json")
    assert refusal().startswith(
        "model.path=model: the folder holds LoRA adapters, not a model. "
    )


def test_chat_messages_need_a_chat_template(workspace: Path) -> None:
    record = {"prompt": [{"role": "user", "content": "1+1="}]}
    (workspace / "train.jsonl").write_text(json.dumps(record))
    assert (
        "are chat messages, but the tokenizer of model.path=model has no chat template"
        in refusal()
    )
    (workspace / "model/tokenizer_config.json").write_text(
        '{"chat_template": "{{ messages }}"}'
    )
    check(load("config.yaml"))


def test_ranks_that_share_experts_must_divide() -> None:
    """Ranks with different tokens: those of a tensor-parallel group have different ones, too."""
    config = Config()
    (
        config.policy.data_parallel,
        config.policy.parallel.replicate,
        config.policy.parallel.context_parallel,
    ) = (
        6,
        2,
        2,
    )
    for divisor in (1, 2, 3, 6):
        config.policy.parallel.expert_parallel = divisor
        check_parallel(config)
    config.policy.parallel.expert_parallel = 4
    with pytest.raises(
        ConfigError, match=r"expert_parallel=4 does not divide .* = 6 ranks"
    ):
        check_parallel(config)
    config.policy.parallel.tensor_parallel = 2
    check_parallel(config)


def test_a_model_of_the_local_hub_cache_is_found_by_name(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = workspace / "hub" / "models--someone--small"
    snapshot = hub / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0" * 40)
    write_model(snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workspace / "hub"))
    check(load("config.yaml", ["model.path=someone/small"]))


@pytest.mark.parametrize("place", ["package.module", "namespace.module", "reward.py"])
def test_a_reward_function_is_found_without_importing_anything(
    workspace: Path, place: str
) -> None:
    for package in ("package", "namespace"):
        (workspace / package).mkdir()
        (workspace / package / "module.py").write_text(
            "from elsewhere import reward\nraise RuntimeError"
        )
    (workspace / "package/__init__.py").write_text("raise RuntimeError")
    check(load("config.yaml", [f"reward.function={place}:reward"]))


def test_auto_device_is_the_cpu_where_gpus_are_hidden(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = load("config.yaml", ["resources.device=auto"])
    assert not config.uses_gpus
    assert config.rollout_placement == "shared_memory"


def test_a_run_that_is_there_is_not_written_over(workspace: Path) -> None:
    config = load("config.yaml")
    config.run_folder.mkdir(parents=True)
    check(config)
    (config.run_folder / "config.yaml").touch()
    with pytest.raises(
        ConfigError,
        match=r"holds a run already. Choose another name, remove it, or resume it",
    ):
        check(config)


def test_what_is_a_critic_leaves_at_zero_follows_the_policy(workspace: Path) -> None:
    config = load(
        "config.yaml",
        ["algorithm.advantage=gae", "critic.warmup_steps=4", "model.lora.rank=8"],
    )
    assert [
        config.limits[f"critic.{name}"].max_tokens for name in ("update", "values")
    ] == [4096, 4096]
    assert (config.total_optimizer_steps, config.schedule_steps("critic")) == (12, 20)
    assert (config.model_of("critic").path, config.model_of("critic").lora.rank) == (
        "model",
        0,
    )
    told = load(
        "config.yaml",
        [
            "algorithm.advantage=gae",
            "critic.max_tokens_per_micro_batch=5000",
            "critic.path=other",
        ],
    )
    assert [told.limits[f"critic.{name}"].max_tokens for name in ("update", "values")] == [
        5000,
        5000,
    ]
    assert told.model_of("critic").path == "other"


def test_a_reward_model_may_stand_alone(workspace: Path) -> None:
    alone = load("config.yaml", ["reward.model.path=judge", "reward.function=''"])
    check(alone)
    assert alone.reward.weights == {}
    assert alone.training_roles == ("policy", "reward_model")
    assert (
        alone.model_of("reward_model").path,
        alone.limits["reward_model.scores"].max_tokens,
    ) == (
        "judge",
        4096,
    )


def test_wrong_settings_of_one_check_come_together_and_a_fault_of_another_hides_none(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        "algorithm.pass_k=8",
        "rollout.sampling.temperature=0",
        "policy.optimizer.warmup_steps=99",
        "reward.overlong_tokens=9999",
    ]
    arguments = ["--config", "config.yaml", "algorithm.advantage=pass_at_k", *wrong]
    assert main(arguments) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(wrong), told
    assert all(any(setting.partition("=")[0] in line for line in told) for setting in wrong)

    def broken(config: object) -> None:
        raise KeyError("a fault of the check")

    monkeypatch.setattr("controller.preflight.checks.check_trackers", broken)
    assert main(arguments) == 2
    assert capsys.readouterr().err.splitlines() == told
    with pytest.raises(KeyError):
        check(load("config.yaml"))
