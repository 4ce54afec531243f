"""What is no manifest of a checkpoint."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.refusals import refused
from workers.errors import CheckpointError
from workers.model.checkpoint.checkpoint_folder import MANIFEST, read_manifest


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_folder_and_a_pipe_are_no_manifest(make, tmp_path):
    make(tmp_path / MANIFEST)
    with pytest.raises(CheckpointError, match="is not a file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("field", ["step", "world_size"])
def test_a_manifest_whose_step_or_ranks_are_not_whole_numbers_is_refused(field, tmp_path):
    whole = {"step": 3, "world_size": 2, "engine": {}, "extra": {}, "files": {}}
    content = {"format": "ballast checkpoint 1", **whole}
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    assert asdict(read_manifest(tmp_path)) == whole
    (tmp_path / MANIFEST).write_text(json.dumps(content | {field: "3"}))
    with refused("must be whole numbers", CheckpointError):
        read_manifest(tmp_path)
