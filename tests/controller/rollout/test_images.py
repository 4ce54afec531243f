"""Images of samples: once in the object store, in files, and with reward functions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import ray

from controller.actors.rewards import _images_of
from controller.data.prompts import Prompt
from controller.observability.run_folder import thumbnails
from controller.rollout.sample_files import (
    FinishedSample,
    StoredSamples,
    read_rows,
    read_samples,
    read_step,
    write_rows,
    write_samples,
    write_step,
)
from controller.rollout.samples import RolloutBatch, assemble
from tests.workers.vision_families import pictures
from workers.agents.session import Session, SessionPrompt
from workers.batch.dataproto import DataProto
from workers.batch.placed_images import PlacedImage, keys
from workers.batch.remote_batch import IMAGES, RemoteBatch, store_images
from workers.batch.score import Score
from workers.engine.branches import branches_of
from workers.engine.prefix_hashes import prefix_hashes
from workers.engine.requests import Response, SampleResult
from workers.images.images import ImageSource, digest_of, png_of, read_image
from workers.roles.reward import RewardWorker, ScoreRequest
from workers.user_code.rewards import RewardFunction

SOURCES = [ImageSource(picture, "record 1").image() for picture in pictures()]
PROMPT = (PlacedImage(SOURCES[0], 1, 2), PlacedImage(SOURCES[1], 3, 1))
ROW = {
    "input_ids": np.arange(8, dtype=np.int32),
    "loss_mask": np.arange(8) > 4,
    "rollout_log_probs": np.zeros(8, np.float32),
    "weight_versions": np.where(np.arange(8) > 4, 0, -1).astype(np.int32),
}
SCORE = Score(1.0, "yes")


@pytest.fixture
def rollout(ray_session: None) -> RolloutBatch:
    """Two samples of a prompt of two images, the first with a branch that holds a third."""
    block = ray.put(DataProto.from_rows([ROW] * 4))
    prompt = store_images(PROMPT, {})
    branch = (*prompt, PlacedImage(replace(SOURCES[2], data=b"an observation's"), 5, 2))
    branches = branches_of([ROW, ROW], 5, [prompt, branch])
    hashes = prefix_hashes(keys(ROW["input_ids"], PROMPT), 5)
    facts: dict[str, Any] = {"images": prompt, "prefix_hashes": hashes}
    found = [
        SampleResult("1", 0, 5, 3, "stop", 0, row=0, branches=branches, **facts),
        SampleResult("1", 1, 5, 3, "stop", 0, row=3, **facts),
    ]
    rollout = assemble(
        [(result, block) for result in found], {result.key: SCORE for result in found}
    )
    return replace(rollout, trained=rollout.rows)


def _digests(batch: RemoteBatch) -> list[list[int]]:
    return [[each.image.digest for each in images] for images in batch[IMAGES]]


def test_a_content_is_stored_once_and_gathered(rollout: RolloutBatch) -> None:
    rows = rollout.rows
    references = {
        each.image.digest: each.image.data for images in rows[IMAGES] for each in images
    }
    assert len(references) == 3
    assert all(
        each.image.data is references[each.image.digest]
        for images in rows[IMAGES]
        for each in images
    )
    batch = rows.select([1, 0]).gather()
    for images, expected in zip(
        batch.objects[IMAGES], rows.select([1, 0])[IMAGES], strict=True
    ):
        assert images == expected
        assert digest_of(read_image(images[0].image.data, "an image")) == SOURCES[0].digest
    assert len(rows[IMAGES][0]) == 3
    assert IMAGES not in rows.light.columns


def test_files_keep_images(rollout: RolloutBatch, tmp_path: Path) -> None:
    write_step(tmp_path / "step.npz", rollout)
    write_rows(tmp_path / "rows.npz", rollout.rows)
    step, rows = read_step(tmp_path / "step.npz"), read_rows(tmp_path / "rows.npz")
    for found in (step.rows, step.trained, rows):
        assert _digests(found) == _digests(rollout.rows)
        assert found["prefix_hashes"].tolist() == rollout.rows["prefix_hashes"].tolist()
        data = [
            each.image.data for images in found.gather().objects[IMAGES] for each in images
        ]
        assert data == [
            each.image.data
            for images in rollout.rows.gather().objects[IMAGES]
            for each in images
        ]
    result = SampleResult("1", 0, 5, 3, "stop", 0, row=0, images=rollout.batch[IMAGES][0])
    write_samples(
        tmp_path / "samples.npz", StoredSamples([FinishedSample(result, [ROW], None)])
    )
    (sample,) = read_samples(tmp_path / "samples.npz").finished
    assert sample.result.images == result.images
    assert sample.result.prefix_hashes == rollout.batch["prefix_hashes"][0]


def test_sessions_of_a_checkpoint_keep_their_images(
    ray_session: None, tmp_path: Path
) -> None:
    """What a stored session trains, and the prompts that it answers, have the images of the first one."""
    session = Session("s", max_turns=9)
    answer = Response(
        np.array([8], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop"
    )
    asked, prompt, images = SessionPrompt([]), ROW["input_ids"], PROMPT
    for number in range(2):
        png = tuple(
            replace(each, image=replace(each.image, data=png_of(each.image.data)))
            for each in images
        )
        node = session.add(asked, prompt, answer, number=number, images=png)
        node.received = True
        asked, images = (
            SessionPrompt([], parent=node),
            (*PROMPT, PlacedImage(SOURCES[2], 10, 2)),
        )
        prompt = np.append(session.ids(node), np.array([7, 9, 9], np.int32))
    result = SampleResult("1", 0, 5, 3, "stop", 0, row=0, images=PROMPT[:1])
    finished = [
        FinishedSample(replace(result, images=store_images(PROMPT[:1], {})), [ROW], None)
    ]
    write_samples(
        tmp_path / "samples.npz", StoredSamples(finished, {5: session.snapshot()})
    )
    found = read_samples(tmp_path / "samples.npz")
    assert found.finished[0].result.images == result.images
    again = Session("s", max_turns=9, record=found.partial[5], goes_on=True)
    assert (
        again.row_images
        == session.row_images
        == [(*PROMPT, PlacedImage(SOURCES[2], 10, 2))]
    )
    assert again.prompt_hash == session.prompt_hash
    first = Session("s", max_turns=9, record=found.partial[5])
    assert first.claim_recorded(SessionPrompt([]), ROW["input_ids"], PROMPT[:1]) is None
    assert first.claim_recorded(SessionPrompt([]), ROW["input_ids"], PROMPT) is not None


def test_a_reward_function_gets_the_record_s_images_whatever_the_agent_showed(
    ray_session: None,
) -> None:
    prompt = Prompt("1", ROW["input_ids"], {}, images=PROMPT)
    result = SampleResult("1", 0, 5, 3, "stop", 0, row=0)
    mine, others = store_images(PROMPT, {}), (PlacedImage(SOURCES[2], 0, 1), *PROMPT)
    assert (
        _images_of(prompt, replace(result, images=(*mine, *others)))[0].image.data
        is mine[0].image.data
    )
    for images in (others, ()):
        found = _images_of(prompt, replace(result, images=images))
        assert found == PROMPT
        assert ray.get(found[1].image.data) == png_of(SOURCES[1].data)


def test_reward_functions_get_pictures(
    ray_session: None, vision_model: Callable[[str], Path]
) -> None:
    # By value.
    reward = cloudpickle.dumps(
        lambda response, images: sum(image.width for image in images)
    )
    function = RewardFunction("size", 1.0, reward, ("images",))
    worker = RewardWorker(
        [function], str(vision_model("qwen2_5_vl")), timeout_s=60, concurrency=1
    )
    request = ScoreRequest(
        0, 5, {"images": ["a.png 84 x 56"]}, store_images(PROMPT, {}), "images"
    )
    (score,) = worker.score(DataProto.from_rows([ROW]), [request])
    assert (score.reward, score.failure) == (84 + 56, "")


def test_thumbnails_are_small_and_written_once(tmp_path: Path) -> None:
    names = thumbnails(tmp_path, PROMPT).split()
    assert names == [f"images/{each.image.digest:016x}.png" for each in PROMPT]
    assert max(read_image(name, "a report", str(tmp_path)).size[1] for name in names) == 96
    before = [(tmp_path / name).stat().st_mtime_ns for name in names]
    thumbnails(tmp_path, PROMPT)
    assert [(tmp_path / name).stat().st_mtime_ns for name in names] == before
    assert Prompt("1", ROW["input_ids"], {}, images=PROMPT).image_names == [
        "image 84 x 56",
        "image 56 x 112",
    ]
