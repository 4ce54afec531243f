"""Signal: does a small policy learn something from these records?

records --generate: n samples of each, scored--> lines --of_records--> pass@k, share of groups with signal
    --> too easy, too hard, samples per prompt, the responses' cap, a column `difficulty`

A group has signal if its rewards are not all equal: else its advantages are 0.
"""

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from math import comb, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ballast.certify.certificate import Certificate
from ballast.certify.findings import Finding, Level
from ballast.certify.small_policy import (
    ANSWER,
    NoPolicyError,
    SmallPolicy,
    find_policy,
    room,
    spread,
    write_configuration,
)
from ballast.certify.subject import Subject
from controller.algorithm.validation_metrics import pass_at_k
from workers.errors import BallastError, one_line

if TYPE_CHECKING:
    from controller.sampling.output import Line

CHECK = "signal"
SAMPLES = 16  # of a record, the largest k of pass@k
RECORDS = 64
WRITTEN = 1024  # records that get a difficulty
FINISHED_SHARE = 0.99  # of finished responses within the cap
CUT_SHARE = 0.05
MOST_SILENT = 0.5  # share of groups without signal that is worth a finding
DIFFICULTY = "difficulty"
FORMULA = "the n that maximizes (s(n) - s(2)) / (s(N) - s(2)) - (n - 2) / (N - 2), s: share with signal"


@dataclass(frozen=True)
class Group:
    """Samples of one record. number: the record's, from 1. right: how many reach the threshold of success.

    lengths: tokens of responses that finished. cut: responses that did not.
    """

    number: int
    rewards: Sequence[float]
    right: int
    lengths: Sequence[int]
    cut: int

    @property
    def pass_at_1(self) -> float:
        return self.right / len(self.rewards)

    def signal(self, samples: int) -> float:
        """Probability that `samples` of the group's rewards, drawn at random, are not all equal.

        1 - sum over values v of C(count of v, samples) / C(n, samples), unbiased as pass@k is.
        """
        total = comb(len(self.rewards), samples)
        equal = sum(comb(count, samples) for count in Counter(self.rewards).values())
        return 1.0 - equal / total


@dataclass(frozen=True)
class Signal:
    """What the groups say together."""

    groups: Sequence[Group]

    @cached_property
    def samples(self) -> int:
        """Samples that every group has."""
        return min(len(group.rewards) for group in self.groups)

    @property
    def too_hard(self) -> list[int]:
        """Numbers of records that no sample got right, and whose rewards are all equal."""
        return [
            group.number
            for group in self.groups
            if not group.right and not group.signal(self.samples)
        ]

    @property
    def too_easy(self) -> list[int]:
        return [group.number for group in self.groups if group.right == len(group.rewards)]

    def pass_at(self, k: int) -> float:
        values = [pass_at_k(len(group.rewards), group.right, k) for group in self.groups]
        return float(np.mean(values))

    def share(self, samples: int) -> float:
        """Share of groups of `samples` that have signal."""
        return float(np.mean([group.signal(samples) for group in self.groups]))

    @property
    def best_samples(self) -> int:
        """Samples per prompt at the knee of the share: where it lies farthest above the straight line."""
        most = self.samples
        gain = self.share(most) - self.share(2) if most > 2 else 0.0
        if gain < 1e-9:
            return 2
        heights = {}
        for samples in range(2, most + 1):
            risen = (self.share(samples) - self.share(2)) / gain
            heights[samples] = risen - (samples - 2) / (most - 2)
        return max(heights, key=lambda samples: heights[samples])

    @property
    def cap(self) -> int:
        """Tokens that FINISHED_SHARE of the finished responses need, 0 if none finished."""
        lengths = [length for group in self.groups for length in group.lengths]
        return int(np.quantile(lengths, FINISHED_SHARE, method="higher")) if lengths else 0

    @property
    def cut_share(self) -> float:
        cut = sum(group.cut for group in self.groups)
        return cut / sum(len(group.rewards) for group in self.groups)


def group_lines(
    lines: Iterable["Line"], numbers: Sequence[int], success: str, threshold: float
) -> Signal:
    """Group lines of samples.jsonl by record. numbers: of the records, by their place in the job.

    success: the score that says whether a response is right. Failed rewards are left out.
    """
    by_record: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if "failure" not in line:
            by_record[numbers[int(line["uid"])]].append(line)
    groups = []
    for number, members in sorted(by_record.items()):
        if len(members) > 1:
            groups.append(_group(number, members, success, threshold))
    return Signal(groups)


def _group(number: int, lines: Sequence["Line"], success: str, threshold: float) -> Group:
    rewards = [line["reward"] for line in lines]
    marks = [
        line["reward"] if success == "reward" else line["parts"].get(success, nan)
        for line in lines
    ]
    lengths = [
        line["response_tokens"] for line in lines if line["finish_reason"] != "length"
    ]
    right = sum(mark >= threshold for mark in marks)
    return Group(number, rewards, right, lengths, len(lines) - len(lengths))


def check_signal(subject: Subject, certificate: Certificate) -> None:
    """Sample from the policy of --model, or the tiny one. --write writes a column `difficulty`."""
    if not subject.config.rewarded:
        certificate.skip(CHECK, "the configuration has no reward")
        return
    try:
        policy = find_policy(subject)
    except NoPolicyError as reason:
        certificate.skip(CHECK, str(reason))
        return
    try:
        signal = _sample(subject, policy, WRITTEN if subject.write else RECORDS)
    except BallastError as error:
        certificate.skip(CHECK, f"sampling from {policy.path} failed: {one_line(error)}")
        return
    if not signal.groups:
        certificate.skip(CHECK, f"every reward of the samples of {policy.path} failed")
        return
    certificate.add(*signal_findings(signal, policy.path, room(subject, policy)))
    over = f"{signal.samples} samples of each of {len(signal.groups)} of {len(subject.records):,} records"
    bound = f"the policy {policy.path}"
    if policy.unexpressed:
        bound += f". {len(subject.records) - len(policy.records)} records left out: {policy.unexpressed}"
    certificate.add_coverage(CHECK, over, bound)
    certificate.add_table("signal", signal_rows(signal))
    certificate.add_table("pass@k by record", record_rows(signal))
    certificate.add_table("recommended", recommended_rows(signal))
    if subject.write:
        file = write_difficulty(subject, signal)
        certificate.add_coverage(
            "column difficulty", f"{file}, {len(signal.groups)} records"
        )


def _sample(subject: Subject, policy: SmallPolicy, most: int) -> Signal:
    """Sample from the policy as `ballast generate` does. Raises BallastError."""
    from controller.config.sampler import GenerateConfig
    from controller.lifecycle.interrupts import handlers_kept
    from controller.sampling.jobs import JobRequest
    from controller.sampling.sampling_run import prepare_job

    lines: list[Line] = []
    chosen = spread(policy.records, most)
    with tempfile.TemporaryDirectory(prefix="ballast-certify-") as name:
        folder = Path(name)
        overrides = (
            f"rollout.samples_per_prompt={SAMPLES}",
            f"rollout.sampling.max_new_tokens={room(subject, policy)}",
            "rollout.replicas=1",
            "rollout.tensor_parallel=1",
        )
        file = write_configuration(subject, policy, folder, chosen)
        request = JobRequest(file, output=folder / "samples", overrides=overrides)
        with handlers_kept(), Path(folder, "log").open("w") as log, redirect_stdout(log):
            _, start = prepare_job(
                GenerateConfig, lambda job, done, *rest: lines.extend(done), request
            )
            start()
    config = subject.config.validation
    numbers = [policy.numbers[position] for position in chosen]
    return group_lines(lines, numbers, config.success, config.success_threshold)


def signal_findings(signal: Signal, path: str, cap: int) -> list[Finding]:
    """Name data that a group learns nothing from, and a cap that cuts responses."""
    groups = len(signal.groups)
    findings = []
    for name, numbers, advice in (
        (
            "too_hard",
            signal.too_hard,
            "leave these records out at first, or warm the policy up on solutions",
        ),
        ("too_easy", signal.too_easy, "leave these records out, or make them harder"),
    ):
        if len(numbers) > MOST_SILENT * groups:
            findings.append(
                Finding(
                    name=f"signal.{name}",
                    level=Level.LIKELY,
                    problem=f"{len(numbers)} of {groups} records are {name.replace('_', ' ')} for {path}: "
                    f"all {signal.samples} samples have the same reward",
                    place=f"record {numbers[0]} and others",
                    advice=advice,
                    evidence=f"records {', '.join(map(str, numbers[:8]))}",
                )
            )
    if signal.cut_share > CUT_SHARE:
        findings.append(
            Finding(
                name="signal.responses_cut",
                level=Level.LIKELY,
                problem=f"{signal.cut_share:.0%} of the responses reach the cap of {cap} tokens",
                place=f"rollout.sampling.max_new_tokens={cap}",
                advice="raise it, or ask for shorter answers: a response that is cut has no answer",
                evidence=f"{FINISHED_SHARE:.0%} of those that finish have at most {signal.cap} tokens",
            )
        )
    return findings


def signal_rows(signal: Signal) -> list[dict[str, Any]]:
    """pass@k and the share of groups with signal, by k to the number of samples."""
    rows = []
    for k in range(1, signal.samples + 1):
        share = signal.share(k) if k > 1 else None
        rows.append({"k": k, "pass@k": signal.pass_at(k), "groups of k with signal": share})
    return rows


def record_rows(signal: Signal) -> list[dict[str, Any]]:
    rows = []
    for group in signal.groups:
        row: dict[str, Any] = {"record": group.number}
        for k in (1, 2, 4, 8, 16):
            if k <= len(group.rewards):
                row[f"pass@{k}"] = pass_at_k(len(group.rewards), group.right, k)
        rows.append(row)
    return rows


def recommended_rows(signal: Signal) -> list[dict[str, Any]]:
    of_groups = f"of {len(signal.groups)} records"
    return [
        {"what": "too hard", "value": len(signal.too_hard), "by": of_groups},
        {"what": "too easy", "value": len(signal.too_easy), "by": of_groups},
        {"what": "rollout.samples_per_prompt", "value": signal.best_samples, "by": FORMULA},
        {
            "what": "rollout.sampling.max_new_tokens",
            "value": signal.cap,
            "by": f"{FINISHED_SHARE:.0%} of the responses that finish",
        },
    ]


def write_difficulty(subject: Subject, signal: Signal) -> Path:
    """Write a copy of the sampled records with their difficulty, 1 - pass@1, next to the data."""
    (first, *_) = subject.train
    source = Path(first)
    stem = source.stem if source.exists() else "records"
    file = (
        source.with_name(f"{stem}.difficulty.jsonl")
        if source.exists()
        else Path(f"{stem}.difficulty.jsonl")
    )
    lines = []
    for group in signal.groups:
        record = subject.records[group.number - 1] | {DIFFICULTY: 1.0 - group.pass_at_1}
        lines.append(
            json.dumps({name: value for name, value in record.items() if name != ANSWER})
            + "\n"
        )
    file.write_text("".join(lines), encoding="utf-8")
    return file
