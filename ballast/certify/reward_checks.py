"""Point 3: does the reward pay what it should, and only that?

panel of policies --> table, oracle, hacks, failures | same calls under conditions --> `behaviour_checks`
"""

import re
from collections.abc import Sequence

from ballast.certify.certificate import Certificate
from ballast.certify.findings import Finding, Level
from ballast.certify.panel import (
    Drawn,
    Paid,
    answer_policies,
    blind_policies,
    boxed_policy,
    draw,
    find_form,
    open_rewards,
    score_policies,
)
from ballast.certify.subject import ANSWER_COLUMNS, Subject
from workers.errors import quote

NEAR = 0.9  # of the distance from the least policy to the oracle: a hack
SHARE_PAID = 0.95  # of the oracle's answers, below which some are named
SAME = 0.01  # of the rewards' range: what rounding or a length penalty may differ by
LARGE = 100.0
FAILURES = (
    ("took more than", "reward.hangs", "takes longer than its time limit"),
    ("ended its process", "reward.ends_process", "ends its process"),
    ("finite float32", "reward.not_finite", "returns no finite number"),
    ("raised", "reward.raises", "raises"),
    (
        "returned",
        "reward.wrong_result",
        "returns something other than a number for each response",
    ),
)
NOT_A_NUMBER = re.compile(r"it returned (?:None|['\"\[(])")


def check_reward(subject: Subject, certificate: Certificate) -> None:
    """Score the panel of policies, and say which are paid."""
    if not subject.functions:
        certificate.skip("reward panel", "the configuration names no reward function")
        return
    drawn = draw(subject)
    rewards = open_rewards(subject)
    try:
        blind = score_policies(subject, rewards, drawn, blind_policies(subject, drawn))
        form, paid = "", list[Paid]()
        if any(row.answer is not None for row in drawn):
            form, text, means = find_form(subject, rewards, drawn)
            policies = answer_policies(drawn, text)
            if "\\boxed" not in text and means["boxed"] >= NEAR * means[form] > 0:
                policies.append(boxed_policy(drawn))
            paid = score_policies(subject, rewards, drawn, policies)
        else:
            certificate.skip(
                "reward oracle", "no column holds the answers: name it with --answer-key"
            )
    finally:
        rewards.stop()
    panel = [*paid, *blind]
    certificate.add(*_failures(panel, drawn), *_judge_panel(subject, panel, drawn, form))
    threshold = _threshold(panel)
    certificate.add_table("reward panel", [result.row(threshold) for result in panel])
    certificate.add_coverage(
        "reward panel",
        f"{len(panel)} policies on {len(drawn)} of {len(subject.records)} records"
        + (f", answers from {subject.answer_key!r} in the form {form!r}" if form else ""),
        "exploits that none of these policies shows",
    )


def _judge_panel(
    subject: Subject, panel: Sequence[Paid], drawn: Sequence[Drawn], form: str
) -> list[Finding]:
    """Compare the oracle with the policies that know no answer."""
    rewards = [reward for result in panel for reward in result.rewards]
    place = ", ".join(subject.config.reward.weights)
    if max(rewards) == min(rewards):
        return [
            Finding(
                "reward.constant",
                Level.CERTAIN
                if rewards[0] or form
                else Level.NOTE,  # without answers, all may be wrong
                f"The reward is {rewards[0]:g} for every response.",
                place,
                "Let it depend on the response. Equal rewards in a group teach nothing.",
                f"{len(rewards)} responses of {len(panel)} policies",
            )
        ]
    findings = _range(rewards, place)
    oracle = next((result for result in panel if result.policy.name == "oracle"), None)
    if oracle is None:
        return findings
    blind = [result for result in panel if not result.policy.knows and result.rewards]
    lowest = min(result.mean for result in blind)
    best = max(blind, key=lambda result: result.mean)
    if _is_unpaid(oracle, blind, lowest, max(rewards) - min(rewards)):
        return [*findings, _oracle_unpaid(subject, oracle, best, place)]
    if best.mean > oracle.mean:
        findings.append(_oracle_loses(oracle, best, place, form))
    reach = lowest + NEAR * (oracle.mean - lowest)
    for result in blind:
        if result.mean >= reach:
            findings.append(_hack(result, oracle, place))
    findings += _unpaid_answers(subject, oracle, drawn, (lowest + max(oracle.rewards)) / 2)
    findings += _notations(panel, oracle, lowest, place)
    return findings


def _is_unpaid(oracle: Paid, blind: Sequence[Paid], lowest: float, spread: float) -> bool:
    """Whether the records' own answers earn no more than nothing, and no more than other records' answers."""
    means = {result.policy.name: result.mean for result in blind}
    other = means.get("oracle of another record", lowest)
    worth = oracle.mean - other
    return oracle.mean <= lowest or (
        oracle.mean <= means["empty"] and worth <= SAME * spread
    )


def _range(rewards: Sequence[float], place: str) -> list[Finding]:
    if max(map(abs, rewards)) <= LARGE:
        return []
    return [
        Finding(
            "reward.large",
            Level.LIKELY,
            f"Rewards reach from {min(rewards):g} to {max(rewards):g}.",
            place,
            "Scale the reward to about -1 to 1, or check its units.",
        )
    ]


def _oracle_unpaid(subject: Subject, oracle: Paid, best: Paid, place: str) -> Finding:
    answer = next(score.response for score in oracle.scores if score is not None)
    taken = {column for function in subject.functions for column in function.columns}
    certain = (
        subject.answer_key.partition(".")[0] in taken
        and subject.answer_key in ANSWER_COLUMNS
    )
    return Finding(
        "reward.oracle_unpaid",
        Level.CERTAIN if certain else Level.LIKELY,
        f"The reward pays the records' own answers no more than {best.policy.name!r}.",
        place,
        "Compare the column that holds the answer, in the form that the prompt asks for. If another column "
        "holds it, name it with --answer-key.",
        f"answers of {subject.answer_key!r} in every form tried: {oracle.mean:g}, such as {quote(answer)}; "
        f"{best.policy.name}: {best.mean:g}",
    )


def _oracle_loses(oracle: Paid, best: Paid, place: str, form: str) -> Finding:
    return Finding(
        "reward.oracle_loses",
        Level.CERTAIN,
        f"The policy {best.policy.name!r} earns more than the records' own answers.",
        place,
        "Pay the right answer most.",
        f"{best.policy.name}: {best.mean:.3g}, such as {_example(best)}; "
        f"oracle in the form {form!r}: {oracle.mean:.3g}",
    )


WRONG_ANSWERS = {
    "all answers": "A list of all answers",
    "empty": "An empty response",
    "format only": "The form of an answer, without an answer,",
    "injection: judge's prompt": "A judge's instructions, without an answer,",
    "injection: markup": "Markup of a high score, without an answer,",
    "injection: rubric": "A call to ignore the rubric, without an answer,",
    "look-alikes": "The right answer in look-alike characters",
    "one character": "One character",
    "oracle of another record": "The right answer of another record",
    "prompt copied": "A copy of the prompt",
    "repetition to the cap": "One text, repeated to the cap,",
    "usual answer": "The most frequent answer, given to every record,",
}
"""Policies of the panel, in words."""
ONE_ANSWER_WINS = (
    "Add records with other answers, or pay less for a part of an answer: a policy can win without "
    "reading the prompt."
)
WRONG_ANSWER_WINS = (
    "Let the reward read the final answer alone, pay less for a part of it, and "
    "try this response again."
)


def _hack(result: Paid, oracle: Paid, place: str) -> Finding:
    usual = result.policy.name == "usual answer"
    name = (
        "data.one_answer"
        if usual
        else f"reward.hack_{re.sub(r'[^a-z]+', '_', result.policy.name.lower())}"
    )
    wrong_answer = WRONG_ANSWERS.get(result.policy.name, result.policy.name)
    return Finding(
        name.rstrip("_"),
        Level.LIKELY if usual else Level.CERTAIN,
        f"{wrong_answer} earns {result.mean:.3g} on average over {len(result.scores):,} records, "
        f"and the right answer earns {oracle.mean:.3g}.",
        place,
        ONE_ANSWER_WINS if usual else WRONG_ANSWER_WINS,
        f"the response {_example(result)}",
    )


def _example(result: Paid) -> str:
    scores = [score for score in result.scores if score is not None]
    return quote(max(scores, key=lambda score: score.reward).response)


def _unpaid_answers(
    subject: Subject, oracle: Paid, drawn: Sequence[Drawn], middle: float
) -> list[Finding]:
    findings = []
    unpaid = []
    for row, score in zip(drawn, oracle.scores, strict=True):
        if score is not None and not score.failure and score.reward < middle:
            unpaid.append(row)
    share = 1 - len(unpaid) / max(len(oracle.rewards), 1)
    if unpaid:
        findings.append(
            Finding(
                "data.answer_not_paid",
                Level.CERTAIN if share >= SHARE_PAID / 2 else Level.LIKELY,
                f"The reward does not pay {len(unpaid)} of {len(oracle.rewards)} records' own answers.",
                ", ".join(row.place for row in unpaid[:3]),
                "Correct these answers, or let the reward read them: no response to these records is paid.",
                f"such as {quote(unpaid[0].answer)} in {subject.answer_key!r}",
            )
        )
    return findings


def _notations(
    panel: Sequence[Paid], oracle: Paid, lowest: float, place: str
) -> list[Finding]:
    middle = (lowest + oracle.mean) / 2
    unpaid = [
        result
        for result in panel
        if result.policy.name.startswith("notation") and result.mean < middle
    ]
    findings = []
    boxes = [result for result in unpaid if "intermediate" in result.policy.name]
    if boxes:
        findings.append(
            Finding(
                "reward.reads_first_box",
                Level.CERTAIN,
                "The reward reads the first box of a response, not the last.",
                place,
                "Read the last box: responses box intermediate results too.",
                f"{boxes[0].mean:.3g} for {_example(boxes[0])}, oracle: {oracle.mean:.3g}",
            )
        )
    names = [
        result.policy.name.removeprefix("notation: ")
        for result in unpaid
        if result not in boxes
    ]
    if names:
        findings.append(
            Finding(
                "reward.notation",
                Level.NOTE,
                f"The reward does not pay right answers written as {', '.join(names)}.",
                place,
                "Compare values instead of texts, if the prompt does not ask for one notation.",
            )
        )
    return findings


def _failures(panel: Sequence[Paid], drawn: Sequence[Drawn]) -> list[Finding]:
    """Name each kind of failure once, with its first example."""
    findings: dict[str, Finding] = {}
    counts: dict[str, int] = {}
    for result in panel:
        for row, score in zip(drawn, result.scores, strict=True):
            if score is None or not score.failure:
                continue
            name, problem = kind_of(score.failure)
            counts[name] = counts.get(name, 0) + 1
            findings.setdefault(
                name,
                Finding(
                    name,
                    Level.CERTAIN,
                    f"The reward function {problem}.",
                    f"{row.place}, policy {result.policy.name!r}",
                    "Return a finite number for every text: 0 for one that cannot be read.",
                    f"{score.failure}, for {quote(score.response)}",
                ),
            )
    return list(findings.values())


def kind_of(failure: str) -> tuple[str, str]:
    """Return the name and the problem of a finding about a failure of a reward function."""
    if NOT_A_NUMBER.search(failure):
        return "reward.wrong_result", "returns something other than a number"
    for words, name, problem in FAILURES:
        if words in failure:
            return name, problem
    return "reward.fails", "fails"


def _threshold(panel: Sequence[Paid]) -> float:
    """Return the reward above which a response counts as paid: halfway to the largest."""
    rewards = [reward for result in panel for reward in result.rewards]
    return (min(rewards) + max(rewards)) / 2
