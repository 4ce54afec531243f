"""Metrics for Prometheus alone: what `live_metrics` exports while a step goes on, and the distributions of a step."""

from controller.observability.declaration import Declaration, Kind

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
TOKENS = tuple(float(2**power) for power in range(3, 18))
AS_IT_CHANGES, AFTER_A_STEP, AFTER_AN_UPDATE = "as it changes", "with every step", "with every step that trains"

STEP = Declaration("run/step", "step", "Number of the last step that is complete.", when=AFTER_A_STEP)
STEPS = Declaration(
    "run/steps",
    "steps",
    "Steps made; those that are made again after a failure count again.",
    kind=Kind.COUNTER,
    when=AFTER_A_STEP,
)
PHASE = Declaration(
    "phase/{phase}",
    "",
    "1 while the run is in the phase, else 0. Of phases inside each other the innermost counts: `step` is what lies "
    "between a step's phases.",
    when=AS_IT_CHANGES,
)
ENGINE_STATE = Declaration(
    "engine/state/{replica}/{state}",
    "",
    "1 for the state that the engine is in, else 0: starting, stale, current, draining, asleep, dead.",
    when=AS_IT_CHANGES,
)
REQUESTS_WAITING = Declaration(
    "rollout/requests_waiting", "requests", "Requests that no engine has room for.", when=AS_IT_CHANGES
)
REQUESTS_IN_FLIGHT = Declaration(
    "engine/requests_in_flight/{replica}", "requests", "Requests that the engine works on.", when=AS_IT_CHANGES
)
SAMPLE_TOKENS = Declaration(
    "sample/response_tokens",
    "tokens",
    "Lengths of responses.",
    kind=Kind.HISTOGRAM,
    when=AFTER_A_STEP,
    boundaries=TOKENS,
)
SAMPLE_SECONDS = Declaration(
    "sample/generation_s",
    "s",
    "How long samples took, from the request to the end, waiting in the engine included.",
    kind=Kind.HISTOGRAM,
    when=AFTER_A_STEP,
    boundaries=SECONDS,
)
# No histogram: Ray's take no boundary at or below 0, and leave out values below 0.
SAMPLE_REWARD = Declaration(
    "sample/reward/{quantile}", "reward", "Quantiles 0, 0.1, 0.5, 0.9 and 1 of the step's rewards.", when=AFTER_A_STEP
)
MICRO_STEP_SECONDS = Declaration(
    "micro_step/{role}/{rank}/{phase}_s",
    "s",
    "How long micro-steps with work took; `phase` is the pass: update, log_probs, values.",
    kind=Kind.HISTOGRAM,
    when=AFTER_AN_UPDATE,
    boundaries=SECONDS,
)
RANK_SECONDS = Declaration(
    "rank/{role}/{rank}/{phase}_s", "s", "All micro-steps of a rank in the step.", when=AFTER_AN_UPDATE
)
RANK_PREDICTED_SECONDS = Declaration(
    "rank_predicted/{role}/{rank}/{phase}_s",
    "s",
    "The same as the cost model predicts it, scaled so that the ranks of a role together take as long as they did.",
    when=AFTER_AN_UPDATE,
)
LIVE = (
    STEP,
    STEPS,
    PHASE,
    ENGINE_STATE,
    REQUESTS_WAITING,
    REQUESTS_IN_FLIGHT,
    SAMPLE_TOKENS,
    SAMPLE_SECONDS,
    SAMPLE_REWARD,
    MICRO_STEP_SECONDS,
    RANK_SECONDS,
    RANK_PREDICTED_SECONDS,
)
"""Metrics for Prometheus alone."""
