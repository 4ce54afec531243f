"""What a shell or a launcher decides is decided in the same way, or named."""

from pathlib import Path
from typing import Any

import pytest

from ballast.commands import main
from ballast.migrate.reading import parse_value, read_recipe
from ballast.migrate.translation import migrate

CONDITION = """backend=megatron
if {condition}; then
    SIZE=1
elif [ "$backend" = "megatron" ]; then
    SIZE=2
else SIZE=3
fi
python main.py trainer.size=$SIZE trainer.other=$((SIZE * 2)){more}
"""


@pytest.mark.parametrize(
    ("condition", "size"),
    [
        ('[ "$backend" = "fsdp" ]', 2),
        ('[ "$backend" = "megatron" ]', 1),
        ('[[ $backend == "fsdp" ]]', 2),
        ('[ "${backend}" != fsdp ]', 1),
        ('[ -z "$backend" ]', 2),
        ('[ -n "${backend}" ]', 1),
        ("[ 3 -gt 2 ]", 1),
        ('[[ 3 -gt 2 && "$backend" == fsdp ]]', 2),
        ('[[ 3 -gt 2 || "$backend" == fsdp ]]', 1),
    ],
)
def test_the_branch_that_a_shell_takes_is_read(
    condition: str, size: int, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(CONDITION.format(condition=condition, more=""))
    recipe = read_recipe([str(script)])
    assert dict(recipe) == {"trainer.size": size, "trainer.other": 2 * size}
    assert recipe.notes == []


def test_a_branch_that_only_a_shell_knows_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'if [ "$1" = long ]; then\n python -m x data.max_response_length=9 actor_rollout_ref.model.path=m\nfi\n'
    )
    assert read_recipe([str(script)])["data.max_response_length"] == 9
    assert main(["migrate", str(script)]) == 0
    assert "if [ $1 = long ]: only a shell knows it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (': "${N:=256}"\npython x a.b=$N', {"a.b": 256}),
        (': "${N:=4}"\n: "${M:=$((N * 2))}"\npython x a.b=$M', {"a.b": 8}),
        ("N=2\n: ${N:=4}\npython x a.b=${N}", {"a.b": 2}),
        ("python x a.b=${N-7} a.c=${M:-8}", {"a.b": 7, "a.c": 8}),
        ('D=$(cd "$(dirname x)/.." && pwd)\npython x --folder $D/a --n 2', {"n": 2}),
        (
            "accelerate launch --num_processes 8 sft.py --size 4",
            {"num_processes": 8, "size": 4},
        ),
        (
            "ray job submit --address http://x --runtime-env-json='{}' -- python3 t.py --n 2",
            {"n": 2},
        ),
        (
            "trl grpo --eval_strategy no --save_strategy steps",
            {"eval_strategy": "no", "save_strategy": "steps"},
        ),
    ],
)
def test_defaults_and_commands_of_a_shell_are_read(
    text: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(text)
    recipe = read_recipe([str(tmp_path / "run.sh")])
    folder = str(recipe.pop("folder", "$(cd "))
    assert dict(recipe) == wanted
    assert folder.startswith("$(cd ")


def test_words_of_yaml_1_1_stay_texts() -> None:
    assert [parse_value(text) for text in ("no", "yes", "off", "true", "None")] == [
        "no",
        "yes",
        "off",
        True,
        None,
    ]


LAUNCHER = """
@dataclass
class Arguments:
    folder: str = "/data"

def prepare(args):
    run(f"convert --tensor-model-parallel-size 4")

def execute(args):
    samples = 8
    rollout_args = f"--prompt-data {args.folder}/a.jsonl --n-samples-per-prompt {samples} " "--rollout-batch-size 32 "
    more = f"--lr {args.rate} "
    train_args = f"{rollout_args}{more} {wandb(args)} --hf-checkpoint m --global-batch-size 256"
    U.execute(train_args=train_args, train_script="train_async.py")
"""


def test_flags_in_the_texts_of_a_launcher_are_read(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(LAUNCHER)
    recipe = read_recipe([str(tmp_path / "run.py")])
    assert dict(recipe) == {
        "prompt-data": "/data/a.jsonl",
        "n-samples-per-prompt": 8,
        "rollout-batch-size": 32,
        "lr": "$args.rate",
        "hf-checkpoint": "m",
        "global-batch-size": 256,
    }
    assert "train_async.py" in recipe.program
    assert recipe.notes


def test_a_child_replaces_what_it_marks_and_what_is_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: {train: {name: a}, size: 2, kept: {one: 1}}\n")
    (tmp_path / "b.yaml").write_text("grpo: {num_prompts_per_step: 4}\n")
    (tmp_path / "child.yaml").write_text(
        "defaults: [a.yaml, b.yaml]\ndata: {train: [{name: b}], kept: {two: 2}}\n"
    )
    recipe = read_recipe([str(tmp_path / "child.yaml")])
    wanted = {
        "data.train": [{"name": "b"}],
        "data.size": 2,
        "data.kept.one": 1,
        "data.kept.two": 2,
    }
    assert dict(recipe) == wanted | {"grpo.num_prompts_per_step": 4}
    (tmp_path / "child.yaml").write_text(
        "defaults: a.yaml\ndata: {_override_: true, train: [{name: b}]}\n"
    )
    assert dict(read_recipe([str(tmp_path / "child.yaml")])) == {
        "data.train": [{"name": "b"}]
    }


def test_a_comment_tells_the_program(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "# For `trl sft --config`\nmodel_name_or_path: m\nlearning_rate: 1.0e-5\n"
    )
    assert read_recipe([str(tmp_path / "config.yaml")]).program == "trl sft"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("load_dataset('openai/gsm8k', 'main', split='train')", "openai/gsm8k:main@train"),
        ("load_dataset('trl-lib/tldr')['train']", "trl-lib/tldr@train"),
        (
            "load_dataset(path='trl-lib/tldr', split='train[:10%]')",
            "trl-lib/tldr@train[:10%]",
        ),
        ("data", "trl-lib/tldr@test"),
        ("data.map(prepare)", "${data.map(prepare)}"),
        ("load_dataset(NAME)", "${load_dataset(NAME)}"),
        ("load_dataset('json', data_files='a.jsonl')", "a.jsonl"),
        ("load_dataset('json', data_files='a.jsonl', split='train')", "a.jsonl"),
        ("load_dataset('parquet', data_files='a.parquet')['train']", "a.parquet"),
        (
            "load_dataset('csv', data_files='a.csv')",
            "${load_dataset('csv', data_files='a.csv')}",
        ),
        (
            "load_dataset('json', data_files='*.jsonl')",
            "${load_dataset('json', data_files='*.jsonl')}",
        ),
        (
            "load_dataset('json', data_files='a.jsonl', split='train[:9]')",
            "${load_dataset('json', data_files='a.jsonl', split='train[:9]')}",
        ),
    ],
)
def test_a_data_set_of_the_hub_is_named(code: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"data = load_dataset('trl-lib/tldr', split='test')\nGRPOTrainer(model='m', train_dataset={code})\n"
    )
    assert read_recipe([str(tmp_path / "train.py")])["train_dataset"] == wanted


@pytest.mark.parametrize(
    ("formula", "value"), [("mul", 8192), ("add", 4098), ("div", 2048.0), ("max", 4096)]
)
def test_arithmetic_of_a_yaml_is_computed(
    tmp_path: Path, formula: str, value: float
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        f'policy: {{length: 4096, tokens: "${{{formula}:${{policy.length}}, 2}}"}}'
    )
    assert read_recipe([str(path)])["policy.tokens"] == value


SCRIPT = """
def accuracy_reward(completions): ...
trainer = GRPOTrainer(model='m', reward_funcs={functions}, peft_config=LoraConfig(r=16), args=GRPOConfig(seed=3))
{end}
"""


@pytest.mark.parametrize(
    ("functions", "end", "notes"),
    [
        ("[accuracy_reward]", "trainer.train()", 1),
        ("accuracy_reward", "result = trainer.train()", 1),
        ("[accuracy_reward]", "if __name__ == '__main__':\n    trainer.train()", 0),
        ("['my.lib.brief']", "trainer.train()", 0),
    ],
)
def test_a_script_that_trains_when_it_is_imported_is_named(
    functions: str, end: str, notes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.format(functions=functions, end=end))
    migration = migrate(read_recipe(["train.py"]))
    assert sum("trains when it is imported" in line for line in migration.open) == notes
    # The function is the user's.
    assert not any("workers.reward_functions:math" in line for line in migration.open)
    assert not any("peft_config" in line for line in migration.without)
    assert migration.settings["model.lora.rank"] == 16


TOOLS = """
def add(a: int, b: int) -> int: ...
if __name__ == '__main__':
    args = GRPOConfig(max_completion_length=64, max_tool_calling_iterations=4)
    GRPOTrainer(model='m', reward_funcs='r', args=args{tools}).train()
"""


@pytest.mark.parametrize(("tools", "is_open"), [(", tools=[add]", True), ("", False)])
def test_limits_of_tools_stay_with_the_tools_that_the_user_is_asked_for(
    tools: str, is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TOOLS.format(tools=tools))
    migration = migrate(read_recipe(["train.py"]))
    lines = [
        line
        for line in (*migration.open, *migration.without)
        if line.startswith("rollout.max_turns=5")
    ]
    assert [("rollout.tools" in line, line in migration.open) for line in lines] == [
        (is_open, is_open)
    ]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (
            "python3 -m openrlhf.cli.train_ppo_ray --reward.remote_url a/b.py --x.y",
            "reward.remote_url",
            "a/b.py",
        ),
        (
            "ARGS=(\n --train.agent_func_path agent.py\n --x.y 1\n)",
            "train.agent_func_path",
            "agent.py",
        ),
        (
            "F=reward.py\npython train.py --reward_funcs $F other.py",
            "reward_funcs",
            ["reward.py", "other.py"],
        ),
        (
            "ray job submit --address a -- python3 train.py --custom reward.py",
            "custom",
            "reward.py",
        ),
        ("--custom reward.py --size 1", "custom", "reward.py"),
        ("torchrun --standalone train.py --size 1", "standalone", True),
        ("python -m torch.distributed.run --nnodes 2 -m mod --hook f.py", "hook", "f.py"),
    ],
)
def test_a_file_of_python_behind_a_flag_is_its_value(
    text: str, key: str, value: Any, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert read_recipe([str(script)])[key] == value


def test_a_command_in_quotes_is_read_without_the_flags_of_its_launcher(
    tmp_path: Path,
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        'LR=5e-7\nsrun --nodes=2 -w a bash -c "pip install ray \\\n && ray job submit --address=b -- python3 \\\n'
        ' -m openrlhf.cli.train_ppo_ray --actor.adam.lr $LR --rollout.batch_size 64" &>> log\n'
    )
    recipe = read_recipe([str(script)])
    assert dict(recipe) == {"actor.adam.lr": 5e-7, "rollout.batch_size": 64}
    assert "openrlhf.cli.train_ppo_ray" in recipe.program


def test_who_shares_gpus_in_openrlhf_is_named_with_the_reason() -> None:
    flags = "--train.colocate_actor_ref --train.colocate_critic_reward --actor.adam.lr 1e-6"
    migration = migrate(read_recipe([f"python3 -m openrlhf.cli.train_ppo_ray {flags}"]))
    assert migration.unknown == []
    reasons = [line for line in migration.without if line.startswith("train.colocate_")]
    assert len(reasons) == 2


@pytest.mark.parametrize(
    "tool",
    [
        "ray start --head --node-ip-address 127.0.0.1 --num-gpus 8 --disable-usage-stats",
        "sleep 3\nray stop --force",
        "pip install -e . --no-deps && uv pip install x --system",
        "hf download a/b --repo-type dataset --local-dir data",
        "nvidia-smi --query-gpu=index --format=csv | wc -l",
    ],
)
def test_flags_of_commands_beside_the_program_are_no_keys(tool: str) -> None:
    train = "python3 train.py --num-rollout 3 --lr 1e-6"
    wanted = {"num-rollout": 3, "lr": 1e-6}
    assert dict(read_recipe([f"{tool}\n{train}"])) == wanted
    assert dict(read_recipe([f"{tool} && {train}\nray stop --force"])) == wanted
    assert dict(read_recipe([f"{tool}; {train}"])) == wanted
