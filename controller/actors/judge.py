"""Judge: a generative model on vLLM engines that scores responses while others are generated.

    scored samples --Questions--> prompts --EnginePool--> answers --RewardPool of the parser--> grades
         ^  '------------- with the mean of its grades, as the part `judge` of the reward <---------'
    JudgedScoring

Its engines are its own, or the policy's. Retries, time limits and replacement of lost engines are the pool's.
"""

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import ray

from controller.actors.rewards import RewardPool, Scoring
from controller.data.prompts import Prompt
from controller.data.questions import Questions
from controller.engines.engine_calls import POLL_SECONDS
from controller.engines.engine_pool import EnginePool
from controller.engines.router import Key
from controller.observability.failures import place_of
from workers.batch.score import Score
from workers.config.judge import POLICY, JudgeConfig
from workers.engine.requests import JUDGE_STEP, SampleRequest, SampleResult, sample_seed
from workers.errors import BallastError, DataError, quote
from workers.rendering import Renderer

TIE = 0.5
LONGEST_QUOTE = 60
DROPPED, UNPARSED = "judge's answers dropped", "judge's answers without a grade"
COUNTED = ("answers", "unparsed", "dropped", "tokens", "seconds")


@dataclass
class Case:
    """A sample before the judge.

    score: without the judge. left: answers that are awaited. answer: the last one. grades: of each answer
    `judge`, from 0 to 1, and other numbers that the parser returned. failure: why the last answer without a
    grade has none.
    """

    key: Key
    prompt: Prompt
    score: Score
    left: int = 0
    answer: str = ""
    grades: list[dict[str, float]] = field(default_factory=list)
    failure: str = ""

    def add_grade(self, weight: float) -> Score:
        """Return the score with the mean grade. Without a grade the sample fails, and its turns earned
        nothing.
        """
        score = replace(self.score, judgement=self.answer, scored=time.time())
        if score.failure:
            return score
        if not self.grades:
            credit = tuple((tokens, 0.0, state) for tokens, _, state in score.credit)
            return replace(
                score, reward=0.0, parts={}, failure=f"judge: {self.failure}", credit=credit
            )
        means = {}
        for name in dict.fromkeys(itertools.chain(*self.grades)):
            means[name] = float(
                np.mean([grade[name] for grade in self.grades if name in grade])
            )
        return replace(
            score, reward=score.reward + weight * means["judge"], parts=score.parts | means
        )


class Judge:
    def __init__(
        self,
        settings: JudgeConfig,
        engines: EnginePool,
        parser: RewardPool,
        questions: Questions,
        renderer: Renderer,
        seed: int,
    ) -> None:
        """engines: its own, or the policy's with reward.judge.model=policy. parser: scores answers as
        responses.
        """
        self.settings = settings
        self._engines = engines
        self._seed = seed
        self._questions = questions
        self._renderer = renderer
        self._parsing = parser.begin()
        self._router = engines.begin(settings.sampling, self._parse_answers).router
        self._numbers = itertools.count()
        self._asked: dict[str, Sequence[Case]] = {}
        self._counts = dict.fromkeys(COUNTED, 0.0)
        self._failures: dict[str, list[str]] = {DROPPED: [], UNPARSED: []}
        self._looked = 0.0

    def ask(self, cases: Sequence[Case]) -> None:
        """Ask about each response, or compare each with the next ones of its group, in a ring."""
        settings = self.settings
        count = len(cases)
        questions: list[tuple[Case, ...]] = [(case,) for case in cases]
        if settings.form == "pairwise":
            distances = range(1, min(settings.opponents, count - 1) + 1)
            questions = [
                (a, cases[(i + distance) % count])
                for i, a in enumerate(cases)
                for distance in distances
            ]
        if not questions:  # others of its group have no score
            cases[0].grades.append({"judge": TIE})
        for case in itertools.chain(*questions):
            case.left += settings.samples
        for question in questions:
            self._put(question)

    def _put(self, cases: Sequence[Case]) -> None:
        settings = self.settings
        prompt = cases[0].prompt
        place = f"the question about prompt {prompt.uid}"
        try:
            text = self._questions.text(
                prompt.columns, [case.score.response for case in cases]
            )
            chat = (
                [{"role": "user", "content": text}]
                if self._renderer.tokenizer.chat_template
                else text
            )
            ids = self._renderer.prompt_ids(chat, place, settings.chat_template_arguments)
            if len(ids) > settings.max_prompt_tokens:
                raise DataError(
                    f"{place} has {len(ids)} tokens, above reward.judge.max_prompt_tokens."
                )
        except BallastError as error:
            self._grade(cases, str(error), answers=settings.samples)
            return
        self._looked = self._looked if self._asked else time.monotonic()
        for number in range(settings.samples):
            uid = f"judge {next(self._numbers)}"
            name = f"{[case.key for case in cases]}/{text}"
            self._asked[uid] = cases
            seed = sample_seed(self._seed, JUDGE_STEP, name, number)
            self._router.submit(
                [SampleRequest(uid, 0, ids, seed, timeout_s=settings.timeout_s)]
            )

    def advance(self, timeout_s: float = 0.0, *, pump: bool = True) -> None:
        """Read answers. Waits up to `timeout_s` for the first. pump: not in a callback of the
        same engines.
        """
        now = time.monotonic()
        self._counts["seconds"] += now - self._looked if self._asked else 0.0
        self._looked = now
        busy = not self._router.done
        if pump and busy:
            self._engines.pump_all(timeout_s)
        self._router.take_retried()  # unread, and this generation lasts as long as the run
        for result in self._router.take_dropped():
            self._counts["dropped"] += 1
            cases = self._asked.pop(result.uid)
            self._failures[DROPPED].append(f"{place_of(cases[0].key)}: {result.error}")
            self._grade(cases, f"its engines gave up ({result.error})")
        for (uid, _), score in self._parsing.ready(0.0 if busy else timeout_s).items():
            self._hear(self._asked.pop(uid), score)

    def take_metrics(self) -> dict[str, float]:
        """Return counts since the last call."""
        counts = self._counts
        self._counts = dict.fromkeys(COUNTED, 0.0)
        return {f"judge/{name}": count for name, count in counts.items()}

    def take_failures(self) -> dict[str, list[str]]:
        """Return places and causes of answers that gave no grade since the last call, by kind."""
        failures = self._failures
        self._failures = {DROPPED: [], UNPARSED: []}
        return failures

    def _parse_answers(self, results: list[SampleResult], block: ray.ObjectRef) -> None:
        self._counts["answers"] += len(results)
        self._counts["tokens"] += sum(
            result.prompt_tokens + result.response_tokens for result in results
        )
        self._parsing.submit(
            results,
            block,
            {result.uid: self._asked[result.uid][0].prompt for result in results},
        )

    def _hear(self, cases: Sequence[Case], answer: Score) -> None:
        lowest, highest = self.settings.grades
        failure = answer.failure
        if not failure and not lowest <= answer.reward <= highest:
            failure = f"the grade {answer.reward:g} is not from {lowest:g} to {highest:g}"
        if failure:
            failure += f"; the answer ends with {quote(answer.response[-LONGEST_QUOTE:])}"
            self._failures[UNPARSED].append(f"{place_of(cases[0].key)}: {failure}")
        self._counts["unparsed"] += bool(failure)
        for case in cases:
            case.answer = answer.response
        grade = (answer.reward - lowest) / (highest - lowest)
        parts = {f"judge/{name}": value for name, value in answer.parts.items()}
        self._grade(cases, failure, {"judge": grade, **parts}, {"judge": 1.0 - grade})

    def _grade(
        self,
        cases: Sequence[Case],
        failure: str,
        *grades: dict[str, float],
        answers: int = 1,
    ) -> None:
        for place, case in enumerate(cases):
            case.left -= answers
            if failure:
                case.failure = failure
            else:
                case.grades.append(grades[place])


class JudgedScoring(Scoring):
    """Scoring whose samples are judged once the reward functions have scored them, or their whole group."""

    def __init__(self, pool: RewardPool, judge: Judge, samples: int) -> None:
        """samples: of a group."""
        super().__init__(pool)
        self._judge = judge
        self._samples = samples
        self._prompts: dict[Key, Prompt] = {}
        self._groups: dict[str, list[Case]] = {}  # until they are asked about
        self._missing: Counter[str] = Counter()  # samples of a group that are not judged
        self._cases: dict[Key, Case] = {}

    def submit(
        self,
        results: Sequence[SampleResult],
        block: ray.ObjectRef,
        prompts: Mapping[str, Prompt],
    ) -> None:
        super().submit(results, block, prompts)
        self._prompts |= {result.key: prompts[result.uid] for result in results}
        self._ask(super().ready())
        self._judge.advance(pump=self._judge.settings.model != POLICY)

    def without(self, result: SampleResult) -> None:
        self._missing[result.uid] += 1
        self._ask({})

    def collect(self) -> dict[Key, Score]:
        self._ask(super().collect(), last=True)
        scores = self.ready()
        while self._cases:
            scores |= self.ready(POLL_SECONDS)
        return scores

    def ready(self, timeout_s: float = 0.0) -> dict[Key, Score]:
        self._ask(super().ready(0.0 if self._cases else timeout_s))
        self._judge.advance(timeout_s if self._cases else 0.0)
        done = [
            self._cases.pop(key) for key, case in list(self._cases.items()) if not case.left
        ]
        return {
            case.key: self._pool.check_score(
                case.key, case.add_grade(self._judge.settings.weight)
            )
            for case in done
        }

    def _ask(self, scores: Mapping[Key, Score], *, last: bool = False) -> None:
        """Ask about complete groups, and with `last` about all. A single response is a group unless they are
        compared.

        Samples without a score are not judged.
        """
        for key, score in scores.items():
            case = Case(key, self._prompts.pop(key), score)
            uid = key[0]
            if score.failure:
                self._cases[key] = case
                self._missing[uid] += 1
            else:
                self._groups.setdefault(uid, []).append(case)
        compares = self._judge.settings.form == "pairwise"
        for uid, group in list(self._groups.items()):
            if last or not compares or len(group) + self._missing[uid] >= self._samples:
                del self._groups[uid]
                self._cases |= {case.key: case for case in group}
                self._judge.ask(sorted(group, key=lambda case: case.key))
