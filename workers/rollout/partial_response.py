"""Responses that an engine has not finished: what they have so far, and how they are continued.

engine --partial_responses--> PartialResponse --kept by the driver--> request with `begun` --rest--> after --> Turn
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.rollout.episode import Turn
from workers.rollout.requests import PartialResponse

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def partial_responses(engine: "AsyncLLM") -> dict[str, PartialResponse]:
    """The responses so far of the engine's requests, by their names, for those with tokens.

    vLLM gives the versions of tokens with a finished output only; its output processor has them before.
    """
    states = engine.output_processor.request_states.values()
    return {state.external_req_id: _partial(state) for state in states if state.detokenizer.num_output_tokens()}


def _partial(state: Any) -> PartialResponse:
    return PartialResponse(
        np.array(state.detokenizer.output_token_ids, dtype=np.int32),
        np.array(state.logprobs_processor.logprobs.logprobs, dtype=np.float32),
        token_versions(state._weight_version_spans()),
    )


def token_versions(spans: Sequence[Any]) -> np.ndarray:
    """int32 [tokens] of vLLM's spans of tokens by the version of the weights."""
    return np.repeat([int(span.version) for span in spans], [span.end - span.start for span in spans]).astype(np.int32)


def joined(begun: PartialResponse | None, rest: PartialResponse) -> PartialResponse:
    """A response whose beginning was sampled earlier than the rest."""
    if begun is None:
        return rest
    return PartialResponse(
        np.concatenate([begun.ids, rest.ids]),
        np.concatenate([begun.log_probs, rest.log_probs]),
        np.concatenate([begun.versions, rest.versions]),
    )


def after(begun: PartialResponse, rest: Turn) -> Turn:
    """The whole turn of which `rest` was sampled after `begun`."""
    whole = joined(begun, PartialResponse(rest.ids, rest.log_probs, rest.versions))
    read = rest.read_tokens - len(begun.ids)
    return replace(
        rest,
        ids=whole.ids,
        log_probs=whole.log_probs,
        versions=whole.versions,
        read_tokens=read,
        cached_tokens=min(rest.cached_tokens, read),
    )
