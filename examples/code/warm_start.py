"""A small policy that writes a program in two cases of five: the start of this example, as in
`examples.tools`.
"""

import random
import sys
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from examples.code import data, tools
from examples.tools.warm_start import start

SCHEMAS = [get_json_schema(tools.python)]


def conversation(rng: random.Random, calls: float) -> dict[str, Any]:
    """A record of `controller.sft`."""
    each = data.problem(rng, held_out=False)
    turns = data.called(*each) if rng.random() < calls else data.guessed(rng, each[1])
    return {"messages": [*data.question(*each), *turns], "tools": SCHEMAS}


if __name__ == "__main__":
    sys.exit(start(Path(__file__).parent, conversation, data.write))
