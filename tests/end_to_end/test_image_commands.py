"""Commands on records with images: samples of a data set as the hub has it, pairs over several ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from ballast.sampling_commands import generate
from tests.controller.offline.local_run import run_offline
from tests.json_lines import read_lines
from tests.workers.vision_families import pictures
from workers.images.images import png_of

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.slow]
ASKED = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}
]


def test_samples_of_a_data_set_of_the_hub(
    vision_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its files are Parquet in a folder. `datasets` keeps images as bytes with a name that is nowhere."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    messages = [[{"role": "user", "content": "<image>how many?"}] for _ in pictures()]
    images = pa.array(
        [{"bytes": png_of(each), "path": "gone.png"} for each in pictures()], kind
    )
    table = pa.table({"prompt": pa.array(messages), "image": images})
    features = {"info": {"features": {"image": {"decode": False, "_type": "Image"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pq.write_table(table, tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    settings = [
        f"model.path={vision_model('qwen2_5_vl')}",
        f"data.train={tmp_path / 'hub'}",
        "data.image_key=image",
    ]
    settings += [
        "rollout.sampling.max_new_tokens=6",
        "rollout.cpu_kv_cache_gib=0.25",
        "rollout.samples_per_prompt=2",
    ]
    OmegaConf.save(OmegaConf.from_dotlist(settings), tmp_path / "config.yaml")
    assert (
        generate.main(
            ["--config", str(tmp_path / "config.yaml"), f"--output={tmp_path / 'samples'}"]
        )
        == 0
    )
    lines = read_lines(tmp_path / "samples" / "samples.jsonl")
    sizes = [f"gone.png {each.width} x {each.height}" for each in pictures()]
    found = sorted(
        (line["uid"], *line["record"]["image"], line["response_tokens"]) for line in lines
    )
    assert found == sorted(
        (str(uid), size, 6) for uid, size in enumerate(sizes) for _ in range(2)
    )


PLANS: dict[str, list[str]] = {
    "1 rank": [],
    "2 ranks": ["policy.data_parallel=2"],
    "padded": ["model.layout=padded"],
    "context parallel": ["policy.parallel.context_parallel=2"],
}


@pytest.mark.parametrize("train_vision", [False, True])
def test_preferences_of_images_do_not_depend_on_the_plan(
    vision_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train_vision: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, picture in enumerate(pictures()):
        picture.save(tmp_path / f"{number}.png")
    pairs: list[dict[str, Any]] = [
        {
            "prompt": ASKED,
            "chosen": f"{n} dots",
            "rejected": "no",
            "images": [f"{n % 3}.png"],
        }
        for n in range(15)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    settings = [
        f"model.path={vision_model('qwen2_5_vl')}",
        f"run.dir={tmp_path / 'runs'}",
        "data.validation=pairs.jsonl",
    ]
    settings += [
        f"model.train_vision={str(train_vision).lower()}",
        "policy.max_tokens_per_micro_batch=256",
    ]
    curves = []
    for number, plan in enumerate(PLANS.values()):
        outcome = run_offline("preferences", f"run-{number}", *settings, *plan)
        curves.append(
            [*(step["policy/loss"] for step in outcome.steps), outcome.after["loss"]]
        )
    assert abs(curves[0][-1] - curves[0][0]) > 1e-3, (
        "the steps change what is to be compared"
    )
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-6)
