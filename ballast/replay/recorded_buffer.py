"""RecordedBuffer: the samples of a recorded run, read from its files.

runs/NAME/samples/step-3.npz --read_step--> RolloutBatch of step 3
"""

from pathlib import Path
from typing import Any

import numpy as np

from controller.data.prompts import Prompt
from controller.observability.run_folder import step_file
from controller.rollout.buffer import RolloutBuffer
from controller.rollout.sample_files import read_step
from controller.rollout.samples import RolloutBatch


class RecordedBuffer(RolloutBuffer):
    """Reads a step's samples. folder: of the run that recorded them."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.folder = folder

    def collect(self, step: int) -> RolloutBatch:
        """Read a step's samples. Raises DataError as `read_step`."""
        return read_step(step_file(self.folder, step))


class RecordedPrompts:
    """Placeholders for prompts, which show their place in the stream. key: data.prompt_key."""

    def __init__(self, key: str) -> None:
        self.key = key

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return `count` placeholders from place `start` on."""
        places = map(str, range(start, start + count))
        return [
            Prompt(place, np.empty(0, np.int32), {self.key: place}, "") for place in places
        ]
