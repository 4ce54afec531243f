"""The engine runs where torch and transformers are installed and nothing else of this project's dependencies
is.
"""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
ABSENT = (
    "ray",
    "vllm",
    "tensordict",
    "omegaconf",
    "peft",
    "numba",
    "tensorboard",
    "matplotlib",
    "pyarrow",
    "psutil",
)

# A name that sys.modules maps to None cannot be imported, and is not found by those who only look for it.
SCRIPT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))
sys.argv = ["benchmark", "--tiny", "--device", "cpu", "--repeats", "1", "--sequences", "4"]
import tests.gpu.benchmark
tests.gpu.benchmark.main()
"""


def test_training_steps_in_both_layouts_without_the_other_dependencies():
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=REPOSITORY, text=True, capture_output=True
    )
    assert process.returncode == 0, process.stderr
    table = [line for line in process.stdout.splitlines() if line.startswith("| tiny |")]
    assert [line.split(" | ")[1] for line in table] == [
        "packed, log-probs in chunks",
        "packed, log-probs at once",
        "padded, log-probs in chunks",
        "padded, log-probs at once",
        "256 tokens, whole model",
        "256 tokens, whole model, offloaded",
        "prompt 64, 4 responses of 32, computed 4 times",
        "prompt 64, 4 responses of 32, computed once",
    ]
