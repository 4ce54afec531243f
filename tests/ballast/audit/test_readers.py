"""Readers of other systems' dumps: each file is written as the system's own code writes it."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ballast.audit import Bundle
from ballast.audit.__main__ import main
from ballast.audit.readers import read_dump
from workers.errors import DataError

IDS = [[5, 6, 7, 8, 1], [5, 6, 9, 1]]
"""Two responses to the prompt 5, 6."""
LOGPROBS = [[-0.5, -0.25, -1.0], [-2.0, -0.125]]
REWARDS = [1.0, 0.5]
PROMPT = 2


def write_verl(folder: Path) -> Path:
    # verl 0.9.1, trainer/ppo/ray_trainer.py, _write_generations:
    #   base_data = {"input": inputs, "output": outputs, "gts": gts, "score": scores,
    #                "step": [global_steps] * n}
    #   f.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
    base_data = {
        "input": ["ab"] * 2,
        "output": ["cde", "fé"],
        "gts": [None] * 2,
        "score": REWARDS,
        "step": [12] * 2,
        "acc": [1, 0],
    }
    path = folder / "12.jsonl"
    with path.open("w") as file:
        for number in range(2):
            entry = {name: values[number] for name, values in base_data.items()}
            file.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
    return path


def slime_sample(number: int, **fields: Any) -> dict[str, Any]:
    # slime/utils/types.py, Sample.to_dict: value = self.__dict__.copy(); value["status"] = self.status.value
    sample = {
        "group_index": 3,
        "index": number,
        "rollout_id": None,
        "prompt": "ab",
        "tokens": IDS[number],
        "response": "x",
        "response_length": len(IDS[number]) - PROMPT,
        "label": None,
        "reward": REWARDS[number],
        "loss_mask": None,
        "weight_versions": ["7"],
        "rollout_log_probs": LOGPROBS[number],
        "remove_sample": False,
        "status": ["completed", "truncated"][number],
        "metadata": {},
        "spec_info": {"spec_accept_token_num": 0},
    }
    return sample | fields


def write_slime(folder: Path) -> Path:
    # slime/observability/rollout_data_utils.py: torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    samples = [slime_sample(0), slime_sample(1)]
    path = folder / "12.pt"
    torch.save({"rollout_id": 12, "samples": samples}, path)
    return path


def write_miles(folder: Path) -> Path:
    # miles/ray/rollout/debug_data.py: torch.save(dict(rollout_id=..., metadata=metadata or {}, **dump_data), path)
    # miles/utils/types.py: rollout_routed_experts is a NumPy array of int32.
    experts = np.zeros((4, 2, 2), np.int32)
    samples = [slime_sample(number, rollout_routed_experts=experts) for number in range(2)]
    path = folder / "12.pt"
    torch.save({"rollout_id": 12, "metadata": {}, "samples": samples}, path)
    return path


def write_slime_train_data(folder: Path) -> Path:
    # slime/observability/train_data_utils.py, _build_dump_payload: {"format_version": 2, "rollout_id", "rank",
    # "samples", "dp_shards"}. A sample holds its part of each column of rollout_data.
    samples = []
    for number, ids in enumerate(IDS):
        length = len(ids) - PROMPT
        samples.append(
            {
                "data_parallel_rank": 0,
                "sample_index": number,
                "rollout_position": number,
                "tokens": torch.tensor(ids),
                "response_lengths": length,
                "total_lengths": len(ids),
                "rewards": REWARDS[number],
                "loss_masks": torch.ones(length, dtype=torch.int32),
                "log_probs": torch.tensor(LOGPROBS[number]),
                "rollout_log_probs": torch.tensor(LOGPROBS[number]),
                "advantages": torch.full((length,), 0.5),
            }
        )
    path = folder / "12_0.pt"
    payload = {
        "format_version": 2,
        "rollout_id": 12,
        "rank": 0,
        "samples": samples,
        "dp_shards": [],
    }
    torch.save(payload, path)
    return path


def write_prime_rl(folder: Path) -> Path:
    # prime_rl/trainer/rl/token_export.py: {"schema_version", "step", "rank", "micro_step", ...,
    # **_slice_columns(columns, start, end)}, in token_exports/step_{step}/rank_{rank}.jsonl
    step_folder = folder / "token_exports" / "step_12"
    step_folder.mkdir(parents=True)
    for rank, ids in enumerate(IDS):
        logprobs = [0.0] * PROMPT + LOGPROBS[rank]
        record = {
            "schema_version": 1,
            "step": 12,
            "rank": rank,
            "micro_step": 0,
            "micro_sequence_idx": 0,
            "export_sequence_idx": 0,
            "env_name": "math",
            "token_ids": ids,
            "position_ids": list(range(len(ids))),
            "loss_mask": [False] * PROMPT + [True] * len(LOGPROBS[rank]),
            "advantages": [0.5] * len(ids),
            "inference_logprobs": logprobs,
            "trainer_logprobs": [-3.0, -1.0, *LOGPROBS[rank]],
            "entropy": [1.0] * len(ids),
            "importance_ratio": None,
        }
        text = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
        (step_folder / f"rank_{rank}.jsonl").write_text(text)
    return step_folder


def verifiers_trace(number: int) -> dict[str, Any]:
    # verifiers/v1/graph.py, MessageNode: a node has the tokens that it adds, and log-probs of the sampled ones.
    ids = IDS[number]
    length = len(ids) - PROMPT
    return {
        "version": 1,
        "id": f"trace-{number}",
        "task": {"type": "Math", "data": {}, "key": "sum-1"},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": [
            {
                "message": {"role": "user", "content": "ab"},
                "token_ids": [5],
                "mask": [False],
                "logprobs": [],
            },
            {
                "parent": 0,
                "message": {"role": "assistant", "content": "x"},
                "sampled": True,
                "token_ids": ids[1:],
                "mask": [False] + [True] * length,
                "logprobs": LOGPROBS[number],
                "advantages": [0.5] * length,
            },
        ],
        "calls": [{"node": 1, "finish_reason": ["stop", "length"][number]}],
        "rewards": {"correct": {"score": 2 * REWARDS[number], "weight": 0.5}},
        "stop_condition": "stop",
    }


def write_verifiers(folder: Path) -> Path:
    # prime_rl/monitors/file.py: rollouts/step_{step}/{kind}/{subset}/traces.jsonl, orjson of episode.to_record()
    # verifiers/v1/episode.py: Episode has group.id, run.work.step, run.work.policy.start and .end
    path = folder / "traces.jsonl"
    lines = []
    for number in range(2):
        work = {"type": "train", "step": 12, "policy": {"start": 7, "end": 7}}
        episode = {
            "id": f"episode-{number}",
            "env": {"id": "math"},
            "task": {"type": "Math", "data": {}},
            "group": {"id": "group-1"},
            "run": {"type": "train", "id": "run", "work": work},
            "ok": True,
            "traces": [verifiers_trace(number)],
        }
        lines.append(json.dumps(episode))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_nemo_rl(folder: Path) -> Path:
    # nemo_rl/algorithms/grpo.py: log_data["token_ids"] = train_data["input_ids"].tolist(), ...
    # nemo_rl/utils/logger.py: for i, sample in enumerate(to_log.make_microbatch_iterator(1)):
    #   f.write(json.dumps({**sample, "idx": i}, default=str) + "\n")
    longest = max(len(ids) for ids in IDS)
    path = folder / "train_data_step12.jsonl"
    with path.open("w") as file:
        for number, ids in enumerate(IDS):
            padding = longest - len(ids)
            logprobs = [0.0] * PROMPT + LOGPROBS[number] + [0.0] * padding
            sample = {
                "content": [["ab", "x"]],
                "rewards": [REWARDS[number]],
                "input_lengths": [len(ids)],
                "token_ids": [ids + [0] * padding],
                "token_loss_mask": [
                    [0] * PROMPT + [1] * len(LOGPROBS[number]) + [0] * padding
                ],
                "sample_loss_mask": [1.0],
                "advantages": [[0.5] * longest],
                "generation_logprobs": [logprobs],
                "prev_logprobs": [logprobs],
            }
            file.write(json.dumps({**sample, "idx": number}, default=str) + "\n")
    return path


def write_atif(folder: Path) -> Path:
    # Harbor's trajectory format: steps of source agent have metrics.prompt_token_ids,
    # metrics.completion_token_ids and metrics.logprobs.
    for number, ids in enumerate(IDS):
        metrics = {
            "prompt_tokens": PROMPT,
            "prompt_token_ids": ids[:PROMPT],
            "completion_token_ids": ids[PROMPT:],
            "logprobs": LOGPROBS[number],
        }
        trajectory = {
            "schema_version": "ATIF-v1.5",
            "session_id": f"session-{number}",
            "agent": {"name": "terminus-2", "version": "2.0.0"},
            "steps": [
                {"step_id": 1, "source": "user", "message": "ab"},
                {"step_id": 2, "source": "agent", "message": "x", "metrics": metrics},
            ],
        }
        path = folder / f"trial-{number}" / "agent" / "trajectory.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(trajectory, indent=2))
    return folder


ALL_TEXT = {"rewards", "group", "prompt_length"}
FORMATS: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "verl": (write_verl, ALL_TEXT),
    "slime": (
        write_slime,
        {
            *ALL_TEXT,
            "sampler_logprobs",
            "weight_versions",
            "truncated",
            "sample",
            "trained",
        },
    ),
    "miles": (
        write_miles,
        {
            *ALL_TEXT,
            "sampler_logprobs",
            "weight_versions",
            "truncated",
            "sample",
            "trained",
        },
    ),
    "slime train data": (
        write_slime_train_data,
        {"rewards", "prompt_length", "sampler_logprobs", "old_logprobs", "advantages"},
    ),
    "prime-rl": (
        write_prime_rl,
        {
            "prompt_length",
            "sampler_logprobs",
            "old_logprobs",
            "new_logprobs",
            "advantages",
            "micro_batch",
        },
    ),
    "verifiers": (
        write_verifiers,
        {
            *ALL_TEXT,
            "sampler_logprobs",
            "advantages",
            "weight_versions",
            "truncated",
            "sample",
        },
    ),
    "NeMo-RL": (
        write_nemo_rl,
        {*ALL_TEXT, "sampler_logprobs", "old_logprobs", "advantages", "trained"},
    ),
    "ATIF": (write_atif, {"prompt_length", "sampler_logprobs", "sample"}),
}


def column_names(bundle: Bundle) -> set[str]:
    return {*bundle.tokens, *bundle.rows} - {"token_ids", "loss_mask"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_dump_becomes_a_bundle(name: str, tmp_path: Path) -> None:
    write, columns = FORMATS[name]
    bundle = read_dump(write(tmp_path))
    assert column_names(bundle) == columns
    assert bundle.offsets.tolist() == [0, 5, 9]
    assert bundle.token_column("loss_mask").tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert bundle.row_column("prompt_length").tolist() == [PROMPT, PROMPT]
    if name != "verl":
        assert bundle.token_column("token_ids").tolist() == IDS[0] + IDS[1]
    if name != "ATIF":
        assert bundle.facts.step == 12
    if "rewards" in columns:
        assert bundle.row_column("rewards").tolist() == REWARDS
    if "group" in columns:
        assert len(set(bundle.row_column("group").tolist())) == 1
    if "sampler_logprobs" in columns:
        expected = [0, 0, *LOGPROBS[0], 0, 0, *LOGPROBS[1]]
        assert bundle.token_column("sampler_logprobs").tolist() == expected
    if "weight_versions" in columns:
        assert set(bundle.token_column("weight_versions").tolist()) == {7}
    if "truncated" in columns:
        assert bundle.row_column("truncated").tolist() == [0, 1]


@pytest.mark.parametrize("name", ["verl", "verifiers", "NeMo-RL"])
def test_lines_in_a_file_named_json_are_no_trajectory(name: str, tmp_path: Path) -> None:
    write, _ = FORMATS[name]
    path = write(tmp_path)
    renamed = path.rename(path.with_suffix(".json"))
    assert read_dump(renamed).offsets.tolist() == [0, 5, 9]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "record", [{"a": 1}, {"schema_version": 2}, {"schema_version": None, "steps": []}]
)
def test_json_of_another_form_is_no_trajectory(
    record: Any, indent: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(record, indent=indent))
    with pytest.raises(DataError, match="its keys are of no known dump") as failure:
        read_dump(path)
    assert "schema_version" not in str(failure.value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_dump_names_what_its_format_lacks(name: str, tmp_path: Path) -> None:
    write, columns = FORMATS[name]
    bundle = read_dump(write(tmp_path))
    needed = {
        "sampler_logprobs",
        "old_logprobs",
        "new_logprobs",
        "advantages",
        "rewards",
        "group",
        "truncated",
    }
    reasons = bundle.missing
    for column in needed - columns:
        assert reasons[column] != "not given"


@pytest.mark.parametrize("name", FORMATS)
def test_the_command_audits_a_clean_dump(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, _ = FORMATS[name]
    assert main([str(write(tmp_path)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    verdicts = {
        finding["name"]: finding["verdict"]
        for step in report["steps"]
        for finding in step["findings"]
    }
    assert verdicts["layout.ids"] == "passed"
    assert verdicts["loss.value"] == "unknown"


def test_the_command_audits_a_folder_of_dumps_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_verl(tmp_path).read_text()
    for step in (2, 10):
        (tmp_path / f"{step}.jsonl").write_text(
            text.replace('"step": 12', f'"step": {step}')
        )
    main([str(tmp_path), "--json"])
    assert [step["step"] for step in json.loads(capsys.readouterr().out)["steps"]] == [
        2,
        10,
        12,
    ]


def test_a_removed_sample_is_not_trained(tmp_path: Path) -> None:
    path = tmp_path / "1.pt"
    samples = [
        slime_sample(0, remove_sample=True),
        slime_sample(1, loss_mask=[0, 1], reward={"a": 1.0}),
    ]
    torch.save({"rollout_id": 1, "samples": samples}, path)
    bundle = read_dump(path)
    assert bundle.row_column("trained").tolist() == [0, 1]
    assert bundle.token_column("loss_mask").tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert (
        "--reward-key" in bundle.missing["rewards"] or "1 of 2" in bundle.missing["rewards"]
    )


def test_branches_of_a_trace_are_rows_of_a_sample(tmp_path: Path) -> None:
    trace = verifiers_trace(0)
    second = {
        **trace["nodes"][1],
        "token_ids": [9, 1],
        "mask": [True, True],
        "logprobs": [-1.0, -2.0],
    }
    del second["advantages"]
    trace["nodes"].append(second)
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(trace) + "\n")
    bundle = read_dump(path)
    assert bundle.row_column("sample").tolist() == [0, 0]
    assert bundle.token_column("token_ids").tolist() == [*IDS[0], 5, 9, 1]
    assert bundle.missing["advantages"] == "1 of 2 samples have it"


def test_turns_that_continue_are_one_row(tmp_path: Path) -> None:
    turns = [([5, 6], [7, 8]), ([5, 6, 7, 8, 3], [4]), ([5, 9], [4])]
    steps = []
    for number, (prompt, completion) in enumerate(turns):
        metrics = {
            "prompt_token_ids": prompt,
            "completion_token_ids": completion,
            "logprobs": [-1.0] * len(completion),
        }
        steps.append(
            {"step_id": number + 1, "source": "agent", "message": "", "metrics": metrics}
        )
    path = tmp_path / "trajectory.json"
    path.write_text(
        json.dumps({"schema_version": "ATIF-v1.7", "agent": {}, "steps": steps})
    )
    bundle = read_dump(path)
    assert bundle.offsets.tolist() == [0, 6, 9]
    assert bundle.token_column("loss_mask").tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1]
    assert bundle.token_column("sampler_logprobs").tolist() == [
        0,
        0,
        -1,
        -1,
        0,
        -1,
        0,
        0,
        -1,
    ]


class Hostile:
    """A pickle that would make a file if it were loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    proof = tmp_path / "loaded"
    torch.save(
        {"rollout_id": 1, "samples": [slime_sample(0, metadata=Hostile(proof))]},
        tmp_path / "1.pt",
    )
    (tmp_path / "2.pt").write_bytes(pickle.dumps(Hostile(proof)))
    for name in ("1.pt", "2.pt"):
        with pytest.raises(DataError, match=name):
            read_dump(tmp_path / name)
    assert not proof.exists()


BAD_FILES: dict[str, tuple[str, bytes]] = {
    "empty": ("a.jsonl", b""),
    "not JSON": ("a.jsonl", b"{"),
    "a list": ("a.jsonl", b"[1]"),
    "unknown keys": ("a.jsonl", b'{"a": 1}'),
    "a text as score": (
        "a.jsonl",
        b'{"input": "a", "output": "b", "score": "1", "step": 1}',
    ),
    "a missing step": (
        "a.jsonl",
        b'{"input": "a", "output": "b", "score": 1, "step": null}',
    ),
    "log-probs of another length": (
        "a.jsonl",
        b'{"token_ids": [1, 2], "loss_mask": [0, 1], "inference_logprobs": [0], "trainer_logprobs": [0, 0], '
        b'"step": 1, "micro_step": 0, "advantages": [0, 0]}',
    ),
    "a circle of nodes": (
        "a.jsonl",
        b'{"task": {}, "nodes": [{"parent": 1, "token_ids": [1], "mask": [true]}, '
        b'{"parent": 0, "token_ids": [1], "mask": [true]}, {"parent": 0, "token_ids": [], "mask": []}]}',
    ),
    "no samples": ("a.jsonl", b'{"task": {}, "traces": []}'),
    "shorter than its length": (
        "a.jsonl",
        b'{"token_ids": [[1]], "token_loss_mask": [[1]], "sample_loss_mask": [1], "input_lengths": [2]}',
    ),
    "another JSON": ("a.json", b'{"schema_version": "1"}'),
    "no token ids": (
        "a.json",
        b'{"schema_version": "ATIF-v1.7", "steps": [{"source": "agent", "message": "x"}]}',
    ),
    "not of torch": ("a.pt", b"abc"),
    "cut": ("a.pt", b"PK\x03\x04abc"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_broken_dump_is_an_error_of_one_line(name: str, tmp_path: Path) -> None:
    file_name, content = BAD_FILES[name]
    path = tmp_path / file_name
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.\w+") as error:
        read_dump(path)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_dump_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a bundle"):
        read_dump(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        read_dump(tmp_path / "none")
