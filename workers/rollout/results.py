"""Results: what becomes of a sample whose last turn is sampled.

Episode | Session + reward --finish_sample, finish_session--> (SampleResult, rows)
error --failed_result--> SampleResult without rows
(SampleResult, rows), ... --flush--> DataProto, list[SampleResult]
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from workers.agents.session import Session
from workers.batch.dataproto import ROUTED_EXPERTS, DataProto
from workers.batch.placed_images import keys
from workers.batch.score import Score
from workers.engine.branches import branches_of
from workers.engine.prefix_hashes import prefix_hashes
from workers.engine.requests import ERROR, LENGTH, STOP, TURNS, SampleRequest, SampleResult
from workers.episodes.conversation import Conversation
from workers.episodes.episode import Episode

Row = dict[str, np.ndarray]
Sample = tuple[SampleResult, list[Row]]


def flush(
    samples: Sequence[Sample], experts: int = 0
) -> tuple[DataProto, list[SampleResult]]:
    """Join the rows, and number the results, sorted by (uid, sample). experts: of a layer, for their numbers'
    type.
    """
    block: list[Row] = []
    results = []
    for result, rows in sorted(samples, key=lambda sample: sample[0].key):
        results.append(replace(result, row=len(block)) if rows else result)
        block += [_narrow(row) for row in rows] if experts < 256 else rows
    return DataProto.from_rows(block), results


def _narrow(row: Row) -> Row:
    """A byte for an expert's number: -1 becomes 255."""
    return (
        row | {ROUTED_EXPERTS: row[ROUTED_EXPERTS].astype(np.uint8)}
        if ROUTED_EXPERTS in row
        else row
    )


def finish_session(
    request: SampleRequest,
    session: Session,
    agent_score: Score | None,
    failure: str,
    *,
    needs_reward: bool,
) -> Sample:
    """Return the sample of a session that its agent has left. agent_score: its reward. failure: why it did
    not end well.

    needs_reward: whether nothing else rewards it.
    """
    if agent_score is not None:
        session.reward(agent_score.reward)
    parts = dict(agent_score.parts) if agent_score else {}
    if not needs_reward and session.value is not None:
        parts["agent"] = session.value
    elif not needs_reward:
        session.reward(0.0)
    if session.value is None and not failure:
        failure = (
            "it gave the session no reward, and there is no reward.function. "
            "Return a reward, or set one"
        )
    score = replace(
        agent_score or Score(0.0, ""),
        reward=0.0 if failure else session.value or 0.0,
        parts=parts,
        failure=failure and f"agent: {failure}",
        credit=session.credit(),
        session=tuple(session.describe_turns()),
    )
    cut = session.kept[-1].response.finish_reason == LENGTH
    result, rows = finish_sample(
        request, session, TURNS if session.full else LENGTH if cut else STOP, score
    )
    return replace(result, messages=session.transcript), rows


def finish_sample(
    request: SampleRequest,
    episode: Episode | Session,
    reason: str,
    environment: Score | None = None,
    conversation: Conversation | None = None,
) -> Sample:
    versions = episode.version_tokens
    rows = episode.rows()
    images = episode.row_images
    ids = keys(rows[0]["input_ids"], images[0])
    result = SampleResult(
        request.uid,
        request.sample,
        episode.prompt_tokens,
        episode.response_tokens,
        reason,
        versions[0][0],
        newest_weight_version=versions[-1][0],
        version_tokens=versions,
        turns=len(episode.turns),
        cut_thoughts=episode.cut_thoughts,
        observation_tokens=episode.observation_tokens,
        prompt_hash=episode.prompt_hash,
        prefix_hashes=prefix_hashes(ids, episode.prompt_tokens),
        read_tokens=sum(turn.read_tokens for turn in episode.turns),
        cached_tokens=sum(turn.cached_tokens for turn in episode.turns),
        environment=environment,
        branches=branches_of(rows, episode.prompt_tokens, images),
        images=images[0],
        messages=conversation.transcript if conversation else [],
        cut_tokens=conversation.cut_tokens if conversation else 0,
        history_refused=bool(conversation and conversation.refused),
    )
    return result, rows


def failed_result(request: SampleRequest, error: Exception) -> SampleResult:
    reason = f"{type(error).__name__}: {error.__cause__ or error}"
    if isinstance(error, TimeoutError) and request.timeout_s:
        reason = f"it took more than {request.timeout_s:g} s"
    tokens = len(request.prompt_ids)
    return SampleResult(
        request.uid,
        request.sample,
        tokens,
        0,
        ERROR,
        weight_version=-1,
        error=reason,
    )
