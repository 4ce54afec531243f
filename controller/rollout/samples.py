"""RolloutBatch: the samples that the engines returned, with their scores, as a RemoteBatch.

(SampleResult, reference of its block) + Score, for each sample --assemble--> RolloutBatch
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from controller.algorithm.validation_metrics import ScoredResponse
from controller.observability.recorded_values import as_recorded
from controller.observability.shown_text import other_columns, shorten, show_prompt
from controller.observability.step_metrics import session_metrics
from controller.rollout.batch_rows import training_rows
from workers.batch.dataproto import ROUTED_EXPERTS, object_column
from workers.batch.remote_batch import IMAGES, RemoteBatch, places, store_images
from workers.batch.score import LONGEST_SENT, TOOL_PARTS, Score, with_texts
from workers.engine.requests import COUNTS, LENGTH, TURNS, SampleResult
from workers.errors import RolloutError, UnfinishedError

if TYPE_CHECKING:
    from controller.data.prompts import Prompt
    from controller.engines.engine_pool import Sample
    from controller.engines.router import Key

SHOWN_TURNS = 10  # whose rewards are metrics
LONGEST_TEXT = 2_000  # recorded characters of a prompt or a response
LONGEST_SESSION = 10  # texts of that length that are recorded of an agent's session
TOKEN_COLUMNS = ("input_ids", "loss_mask", "rollout_log_probs")
EXAMPLE_COLUMNS = (
    "uid",
    "sample",
    "response_tokens",
    "seconds",
    "weight_version",
    "reward",
)
SAMPLED_COLUMNS = (*TOKEN_COLUMNS, ROUTED_EXPERTS)


@dataclass(frozen=True)
class RolloutBatch:
    """Samples of one or several rounds of generation.

    samples: columns as in SampleResult: uid, sample, COUNTS (int64), prefix_hashes, branches, truncated
    (bool), seconds (float64). Its tokens: TOKEN_COLUMNS and, with model.router_replay, ROUTED_EXPERTS.
    by_sample: scores in the order of `samples`. truncated_dropped: samples that reward.truncated=drop left
    out. failures: why samples have no score.
    version_tokens: tokens by version of the weights. trained: rows that a step trains on, in order, with
    record columns, or empty until the buffer has chosen them.
    """

    samples: RemoteBatch
    by_sample: dict["Key", Score]
    dropped: int
    retried: int
    failures: tuple[str, ...] = ()
    truncated_dropped: int = 0
    rounds: int = 1
    version_tokens: Mapping[int, int] = field(default_factory=dict)
    trained: RemoteBatch = field(default_factory=lambda: RemoteBatch({}, {}))

    @cached_property
    def batch(self) -> RemoteBatch:
        """`samples` with the column `reward`, float64 [B], and objects [B] (see `Score`): of episodes
        `credit`, of an agent's sessions `offsets`.
        """
        scores = self.by_sample.values()
        batch = self.samples.with_columns(
            reward=np.array([score.reward for score in scores])
        )
        credit = object_column([score.credit for score in scores])
        name = "offsets" if any(score.session for score in scores) else "credit"
        return batch.with_columns(**{name: credit}) if any(credit) else batch

    @cached_property
    def rows(self) -> RemoteBatch:
        """`batch` as rows to train on. A sample of several branches has several, one after the other."""
        return training_rows(self.batch)

    @cached_property
    def last_rows(self) -> RemoteBatch:
        """The row of each sample in which the last turn was sampled."""
        branches = np.maximum(
            1, [len(sample_branches) for sample_branches in self.samples["branches"]]
        )
        return self.rows.select(np.cumsum(branches) - 1)

    @staticmethod
    def concat(rounds: Sequence["RolloutBatch"]) -> "RolloutBatch":
        """Join rounds of one step."""
        return RolloutBatch(
            RemoteBatch.concat([rollout.samples for rollout in rounds]),
            {key: score for rollout in rounds for key, score in rollout.by_sample.items()},
            sum(rollout.dropped for rollout in rounds),
            sum(rollout.retried for rollout in rounds),
            tuple(failure for rollout in rounds for failure in rollout.failures),
            sum(rollout.truncated_dropped for rollout in rounds),
            sum(rollout.rounds for rollout in rounds),
            _totals([rollout.version_tokens for rollout in rounds]),
        )

    def with_reward_part(
        self,
        name: str,
        values: np.ndarray,
        *,
        weight: float = 1.0,
        added: np.ndarray | None = None,
    ) -> "RolloutBatch":
        """Add weighted `values` [B], or what is `added`, to the rewards, and keep `values` as the part
        `name`.
        """
        additions = weight * values if added is None else added
        by_sample = {
            key: replace(
                score, reward=score.reward + add, parts=score.parts | {name: value}
            )
            for (key, score), value, add in zip(
                self.by_sample.items(), values.tolist(), additions.tolist(), strict=True
            )
        }
        return replace(self, by_sample=by_sample)

    def with_rewards(self, rewards: np.ndarray, name: str) -> "RolloutBatch":
        """Replace the rewards by `rewards` [B], and keep the difference as the part `name`."""
        by_sample = {
            key: replace(
                score, reward=reward, parts=score.parts | {name: reward - score.reward}
            )
            for (key, score), reward in zip(
                self.by_sample.items(), rewards.tolist(), strict=True
            )
        }
        return replace(self, by_sample=by_sample)

    def without_truncated(self) -> "RolloutBatch":
        """Drop and count truncated samples. Raises RolloutError if no other is left."""
        mask = ~self.samples["truncated"]
        if not mask.any():
            raise RolloutError(
                "reward.truncated=drop: every sample of this round was truncated. Set mask, or raise "
                "rollout.sampling.max_new_tokens."
            )
        by_sample = dict(itertools.compress(self.by_sample.items(), mask))
        dropped = self.truncated_dropped + int(np.sum(~mask))
        return replace(
            self,
            samples=self.samples.select(mask),
            by_sample=by_sample,
            truncated_dropped=dropped,
        )

    def with_baseline(self, greedy: "RolloutBatch") -> "RolloutBatch":
        """Add the greedy response's reward to the same prompt as the column `greedy_reward`.

        greedy: one sample a prompt. Drops and counts samples whose greedy response failed. Raises
        RolloutError if none is left.
        """
        rewards = {uid: score.reward for (uid, _), score in greedy.by_sample.items()}
        mask = np.array([uid in rewards for uid in self.samples["uid"].tolist()])
        if not mask.any():
            raise RolloutError(
                "no prompt of this round has both samples and a greedy response to compare them with."
            )
        samples = self.samples.select(mask)
        samples = samples.with_columns(
            greedy_reward=np.array([rewards[uid] for uid in samples["uid"].tolist()])
        )
        by_sample = {
            key: score for key, score in self.by_sample.items() if key[0] in rewards
        }
        return replace(
            self,
            samples=samples,
            by_sample=by_sample,
            dropped=self.dropped + int(np.sum(~mask)),
            retried=self.retried + greedy.retried,
            failures=self.failures + greedy.failures,
        )

    def scores(self) -> dict[str, float]:
        """Return means of the reward and of every other number of the reward functions."""
        scores = list(self.by_sample.values())
        means = {"reward": float(np.mean([score.reward for score in scores]))}
        for name in sorted({name for score in scores for name in score.parts}):
            means[name] = float(
                np.mean([score.parts[name] for score in scores if name in score.parts])
            )
        return means

    def scored_responses(
        self, prompts: Mapping[str, "Prompt"], prompt_key: str
    ) -> list[ScoredResponse]:
        return [
            ScoredResponse(
                uid,
                prompts[uid].source,
                {"reward": score.reward} | score.parts,
                score.answer,
                {
                    "prompt": show_prompt(
                        prompts[uid].columns[prompt_key], prompts[uid].image_names
                    ),
                    "record": shorten(
                        other_columns(prompts[uid].columns, prompt_key), LONGEST_TEXT
                    ),
                    "response": score.response,
                }
                | _record_turns(score, sys.maxsize),
            )
            for (uid, _), score in self.by_sample.items()
        ]

    def without_tokens(self) -> "RolloutBatch":
        """Keep only light columns and scores, which frees the object store."""
        return replace(self, samples=self.samples.light, trained=RemoteBatch({}, {}))

    def examples(
        self,
        count: int,
        texts_of: Callable[[str], dict[str, str]],
        characters: int = LONGEST_TEXT,
    ) -> list[dict[str, Any]]:
        """Return the first `count` samples, the slowest and the longest, each once, for a record.

        texts_of: texts by a prompt's uid. characters: limit of a text.
        """
        scores = list(self.by_sample.values())
        records = []
        for row in self._choose_rows(count):
            score = scores[row]
            record = {name: self.batch[name][row].item() for name in EXAMPLE_COLUMNS}
            for name, text in texts_of(record["uid"]).items():
                record[name] = shorten(text, characters)
            record["response"] = shorten(score.response, characters)
            record |= _record_turns(score, characters)
            if score.failure:
                record["failure"] = score.failure
            records.append(record)
        return records

    def with_texts(
        self, count: int, read: Callable[[list[Any]], Iterable[Mapping[str, Any]]]
    ) -> "RolloutBatch":
        """Add texts that `RewardWorker` left out, of the samples in `examples(count)`. read:
        `RewardPool.read`.
        """
        items = list(self.by_sample.items())
        first = self.samples.tokens["input_ids"]
        starts = self.batch["prompt_tokens"]
        long = self.batch["length"] - starts > LONGEST_SENT
        rows = [
            row
            for row in self._choose_rows(count)
            if long[row] and not items[row][1].response
        ]
        read_texts = (
            read([(first[row][0], first[row][2], int(starts[row])) for row in rows])
            if rows
            else ()
        )
        new_scores = {
            items[row][0]: with_texts(items[row][1], **texts)
            for row, texts in zip(rows, read_texts, strict=True)
        }
        return replace(self, by_sample=self.by_sample | new_scores)

    def _choose_rows(self, count: int) -> list[int]:
        slowest, longest = (
            np.argsort(-self.batch[name], kind="stable")
            for name in ("seconds", "response_tokens")
        )
        first = range(len(self.batch))[:count]
        return list(
            dict.fromkeys([*first, *slowest[:count].tolist(), *longest[:count].tolist()])
        )

    def metrics(self) -> dict[str, float]:
        tokens = self.batch["response_tokens"]
        scores = self.by_sample.values()
        observed = self.batch["length"] - self.batch["prompt_tokens"] - tokens
        means = self.scores()
        if "greedy_reward" in self.batch.columns:
            means["greedy"] = float(self.batch["greedy_reward"].mean())
        return {
            "reward/mean": means.pop("reward"),
            "reward/std": float(self.batch["reward"].std()),
            **{
                name if name in TOOL_PARTS else f"reward/{name}": value
                for name, value in means.items()
            },
            "reward/failures": float(len(self.failures)),
            "rollout/samples": float(len(self.batch)),
            "rollout/samples_dropped": float(self.dropped),
            "rollout/samples_retried": float(self.retried),
            "rollout/sampling_rounds": float(self.rounds),
            "rollout/response_tokens_mean": float(tokens.mean()),
            "rollout/response_tokens_max": float(tokens.max()),
            "rollout/truncated_share": float(
                (self.batch["truncated"].sum() + self.truncated_dropped)
                / (len(self.batch) + self.truncated_dropped)
            ),
            "rollout/prefix_cache_hits": float(
                self.batch["cached_tokens"].sum() / max(1, self.batch["read_tokens"].sum())
            ),
            "rollout/rows_per_sample": len(self.rows) / len(self.batch),
            "rollout/cut_tokens_mean": float(self.batch["cut_tokens"].mean()),
            "rollout/history_refused_share": float(self.batch["history_refused"].mean()),
            "rollout/turns_mean": float(self.batch["turns"].mean()),
            "rollout/observation_tokens_mean": float(observed.mean()),
            "rollout/oldest_weight_version": float(self.batch["weight_version"].min()),
            "rollout/newest_weight_version": float(
                self.batch["newest_weight_version"].max()
            ),
            **_turn_metrics([score.turn_rewards for score in scores if not score.session]),
            **session_metrics([score.session for score in scores], self.batch["seconds"]),
        }


def _turn_metrics(earned: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the mean and number of rewards of the first turns, if any turn earned one."""
    metrics: dict[str, float] = {}
    for turn in range(
        min(SHOWN_TURNS, max(map(len, earned))) if any(map(any, earned)) else 0
    ):
        rewards = [
            turn_rewards[turn] for turn_rewards in earned if len(turn_rewards) > turn
        ]
        metrics |= {
            f"turn/reward/{turn + 1}": float(np.mean(rewards)),
            f"turn/samples/{turn + 1}": float(len(rewards)),
        }
    return metrics


def assemble(
    samples: Sequence["Sample"],
    scores: Mapping["Key", Score],
    *,
    dropped: Sequence[SampleResult] = (),
    retried: int = 0,
    drop_failed: bool = False,
    token_columns: Sequence[str] = TOKEN_COLUMNS,
) -> RolloutBatch:
    """Join finished samples and scores by (uid, sample). `drop_failed` omits samples without a score.

    dropped: the last failure of every dropped sample. token_columns: columns to keep. Raises UnfinishedError
    if no sample is left.
    """
    pairs = [
        (result, block)
        for result, block in samples
        if not (drop_failed and scores[result.key].failure)
    ]
    results = [result for result, _ in pairs]
    failures = [score.failure for score in scores.values() if score.failure]
    if not results:
        reasons = [result.error for result in dropped] + failures
        reason = reasons[0] if reasons else "none was requested"
        raise UnfinishedError(
            f"no sample of this round was finished. The first was given up because {reason}"
        )
    blocks = [block for _, block in pairs]
    rows = [result.row for result in results]
    columns = {
        "uid": np.array([result.uid for result in results]),
        "prefix_hashes": object_column([result.prefix_hashes for result in results]),
        "truncated": np.array(
            [result.finish_reason in (LENGTH, TURNS) for result in results]
        ),
        "seconds": np.array([result.seconds for result in results]),
    }
    for name in ("sample", *COUNTS):
        columns[name] = np.array(
            [getattr(result, name) for result in results], dtype=np.int64
        )
    columns |= _images(results)
    tokens = {name: places(name, blocks, rows) for name in token_columns}
    return RolloutBatch(
        RemoteBatch(columns, tokens),
        {result.key: scores[result.key] for result in results},
        len(dropped),
        retried,
        tuple(failures),
        version_tokens=_totals([dict(result.version_tokens) for result in results]),
    )


def _images(results: Sequence[SampleResult]) -> dict[str, np.ndarray]:
    """Return the columns `branches` and, where there are images, IMAGES: each content once in the object
    store.
    """
    refs: dict[int, Any] = {}
    branches = []
    for result in results:
        result_branches = [
            replace(branch, images=store_images(branch.images, refs))
            for branch in result.branches
        ]
        branches.append(tuple(result_branches))
    images = [store_images(result.images, refs) for result in results]
    return {"branches": object_column(branches)} | (
        {IMAGES: object_column(images)} if any(images) else {}
    )


def _totals(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    totals: Counter[int] = Counter()
    for version_counts in counts:
        totals.update(version_counts)
    return dict(totals)


def _record_turns(score: Score, longest: int) -> dict[str, Any]:
    """Return the turns of an episode, cut to `longest` characters together, or the tree of an agent's
    session, and the judge's answer.
    """
    record: dict[str, Any] = {}
    if score.judgement:
        record["judgement"] = shorten(score.judgement, longest)
    if score.session:
        record["session"] = as_recorded(score.session, LONGEST_SESSION * longest)
    elif score.turns:
        longest_text = max(1, longest // len(score.turns))
        record["turns"] = [_shorten_texts(turn, longest_text) for turn in score.turns]
    return record


def _shorten_texts(texts: Mapping[str, str], longest: int) -> dict[str, str]:
    return {name: shorten(text, longest) for name, text in texts.items()}
