"""Model the cost of a sequence of L tokens as `linear * L + quadratic * L**2`, plus the same form for its
images. Of L**2, layers with a window compute a part (basics/windows.py).

model config ----- counted ---+
                              +--> CostModel --> workload of each sequence --> balanced by plans
measured seconds -- fitted ---+

`CostModel.fit` fits measured micro-batches by non-negative least squares:

    seconds_i ~ overhead + linear * sum(L) + quadratic * sum(L**2)        L: lengths in micro-batch i

It minimises relative errors, because timing noise is proportional to the time.

`CostModel.from_model_config` counts 2 FLOPs per token for each weight, and the widths of attention scores and
weighted sums per squared token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from balancing.basics.grouping import Floats
from balancing.basics.image_patches import Images
from balancing.basics.validation import one_of, weight_array, whole_numbers
from balancing.basics.windows import Window, attended_squares
from balancing.errors import CostModelError
from balancing.model_counts import attention_windows, count_layers, forward_flops
from balancing.model_fields import Fields

FEWEST_MEASUREMENTS = 4
"""Three terms need a fourth measurement to estimate the error."""
HIGHEST_CONDITION = 1_000.0
"""Above this condition number, 1 % timing noise exceeds the coefficients."""


SEVEN_BILLION = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
"""Qwen2.5-7B: dense, grouped-query, 7.6 billion weights. The command uses it by default."""


FLOPS_PER_BYTE = 1_100.0
"""FLOPs of a GPU while a link sends a byte: 5e14 FLOP/s and 4.5e11 B/s (H100 SXM, NVLink, one direction)."""


def exchange_share(config: Mapping[str, Any] | object, *, ring: bool = False) -> float:
    """Return the time to send a token's heads to other ranks, as a share of its matrix products
    (`ContextDegrees`).

    Ulysses sends queries, keys, values and outputs, a ring keys and values, 2 bytes an element. Backward
    sends as much again and computes twice as much. Transfers that computation hides count too. Raises
    CostModelError for a missing key.
    """
    layers = count_layers(Fields(config))
    sent = sum(layer.exchanged_in_ring if ring else layer.exchanged for layer in layers)
    linear = TRAINING_FACTOR * forward_flops(config)[0]
    return 2 * 2 * sent * FLOPS_PER_BYTE / linear


def image_flops(config: Mapping[str, Any] | object) -> tuple[float, float, float]:
    """Count a vision tower's forward FLOPs per image token and squared image token, and its patches per image
    token.

    Attention in windows or tiles of fixed size is linear. Returns zeros and one patch for a model of text.
    """
    top = Fields(config, nested="")
    if top.get("vision_config") is None:
        return 0.0, 0.0, 1.0
    vision = Fields(config, nested="vision_config")
    out = Fields(config).integer("hidden_size")
    width = vision.integer("embed_dim", "hidden_size")
    layers = vision.integer("depth", "num_hidden_layers", default=12)
    merged = vision.get("spatial_merge_size", "pooling_kernel_size") or top.get(
        "scale_factor", "spatial_merge_size"
    )
    merged = merged or 1 / (top.get("downsample_ratio") or 1)
    kind = str(vision.get("model_type"))
    patch = vision.integer("patch_size", default=14)
    inner = vision.integer(
        "intermediate_size", default=int(width * (vision.get("mlp_ratio") or 4))
    )
    if kind.startswith("glm4v"):
        inner = vision.integer("out_hidden_size", default=out)
    matrices = 3 if kind.startswith(("qwen2_5", "pixtral", "glm4v")) else 2
    frames = vision.integer("temporal_patch_size", default=1)
    weights = (
        layers * width * (4 * width + matrices * inner) + 3 * frames * patch * patch * width
    )
    # patches that a patch of other layers attends to, layers that attend to all
    near = 0
    everywhere = layers
    if kind.startswith("qwen2_5"):
        near = (vision.integer("window_size") // patch) ** 2
        everywhere = len(vision.get("fullatt_block_indexes"))
    elif (
        vision.get("spatial_merge_size") is None
        and vision.get("image_size")
        and kind != "pixtral"
    ):
        near = (vision.integer("image_size") // patch) ** 2
        everywhere = 0
    patches = float(merged * merged)
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    linear = patches * (2 * weights + 4 * width * near * (layers - everywhere))
    middle = patches * width if frames > 1 else out  # width inside of the projector
    return (
        linear + 2 * mergers * middle * (patches * width + out),
        4.0 * width * everywhere * patches**2,
        patches,
    )


TRAINING_FACTOR = 3.0
"""(forward + backward) / forward. Backward has two matrix products for each forward one."""

Unit = Literal["FLOP", "token", "second"]


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of L tokens: `linear * L + quadratic * L**2`, in `unit`.

    linear: matrix products with weights, and with states. quadratic: causal attention. Plans depend only on
    their ratio. windows: of layers that do not see all of L**2.
    image_linear, image_quadratic: the vision tower's, for each image, by its tokens. patches: of an image
    token. Raises CostModelError if a coefficient is negative, not finite, or both are 0, and OptionError for
    an unknown unit.
    """

    linear: float
    quadratic: float
    unit: Unit = "FLOP"
    image_linear: float = 0.0
    image_quadratic: float = 0.0
    patches: float = 1.0
    windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        # A record holds them as lists.
        object.__setattr__(
            self, "windows", tuple(Window(*window) for window in self.windows)
        )
        for name in ("linear", "quadratic", "image_linear", "image_quadratic"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise CostModelError(
                    f"{name}={value!r} of a CostModel must be finite and >= 0"
                )
        if self.linear == 0 and self.quadratic == 0:
            raise CostModelError(
                "linear and quadratic of a CostModel are both 0. One must be positive."
            )
        one_of(self.unit, "unit", ("FLOP", "token", "second"))

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Return the costs of a token, a squared token, an image token and a squared image token."""
        return self.linear, self.quadratic, self.image_linear, self.image_quadratic

    def workload(self, lengths: ArrayLike, images: Images | None = None) -> Floats:
        """Return the cost in `unit` of each sequence's first tokens, and of the images that begin in them.

        Raises LengthError unless `lengths` are whole numbers >= 0.
        """
        tokens = whole_numbers(lengths, "lengths", minimum=0).astype(np.float64)
        work = self.linear * tokens + self.quadratic * attended_squares(
            tokens, self.windows
        )
        if images is None:
            return work
        return work + images.within(
            tokens,
            images.tokens * (self.image_linear + self.image_quadratic * images.tokens),
        )

    def scaled(self, factor: float) -> "CostModel":
        """Multiply by `factor`. `1 / TRAINING_FACTOR` turns training costs into forward costs."""
        return replace(
            self.with_images(factor),
            linear=self.linear * factor,
            quadratic=self.quadratic * factor,
        )

    def with_images(self, factor: float) -> "CostModel":
        """Multiply the cost of images by `factor`."""
        return replace(
            self,
            image_linear=self.image_linear * factor,
            image_quadratic=self.image_quadratic * factor,
        )

    @classmethod
    def tokens(cls) -> "CostModel":
        """Balance token counts: one unit per token."""
        return cls(1.0, 0.0, "token")

    @classmethod
    def from_model_config(
        cls,
        config: Mapping[str, Any] | object,
        *,
        training: bool = True,
        train_vision: bool = False,
    ) -> "CostModel":
        """Count FLOPs from a Hugging Face model config: a mapping (`config.json`) or an object with
        attributes.

        A product [m, k] x [k, n] counts 2*m*k*n FLOPs, causal attention L**2 / 2 pairs, a mixture of experts
        only the active experts, and embedding look-ups nothing. Each layer counts by its kind.
        training: forward and backward (`TRAINING_FACTOR`). train_vision: also of the vision tower, which
        otherwise has only a forward pass. Raises CostModelError for a missing key.
        """
        windows = attention_windows(count_layers(Fields(config)))
        forward = cls(*forward_flops(config), "FLOP", *image_flops(config), windows)
        if not training:
            return forward
        return forward.with_images(1.0 if train_vision else 1 / TRAINING_FACTOR).scaled(
            TRAINING_FACTOR
        )

    @classmethod
    def fit(cls, micro_batches: Sequence[ArrayLike], seconds: ArrayLike) -> "CostFit":
        """Fit seconds to measurements: `overhead + linear * sum(L) + quadratic * sum(L**2)` per micro-batch.

        micro_batches: the lengths that ran together, one array per measurement. seconds: positive times.
        Raises LengthError, and CostModelError if the data do not determine the three terms.
        """
        sums = []
        for number, lengths in enumerate(micro_batches):
            tokens = whole_numbers(lengths, f"micro_batches[{number}]", minimum=1).astype(
                np.float64
            )
            sums.append((tokens.sum(), np.square(tokens).sum()))
        tokens, squared = np.array(sums, np.float64).reshape(len(sums), 2).T
        return cls.fit_sums(tokens, squared, seconds)

    @classmethod
    def fit_sums(
        cls, tokens: ArrayLike, squared_tokens: ArrayLike, seconds: ArrayLike
    ) -> "CostFit":
        """Fit as `fit`, from sum(L) and sum(L**2) of each micro-batch, the form in which a run
        records them.
        """
        columns = [
            weight_array(tokens, "tokens"),
            weight_array(squared_tokens, "squared_tokens"),
        ]
        if len(columns[0]) != len(columns[1]):
            raise CostModelError(
                "tokens and squared_tokens differ in length. Pass one of each a micro-batch."
            )
        return _fitted(np.column_stack([np.ones(len(columns[0])), *columns]), seconds)


@dataclass(frozen=True)
class CostFit:
    """A fitted cost model in seconds.

    overhead_seconds: fixed cost of a micro-batch. relative_error: root mean square of `predicted / measured -
    1`.
    condition: of the design matrix with normalised columns. The fit amplifies timing noise by about this
    factor.
    """

    model: CostModel
    overhead_seconds: float
    relative_error: float
    measurements: int
    condition: float


def _fitted(terms: Floats, seconds: ArrayLike) -> CostFit:
    times = weight_array(seconds, "seconds")
    if len(terms) != len(times):
        raise CostModelError(
            f"{len(terms)} micro-batches with {len(times)} seconds. Pass one time for each."
        )
    if (times == 0).any():
        raise CostModelError(
            f"seconds[{int(np.argmax(times == 0))}] is 0. A measured time is positive."
        )
    if len(times) < FEWEST_MEASUREMENTS:
        raise CostModelError(
            f"{len(times)} measurements are too few to fit three terms and estimate the error. "
            f"Pass at least {FEWEST_MEASUREMENTS}."
        )
    relative = terms / times[:, None]
    condition = _condition(relative)
    if not condition <= HIGHEST_CONDITION:
        raise CostModelError(
            "the measured micro-batches are too similar to separate overhead, linear and quadratic cost "
            f"(condition {condition:.3g}, at most {HIGHEST_CONDITION:g}). Measure small and large "
            "micro-batches, of short sequences and of long ones."
        )
    coefficients = non_negative_least_squares(relative, np.ones(len(times)))
    if not coefficients[1:].any():
        raise CostModelError(
            "the measured seconds do not grow with tokens. Measure micro-batches of more tokens."
        )
    error = float(np.sqrt(np.mean((terms @ coefficients / times - 1.0) ** 2)))
    overhead, linear, quadratic = coefficients.tolist()
    return CostFit(
        CostModel(linear, quadratic, "second"), overhead, error, len(times), condition
    )


def _condition(design: Floats) -> float:
    norms = np.linalg.norm(design, axis=0)
    return float(np.linalg.cond(design / norms)) if (norms > 0).all() else float("inf")


def non_negative_least_squares(design: Floats, target: Floats) -> Floats:
    """Solve exactly over coefficients >= 0: the best non-negative solution of the column subsets."""
    columns = design.shape[1]
    norms = np.linalg.norm(design, axis=0)
    best = np.zeros(columns)
    lowest = float(target @ target)
    for count in range(columns, 0, -1):
        for subset in combinations(range(columns), count):
            chosen = list(subset)
            solution = (
                np.linalg.lstsq(design[:, chosen] / norms[chosen], target, rcond=None)[0]
                / norms[chosen]
            )
            residual = target - design[:, chosen] @ solution
            if (solution >= 0).all() and residual @ residual < lowest:
                best = np.zeros(columns)
                lowest = float(residual @ residual)
                best[chosen] = solution
    return best
