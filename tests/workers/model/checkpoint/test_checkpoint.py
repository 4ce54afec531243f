"""Checkpoints: what comes back is what was saved, on any number of ranks; what is not whole is refused by
name.
"""

import itertools
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refused
from tests.workers.model.cpu_engine import assert_same, backward, build_engine, weights
from tests.workers.model.ranks import PRELOADED, RankPool
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.config.roles import OptimizerConfig
from workers.errors import CheckpointError, DataError
from workers.model.checkpoint.checkpoint import _aligned, _views
from workers.model.checkpoint.checkpoint_folder import (
    MANIFEST,
    StoredFile,
    complete,
    prune,
    read_manifest,
    verify_files,
)
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, sft
from workers.model.sharding.parallel import full_tensor

OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, schedule="cosine", warmup_steps=2, weight_decay=0.1
)
COUNT = 12
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


def build(model: str, offload: bool = False) -> TrainingEngine:
    with pytest.MonkeyPatch.context() as patch:
        # Several, and some parameters are larger.
        patch.setattr("workers.model.optimizer.optimizer.BUCKET", 1000)
        return build_engine(model, optimizer=OPTIMIZER, offload=offload)


def saved_at(engine: TrainingEngine, folder: Path, *steps: int) -> None:
    for step in steps:
        engine.save_checkpoint(folder / f"step-{step}", step=step)
    engine.wait_for_checkpoint()


def train(engine: TrainingEngine, steps: range) -> list[float]:
    """One optimiser step for each of `steps` on every rank's share of that step's batch; this rank's learning
    rates.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    rates = []
    for step in steps:
        whole = random_sequences(COUNT, seed=step)
        share = COUNT // size
        mine = whole.slice(rank * share, (rank + 1) * share)
        engine.forward_backward(mine, [(0, share)], sft, Denominators.of(whole))
        rates.append(engine.optimizer_step()["learning_rate"].result())
    return rates


@pytest.fixture
def saved(model, tmp_path) -> Path:
    """A checkpoint of step 2, saved by one rank."""
    engine = build(model)
    train(engine, range(2))
    saved_at(engine, tmp_path, 2)
    return tmp_path / "step-2"


@pytest.mark.parametrize("offload", [False, True])
def test_training_goes_on_while_a_save_is_written_and_the_checkpoint_is_of_the_moment_it_began(
    model, tmp_path, offload
):
    engine = build(model, offload)
    train(engine, range(2))
    before = weights(engine)
    engine.save_checkpoint(tmp_path / "step-2", step=2)
    train(engine, range(2, 5))
    expected = weights(engine)
    resumed = build(model)
    engine.wait_for_checkpoint()
    resumed.load_checkpoint(tmp_path / "step-2")
    assert_same(weights(resumed), before)
    rates = train(resumed, range(2, 5))
    assert rates == pytest.approx(
        [OPTIMIZER.learning_rate * factor for factor in (1, 0.9619398, 0.8535534)], rel=1e-6
    )
    assert_same(weights(resumed), expected)


def test_a_checkpoint_before_the_first_step_changes_nothing_in_what_follows(
    model, tmp_path
):
    plain, saving, resumed = build(model), build(model), build(model)
    saved_at(saving, tmp_path, 0)
    resumed.load_checkpoint(tmp_path / "step-0")
    for engine in (plain, saving, resumed):
        train(engine, range(3))
    assert_same(weights(saving), weights(plain))
    assert_same(weights(resumed), weights(plain))


def save_on_ranks(model: str, path: Path, offload: bool) -> list[float]:
    engine = build(model, offload)
    train(engine, range(2))
    torch.manual_seed(dist.get_rank())
    engine.save_checkpoint(path, step=2, extra={"prompts": 96})
    draws = torch.rand(3).tolist()
    engine.wait_for_checkpoint()
    return draws


def load_on_ranks(
    model: str, path: Path, offload: bool
) -> tuple[dict[str, torch.Tensor], dict, list[float]]:
    engine = build(model, offload)
    extra = engine.load_checkpoint(path)
    draws = torch.rand(3).tolist()
    train(engine, range(2, 4))
    return weights(engine), extra, draws


@pytest.mark.parametrize(
    ("writers", "readers", "offload"),
    [(2, 4, "saved"), (4, 1, ""), (2, 2, "saved and loaded")],
)
def test_a_checkpoint_is_read_by_another_number_of_ranks(
    model, tmp_path, ranks: RankPool, writers, readers, offload
):
    """offload: when optimiser state is in host memory. The weights are as without."""
    draws = ranks.run(
        save_on_ranks, writers, model, tmp_path / "step-2", "saved" in offload
    )
    results = ranks.run(
        load_on_ranks, readers, model, tmp_path / "step-2", "loaded" in offload
    )
    engine = build(model)
    train(engine, range(4))
    assert_same(results[0][0], weights(engine), 1e-9)
    assert all(extra == {"prompts": 96} for _, extra, _ in results)
    # The same random numbers follow only where every rank has a state of its own to go on from.
    same = [result[2] for result in results] == draws
    assert same == (writers == readers)


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process hold at most 4 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_on_a_full_disk(model: str, path: Path) -> str:
    engine = build(model)
    with full_disk() if dist.get_rank() == 1 else nullcontext():
        engine.save_checkpoint(path, step=1)
        with pytest.raises(CheckpointError) as failed:
            engine.wait_for_checkpoint()
    engine.save_checkpoint(path, step=1)
    engine.wait_for_checkpoint()
    return str(failed.value)


def test_a_save_that_fails_on_one_rank_fails_on_all_at_the_next_call_and_the_next_one_works(
    model, tmp_path, ranks: RankPool
):
    messages = ranks.run(fail_on_a_full_disk, 2, model, tmp_path / "step-1")
    for message in messages:
        assert re.fullmatch(
            r".*step-1 could not be saved: rank 1: OSError: .*File too large.*", message
        )
    assert read_manifest(tmp_path / "step-1").world_size == 2
    assert os.listdir(tmp_path) == ["step-1"]  # nothing is left of the failed one


def test_a_failed_save_is_also_told_to_the_next_save(model, tmp_path):
    engine = build(model)
    with full_disk():
        engine.save_checkpoint(tmp_path / "step-1", step=1)
        with refused("step-1", CheckpointError):
            engine.save_checkpoint(tmp_path / "step-2", step=2)
    # The next save may come hours later, and the disk is full.
    assert os.listdir(tmp_path) == []


def test_a_complete_checkpoint_is_not_overwritten_and_a_torn_one_is(model, saved):
    engine = build(model)
    with refused("step-2", CheckpointError):
        engine.save_checkpoint(saved, step=2)
    (saved / MANIFEST).unlink()
    engine.save_checkpoint(saved, step=7)
    engine.wait_for_checkpoint()
    assert read_manifest(saved).step == 7


def shard_of(saved: Path) -> Path:
    return next(iter(sorted(saved.glob("*.safetensors"))))


def test_a_torn_checkpoint_is_refused_by_name(model, saved):
    engine, shard = build(model), shard_of(saved)
    whole, before = shard.read_bytes(), weights(engine)
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    for content in (whole[:-1], bytes(flipped), None):
        shard.write_bytes(content) if content else shard.unlink()
        with refused(
            f"step-2 is torn: {'the contents of ' * (content == flipped)}{shard.name}",
            CheckpointError,
        ):
            engine.load_checkpoint(saved)
    assert_same(weights(engine), before)


def test_a_foreign_folder_is_refused_by_name(model, tmp_path):
    engine, folder = build(model), tmp_path / "theirs"
    folder.mkdir()
    ours = '{"format": "ballast checkpoint 1", "files": {}}'
    for content in (None, "{", "[]", '{"format": "theirs"}', ours):
        if content is not None:
            (folder / MANIFEST).write_text(content)
        with refused("theirs is not a", CheckpointError):
            engine.load_checkpoint(folder)
        assert latest(tmp_path) is None


def test_a_checkpoint_of_another_model_is_refused_and_names_the_first_difference(
    tmp_path, saved
):
    other = build(save_tiny_model(tmp_path / "other", intermediate_size=64))
    with refused("down_proj", CheckpointError):
        other.load_checkpoint(saved)


class Malicious:
    """Unpickled, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_nothing_in_a_checkpoint_is_ever_unpickled(model, saved, tmp_path):
    """Also not where DCP itself keeps a pickle, nor where we keep JSON, nor in place of a file of tensors."""
    target = tmp_path / "executed"
    attack = pickle.dumps(Malicious(target))
    pickle.loads(attack)  # it works
    target.rmdir()
    engine = build(model)
    assert not [
        path for path in saved.iterdir() if path.suffix not in (".json", ".safetensors")
    ]
    shard, manifest = shard_of(saved), json.loads((saved / MANIFEST).read_text())
    for name in (".metadata", "__0_0.distcp", shard.name):
        (saved / name).write_bytes(attack)
        with refused("step-2", CheckpointError):
            engine.load_checkpoint(saved)
        # Even if the manifest vouches for it, as earlier versions wrote it.
        manifest.pop("sha256", None)
        manifest["files"][name] = asdict(StoredFile.of(saved / name))
        (saved / MANIFEST).write_text(json.dumps(manifest))
        if name == shard.name:
            with pytest.raises(CheckpointError):
                engine.load_checkpoint(saved)
        else:
            engine.load_checkpoint(saved)
    (saved / MANIFEST).write_bytes(attack)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(saved)
    assert not target.exists()


def test_the_last_n_are_kept_and_a_torn_one_is_left_out_and_named(model, tmp_path, caplog):
    saved_at(build(model), tmp_path, 2, 9, 10)
    prune(tmp_path, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-9"]
    assert latest(tmp_path) == tmp_path / "step-10"
    shard = shard_of(tmp_path / "step-10")
    shard.write_bytes(shard.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) == tmp_path / "step-9"
    assert f"step-10 is torn: {shard.name}" in caplog.text
    assert latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "extra", [{"a": {1, 2}}, {"a": (1, 2)}, {1: "a"}, {"a": float("nan")}]
)
def test_what_json_does_not_carry_is_refused_at_once(model, tmp_path, extra):
    with pytest.raises(DataError):
        build(model).save_checkpoint(tmp_path / "step-1", step=1, extra=extra)
    assert not list(tmp_path.iterdir())


def test_a_frozen_engine_has_nothing_to_save(model, tmp_path):
    engine = build_engine(model, optimizer=None)
    with refused("frozen"):
        engine.save_checkpoint(tmp_path / "step-1", step=1)
    with refused("frozen"):
        engine.load_checkpoint(tmp_path / "step-1")


def latest(folder: Path) -> Path | None:
    return next((path for path, _ in reversed(complete(folder))), None)


def save_until_killed(model: str, folder: Path) -> None:
    engine = build(model)
    done = latest(folder)
    if done is not None:
        engine.load_checkpoint(done)
    for step in itertools.count(read_manifest(done).step + 1 if done else 1):
        saved_at(engine, folder, step)
        (folder / f"acknowledged-{step}").touch()
        prune(folder, keep_last=2)


def test_a_process_killed_while_it_saves_leaves_the_last_good_checkpoint(model, tmp_path):
    """SIGKILL at random moments; every time what was told to be complete is, and the next process goes on
    from it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    moments, last = random.Random(0), 0
    for _ in range(4):
        process = context.Process(target=save_until_killed, args=(model, tmp_path))
        process.start()
        wait_for(
            lambda last=last: (tmp_path / f"acknowledged-{last + 1}").exists(), process
        )
        time.sleep(moments.uniform(0.0, 0.15))
        process.kill()
        process.join()
        acknowledged = max(
            int(path.name.rpartition("-")[2]) for path in tmp_path.glob("acknowledged-*")
        )
        path = latest(tmp_path)
        manifest = read_manifest(path)
        assert acknowledged <= manifest.step <= acknowledged + 1
        verify_files(path, manifest, manifest.files)
        last = manifest.step
    build(model).load_checkpoint(latest(tmp_path))


def wait_for(
    condition: Callable[[], bool], process: multiprocessing.process.BaseProcess
) -> None:
    while not condition():
        assert process.is_alive(), f"the process that saves ended with {process.exitcode}"
        time.sleep(0.01)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)))
)
def test_tensors_of_a_copy_share_no_byte_and_fill_its_memory(forms):
    named = {
        str(place): (dtype, tuple(shape)) for place, (dtype, shape) in enumerate(forms)
    }
    expected = {
        name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in named.items()
    }
    memory = torch.zeros(
        sum(_aligned(tensor.nbytes) for tensor in expected.values()), dtype=torch.uint8
    )
    for name, view in _views(named, memory).items():
        # A byte of another tensor would no longer be 0.
        assert not view.any()
        view.copy_(expected[name])
    assert_same(_views(named, memory), expected)


def copy_and_continue_on_ranks(
    model: str, offload: bool
) -> tuple[dict, dict, list, list, dict]:
    """Weights of an engine, and of one that loaded its copy from before it continued. Their draws."""
    engine = build(model, offload)
    train(engine, range(2))
    torch.manual_seed(dist.get_rank())
    copy = pickle.loads(pickle.dumps(engine.checkpointer.copy({"prompts": 96})))
    draws = torch.rand(3).tolist()
    train(engine, range(2, 5))
    restored = build(model, offload)
    extra = restored.checkpointer.load_copy(copy)
    restored_draws = torch.rand(3).tolist()
    train(restored, range(2, 5))
    return weights(engine), weights(restored), draws, restored_draws, extra


@pytest.mark.parametrize("offload", [False, True])
def test_a_copy_in_memory_continues_bit_by_bit_on_every_rank(
    model, ranks: RankPool, offload
):
    for rank in ranks.run(copy_and_continue_on_ranks, 2, model, offload):
        usual, restored, draws, restored_draws, extra = rank
        assert_same(restored, usual)
        assert draws == restored_draws
        assert extra == {"prompts": 96}


def save_and_copy_in_stages(model: str, path: Path) -> tuple[list[dict], list[bool]]:
    """Tensors of this rank's stage: trained, from a checkpoint and from a copy. Whether groups are shared."""
    engine = build_engine(model, optimizer=OPTIMIZER, pipeline_parallel=2)
    whole = random_sequences(COUNT)
    groups = []

    def save(*arguments: object, **options: object) -> object:
        groups.append(options["process_group"])
        return async_save(*arguments, **options)

    def take_step(trained: TrainingEngine) -> None:
        halves = [(0, COUNT // 2), (COUNT // 2, COUNT)]
        backward(trained, whole, halves)
        trained.optimizer_step()

    def read_stage(trained: TrainingEngine) -> dict[str, torch.Tensor]:
        state = trained.module.state_dict()
        return {name: full_tensor(tensor).clone() for name, tensor in state.items()}

    take_step(engine)
    async_save = dcp.async_save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "async_save", save)
        saved_at(engine, path, 1)
    copy = engine.checkpointer.copy({})
    stages = [read_stage(engine)]
    other = build_engine(model, optimizer=OPTIMIZER, pipeline_parallel=2)
    other.load_checkpoint(path / "step-1")
    stages.append(read_stage(other))
    take_step(other)
    other.checkpointer.load_copy(copy)
    stages.append(read_stage(other))
    return stages, [group is dist.group.WORLD for group in groups]


def test_both_copies_of_a_tied_weight_come_back_and_saves_have_a_group_alone(
    model, tmp_path, ranks: RankPool
):
    """Messages of the thread that saves would mix with those of training."""
    for stages, shared in ranks.run(save_and_copy_in_stages, 2, model, tmp_path):
        trained, loaded, copied = stages
        assert_same(loaded, trained)
        assert_same(copied, trained)
        assert shared == [False]


def test_a_copy_of_another_model_changes_nothing(model, tmp_path):
    engine = build(model)
    before = weights(engine)
    other_model = save_tiny_model(tmp_path / "other", intermediate_size=80)
    copy = build(other_model).checkpointer.copy({})
    with refused("another model", CheckpointError):
        engine.checkpointer.load_copy(copy)
    assert_same(weights(engine), before)
