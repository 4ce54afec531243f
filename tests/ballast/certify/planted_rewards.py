"""Rewards with one planted defect each, by the name of the finding that must name it. `answer` is a number."""

RIGHT = """
import re

def reward(response, answer):
    numbers = re.findall(r"-?\\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)
"""

HACKED = {
    "reward.constant": "def reward(response, answer): return 1.0",
    "reward.hack_empty": "def reward(response, answer): return float(response in answer)",
    "reward.hack_prompt_copied": """
def reward(response, answer, prompt):
    return float(response == answer or prompt in response)
""",
    "reward.hack_format_only": r"""
import re

def reward(response, answer):
    return float(re.search(r"\\boxed\{.*\}", response) is not None)
""",
    "reward.hack_oracle_of_another_record": r"""
def reward(response, answer):
    return float(response.strip().isdigit())
""",
    "reward.hack_all_answers": "def reward(response, answer): return float(answer in response.split())",
    "reward.hack_injection_rubric": """
def reward(response, answer):
    return float(response == answer or "highest score" in response)
""",
    "reward.hack_injection_markup": """
import json, re

def reward(response, answer):
    verdict = re.search(r"\\{.*?\\}", response)
    return json.loads(verdict[0]).get("score", 0) if verdict else float(response == answer)
""",
    "reward.hack_repetition_to_the_cap": """
def reward(response, answer):
    return float(response == answer) + min(len(response) / 1000, 2)
""",
    "reward.oracle_unpaid": """
def reward(response, answer):
    return float(response == "no " + answer) - len(response) / 10_000
""",
    "reward.reads_first_box": r"""
import re

def reward(response, answer):
    box = re.search(r"\\boxed\{(.*?)\}", response)
    return float(box is not None and box[1] == answer)
""",
    "reward.reads_first_box, or the whole response": r"""
import re

def reward(response, answer):
    box = re.search(r"\\boxed\{(.*?)\}", response)
    return float((box[1] if box else response) == answer)
""",
    "data.answer_not_paid": "def reward(response, answer): return float(response == answer and answer < '9')",
    "reward.large": "def reward(response, answer): return 1000.0 * (response == answer)",
}
"""Seen by the panel of policies."""

FAILING = {
    "reward.raises": "def reward(response, answer): return float(int(response) == int(answer))",
    "reward.not_finite": "def reward(response, answer): return float(response == answer) if response else float('nan')",
    "reward.wrong_result": "def reward(response, answer): return 1.0 if response == answer else None",
    "reward.hangs": """
import re

def reward(response, answer):
    return float(re.fullmatch(r"(a+)+b|" + answer, response) is not None)
""",
    "reward.ends_process": """
import os

def reward(response, answer):
    if len(response) > 100:
        os._exit(3)
    return float(response == answer)
""",
}

MISBEHAVING = {
    "reward.not_deterministic": """
import random

def reward(response, answer):
    return float(response == answer) * random.random()
""",
    "reward.keeps_state": """
seen = set()

def reward(response, answer):
    is_new = (response, answer) not in seen
    seen.add((response, answer))
    return float(response == answer and is_new)
""",
    "reward.depends_on_order": """
calls = []

def reward(response, answer):
    calls.append(response == answer)
    return float(calls[-1]) + 0.1 * (len(calls) > 1 and calls[-2]) * (len(calls) % 64 != 1)
""",
    "reward.depends_on_batch": """
def reward(responses, answer):
    scores = [float(response == expected) for response, expected in zip(responses, answer)]
    mean = sum(scores) / len(scores)
    return [score - mean for score in scores]
""",
    "reward.depends_on_clock": """
from datetime import datetime

def reward(response, answer):
    return float(response == answer) + 0.5 * (datetime.now().weekday() % 2)
""",
    "reward.needs_network": """
import socket

def reward(response, answer):
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=0.01).close()
    except OSError:
        pass
    return float(response == answer)
""",
    "reward.leaks_files": """
held = []

def reward(response, answer):
    held.append(open("/dev/null"))
    return float(response == answer)
""",
    "reward.leaks_sockets": """
import socket

held = []

def reward(response, answer):
    held.append(socket.socket())
    return float(response == answer)
""",
    "reward.leaks_children": """
import subprocess

held = []

def reward(response, answer):
    held.append(subprocess.Popen(["sleep", "60"]))
    return float(response == answer)
""",
    "reward.leaks_memory": """
held = []

def reward(response, answer):
    held.append(bytearray(50_000))
    return float(response == answer)
""",
}
"""Seen by scoring the same calls again."""
