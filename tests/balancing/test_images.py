"""Images in plans: their work, counted once where sequences share it, and the cap on patches of a
micro-batch.
"""

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import CostModel, Plan, explain, plan_batch, plan_statistics
from balancing.analysis.explain import findings, replan
from balancing.analysis.lengths_file import plan_record, recorded_arguments
from balancing.analysis.statistics import lower_bound, predicted_grids, step_time
from balancing.cost_model import image_flops
from balancing.errors import CountError, LengthError, OptionError, OverCapError
from balancing.pipelines.pipeline import Pipeline

COST = CostModel(1.0, 1e-3, "FLOP", 2.0, 1e-2, patches=4.0)


class Drawn(NamedTuple):
    """Groups whose prompts may hold an image, and sequences that may hold one more after the prompt."""

    lengths: np.ndarray
    prompts: np.ndarray
    groups: np.ndarray
    images: list[list[tuple[int, int]]]

    @property
    def prefixes(self) -> dict[str, np.ndarray]:
        return {"prefix_groups": self.groups, "prefix_lengths": self.prompts}

    def patches(self, rows: np.ndarray, *, shared: bool) -> int:
        """The patches of a micro-batch: of its prompts once if they are shared, and of all that follows."""
        found, seen = 0, set()
        for row in rows.tolist():
            for first, tokens in self.images[row]:
                inside = shared and first < self.prompts[row]
                found += 0 if inside and self.groups[row] in seen else 4 * tokens
            seen.add(self.groups[row])
        return found


def drawn(seed: int, groups: int, of_a_group: int) -> Drawn:
    rng = np.random.default_rng(seed)
    of, image = (
        np.repeat(np.arange(groups), of_a_group),
        rng.integers(1, 60, groups) * (rng.random(groups) < 0.7),
    )
    prompts = (image + rng.integers(1, 30, groups))[of]
    lengths = prompts + rng.integers(2, 100, len(of))
    later = rng.random(len(of)) < 0.1
    images = [
        [(0, int(image[group]))] * bool(image[group]) + [(int(prompt), 2)] * bool(also)
        for group, prompt, also in zip(of, prompts, later, strict=True)
    ]
    return Drawn(lengths, prompts, of, images)


def test_an_image_costs_what_its_tokens_cost_and_what_the_tower_computes() -> None:
    plan = plan_batch(
        [10, 10], ranks=1, max_tokens=20, cost_model=COST, images=[[(2, 5)], []]
    )
    assert plan.workloads.tolist() == pytest.approx(
        [10 + 0.1 + 5 * 2 + 25 * 1e-2, 10 + 0.1]
    )
    assert plan.computed_patches.tolist() == [20, 0]


def test_a_frozen_tower_is_counted_forward_only() -> None:
    text = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    tower = {
        "hidden_size": 4,
        "intermediate_size": 8,
        "depth": 2,
        "patch_size": 2,
        "spatial_merge_size": 2,
    }
    config = {"text_config": text, "vision_config": tower}
    forward = CostModel.from_model_config(config, training=False)
    # a layer: 4 * 4x4 and 2 * 4x8; patches of 2x2 pixels of 3 colours; the projector takes 4 patches of 4 to
    # 8, to 8.
    weights = 2 * (4 * 16 + 2 * 32) + 12 * 4
    assert forward.image_linear == 4 * 2 * weights + 2 * 8 * (4 * 4 + 8)
    assert (forward.image_quadratic, forward.patches) == (2 * 4 * 4 * 4**2, 4)
    frozen, trained = (
        CostModel.from_model_config(config, train_vision=trains) for trains in (False, True)
    )
    assert frozen.coefficients == pytest.approx(
        (3 * forward.linear, 3 * forward.quadratic, *forward.coefficients[2:])
    )
    assert trained.coefficients == pytest.approx(
        [3 * each for each in forward.coefficients]
    )
    assert image_flops(text) == (0, 0, 1)


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
)
def test_work_of_shared_images_is_counted_once_and_above_the_lower_bound(
    seed: int, groups: int, of_a_group: int, ranks: int, shared: bool
) -> None:
    batch = drawn(seed, groups, of_a_group)
    how: dict[str, Any] = {
        "ranks": ranks,
        "max_tokens": int(2 * batch.lengths.max()),
        "cost_model": COST,
    }
    plan = plan_batch(
        batch.lengths, images=batch.images, **(batch.prefixes if shared else {}), **how
    )
    work = 0.0
    for step in plan.mini_batches[0].micro_steps:
        for rows in step.ranks:
            alone = sum(COST.workload([length]).item() for length in batch.lengths[rows])
            again = [
                row
                for at, row in enumerate(rows)
                if shared and batch.groups[row] in batch.groups[rows[:at]]
            ]
            alone -= sum(COST.workload([batch.prompts[row]]).item() for row in again)
            images = [tokens for row in rows for _, tokens in batch.images[row]]
            for row in again:
                for first, tokens in batch.images[row]:
                    if first < batch.prompts[row]:
                        images.remove(tokens)
            work += alone + sum(2 * tokens + 1e-2 * tokens**2 for tokens in images)
    assert plan.computed_workloads.sum() == pytest.approx(work)
    assert step_time(predicted_grids(plan)) >= lower_bound(plan) * (1 - 1e-9)


def check(plan: Plan, batch: Drawn, cap: int, *, shared: bool) -> None:
    rows = np.concatenate([part.rows for part in plan.mini_batches])
    assert sorted(rows.tolist()) == list(range(len(batch.lengths)))
    for part in plan.mini_batches:
        assert part.sums(plan.sizes).max() <= plan.max_tokens
        assert part.sums(plan.computed_patches).max() <= cap
        for step in part.micro_steps:
            assert any(map(len, step.ranks))
            assert all(batch.patches(rows, shared=shared) <= cap for rows in step.ranks)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([1, 1.5, 4]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from(["karmarkar_karp", "karmarkar_karp", "none", "verl"]),
    st.sampled_from([None, Pipeline(2)]),
)
def test_no_micro_batch_exceeds_the_cap_on_patches_or_any_other(
    seed: int,
    groups: int,
    of_a_group: int,
    ranks: int,
    patches: float,
    tokens: int,
    shared: bool,
    algorithm: Any,
    pipeline: Pipeline | None,
) -> None:
    batch = drawn(seed, groups, of_a_group)
    cap = (
        int(
            patches
            * max([4 * sum(tokens for _, tokens in images) for images in batch.images])
        )
        or 1
    )
    prefixes = batch.prefixes if shared else {}
    try:
        plan = plan_batch(
            batch.lengths,
            ranks=ranks,
            mini_batches=np.array_split(
                np.arange(len(batch.lengths)), min(2, len(batch.lengths))
            ),
            max_tokens=int(tokens * batch.lengths.max()),
            max_sequences=3,
            cost_model=COST,
            algorithm=algorithm,
            pipeline=pipeline,
            images=batch.images,
            max_patches=cap,
            **prefixes,
        )
    except CountError:
        assert pipeline is not None, (
            "a pipeline's micro-batches come in rounds, which few sequences cannot fill"
        )
        return
    check(plan, batch, cap, shared=shared)


def test_the_cap_costs_micro_steps_only_where_it_binds() -> None:
    batch = drawn(1, 24, 8)
    how: dict[str, Any] = {
        "ranks": 2,
        "max_tokens": 2000,
        "cost_model": COST,
        "images": batch.images,
        **batch.prefixes,
    }
    free, wide, tight = (
        plan_batch(batch.lengths, **how, max_patches=cap) for cap in (None, 10**6, 240)
    )
    assert [part.rows.tolist() for part in free.mini_batches] == [
        part.rows.tolist() for part in wide.mini_batches
    ]
    check(tight, batch, 240, shared=True)
    assert (
        plan_statistics(free)["most_patches"]
        > 240
        >= plan_statistics(tight)["most_patches"]
    )
    assert tight.mini_batches[0].steps <= 2 * -(
        -sum(4 * i[0][1] for i in batch.images[::8] if i) // (2 * 240)
    )
    assert replan(tight, {"max_patches": None}).predicted_makespans() == pytest.approx(
        free.predicted_makespans()
    )


def test_what_cannot_be_planned_is_refused() -> None:
    how: dict[str, Any] = {"ranks": 1, "max_tokens": 20, "cost_model": COST}
    with pytest.raises(
        OverCapError, match=r"images\[1\] has 20 patches, above max_patches=19\. "
    ):
        plan_batch([10, 10], **how, images=[[], [(2, 5)]], max_patches=19)
    with pytest.raises(LengthError, match="images holds 1 entries for 2 lengths"):
        plan_batch([10, 10], **how, images=[[(2, 5)]])
    with pytest.raises(OptionError, match="max_patches=40: requires layout='packed'"):
        plan_batch([10], **how, images=[[(2, 5)]], max_patches=40, layout="padded")


def test_statistics_and_explanations_count_images_and_a_record_repeats_the_plan() -> None:
    batch = drawn(2, 6, 4)
    how: dict[str, Any] = {
        "ranks": 3,
        "max_tokens": 1000,
        "cost_model": COST,
        "max_patches": 240,
    }
    plan = plan_batch(batch.lengths, images=batch.images, **batch.prefixes, **how)
    text = plan_batch(batch.lengths, **batch.prefixes, **how | {"max_patches": None})
    work = plan.workloads.sum() - text.workloads.sum()
    alone = plan_batch(batch.lengths, images=batch.images, **how)
    assert plan_statistics(alone)["image_share"] == pytest.approx(
        work / plan.workloads.sum()
    )
    assert plan_statistics(plan)["image_share"] < plan_statistics(alone)["image_share"]
    assert "image_share" not in plan_statistics(text)
    record = json.loads(
        json.dumps({"step": 1, "lengths": batch.lengths.tolist()} | plan_record(plan))
    )
    again = plan_batch(batch.lengths, **recorded_arguments(record), **batch.prefixes)
    assert json.loads(json.dumps(plan_record(again))) == json.loads(
        json.dumps(plan_record(plan))
    )
    long = plan_batch(
        [900, 9, 9, 9], images=[[(0, 800)], [], [], []], **how | {"max_patches": None}
    )
    assert "sequence 0 of 900 tokens and 3,200 image patches is" in explain(long)
    crowded = plan_batch(
        [50] * 3, images=[[(0, 40)]] * 3, **how | {"ranks": 2, "max_patches": 160}
    )
    assert findings(crowded)[0].waiting > 0
