import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from controller.config import Config, load, load_as, to_yaml
from controller.config.file import Setting, settings, value_of
from controller.config.offline import SftConfig
from controller.config.recorded import load_recorded
from tests.controller.config_workspace import write_workspace
from tests.refusals import refused
from workers.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
SETTINGS = list(settings(Config()))
NEEDED = ("model.path=m", "data.train=t.jsonl", "reward.function=r.py:f")


def test_an_override_replaces_the_file_and_the_file_replaces_the_default(
    tmp_path: Path,
) -> None:
    config = load(
        write_workspace(tmp_path),
        ["policy.data_parallel=1", "policy.optimizer.learning_rate=1e-4"],
    )
    assert config.policy.data_parallel == 1
    assert config.policy.max_tokens_per_micro_batch == 4096
    assert config.policy.optimizer.learning_rate == 1e-4
    assert config.policy.optimizer.schedule == "constant"
    assert isinstance(config, Config)


@pytest.mark.parametrize("read", [load, load_recorded])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_folder_and_a_pipe_are_no_configuration(
    make: Callable[[Path], None], read: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "odd.yaml")
    with refused("odd.yaml is a folder, a pipe or a device"):
        read(tmp_path / "odd.yaml")


def test_files_lie_one_over_the_other_and_the_last_names_the_run(tmp_path: Path) -> None:
    base = write_workspace(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "run: {name: '', steps: 3}\npolicy: {data_parallel: 1}\n"
    )
    config = load([base, tmp_path / "mine.yaml"], ["run.seed=7"])
    assert (
        config.run.steps,
        config.policy.data_parallel,
        config.policy.max_tokens_per_micro_batch,
        config.run.seed,
    ) == (
        3,
        1,
        4096,
        7,
    )
    assert config.run.name == "mine"
    assert load([tmp_path / "mine.yaml", base]).run.steps == 10
    (tmp_path / "wrong.yaml").write_text("policy: {data_paralel: 1}\n")
    with refused("wrong.yaml: policy.data_paralel"):
        load([base, tmp_path / "wrong.yaml"])


@pytest.mark.parametrize(
    "blank", ["data.validation=", "data.validation= ", "data.validation=''"]
)
def test_a_blank_text_on_the_command_line_is_no_text(tmp_path: Path, blank: str) -> None:
    assert load(write_workspace(tmp_path), [blank]).data.validation == ""
    with refused("policy.data_parallel"):
        load(write_workspace(tmp_path), ["policy.data_parallel="])


def test_a_configuration_written_as_yaml_reads_back_as_itself(tmp_path: Path) -> None:
    config = load(
        write_workspace(tmp_path), ["validation.sampling.temperature=0", "run.seed=7"]
    )
    (tmp_path / "written.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "written.yaml") == config


def test_every_setting_is_documented_and_its_default_is_in_range() -> None:
    for setting in SETTINGS:
        assert setting.doc.endswith("."), setting.key
        assert setting.required or setting.follows or setting.allows(setting.default), (
            setting.key
        )


@pytest.mark.parametrize("setting", SETTINGS[::7], ids=lambda setting: setting.key)
def test_a_setting_with_a_letter_missing_is_recognised(setting: Setting) -> None:
    wrong = setting.key[:-2] + setting.key[-1]
    with refused(f"{wrong} is not a setting; did you mean {setting.key}"):
        load(None, [f"{wrong}=1"])


REFUSED = [
    "policy.max_token=1",
    "max_tokens=1",
    "rollout.temperature=1",
    "actor.max_tokens=1",
    "run.qqqqqq=1",
    "run.steps.x=1",
    "policy.max_tokens_per_micro_batch=many",
    "policy.max_tokens_per_micro_batch=true",
    "policy.max_tokens_per_micro_batch=",
    "policy.max_tokens_per_micro_batch='4096'",
    "policy.optimizer.learning_rate=fast",
    "data.shuffle=1",
    "data.train=[a,b]",
    "policy.optimizer=adam",
    "policy.data_parallel=0",
    "policy.optimizer.beta1=1",
    "rollout.sampling.top_p=0",
    "policy.optimizer.learning_rate=.nan",
    "policy.optimizer.learning_rate=1e308",
    "algorithm.loss.clip_high=.nan",
    "algorithm.loss.clip_cov_low=-1e300",
    "batch.prompts_per_step=100000000000",
    "policy.max_tokens_per_micro_batch=1000000001",
    "reward.functions={f: .nan}",
    "run.steps=1:30",
    "run.steps=010",
    "run.name=010",
    f"run.seed={'1' * 5001}",
    f"policy.optimizer.learning_rate=1{'0' * 400}",
    f"rollout.engine={{a: !!int '{'1' * 5001}'}}",
    "run.dir=a${run.seed",
    "run.dir=\ud800",
    "model.dtype=float16",
    "run.seed=${run.sed}",
    "run.seed=${run.dir}",
    "--policy.data_parallel=1",
    "policy.data_parallel",
    "run.name=[a",
    "run.name=\x1b[31mred",
    "rollout.sampling.stop=${run.seed}",
    "reward.functions=${run.seed}",
    "rollout.sampling.logit_bias=${run}",
    "model.path=${data}",
    "data.chat_template_arguments={a: ???}",
    "data.chat_template_arguments={null: 1}",
    "rollout.sampling.stop=[???]",
    "run.name=" + "[" * 100_000,
]


@pytest.mark.parametrize("override", REFUSED)
def test_a_wrong_override_is_refused_in_one_line_that_begins_with_it(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [*NEEDED, override])
    assert (
        str(caught.value)
        .removeprefix("'")
        .startswith(override.partition("=")[0].removesuffix(".x"))
    )
    assert "\n" not in str(caught.value)
    assert not re.search(
        "http|full_key|object_type|omegaconf", str(caught.value), re.IGNORECASE
    )


REPEATED = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (REPEATED.encode(), "its aliases (*NAME) repeat too much"),
        (b"[" * 100_000 + b"]" * 100_000, "wrong.yaml is nested too deep"),
        (b"run:\n  steps: 1\n dir: [", "wrong.yaml, line 3"),
        (b"run: {steps: 1}\nrun: {steps: 2}", "wrong.yaml, line 2"),
        (b"- run\n- model", "wrong.yaml"),
        (b"just words", "wrong.yaml: just words"),
        (b"\xff\xfe\xfa", "wrong.yaml"),
        (b"run.steps: 3", "wrong.yaml: run.steps"),
        (b"policy: {max_token: 3}", "wrong.yaml: policy.max_token"),
        (b"run:\n  steps: 1:30", "wrong.yaml, line 2"),
        (b"run:\n  dir: a${run.seed", "wrong.yaml, line 2"),
        (b"run: {seed: 1" + b"0" * 400 + b"}", "wrong.yaml, line 1"),
        (b"run: &a {name: *a}", "wrong.yaml"),
        (b"policy:", "wrong.yaml: policy"),
        (b"policy: {1: 3}", "wrong.yaml: policy.1"),
        (b"", "model.path"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(
    tmp_path: Path, content: bytes, named: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with refused(named):
        load(path)
    (tmp_path / "${run.name} {0}.yaml").write_bytes(content)
    with refused(named.replace("wrong", "${run.name} {0}")):
        load(tmp_path / "${run.name} {0}.yaml")
    for missing in ("nowhere.yaml", "."):
        with refused(missing):
            load(missing)


@pytest.mark.parametrize(
    ("file", "name"), [("gsm8k.yaml", "gsm8k"), ("addition/config.yaml", "addition")]
)
def test_a_run_without_name_takes_that_of_its_file(
    tmp_path: Path, file: str, name: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    given = [*NEEDED, f"run.dir={tmp_path / 'runs'}"]
    assert load(path, given).run.name == name
    assert load(path, [*given, "run.name=mine"]).run.name == "mine"
    (tmp_path / "runs" / name).mkdir(parents=True)
    assert load(path, given).run.name == f"{name}-2"
    (tmp_path / "runs" / f"{name}-2").mkdir()
    assert load(path, given).run.name == f"{name}-3"


def test_validation_samples_as_long_as_training_does_unless_told(tmp_path: Path) -> None:
    assert load(write_workspace(tmp_path)).validation.sampling.max_new_tokens == 64
    longer = load(write_workspace(tmp_path), ["validation.sampling.max_new_tokens=90"])
    assert longer.validation.sampling.max_new_tokens == 90
    assert longer.max_model_tokens == 32 + 90


def test_nothing_in_a_configuration_is_executed(tmp_path: Path) -> None:
    path = tmp_path / "code.yaml"
    path.write_text(f"run: {{name: !!python/object/apply:os.mkdir [{tmp_path / 'made'}]}}")
    with refused("code.yaml"):
        load(path)
    assert not (tmp_path / "made").exists()


SHIPPED = sorted(
    [
        *(REPOSITORY / "configs").glob("*.yaml"),
        *(REPOSITORY / "examples").glob("*/config.yaml"),
    ]
)


@pytest.mark.parametrize(
    "path", SHIPPED, ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_every_configuration_that_ships_fits_the_schema(path: Path) -> None:
    config = load(path)
    assert config.run.name and (config.reward.weights or config.rollout.environment)


@pytest.mark.parametrize(
    "removal",
    ["~rollout.threads", "rollout.threads=null", "~rollout", "rollout.threads= null"],
)
def test_an_override_takes_back_what_was_set_before_it(
    tmp_path: Path, removal: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: m}\ndata: {train: t}\nreward: {function: f}\nrollout: {threads: 2}\n"
    )
    assert load(path).rollout.threads == 2
    assert load(path, [removal]).rollout == Config().rollout
    assert load(path, ["rollout.threads=3", removal]).rollout == Config().rollout
    assert load(path, [removal, "rollout.threads=3"]).rollout.threads == 3
    assert load(path, [removal, removal, "run.seed=3"]).run.seed == 3


@pytest.mark.parametrize(
    ("removal", "message"),
    [
        ("~rollout.thread", "did you mean rollout.threads"),
        ("~", "not a setting"),
        ("~rollout.threads=2", "is not an override"),
        ("rollout.thread=null", "did you mean rollout.threads"),
        ("~model.path", "model.path"),
        ("model.path=null", "model.path"),
    ],
)
def test_a_removal_of_no_setting_and_of_a_needed_one_is_refused(
    removal: str, message: str
) -> None:
    with refused(message):
        load(None, [*NEEDED, removal])


def test_removing_a_mapping_leaves_none_of_its_names(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: m}\ndata: {sources: {a.jsonl: 1}}\nreward: {functions: {f.py:g: 1}}\n"
    )
    config = load(path, ["~data.sources", "data.train=t"])
    assert not config.data.sources
    assert config.data.train == "t"


def test_a_mapping_given_again_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: m}\ndata: {sources: {a.jsonl: 1, b.jsonl: 2}}\nreward: {functions: {f.py:g: 1}}\n"
    )
    config = load(path, ["data.sources={c.jsonl: 3}"])
    assert config.data.sources == {"c.jsonl": 3.0}
    assert config.reward.functions == {"f.py:g": 1.0}
    with refused("data.sources.c"):
        load(path, ["data.sources.c=3"])


def test_arguments_of_the_engine_add_up_and_hold_any_value(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: m}\ndata: {train: t}\nreward: {function: f}\nrollout: {engine: {a: 1, b: {c: [2]}}}\n"
    )
    config = load(path, ["rollout.engine.a=x", "rollout.engine.d=null"])
    assert config.rollout.engine == {"a": "x", "b": {"c": [2]}, "d": None}
    with refused("rollout.engine"):
        load(path, ["rollout.engine=fp8"])
    with refused("rollout.engine"):
        load(path, ["rollout.engine.a=${run.seed}"])


@pytest.mark.parametrize("idle", [True, False])
def test_a_dropped_setting_is_left_out_of_an_older_run_if_it_changed_nothing(
    tmp_path: Path, idle: bool
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {{path: m}}\nbalance: {{redeal_groups: {str(not idle).lower()}}}\n"
    )
    with nullcontext() if idle else refused("balance.redeal_groups"):
        assert load(file).balance == Config().balance


def test_old_names_are_read_and_one_line_says_the_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {path: m}\npolicy: {ranks: 2, max_tokens: 96}\ndata: {over_long: error}\n"
    )
    config = load(
        file,
        [
            "rollout.memory_fraction=0.75",
            "run.other_data=${run.resume}",
            "run.resume=restart",
        ],
    )
    assert (config.policy.data_parallel, config.policy.max_tokens_per_micro_batch) == (
        2,
        96,
    )
    assert (config.data.overlong_prompts, config.rollout.gpu_memory_utilization) == (
        "error",
        0.75,
    )
    assert config.run.on_data_change == "restart"
    # A bool in 0.2.
    for given, read in (("true", "all"), ("false", "none"), ("optimizer", "optimizer")):
        assert (
            load(None, ["model.path=m", f"policy.cpu_offload={given}"]).policy.cpu_offload
            == read
        )
    with refused("policy.optimizer.schedule"):
        load(None, ["model.path=m", "policy.optimizer.schedule=true"])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and said[0].startswith(
        f"{file}: policy.ranks is now policy.data_parallel, policy.max_tokens"
    )
    assert (
        load_as(
            SftConfig, None, ["model.path=m", "data.over_long=error"]
        ).data.overlong_records
        == "error"
    )


@pytest.mark.parametrize("count", [1, 3, 4])
def test_three_new_names_are_said_and_the_others_counted(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old_names = [
        "policy.ranks=2",
        "policy.max_tokens=96",
        "data.over_long=error",
        "run.other_data=restart",
    ]
    file = tmp_path / f"{count}.yaml"  # a line is printed once
    OmegaConf.save(OmegaConf.from_dotlist(old_names[:count]), file)
    load_as(Config, file, ["model.path=m"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.count(" is now ") == min(count, 3)
    assert ("and 1 more in" in line, "more" in line) == (count == 4, count == 4)


def test_an_old_name_beside_the_new_one_or_with_a_wrong_value_is_refused() -> None:
    with refused("policy.ranks is not a setting; here it is policy.data_parallel"):
        load(None, ["policy={ranks: 2, data_parallel: 2}"])
    with refused("policy.data_parallel"):
        load(None, ["policy.ranks=two"])


@pytest.mark.parametrize(
    ("given", "mode"), [("true", "full"), ("false", "none"), ("auto", "auto")]
)
def test_a_switch_that_has_become_a_choice_reads_both(
    tmp_path: Path, given: str, mode: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {{path: m, gradient_checkpointing: {given}}}\n")
    assert load(file).model.gradient_checkpointing == mode
    assert (
        load(
            None, ["model.path=m", f"model.gradient_checkpointing={given}"]
        ).model.gradient_checkpointing
        == mode
    )
    with refused("model.attention"):
        load(file, ["model.attention=true"])  # which was none


MAPPINGS = [
    found.key for found in SETTINGS if getattr(found.type, "__origin__", None) is dict
]


@pytest.mark.parametrize("key", MAPPINGS)
@pytest.mark.parametrize(
    "value",
    ["/models/rm", "[a]", "3", "{a: ${run.seed}}", "{a: '${run.seed}'}", "{[1]: 2}", ""],
)
def test_every_mapping_refuses_other_values_by_its_name(
    tmp_path: Path, key: str, value: str
) -> None:
    with refused(key):
        load(write_workspace(tmp_path), [f"{key}={value}"])


@pytest.mark.parametrize(
    "key", [found.key for found in SETTINGS if found.type is dict[str, float]]
)
def test_names_of_a_mapping_are_texts(tmp_path: Path, key: str) -> None:
    with refused(key):
        load(write_workspace(tmp_path), [f"{key}={{1: 2}}"])


@pytest.mark.parametrize("start", ["~", "$HOME"])
def test_a_home_is_read_as_a_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    base = write_workspace(tmp_path)
    for key in ("run.dir", "data.train", "model.path"):
        config = load(base, [f"{key}={start}/x y"])
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == "/home/me/x y"
    mapped = load(
        base,
        [
            "data.train=",
            f"data.sources={{{start}/a.jsonl: 2}}",
            f"teacher.paths={{a: {start}/t}}",
        ],
    )
    assert mapped.data.sources == {"/home/me/a.jsonl": 2} and mapped.teacher.paths == {
        "a": "/home/me/t"
    }
    assert (
        load(base, [f"data.system_prompt=a {start}/x"]).data.system_prompt == f"a {start}/x"
    )
    assert load(base, [f"rollout.sampling.stop=['{start}/']"]).rollout.sampling.stop == [
        f"{start}/"
    ]


@pytest.mark.parametrize("value", ["$BALLAST_UNSET/x", "~nosuchuser/x"])
def test_a_home_that_is_not_known_is_refused(tmp_path: Path, value: str) -> None:
    with refused(f"data.train={value}"):
        load(write_workspace(tmp_path), [f"data.train={value}"])


LISTS = [setting for setting in SETTINGS if setting.type in (list[str], list[int])]


@pytest.mark.parametrize("setting", LISTS, ids=lambda setting: setting.key)
def test_one_value_is_read_as_a_list_of_it(tmp_path: Path, setting: Setting) -> None:
    value = "</a>" if setting.type == list[str] else 7
    config = load(write_workspace(tmp_path), [f"{setting.key}={value}"])
    assert value_of(config, setting.key) == [value]


@pytest.mark.parametrize("value", ["[q_proj, v_proj]", "q_proj,v_proj"])
def test_target_modules_are_a_list_or_names_in_a_text(tmp_path: Path, value: str) -> None:
    written = write_workspace(tmp_path)
    assert (
        load(written, [f"model.lora.target_modules={value}"]).model.lora.target_modules
        == "q_proj,v_proj"
    )
    (tmp_path / "lora.yaml").write_text(
        f"model: {{lora: {{target_modules: {value if '[' in value else [value]}}}}}"
    )
    assert (
        load([written, tmp_path / "lora.yaml"]).model.lora.target_modules == "q_proj,v_proj"
    )
    with refused("model.lora.target_modules"):
        load(written, ["model.lora.target_modules=[]"])
