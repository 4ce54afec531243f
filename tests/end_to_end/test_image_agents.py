"""A run from a configuration whose records hold images, and whose agent is the one of docs/agents.md.

A minute: only here do images of an agent's turns go through an engine into an update of the policy.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.documentation.blocks import ROOT, blocks_of
from tests.end_to_end.test_whole_loop import run_loop
from tests.workers.vision_families import pictures
from workers.batch.remote_batch import IMAGES
from workers.images.images import digest_of

pytestmark = pytest.mark.usefixtures("ray_session")
REWARD = """
def reward(response, images, messages):
    seen = [part.get("digest") for message in messages for part in message["content"] if isinstance(part, dict)]
    return {"reward": len(set(response)) / 10, "width": images[0].width, "seen": sum(map(bool, seen))}
"""


def write(folder: Path, model: Path) -> list[str]:
    """Write data, reward and agent, and return the settings."""
    (agent,) = [
        block.body
        for block in blocks_of(ROOT / "docs" / "agents.md")
        if "image_url" in block.body
    ]
    (folder / "agent.py").write_text(agent)
    (folder / "reward.py").write_text(REWARD)
    for number, picture in enumerate(pictures()):
        picture.save(folder / f"{number}.png")
    content = [{"type": "image"}, {"type": "text", "text": "how many?"}]
    records = [
        {"prompt": [{"role": "user", "content": content}], "images": [f"{n % 3}.png"]}
        for n in range(8)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    return [
        *(
            f"run.dir={folder / 'runs'}",
            "run.name=images",
            f"model.path={model}",
            "run.steps=2",
        ),
        *(
            f"data.train={folder / 'train.jsonl'}",
            "data.shuffle=false",
            "data.max_prompt_tokens=64",
        ),
        *(
            "batch.prompts_per_step=3",
            "rollout.samples_per_prompt=2",
            "rollout.sampling.max_new_tokens=6",
        ),
        *(
            f"rollout.agent={folder / 'agent.py'}:run",
            "rollout.max_turns=2",
            "rollout.max_episode_tokens=128",
        ),
        *(
            f"reward.function={folder / 'reward.py'}:reward",
            "rollout.cpu_kv_cache_gib=0.25",
        ),
        *("policy.max_tokens_per_micro_batch=512", "policy.optimizer.learning_rate=1e-3"),
    ]


@pytest.mark.parametrize(
    "train_vision", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_run_trains_on_an_agent_that_shows_images(
    vision_model: Callable[[str], Path], tmp_path: Path, train_vision: bool
) -> None:
    settings = write(tmp_path, vision_model("qwen2_5_vl"))
    run = run_loop([*settings, f"model.train_vision={str(train_vision).lower()}"])
    sizes = [picture.width for picture in pictures()]
    for step in run.outcome.steps:
        assert step["policy/rollout_mismatch_max"] < 1e-4
        assert (
            step["rollout/samples"],
            step["reward/failures"],
            step["rollout/rows_per_sample"],
        ) == (
            6,
            0,
            1,
        )
        assert (step["reward/seen"], step["rollout/turns_mean"]) == (2, 2)
        assert step["reward/width"] == pytest.approx(sum(sizes) / 3)
    shown = [
        [placed.image.digest for placed in images] for images in run.rollout.batch[IMAGES]
    ]
    digests = [digest_of(picture) for picture in pictures()]
    assert shown == [[digests[int(uid) % 8 % 3]] * 2 for uid in run.rollout.batch["uid"]]
    written = (tmp_path / "runs" / "images" / "samples.jsonl").read_text()
    assert "base64" not in written and "[image]" in written
