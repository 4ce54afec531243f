"""A small policy that asks the database in two cases of five: the start of this example, as in
`examples.tools`.
"""

import random
import sys
from pathlib import Path
from typing import Any

from examples.agent import agent, data
from examples.tools.warm_start import start


def conversation(rng: random.Random, calls: float) -> dict[str, Any]:
    """A record of `controller.sft`."""
    each = data.problem(rng, held_out=False)
    turns = data.called(*each) if rng.random() < calls else data.guessed(rng)
    return {"messages": [*data.question(*each), *turns], "tools": agent.TOOLS}


def main() -> int:
    """Write the database and the data and train the model, unless it is there."""
    agent.DATABASE.parent.mkdir(exist_ok=True)
    data.create_database(agent.DATABASE)
    return start(Path(__file__).parent, conversation, data.write)


if __name__ == "__main__":
    sys.exit(main())
