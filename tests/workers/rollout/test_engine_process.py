"""A process below an actor does not outlive it."""

import ctypes
import os
import subprocess
import sys

import psutil

from workers.rollout.weight_transfer import ACTOR, end_with_actor

CHILD = """
import time
from workers.rollout.weight_transfer import end_with_actor
end_with_actor()
print("up", flush=True)
time.sleep(100)
"""
ACTOR_SCRIPT = f"""
import subprocess, sys, time
from workers.rollout.weight_transfer import mark_actor
mark_actor()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(100)
"""


def test_a_process_below_a_killed_actor_ends() -> None:
    actor = subprocess.Popen([sys.executable, "-c", ACTOR_SCRIPT], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(actor.stdout.readline()))
    assert child.is_running()
    actor.kill()
    actor.wait()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert alive == []


def death_signal() -> int:
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found))  # PR_GET_PDEATHSIG
    return found.value


def test_an_actor_and_processes_of_others_are_left_alone(monkeypatch) -> None:
    monkeypatch.delenv(ACTOR, raising=False)
    end_with_actor()
    assert death_signal() == 0
    monkeypatch.setenv(ACTOR, str(os.getpid()))
    end_with_actor()
    assert death_signal() == 0
