"""Agents elsewhere: stock clients in threads of this process, which keep what they were answered."""

import json
import socket
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import openai

from controller.config import Config
from controller.observability.run_folder import step_file
from controller.rollout.sample_files import read_step
from controller.rollout.samples import RolloutBatch
from tests.workers.rollout import agent_model
from workers.engine.requests import sample_seed

KEY = "a key that agents elsewhere have"
RETRIES = 30


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Agents:
    """answers: texts, by session, since it was last given out. rewards: by session. asked: how often each
    was.
    """

    def __init__(
        self, port: int, *, threads: int = 6, turns: int = 3, pause_s: float = 0.1
    ) -> None:
        self.url, self.turns, self.pause_s = f"http://127.0.0.1:{port}", turns, pause_s
        self.answers: defaultdict[str, list[str]] = defaultdict(list)
        self.rewards: dict[str, float] = {}
        self.asked: defaultdict[str, int] = defaultdict(int)
        self.failures: list[str] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(threads)
        ]

    def __enter__(self) -> "Agents":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _work(self) -> None:
        while not self._over.is_set():
            answer = self._post(f"{self.url}/sessions", KEY)
            if answer is not None and answer.status_code == 200:
                session = answer.json()
                self.asked[session["id"]] += 1
                try:
                    self._play(session)
                except openai.OpenAIError as error:
                    self.failures.append(f"{session['id']}: {error}")

    def _play(self, session: dict[str, Any]) -> None:
        client = openai.OpenAI(
            base_url=session["base_url"], api_key=session["api_key"], max_retries=RETRIES
        )
        messages, name = list(session["record"]["prompt"]), session["id"]
        self.answers[name] = []
        for turn in range(self.turns):
            answer = (
                client.chat.completions.create(model="any", messages=messages)
                .choices[0]
                .message
            )
            self.answers[name].append(answer.content or "")
            messages += [
                answer.model_dump(exclude_none=True),
                {"role": "user", "content": f"Again, {turn}."},
            ]
            time.sleep(self.pause_s * (0.2 + int(name[-1], 16) / 8))
        reward = len(self.answers[name][-1]) / 100
        posted = self._post(
            f"{session['session_url']}/reward", session["api_key"], {"reward": reward}
        )
        if posted is not None and posted.status_code == 200:
            self.rewards[name] = reward

    def _post(self, url: str, key: str, body: Any = None) -> httpx.Response | None:
        for _ in range(RETRIES):
            try:
                return httpx.post(
                    url, headers={"Authorization": f"Bearer {key}"}, json=body, timeout=60
                )
            except httpx.TransportError:  # the run, or its front, starts again
                if self._over.wait(0.5):
                    break
        return None


def agent_settings(folder: Path, name: str) -> list[str]:
    agent_model.save(folder / "model")
    records = [
        {"prompt": [{"role": "user", "content": f"What is {n} + 3?"}], "number": n}
        for n in range(64)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    return [
        *(
            f"run.dir={folder / 'runs'}",
            f"model.path={folder / 'model'}",
            f"data.train={folder / 'train.jsonl'}",
        ),
        *(
            f"run.name={name}",
            "batch.prompts_per_step=4",
            "rollout.samples_per_prompt=3",
            "data.shuffle=false",
        ),
        *(
            "rollout.cpu_kv_cache_gib=0.25",
            "rollout.sampling.max_new_tokens=64",
            "rollout.max_turns=8",
        ),
        *(
            "data.max_prompt_tokens=128",
            "rollout.max_episode_tokens=768",
            "policy.max_tokens_per_micro_batch=2048",
        ),
        *(
            "policy.optimizer.learning_rate=1e-6",
            "run.record_samples=true",
            "tracking.tensorboard=false",
        ),
        *("rollout.threads=1", "resources.dashboard=false"),
    ]


def names_of(config: Config, rollout: RolloutBatch) -> list[str]:
    """Names of the sessions of a step's samples, which follow from a prompt's place."""
    first = config.batch.prompts_per_step
    keys = ((int(uid) // first + 1, uid, sample) for uid, sample in rollout.by_sample)
    return [
        f"{sample_seed(config.run.seed, step, uid, sample):016x}"
        for step, uid, sample in keys
    ]


def unaccounted(
    config: Config, agents: Agents, steps: int, *, cut: bool = False
) -> list[str]:
    """What is wrong between the agents' books and what the steps have trained, a sentence each.

    cut: whether agents may have been told more than is trained, because the driver was killed.
    """
    wrong, trained = [], dict[str, int]()
    for step in range(1, steps + 1):
        rollout = read_step(step_file(config.run_folder, step), put=lambda block: block)
        names = names_of(config, rollout)
        for name, score in zip(names, rollout.by_sample.values(), strict=True):
            kept = [node for node in score.session if node["kept"]]
            said, told = (
                [node["said"]["content"] or "" for node in kept],
                agents.answers[name],
            )
            if name in trained:
                wrong.append(f"{name} is trained twice.")
            if said != told and not (cut and set(said) <= set(told)):
                wrong.append(f"{name} trains {said}, and its agent was told {told}.")
            if score.failure or score.reward != agents.rewards.get(name):
                wrong.append(
                    f"{name} has {score.reward} ({score.failure}), its agent gave {agents.rewards.get(name)}."
                )
            trained[name] = sum(node["tokens"] for node in kept)
        masks = [
            block.row(row)["loss_mask"]
            for block, _, row in rollout.rows.tokens["loss_mask"]
        ]
        if sum(int(mask.sum()) for mask in masks) != sum(trained[name] for name in names):
            wrong.append(f"step {step} trains other tokens than its sessions have.")
    return wrong + [
        f"{name} is played and not trained."
        for name in sorted({*agents.rewards} - {*trained})
        if not cut
    ]
