"""OpenRun: the calls of a training loop, for a loop of one's own. See docs/primitives.md.

    with ballast.open("mine.yaml") as run:
        samples = run.sample(run.prompts(16), n=8).result()
        run.forward_backward(samples.batch, columns={"advantages": ...})      accumulates
        run.step()
        run.publish()                                                         weights to the engines

Calls return futures at once. Training and sampling go on side by side, each in the order of its calls, and
`publish` waits for both. B sequences of a batch.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from balancing import Plan
from ballast.loop.batch_means import BatchMean
from ballast.loop.lanes import Lanes, then
from controller.data.prompts import Prompt, PromptDataset, PromptRules
from controller.lifecycle.model_card import write_card
from controller.observability.shown_text import other_columns, show_prompt
from controller.observability.step_metrics import update_throughput
from controller.primitives import PassResult, Samples, part_of, token_batch, with_columns
from controller.rollout.batch_rows import sample_numbers, with_record_columns
from controller.rollout.buffer import SamplingRound
from controller.rollout.samples import RolloutBatch
from controller.run import Run
from controller.step import on_training_roles
from controller.step import send_weights as publish
from controller.training_loop import Outcome, TrainingRun, end_step
from workers.batch.metrics import Metrics, add_prefix, merge, results
from workers.batch.remote_batch import RemoteBatch
from workers.config.loss import SumLossConfig, WeightedLossConfig
from workers.config.optimizer import StepSettings
from workers.config.roles import SamplingConfig
from workers.errors import ConfigError
from workers.rendering import Renderer

SUMS = (SumLossConfig, WeightedLossConfig)
STATES = "states"


@dataclass
class _Open:
    """What happened since the last step, for its record."""

    updates: list[Metrics] = field(default_factory=list)
    rollouts: list[RolloutBatch] = field(default_factory=list)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    trained: RemoteBatch | None = None


class OpenRun:
    """A started run, whose loop is the caller's. config: its settings. folder: runs/NAME. tokenizer: of the
    policy.
    """

    def __init__(self, run: Run, renderer: Renderer, rules: PromptRules) -> None:
        self.config = run.config
        self.folder = run.folder
        self.tokenizer = renderer.tokenizer
        self._run = run
        self._renderer = renderer
        self._rules = rules
        self._lanes = Lanes(
            run.roles.rollouts, colocated=run.config.rollout_placement == "colocated"
        )
        # Uids of own prompts, apart from places in the stream.
        self._own = itertools.count(-2, -1)
        self._means = dict[str, BatchMean]()
        self._since = _Open()
        self._step = ExitStack()
        self._rows = list[dict[str, float]]()
        self._published = set[str]()
        self._sampled = dict[int, Counter[str]]()  # of the last step: samples by uid
        run.record.shows_all = True
        self._begin_step()

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model takes."""
        return self._renderer.vocabulary

    @property
    def steps(self) -> int:
        """Steps of the policy so far, with those before a resumed run."""
        return self._run.progress.step

    def prompts(self, count: int) -> list[Prompt]:
        """Take the next prompts of the configured data. Raises ConfigError without data.train."""
        if not self.config.data.train and not self.config.data.sources:
            raise ConfigError(
                "data.train is empty: the run has no prompts. Set it, or pass your own to `sample`."
            )
        return self._run.buffer.next_prompts(count)

    def batch(self, rows: Sequence[Mapping[str, Any]], **columns: Any) -> RemoteBatch:
        """Make a batch of token sequences, for `forward` and `forward_backward`.

        rows: `input_ids`, int [n], `loss_mask`, bool [n], True for tokens to learn, and further token
        columns, [n].
        columns: [B]. Raises DataError for rows of different columns or lengths.
        """
        uids = [str(next(self._own)) for _ in rows]
        return token_batch(rows, uids, columns).with_meta(**self._meta())

    def sample(
        self,
        prompts: Sequence[Any],
        n: int = 1,
        sampling: SamplingConfig | None = None,
        *,
        seed: int | None = None,
        record: bool = True,
        adapter: str = "",
        version: int | None = None,
    ) -> Future[Samples]:
        """Sample each prompt `n` times, and score the samples by the configured rewards.

        prompts: from `prompts`, token ids, or texts, chat messages and records as in data.train. sampling:
        replaces rollout.sampling. seed: replaces run.seed, and gives equal prompts equal samples. Without it
        each call has samples of its own. record: whether the step's record has them. adapter: a published
        LoRA policy, or empty for the base model of several. version: of the policy, as `publish` returned it,
        one of the newest model.lora.versions, None for the newest.

        Raises DataError for a prompt above data.max_prompt_tokens.
        """
        if version is not None and not adapter:
            raise ConfigError(
                f"version={version}: only LoRA policies have several. Name one with adapter=..."
            )
        if adapter and adapter not in self._published:
            raise ConfigError(
                f"adapter={adapter!r}: the engines do not have it. Call publish(adapter=...) first."
            )
        parsed_prompts = [self._prompt(prompt) for prompt in prompts]
        run = self._run
        step = self.steps + 1
        by_uid = {prompt.uid: prompt for prompt in parsed_prompts}
        settings = sampling or self.config.rollout.sampling
        earlier = self._count_samples(step, prompts, n)
        begin = partial(
            SamplingRound,
            run.buffer,
            parsed_prompts,
            n,
            settings,
            step,
            seed,
            adapter,
            version,
            earlier,
        )
        future = self._lanes.sample(begin, adapter)
        return then(future, partial(self._make_samples, by_uid, record))

    def forward(
        self, batch: RemoteBatch, role: str = "policy", *, adapter: str = ""
    ) -> Future[PassResult]:
        """Compute log-probs of tokens with `loss_mask`, or the values of the `critic`, before them.

        adapter: name of the policy, with model.lora.policies above 1, here and below.
        """
        method = self._role(role, "reference", adapter=adapter)
        call = self.config.spec(role).forward_pass
        return self._lanes.train(
            lambda: self._forward(method(call), batch, f"{role}.{call}")
        )

    def forward_backward(
        self,
        batch: RemoteBatch,
        loss: Any = None,
        *,
        rows: np.ndarray | None = None,
        columns: Mapping[str, Any] | None = None,
        role: str = "policy",
        adapter: str = "",
    ) -> Future[PassResult]:
        """Add the gradient of a loss to those since the last `step`, and return log-probs of the policy.

        loss: a name or settings of a sum (`workers.model.losses.sums`), or of a mean, None for the configured
        one. A mean counts the whole batch. rows: those to compute in this call, whose gradients add up over
        calls, however the batch is split. columns: added to the batch, arrays [B] or a list of arrays as long
        as the sequences.

        Raises ConfigError for means of two batches, whose common denominator no call could know.
        """
        method = self._role(role, adapter=adapter)
        settings = self._loss(loss, role)
        chosen = np.arange(len(batch)) if rows is None else np.asarray(rows)
        if not isinstance(settings, SUMS):
            mean = self._means.setdefault(f"{role} {adapter}", BatchMean.of(batch))
            mean.take(batch, chosen, settings)
        full_batch = with_columns(batch, columns or {})
        return self._lanes.train(
            lambda: self._backward(method, full_batch, chosen, settings, role)
        )

    def step(
        self, role: str = "policy", *, adapter: str = "", **settings: float | None
    ) -> Future[dict[str, float]]:
        """Take an optimiser step along the gradients, and record a policy's. settings: see `StepSettings`.

        Returns `grad_norm`, `learning_rate`, and `skipped_steps`, 1 if a gradient was not finite.
        """
        method = self._role(role, adapter=adapter)
        step_settings = StepSettings(**settings)
        self._means.pop(f"{role} {adapter}", None)
        return self._lanes.train(lambda: self._take_step(method, step_settings, role))

    def publish(self, *, adapter: str = "") -> Future[int]:
        """Send the policy's weights to the engines, between earlier and later samples. Returns their version.

        With `adapter`, samples go on meanwhile, except those of the oldest version that engines keep.
        """
        self._role("policy", adapter=adapter)
        self._published.add(adapter)

        def send() -> int:
            publish(self._run, adapter)
            return self._run.weight_version

        return self._lanes.both(
            send,
            adapter,
            partial(self._run.roles.rollouts.versions_to_replace, adapter)
            if adapter
            else None,
        )

    def validate(self) -> Future[dict[str, float]]:
        """Sample and score data.validation with the weights published last. Returns and records
        the metrics.
        """
        return self._lanes.both(lambda: self._run.validate(self.steps))

    def save(self, name: str, *, adapter: str = "") -> Future[Path]:
        """Save weights and optimiser state as runs/NAME/states/`name`, of `adapter` or else of all trained
        roles.
        """
        folder = self.folder / STATES / _check_name(name)
        methods = self._methods(adapter)
        return self._lanes.train(lambda: self._save(folder, methods, adapter))

    def load(self, name: str, *, optimizer: bool = True, adapter: str = "") -> Future[None]:
        """Load what `save` has saved. optimizer: False begins with a fresh optimiser state.

        adapter: the LoRA policy that takes the state of one, whichever that was, while others stay as they
        are. The count of steps and the place in the data stay. Engines follow at the next `publish`.
        """
        folder = self.folder / STATES / _check_name(name)
        methods = self._methods(adapter)

        def load() -> None:
            for role, method in methods.items():
                method("load_checkpoint")(
                    str(folder / role), optimizer=optimizer, policy=adapter
                )

        return self._lanes.train(load)

    def export(self, name: str = "model", *, adapter: str = "") -> Future[Path]:
        """Write the policy in Hugging Face format as runs/NAME/`name`."""
        folder = self.folder / _check_name(name)
        method = self._role("policy", adapter=adapter)
        return self._lanes.train(lambda: self._export(method, folder))

    def plan(self, batch: RemoteBatch) -> Plan:
        """Assign the batch's sequences to ranks and micro-batches, as `forward_backward` does."""
        return self._run.planner.forward_plan(batch, "policy.update")

    def log(self, **metrics: float) -> None:
        """Add numbers to the record of the step in progress."""
        self._run.record.add(metrics)

    def close(self) -> None:
        """Wait for training's calls, give up samples, and write summary.json."""
        self._lanes.close()
        self._step.close()
        outcome = Outcome(
            self._run.progress.before,
            self._run.progress.latest,
            tuple(self._rows),
            self.steps,
        )
        self._run.record.writer.summary(outcome.summary())

    def _role(
        self, role: str, *other_roles: str, adapter: str = ""
    ) -> Callable[[str], Any]:
        """Return a function that finds a role's methods by name, of the LoRA policy `adapter` if there are
        several.

        Raises ConfigError for a role that the run lacks, and for a policy that has no name or should not.
        """
        roles = self._run.roles
        policies = self.config.model.lora.policies
        if bool(adapter) != (role == "policy" and policies > 1):
            fix = "Leave it out" if adapter else "Name the policy"
            raise ConfigError(
                f"adapter={adapter!r}: model.lora.policies={policies}, role={role!r}. {fix}."
            )
        if role == "reference" and role in other_roles:
            return roles.reference_method
        if role not in roles.trained:
            raise ConfigError(
                f"role={role!r}: this run trains {', '.join(roles.trained)}. Name one of them."
            )
        return partial(_method, roles.trained[role], adapter and _check_name(adapter))

    def _loss(self, loss: Any, role: str) -> Any:
        if loss is None:
            return self.config.critic.loss if role == "critic" else self.config.policy_loss
        return SumLossConfig(loss) if isinstance(loss, str) else loss

    def _meta(self) -> dict[str, Any]:
        return {"step": self.steps + 1, "steps": self.config.run.steps}

    def _prompt(self, prompt: Any) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        uid = str(next(self._own))
        key = self._rules.prompt_key
        if isinstance(prompt, np.ndarray) or (
            isinstance(prompt, (list, tuple)) and not isinstance(prompt[0], Mapping)
        ):
            ids = self._renderer.check_ids(list(map(int, prompt)), "the prompt of `sample`")
            return Prompt(uid, np.asarray(ids, np.int32), {key: self.tokenizer.decode(ids)})
        record = dict(prompt) if isinstance(prompt, Mapping) else {key: prompt}
        rules = replace(self._rules, overlong_prompts="error")
        return replace(
            PromptDataset([record], self._renderer, rules, shuffle=False, name="sample").at(
                0
            ),
            uid=uid,
        )

    def _count_samples(self, step: int, prompts: Sequence[Any], n: int) -> dict[str, int]:
        """Return by uid how many samples earlier calls of the step have. Texts and token ids get new uids."""
        if step not in self._sampled:
            self._sampled = {step: Counter()}
        counts = self._sampled[step]
        uids = [prompt.uid for prompt in prompts if isinstance(prompt, Prompt)]
        earlier = {uid: counts[uid] for uid in uids}
        counts.update(dict.fromkeys(uids, n))
        return earlier

    def _make_samples(
        self, by_uid: Mapping[str, Prompt], record: bool, sampled_batch: RolloutBatch
    ) -> Samples:
        buffer = self._run.buffer
        rollout = buffer.shape_rewards(buffer.without_dropped(sampled_batch))
        batch = with_record_columns(rollout.rows, by_uid, self.config.loss_columns)
        groups = np.unique(batch["uid"], return_inverse=True)[1]
        batch = batch.with_columns(
            group_number=groups, sample_number=sample_numbers(batch)
        ).with_meta(**self._meta())
        if record:
            self._since.rollouts.append(rollout)
            self._since.prompts |= by_uid
        return Samples(rollout, batch)

    def _prompt_texts(self, prompts: Mapping[str, Prompt], uid: str) -> dict[str, str]:
        columns = prompts[uid].columns
        key = self._rules.prompt_key
        return {
            "prompt": show_prompt(columns[key], prompts[uid].image_names),
            "record": other_columns(columns, key),
        }

    def _forward(self, method: Any, batch: RemoteBatch, pass_name: str) -> PassResult:
        # Of a LoRA policy's reference, without a KL.
        if pass_name not in self.config.limits:
            pass_name = "policy.log_probs"
        plan = self._run.planner.forward_plan(batch, pass_name)
        with on_training_roles(self._run, "log_probs"):
            outputs = method(batch, plan)
        return PassResult(results(outputs.metrics), outputs.tokens)

    def _backward(
        self,
        method: Callable[[str], Any],
        batch: RemoteBatch,
        rows: np.ndarray,
        loss: Any,
        role: str,
    ) -> PassResult:
        part, plan = part_of(self._run, batch, rows, f"{role}.update")
        with on_training_roles(self._run, "update"):
            if role == "policy":
                outputs = method("forward_backward_log_probs")(part, plan, loss)
                metrics = outputs.metrics
                tokens = outputs.tokens
                self._since.trained = batch
                self._run.record.plans([plan], lengths=part["length"])
            else:
                metrics = method("forward_backward")(part, plan, loss)
                tokens = {}
        if role == "policy":
            self._since.updates.append(metrics)
        return PassResult(results(metrics), tokens)

    def _take_step(
        self, method: Callable[[str], Any], settings: StepSettings, role: str
    ) -> dict[str, float]:
        with on_training_roles(self._run, "update"):
            metrics: Metrics = method("optimizer_step")(settings)
        self._run.record.add(add_prefix(role, results(metrics)))
        if role == "policy":
            self._end_step()
        return results(metrics)

    def _begin_step(self) -> None:
        self._step.enter_context(
            self._run.record.step(self._run.number, self._run.last_step)
        )

    def _end_step(self) -> None:
        run = self._run
        since = self._since
        self._since = _Open()
        record = run.record
        record.add(add_prefix("policy", results(merge(since.updates))))
        if since.rollouts:
            rollout = RolloutBatch.concat(since.rollouts)
            record.samples(
                rollout, rollout.rows, partial(self._prompt_texts, since.prompts)
            )
            record.add(rollout.metrics())
        if since.trained is not None:
            record.trains_on(since.trained)
        TrainingRun.step_finished(run)
        self._step.close()
        trained = (
            update_throughput(record.trained, record.seconds)
            if since.trained is not None
            else {}
        )
        self._rows += [record.metrics] * bool(trained)
        end_step(run, record.times() | trained)
        self._begin_step()

    def _methods(self, adapter: str) -> dict[str, Callable[[str], Any]]:
        """Return functions as of `_role`, of one policy or of all trained roles."""
        if adapter:
            return {"policy": self._role("policy", adapter=adapter)}
        return {
            role: partial(_method, group, "")
            for role, group in self._run.roles.trained.items()
        }

    def _save(
        self, folder: Path, methods: Mapping[str, Callable[[str], Any]], adapter: str
    ) -> Path:
        run = self._run
        state = replace(run.progress, **run.state()).to_json()
        for role, method in methods.items():
            method("save_checkpoint")(str(folder / role), self.steps, state, policy=adapter)
            method("wait_for_checkpoint")()
        return folder

    def _export(self, method: Callable[[str], Any], folder: Path) -> Path:
        with on_training_roles(self._run, "save"):
            method("save_pretrained")(str(folder))
        write_card(self.config, folder)
        return folder


def _method(group: Any, adapter: str, name: str) -> Any:
    if adapter:
        group.use_adapters(adapter)
    return getattr(group, name)


def _check_name(name: str) -> str:
    """Raise ConfigError for a name that is not one of a file in the run's folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigError(
            f"name={name!r}: only letters, digits, `_`, `.` and `-` make a name. Change it."
        )
    return name
