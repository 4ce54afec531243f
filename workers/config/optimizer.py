"""Settings of an optimiser and its schedule, see `workers.config.roles`."""

from dataclasses import dataclass

from workers.config.setting import setting


@dataclass(frozen=True)
class StepSettings:
    """Settings of one optimiser step, None for the configured ones. learning_rate replaces the schedule's."""

    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None


@dataclass
class OptimizerConfig:
    """Formulas: `workers.model.optimizer.optimizer` and `workers.model.optimizer.muon`. Clipping and skipped
    steps are the same for all.
    """

    only_with = (
        (".name=custom", "function"),
        (".name=adamw or muon or sgd", "vision_learning_rate"),
        ("model.train_vision=true", "vision_learning_rate"),
        (".name=muon or sgd or custom", "momentum"),
        (".name=adamw or muon or custom", "beta1, beta2, epsilon"),
        (".name=adamw or muon", "state_dtype"),
        (".schedule=custom", "schedule_function"),
        (".schedule=linear or cosine or wsd or custom", "total_steps"),
        (".schedule=linear or cosine or wsd", "final_learning_rate_ratio"),
        (".schedule=wsd", "decay_ratio"),
        (".weight_decay above 0", "weight_decay_on"),
        (".warmup_steps=0", "warmup_ratio"),
    )

    name: str = setting(
        "adamw",
        "`adamw`. `muon`: Muon for the matrices of the layers, AdamW for all else (embeddings, output "
        "layer, norms, biases). `sgd`: with Nesterov momentum. `custom` uses the section's `function` (see "
        "docs/optimizers.md).",
        choices=("adamw", "muon", "sgd", "custom"),
    )
    function: str = setting(
        "",
        "Custom optimiser, `module:function` or `path/file.py:function`: named parameters and these "
        "settings in, a torch optimiser out. The file must have the same path on every node.",
    )
    state_dtype: str = setting(
        "float32",
        "Type of the moments of `adamw` and `muon`. `bfloat16` and `int8` (floats of 8 bits, with a shared "
        "exponent for each block) are rounded stochastically (see docs/small-machines.md).",
        choices=("float32", "bfloat16", "int8"),
    )
    learning_rate: float = setting(
        1e-6, "Peak learning rate. `muon` takes AdamW's.", above=0, maximum=1
    )
    vision_learning_rate: float = setting(
        0.0,
        "Peak learning rate of the vision tower. 0 takes learning_rate.",
        minimum=0,
        maximum=1,
    )
    weight_decay: float = setting(
        0.0, "Decoupled weight decay. With `sgd` in the gradient.", minimum=0, maximum=100
    )
    weight_decay_on: str = setting(
        "matrices",
        "What decays. `matrices` leaves out norms and biases.",
        choices=("matrices", "all"),
    )
    momentum: float = setting(0.95, "Momentum of `muon` and `sgd`.", minimum=0, below=1)
    beta1: float = setting(0.9, "AdamW's decay of the first moment.", minimum=0, below=1)
    beta2: float = setting(0.95, "AdamW's decay of the second moment.", minimum=0, below=1)
    epsilon: float = setting(
        1e-8, "AdamW's addition to the root of the second moment.", above=0, maximum=1
    )
    max_grad_norm: float = setting(
        1.0, "Clip gradients to this L2 norm.", above=0, maximum=10**9
    )
    schedule: str = setting(
        "constant",
        "Learning rate after warm-up. `wsd` is constant and then falls linearly. `custom` uses the section's "
        "`schedule_function`.",
        choices=("constant", "linear", "cosine", "wsd", "custom"),
    )
    schedule_function: str = setting(
        "",
        "Custom schedule, as `function`: `(step, total_steps)` in, a share of the peak out. Warm-up comes "
        "first.",
    )
    warmup_steps: int = setting(0, "Optimiser steps of linear warm-up from 0.", minimum=0)
    warmup_ratio: float = setting(
        0.0, "Warm-up as a share of all optimiser steps.", minimum=0, below=1
    )
    total_steps: int = setting(
        0,
        "Optimiser steps after which the schedule ends. 0 derives it from run.steps and batch.",
        minimum=0,
    )
    decay_ratio: float = setting(
        0.2, "Share of all optimiser steps in which `wsd` falls.", above=0, maximum=1
    )
    final_learning_rate_ratio: float = setting(
        0.0,
        "Final learning rate of `linear`, `cosine` and `wsd`, as a share of the peak.",
        minimum=0,
        maximum=1,
    )
    max_skipped_steps: int = setting(
        10,
        "Stop the run after this many skipped optimiser steps in a row. Steps are skipped if loss or "
        "gradient is NaN or infinite.",
        minimum=1,
    )

    @property
    def offloads(self) -> tuple[str, ...]:
        """Return the values of `cpu_offload` that this optimiser takes besides `none`."""
        if self.name == "adamw" and self.state_dtype == "float32":
            return ("optimizer", "all")
        return () if self.name == "muon" else ("all",)

    def warmup(self, total_steps: int) -> int:
        """Return the optimiser steps of warm-up."""
        return self.warmup_steps or round(self.warmup_ratio * total_steps)
