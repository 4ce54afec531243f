"""--train: GRPO of a small policy, the score beside the oracle of held-out records.

records --controller.fit: the reward, and certified_answer of weight 0--> metrics of validations
    --> both rise: it learns | neither | the score alone: an exploit, with the samples that gained most
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from ballast.certify.certificate import Certificate
from ballast.certify.environment.policies import answer_of
from ballast.certify.findings import Finding, Level
from ballast.certify.held_out import certified_answer
from ballast.certify.small_policy import (
    FEWEST,
    NoPolicyError,
    SmallPolicy,
    find_policy,
    load_tokenizer,
    room,
    spread,
    why_unexpressed,
    write_records,
)
from ballast.certify.subject import Subject
from workers.user_code.process import end_with_parent

CHECK = "train"
ORACLE = "ballast.certify.held_out:certified_answer"
ORACLE_METRIC = "validation/certified_answer"
SCORE_METRIC = "validation/reward"
STEPS = 30
EVERY = 10  # steps between validations
PROMPTS = 16
SAMPLES = 8
HELD_OUT = 192
HELD_OUT_SHARE = 5  # of the training data, one record in so many, without validation data
DEVIATIONS = 2.0  # of a difference, to count as a rise
SHOWN = 5
TIME_LIMIT_S = 1800.0
PLAYED = (
    *("environment", "tools", "agent", "agent_command", "max_turns", "max_episode_tokens"),
    *("max_tool_calls", "max_tool_characters", "agent_timeout_s", "history"),
)
"""Settings of the rollout that say how a sample comes about."""


@dataclass(frozen=True)
class Curve:
    """Values of one metric by step of validation, and half the width of what chance does to a difference."""

    steps: Sequence[int]
    values: Sequence[float]
    noise: float

    @property
    def gain(self) -> float:
        return self.values[-1] - self.values[0]

    @property
    def rises(self) -> bool:
        return self.gain > self.noise


def check_training(subject: Subject, certificate: Certificate) -> None:
    """Train the small policy of --model, or the tiny one, for some minutes."""
    config = subject.config
    if reason := _why_not(subject):
        certificate.skip(CHECK, reason)
        return
    try:
        policy = find_policy(subject)
    except NoPolicyError as error:
        certificate.skip(CHECK, str(error))
        return
    with tempfile.TemporaryDirectory(prefix="ballast-certify-") as name:
        folder = Path(name)
        held_out = _held_out(subject, policy)
        if len(held_out.records) < FEWEST:
            certificate.skip(
                CHECK, f"{len(held_out.records)} held-out records: fewer than {FEWEST}"
            )
            return
        problem = _fit(folder, settings_of(subject, policy, held_out, folder))
        if problem:
            certificate.skip(CHECK, f"controller.fit ended without a result: {problem}")
            return
        run = folder / "train"
        validations = [row for row in _rows(run / "metrics.jsonl") if SCORE_METRIC in row]
        samples = _rows(run / "samples.jsonl")
    score, oracle = curves(validations, len(held_out.records), samples)
    certificate.add(*training_findings(score, oracle, subject, samples))
    over = f"{STEPS} steps of {PROMPTS} prompts, {len(held_out.records)} held-out records"
    certificate.add_coverage(
        CHECK, over, f"the policy {policy.path}, not the model of {config.model.path}"
    )
    certificate.add_table("train", curve_rows(score, oracle))


def _why_not(subject: Subject) -> str:
    """Return why this cannot be trained here, or ""."""
    config = subject.config
    if not config.rewarded:
        return "the configuration has no reward"
    if not subject.answer_key:
        return "no record has an answer, so there is no oracle. Name its column by --answer-key"
    if config.uses_judge or config.uses_reward_model:
        return "the reward is a model's, which is not started here"
    return ""


def _held_out(subject: Subject, policy: SmallPolicy) -> SmallPolicy:
    """Return the held-out records that the policy can express, or else a part of the training data."""
    tokenizer = load_tokenizer(policy.path)
    rows = []
    for record in (record for records in subject.held_out.values() for record in records):
        if not why_unexpressed(tokenizer, record, subject.prompt_key, subject.answer_key):
            rows.append(record)
    if len(rows) < FEWEST:
        rows = policy.records[::HELD_OUT_SHARE]
    rows = [rows[position] for position in spread(rows, HELD_OUT)]
    return SmallPolicy(policy.path, rows, list(range(1, len(rows) + 1)))


def settings_of(
    subject: Subject, policy: SmallPolicy, held_out: SmallPolicy, folder: Path
) -> dict[str, Any]:
    """Return the settings of a small run. What plays and pays samples is the subject's."""
    config = subject.config
    held = [record[subject.prompt_key] for record in held_out.records]
    positions = [
        position
        for position, record in enumerate(policy.records)
        if record[subject.prompt_key] not in held
    ]
    files = {
        "train": write_records(subject, policy, folder, "train", positions),
        "validation": write_records(
            subject, held_out, folder, "validation", range(len(held))
        ),
    }
    new_tokens = room(subject, policy)
    weights = {**config.reward.weights, ORACLE: 0.0}
    return {
        "run": {
            "dir": str(folder),
            "name": "train",
            "steps": STEPS,
            "seed": 0,
            "record_samples": True,
        },
        "model": {"path": policy.path},
        "data": {
            **files,
            "prompt_key": subject.prompt_key,
            "max_prompt_tokens": config.data.max_prompt_tokens,
            "overlong_prompts": "drop",
        },
        "batch": {"prompts_per_step": min(PROMPTS, len(positions))},
        "rollout": {
            **{name: getattr(config.rollout, name) for name in PLAYED},
            "threads": 1,
            "samples_per_prompt": SAMPLES,
            "sampling": {"max_new_tokens": new_tokens},
        },
        "reward": {"functions": weights, "timeout_s": config.reward.timeout_s},
        "validation": {"every": EVERY, "at_start": True},
        "policy": {
            "max_tokens_per_micro_batch": 4096,
            "optimizer": {"learning_rate": 2.0e-4},
        },
    }


def _fit(folder: Path, settings: Mapping[str, Any]) -> str:
    """Run controller.fit as a user does. Returns why it ended without a result, or ""."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(dict(settings)), encoding="utf-8")
    command = [sys.executable, "-m", "controller.fit", "--config", str(file)]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
            preexec_fn=end_with_parent,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {TIME_LIMIT_S:g} s"
    if ended.returncode == 0:
        return ""
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit code {ended.returncode}"


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def curves(
    validations: Sequence[Mapping[str, Any]],
    prompts: int,
    samples: Sequence[Mapping[str, Any]],
) -> tuple[Curve, Curve]:
    """Return score and oracle by step. prompts: held-out ones.

    The noise of a difference of means over n prompts is DEVIATIONS * sqrt(2 / n) * deviation. Of the oracle
    it is at most 1/2, and that of the score at most half the range of the rewards.
    """
    steps = [row["step"] for row in validations]
    rewards = [sample["reward"] for sample in samples]
    spread_of_rewards = (max(rewards) - min(rewards)) / 2 if rewards else 0.5
    scale = DEVIATIONS * sqrt(2 / prompts)
    score = Curve(
        steps, [row[SCORE_METRIC] for row in validations], scale * spread_of_rewards
    )
    oracle = Curve(steps, [row[ORACLE_METRIC] for row in validations], scale * 0.5)
    return score, oracle


def training_findings(
    score: Curve, oracle: Curve, subject: Subject, samples: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """Name an exploit, or a reward that a small policy does not learn from."""
    numbers = (
        f"score {score.values[0]:.3f} to {score.values[-1]:.3f}, "
        f"right answers {oracle.values[0]:.3f} to {oracle.values[-1]:.3f}"
    )
    place = "reward"
    if score.rises and not oracle.rises:
        return [
            Finding(
                name="train.exploit",
                level=Level.CERTAIN,
                problem=f"the score rose and the held-out right answers did not: {numbers}",
                place=place,
                advice="read these samples, which gained most without the answer, and pay them no more",
                evidence="; ".join(exploits(samples, subject)),
            )
        ]
    if not score.rises and not oracle.rises:
        return [
            Finding(
                name="train.does_not_learn",
                level=Level.LIKELY,
                problem=f"neither score nor right answers rose in {STEPS} steps: {numbers}",
                place=place,
                advice="look at the table of signal: groups without signal need a warm start",
                evidence=f"a rise is more than {score.noise:.3f}, of right answers {oracle.noise:.3f}",
            )
        ]
    if oracle.rises and not score.rises:
        return [
            Finding(
                name="train.score_stands_still",
                level=Level.NOTE,
                problem=f"right answers rose and the score did not: {numbers}",
                place=place,
                advice="see whether the score has parts that take back what right answers gain",
            )
        ]
    return []


def exploits(samples: Sequence[Mapping[str, Any]], subject: Subject) -> list[str]:
    """Return the samples that gained most against their first third, of those without the right answer.

    One sample a prompt, because a policy that found an exploit writes the same everywhere.
    """
    answers = {str(record[subject.prompt_key]): record for record in subject.records}
    last_step = max((sample["step"] for sample in samples), default=0)
    first = [
        sample["reward"] for sample in samples if sample["step"] <= max(1, last_step // 3)
    ]
    before = fmean(first) if first else 0.0
    best: dict[str, Mapping[str, Any]] = {}
    for sample in samples:
        prompt = str(sample["prompt"])
        answer = answer_of(answers.get(prompt, {}), subject.answer_key)
        if 3 * sample["step"] <= 2 * last_step or certified_answer(
            sample["response"], answer
        ):
            continue
        if prompt not in best or sample["reward"] > best[prompt]["reward"]:
            best[prompt] = sample
    most = sorted(best.values(), key=lambda sample: sample["reward"], reverse=True)[:SHOWN]
    return [
        f"+{sample['reward'] - before:.3f} {str(sample['prompt'])[-40:]!r} -> {sample['response'][:80]!r}"
        for sample in most
    ]


def curve_rows(score: Curve, oracle: Curve) -> list[dict[str, Any]]:
    rows = []
    for step, value, right in zip(score.steps, score.values, oracle.values, strict=True):
        rows.append({"step": step, "score": value, "right answers": right})
    return rows
