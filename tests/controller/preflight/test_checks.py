import json
from pathlib import Path

import pytest

from controller.config import Config, load
from controller.preflight.checks import check
from controller.preflight.training_checks import check_replicate
from tests.controller.config_workspace import refusal, write_model
from workers.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
KL_LOSS = "algorithm.loss.kl_coefficient=0.1"

CUSTOM = ("algorithm.loss.name=custom", "algorithm.loss.function=workers.model.losses.token_ratio:cispo")


@pytest.fixture
def workspace(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(workspace / "hub"))
    (workspace / "losses.py").write_text("def mine(predictions, config): ...")
    return workspace


def test_the_configuration_of_the_workspace_is_accepted(workspace: Path) -> None:
    check(load("config.yaml"))


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_accepted(workspace: Path, recipe: Path) -> None:
    own = ["model.path=model", "data.train=train.jsonl", "data.validation=validation.jsonl"]
    small = ["data.max_prompt_tokens=32", "rollout.sampling.max_new_tokens=64", "policy.max_tokens=96"]
    shaped = ["reward.overlong_tokens=16"] if recipe.stem == "dapo" else []
    config = load(recipe, [*own, *small, *shaped, "reward.function=reward.py:reward"])
    check(config)
    assert config.run.name == recipe.stem


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.dtype=bfloat16",),
        ("rollout.engine={block_size: 16, kv_cache_dtype: fp8}",),
        ("data.validation=''",),
        ("policy.optimizer.schedule=cosine", "policy.optimizer.total_steps=10", "policy.optimizer.warmup_steps=9"),
        ("algorithm.loss.kl_coefficient=0.1", "reference.path=model", "reference.forward_max_tokens=96"),
        ("policy.max_tokens=96", "rollout.max_model_tokens=128"),
        ("batch.mini_batches=16",),
        ("batch.mini_batches=1", "batch.epochs=2", "algorithm.loss.clip_low=0.1", "policy.forward_max_tokens=96"),
        ("batch.mini_batches=1", "batch.epochs=2", "algorithm.loss.name=clip_cov"),
        (*CUSTOM, "algorithm.loss.columns=solution", "algorithm.loss.old_entropies=true"),
        (*CUSTOM, "batch.mini_batches=1", "algorithm.loss.old_entropies=true", "policy.forward_max_tokens=96"),
        ("resources.device=cuda", "policy.cpu_offload=true", "rollout.replicas=2"),
        ("resources.device=cuda", "rollout.placement=apart", "rollout.replicas=3", "rollout.tensor_parallel=4"),
        ("validation.sampling.temperature=0",),
        ("rollout.max_staleness=1", "batch.mini_batches=1", "algorithm.loss.clip_high=0.3"),
        ("rollout.max_staleness=1", "algorithm.loss.name=reinforce", "algorithm.loss.rollout_correction.weights=token"),
        ("policy.max_tokens=48", "policy.parallel.context_parallel=2"),
        ("policy.parallel.context_parallel=3", "policy.parallel.context_parallel_method=ring"),
        ("policy.parallel.tensor_parallel=2", "policy.parallel.replicate=2"),
        ("policy.parallel.replicate=2", "policy.parallel.defer_gradient_reduction=true"),
        ("policy.parallel.pipeline_parallel=2", "balance.order=makespan"),
        ("resources.device=cuda", "policy.parallel.tensor_parallel=2", "rollout.replicas=4"),
        ("rollout.sampling.top_p=0.9", "rollout.sampling.top_k=20"),
        ("algorithm.advantage=pass_at_k", "algorithm.pass_k=1"),
        ("algorithm.advantage=reinforce_plus_plus", "rollout.samples_per_prompt=1", "batch.prompts_per_step=8"),
        ("algorithm.loss.dual_clip=3", "algorithm.loss.clip_high=0.28"),
        ("algorithm.loss.name=kl_cov", "algorithm.loss.covariance_fraction=0.002"),
        ("algorithm.loss.aggregation=sequence_mean_token_sum_norm", "algorithm.loss.constant_length=64"),
        ("algorithm.loss.rollout_correction.weights=token", "algorithm.loss.rollout_correction.cap=3"),
        ("algorithm.loss.name=custom", "algorithm.loss.function=losses:mine"),
        ("algorithm.loss.name=custom", "algorithm.loss.function=losses.py:mine"),
    ],
    ids=" ".join,
)
def test_unusual_but_meaningful_combinations_are_accepted(workspace: Path, overrides: tuple[str, ...]) -> None:
    check(load("config.yaml", overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reference.path=model",), "reference.path=model has no effect without algorithm.loss.kl_coefficient above 0"),
        (
            (KL_LOSS, "algorithm.loss.kl_estimator=k2", "algorithm.loss.kl_correction=straight_through"),
            "algorithm.loss.kl_correction=straight_through takes the gradient of k2, which is that of",
        ),
        (
            (KL_LOSS, "algorithm.loss.kl_estimator=absolute", "algorithm.loss.kl_correction=importance"),
            "algorithm.loss.kl_correction=importance is for estimates whose mean is the KL, and algorithm.loss.kl_esti",
        ),
        (
            ("algorithm.advantage=reinforce_plus_plus", "algorithm.gamma=0.9", "algorithm.loss.name=gmpo"),
            "algorithm.loss.name=gmpo weighs a sequence by one advantage, and algorithm.gamma below 1 or",
        ),
        (
            ("algorithm.advantage=pass_at_k", "rollout.samples_per_prompt=4"),
            "algorithm.pass_k=4 is not below rollout.samples_per_prompt=4",
        ),
        (
            ("algorithm.advantage=maxrl", "rollout.samples_per_prompt=1"),
            "rollout.samples_per_prompt=1 leaves algorithm.advantage=maxrl nothing to compare",
        ),
        (
            ("algorithm.advantage=reinforce_plus_plus", "algorithm.groups_without_signal=drop"),
            "algorithm.groups_without_signal=drop with algorithm.advantage=reinforce_plus_plus leaves out",
        ),
        (
            (*CUSTOM, "algorithm.loss.columns=level"),
            "data.train: the first record of train.jsonl has no column 'level', which algorithm.loss.columns names.",
        ),
        (
            (*CUSTOM, "algorithm.loss.columns=reward"),
            "algorithm.loss.columns: a batch has a column 'reward' of its own; rename that of the records.",
        ),
        (
            (*CUSTOM, "algorithm.loss.columns=solution, solution"),
            "algorithm.loss.columns names 'solution' twice; name it once.",
        ),
        (
            ("batch.epochs=2", "algorithm.loss.name=reinforce"),
            "algorithm.loss.name=reinforce assumes samples of the current policy, and batch.epochs=2 trains on them",
        ),
        (
            ("batch.epochs=2", "policy.optimizer.warmup_steps=41"),
            "policy.optimizer.warmup_steps=41 is more than the 40 optimiser steps of the policy",
        ),
        (("algorithm.loss.name=custom",), "algorithm.loss.function='' must be module:function or path/file.py"),
        (
            ("algorithm.loss.name=custom", "algorithm.loss.function=gone.py:mine"),
            "algorithm.loss.function='gone.py:mine': there is no file gone.py.",
        ),
        (
            ("algorithm.loss.name=custom", "algorithm.loss.function=losses:gone"),
            "algorithm.loss.function='losses:gone': ",
        ),
        (
            ("algorithm.loss.aggregation=sequence_mean_token_sum_norm",),
            "algorithm.loss.aggregation=sequence_mean_token_sum_norm divides by algorithm.loss.constant_length",
        ),
        (
            ("batch.mini_batches=1", "algorithm.loss.name=clip_cov"),
            "algorithm.loss.name=clip_cov chooses tokens by their old log-probs",
        ),
        (("algorithm.loss.dual_clip=1",), "algorithm.loss.dual_clip=1.0 must be above 1"),
        (
            ("algorithm.loss.name=clip_cov", "algorithm.loss.clip_cov_low=5"),
            "algorithm.loss.clip_cov_low=5.0 is not below clip_cov_high=5.0",
        ),
        (("policy.optimizer.warmup_steps=21",), "policy.optimizer.warmup_steps=21 is more than the 20 optimiser steps"),
        (("rollout.samples_per_prompt=1",), "rollout.samples_per_prompt=1 leaves algorithm.advantage=grpo nothing"),
        (
            ("batch.mini_batches=33",),
            "batch.mini_batches=33 is more than the batch.prompts_per_step * rollout.samples_per",
        ),
        (("batch.mini_batches=17",), "policy.ranks=2 is more than the 1 sequences of a mini-batch"),
        (("rollout.sampling.temperature=0",), "rollout.sampling.temperature=0 samples equal responses"),
        (
            ("validation.samples=4", "validation.sampling.temperature=0"),
            "validation.samples=4 at validation.sampling.temperature=0 are 4 equal responses",
        ),
        (
            ("policy.max_tokens=95",),
            "policy.max_tokens=95 is below the longest possible sequence, data.max_prompt_tokens=32",
        ),
        (
            ("policy.max_tokens=96", "model.length_multiple=64"),
            "policy.max_tokens=96 is below the longest possible sequence, data.max_prompt_tokens=32 + "
            "rollout.sampling.max_new_tokens=64 = 96 tokens, 128 as a multiple of 64; raise the cap",
        ),
        (
            ("policy.max_tokens=47", "policy.parallel.context_parallel=2"),
            "policy.max_tokens=47 times policy.parallel.context_parallel=2 is below the longest possible sequence",
        ),
        (("policy.parallel.replicate=3",), "policy.parallel.replicate=3 does not divide policy.ranks=2"),
        (("balance.order=makespan",), "balance.order=makespan is of a pipeline; set policy.parallel.pipeline_parallel"),
        (
            ("resources.device=cuda", "policy.parallel.pipeline_parallel=2", "model.compile=true"),
            "model.compile is not tested with stages; set model.compile=false or policy.parallel.pipeline_parallel=1",
        ),
        (
            (
                "policy.parallel.context_parallel=2",
                "policy.parallel.context_parallel_method=ring",
                "model.attention=sdpa",
            ),
            "model.attention=sdpa has no effect without policy.parallel.context_parallel_method=ulysses",
        ),
        (
            (
                "resources.device=cuda",
                "policy.parallel.context_parallel=2",
                "policy.parallel.context_parallel_method=ring",
                "model.dtype=float32",
            ),
            "policy.parallel.context_parallel_method=ring needs half precision on GPUs",
        ),
        (
            ("policy.parallel.tensor_parallel=2", "model.layout=padded", "model.attention=eager"),
            "model.attention=eager is for padded rows that ranks do not share",
        ),
        (("policy.parallel.tensor_parallel=2", "model.lora.rank=8"), "adapters are not shared between ranks"),
        (
            ("policy.parallel.tensor_parallel=2", "model.compile=true", "resources.device=cuda"),
            "model.compile does not take layers that ranks share",
        ),
        (("policy.forward_max_tokens=95",), "policy.forward_max_tokens=95 is below the longest possible sequence"),
        (
            ("algorithm.loss.kl_coefficient=0.1", "reference.forward_max_tokens=95"),
            "reference.forward_max_tokens=95 is below the longest possible sequence",
        ),
        (("rollout.max_model_tokens=95",), "rollout.max_model_tokens=95 is below the 96 tokens"),
        (
            ("rollout.max_model_tokens=96", "validation.sampling.max_new_tokens=65"),
            "rollout.max_model_tokens=96 is below the 97 tokens",
        ),
        (
            ("rollout.max_staleness=1", "resources.device=cuda"),
            "rollout.max_staleness=1 generates while the policy trains, but rollout.placement=colocated has them take",
        ),
        (
            ("rollout.max_staleness=2", "algorithm.groups_without_signal=replace", "reward.model.path=model"),
            "algorithm.groups_without_signal=replace needs rewards as samples come, but reward.model.path scores them",
        ),
        (
            ("rollout.max_staleness=2", "algorithm.advantage=remax"),
            "algorithm.advantage=remax compares samples with a greedy response of the same weights, but with",
        ),
        (
            ("rollout.max_staleness=1", "algorithm.loss.name=reinforce"),
            "algorithm.loss.name=reinforce assumes samples of the current policy, but rollout.max_staleness=1 makes",
        ),
        (
            ("rollout.placement=colocated",),
            "rollout.placement=colocated needs GPUs and resources.device=cpu gives none",
        ),
        (("rollout.placement=apart",), "rollout.placement=apart needs GPUs"),
        (
            ("resources.device=cuda", "rollout.placement=shared_memory"),
            "rollout.placement=shared_memory is for CPUs and the run uses GPUs",
        ),
        (
            ("resources.device=cuda", "rollout.replicas=3"),
            "rollout.replicas * rollout.tensor_parallel = 3 GPUs are more",
        ),
        (("model.attention=varlen",), "model.attention=varlen is a CUDA kernel"),
        (("model.attention=flash",), "model.attention=flash is a CUDA kernel"),
        (("model.attention=flash3",), "model.attention=flash3 is a CUDA kernel"),
        (("model.attention=eager",), "model.attention=eager is for padded rows that ranks do not share"),
        (
            ("model.attention=eager", "model.layout=padded", "model.forward_layout=packed"),
            "model.attention=eager is for padded rows that ranks do not share",
        ),
        (("model.attention=varlen", "model.layout=padded"), "model.attention=varlen is a CUDA kernel"),
        (("model.forward_length_multiple=64", "policy.max_tokens=96"), "policy.forward_max_tokens=96 is below"),
        (
            ("resources.device=cuda", "model.attention=varlen", "model.dtype=float32"),
            "model.attention=varlen takes half precision only",
        ),
        (("run.name=a/b",), "run.name='a/b' names a folder below run.dir"),
        (
            ("run.dir=config.yaml",),
            "run.dir: config.yaml/test cannot be written, config.yaml is not a writable folder.",
        ),
        (("resources.ray_address=ray://head:10001",), "resources.ray_address=ray://head:10001: Ray Client is not"),
        (
            ("model.path=nowhere/at/all",),
            "model.path: there is no folder nowhere/at/all and no such model in the local",
        ),
        (
            ("model.path=Qwen/Nothing",),
            "model.path: there is no folder Qwen/Nothing and no such model in the local hub ca",
        ),
        (("data.train=gone.jsonl",), "data.train: there is no file gone.jsonl"),
        (("data.validation=gone.jsonl",), "data.validation: there is no file gone.jsonl"),
        (("data.train=reward.py",), "data.train: reward.py is none of .jsonl, .json, .parquet, .arrow, nor a folder"),
        (("data.train=model",), "data.train: model/config.json must be a list of records"),
        (("data.prompt_key=question",), "data.train: train.jsonl:1 has no 'question'; set data.prompt_key"),
        (("data.train=''",), "one of data.train and data.sources (several, by w"),
        (
            ("data.sources={train.jsonl: 1}",),
            "one of data.train and data.sources (several, by weight) must be set, and not both.",
        ),
        (("data.train=''", "data.sources={train.jsonl: 0}"), "data.sources: the weight of train.jsonl must be above 0"),
        (("data.source_key=kind",), "data.train: the first record of train.jsonl has no column data.source_key='kind'"),
        (("data.system_prompt=Add.",), "data.train: the prompts of train.jsonl are texts, but data.system_prompt goes"),
        (("reward.overlong_tokens=64",), "reward.overlong_tokens=64 punishes every response"),
        (
            ("algorithm.advantage=maxrl", "reward.overlong_tokens=8"),
            "algorithm.advantage=maxrl takes rewards as rates of success, and reward.overlong_tokens makes",
        ),
        (
            ("reward.model.path=model", "reward.model.max_tokens=96", "validation.sampling.max_new_tokens=65"),
            "reward.model.max_tokens=96 is below the longest possible sequence, data.max_prompt_tokens=32 + "
            "validation.sampling.max_new_tokens=65 = 97 tokens",
        ),
        (("data.curriculum=gone.py:order",), "data.curriculum='gone.py:order': there is no file gone.py."),
        (("reward.function=''",), "one of reward.function and reward.functions (several"),
        (
            ("reward.function=''", "reward.functions={reward.py:reward: 1, config.py:reward: 1}"),
            "reward.functions='config.py:reward': there is no file config.py",
        ),
        (("reward.function=reward",), "reward.function='reward' must be module:function or path/file.py:function."),
        (("reward.function=reward.py:not-a-name",), "reward.function='reward.py:not-a-name' must be module:function"),
        (("reward.function=gone.py:reward",), "reward.function='gone.py:reward': there is no file gone.py."),
        (("reward.function=gone.sub:reward",), "reward.function='gone.sub:reward': there is no module gone.sub"),
        (("reward.function=reward.py:rewards",), "reward.function='reward.py:rewards': reward.py defines no rewards."),
        (("reward.function=reward.py:RuntimeError",), "reward.function='reward.py:RuntimeError': reward.py defines no"),
        (
            ("reward.function=config.yaml:reward",),
            "reward.function='config.yaml:reward': there is no module config.yaml",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_work_is_refused(workspace: Path, overrides: tuple[str, ...], message: str) -> None:
    assert refusal(*overrides).startswith(message)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model/config.json", None, "model.path: folder model holds no model, it has no config.json."),
        ("model/config.json", "{", "model.path: model/config.json is not valid JSON: "),
        ("model/config.json", "[]", "model.path: model/config.json is not a JSON object."),
        ("model/model.safetensors", None, "model.path=model: model has no weights "),
        ("model/tokenizer.json", None, "model.path=model: model has no tokenizer "),
        ("train.jsonl", "", "data.train: train.jsonl has no records."),
        (
            "train.jsonl",
            '[{"prompt": "1"}]',
            "data.train: train.jsonl:1 has no 'prompt'; set data.prompt_key",
        ),
        ("train.jsonl", '{"prompt": 3}', "data.train: train.jsonl:1 has a prompt of type int"),
        ("validation.jsonl", '{\n"prompt": "1"}', "data.validation: validation.jsonl:1 is not JSON: "),
        ("reward.py", "def reward(:", "reward.function='reward.py:reward': reward.py is not valid Python: "),
        ("reward.py", "print(reward)", "reward.function='reward.py:reward': reward.py defines no reward."),
    ],
)
def test_a_file_that_is_gone_or_broken_is_named(workspace: Path, file: str, content: str | None, message: str) -> None:
    if content is None:
        (workspace / file).unlink()
    else:
        (workspace / file).write_text(content)
    assert refusal().startswith(message)


def test_a_folder_of_adapters_is_no_model(workspace: Path) -> None:
    (workspace / "model/config.json").rename(workspace / "model/adapter_config.json")
    assert refusal().startswith("model.path=model: the folder holds LoRA adapters, not a model. ")


def test_chat_messages_need_a_chat_template(workspace: Path) -> None:
    record = {"prompt": [{"role": "user", "content": "1+1="}]}
    (workspace / "train.jsonl").write_text(json.dumps(record))
    assert "are chat messages, but the tokenizer of model.path=model has no chat template" in refusal()
    (workspace / "model/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    check(load("config.yaml"))


def test_ranks_that_share_experts_must_divide() -> None:
    """Ranks with different tokens: those of a tensor-parallel group have different ones, too."""
    config = Config()
    config.policy.ranks, config.policy.parallel.replicate, config.policy.parallel.context_parallel = 6, 2, 2
    for divisor in (1, 2, 3, 6):
        config.policy.parallel.expert_parallel = divisor
        check_replicate(config)
    config.policy.parallel.expert_parallel = 4
    with pytest.raises(ConfigError, match=r"expert_parallel=4 does not divide .* = 6 ranks"):
        check_replicate(config)
    config.policy.parallel.tensor_parallel = 2
    check_replicate(config)


def test_a_model_of_the_local_hub_cache_is_found_by_name(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = workspace / "hub" / "models--someone--small"
    snapshot = hub / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0" * 40)
    write_model(snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workspace / "hub"))
    check(load("config.yaml", ["model.path=someone/small"]))


@pytest.mark.parametrize("place", ["package.module", "namespace.module", "reward.py"])
def test_a_reward_function_is_found_without_importing_anything(workspace: Path, place: str) -> None:
    for package in ("package", "namespace"):
        (workspace / package).mkdir()
        (workspace / package / "module.py").write_text("from elsewhere import reward\nraise RuntimeError")
    (workspace / "package/__init__.py").write_text("raise RuntimeError")
    check(load("config.yaml", [f"reward.function={place}:reward"]))


def test_auto_device_is_the_cpu_where_gpus_are_hidden(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = load("config.yaml", ["resources.device=auto"])
    assert not config.uses_gpus
    assert config.rollout_placement == "shared_memory"


def test_a_run_that_is_there_is_not_written_over(workspace: Path) -> None:
    config = load("config.yaml")
    config.run_folder.mkdir(parents=True)
    check(config)
    (config.run_folder / "config.yaml").touch()
    with pytest.raises(ConfigError, match="holds a run already; choose another name, remove it, or go on"):
        check(config)
