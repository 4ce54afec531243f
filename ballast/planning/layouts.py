"""`python -m ballast layout --config FILE --cluster NODES [--write FILE]`: find the fastest layouts of a run.

    Config, Cluster --rules, memory by formula--> balancing.time_model.search --preflight--> the best ten

Searched: data, context, tensor, pipeline and expert parallelism, replicas of the model, checkpointing,
engines and their tensor parallelism, placement and staleness. A setting given as an override keeps its value.
All else is as in FILE. Memory is a formula: try the layout that you take with `--dry-run --cluster`.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any

from balancing.time_model import Layout, StepTime
from balancing.time_model.memory import engine_holds, fullest_gib, training_gib
from balancing.time_model.search import (
    Half,
    Problem,
    best_layouts,
    engine_halves,
    training_halves,
)
from controller.config import Config, changed_yaml, load
from controller.config.file import value_of
from controller.config.model_files import fetch_description, read_model_files
from controller.lifecycle.session import exit_code
from controller.preflight.arguments import (
    Arguments,
    Command,
    OneLineParser,
    parse_arguments,
    writing,
)
from controller.preflight.checks import check, check_layout
from controller.preflight.cluster import place, run_on
from controller.preflight.describe_time import read_problem
from controller.preflight.memory import USABLE_SHARE
from controller.preflight.time_inputs import layout_of, needs_of
from workers.config.model import ATTENTION_KEPT, RECOMPUTED
from workers.config.roles import ParallelConfig, RolloutConfig
from workers.errors import ConfigError, UnsupportedModelError
from workers.model.rules.families import expert_count, features_of_file, unshared_states
from workers.model.rules.model_rules import (
    check_context_parallel,
    check_experts,
    check_states,
    check_tensor_parallel,
)

COMMAND = Command(
    "ballast.planning.layouts",
    "Find the fastest layouts of a run.",
    Config,
    describes_clusters=True,
)
USAGE = (
    "python -m ballast layout --config FILE --cluster NODES [--write FILE [--take N]] [--json] "
    "[--lengths runs/NAME] [--response-tokens DISTRIBUTION] [--measured runs/NAME] [key.sub=value ...]"
)
SHOWN = 10
MOST_GPUS = 4096
MOST_CHECKED = 200
"""Layouts that are checked before the search gives up."""
SETTINGS = {
    "policy.data_parallel": "dp",
    "policy.parallel.context_parallel": "cp",
    "policy.parallel.tensor_parallel": "tp",
    "policy.parallel.pipeline_parallel": "pp",
    "policy.parallel.expert_parallel": "ep",
    "policy.parallel.replicate": "replicate",
    "rollout.replicas": "engines",
    "rollout.tensor_parallel": "engine_tp",
    "rollout.placement": "placement",
    "rollout.max_staleness": "staleness",
}
"""Fields of a Layout by setting. model.gradient_checkpointing is `recomputed`, of layers that may be
compiled.
"""
CHECKPOINTING_OF = {0.0: "none", 0.3: "selective", 0.8: "selective", 1.0: "full"}


class LayoutSearch:
    """The layouts of one configuration on a cluster. Raises ConfigError for a cluster without named GPUs."""

    def __init__(self, request: Arguments) -> None:
        assert request.cluster is not None
        if not request.cluster.gpu:
            raise ConfigError(
                "--cluster: layouts are searched on GPUs. Name them, as in nodes=8,gpus=8,gpu=H100."
            )
        if request.cluster.nodes * request.cluster.gpus > MOST_GPUS:
            raise ConfigError(
                f"--cluster: layouts are searched for at most {MOST_GPUS:,} GPUs, which takes half a "
                "minute. Describe fewer nodes, and raise policy.parallel.replicate in the layout."
            )
        self._request = request
        self._cluster = request.cluster
        self._gib = USABLE_SHARE * request.cluster.gpu_gib
        self.config = load(request.config, request.overrides)
        run_on(self.config, self._cluster)
        fetch_description(self.config.model.path, "model.path", print)
        self._text = read_model_files(self.config.model.path, "model.path").text
        self._fixed = {
            name.partition("=")[0] for name in request.overrides
        } & SETTINGS.keys()
        self._needs = needs_of(self.config)
        self._problem = self._read_problem()
        ahead = self._read_problem(
            replace(self.config.rollout, placement="apart", max_staleness=1)
        )
        # By staleness, with which passes fall away.
        self._problems = {False: self._problem, True: ahead}

    def _read_problem(self, rollout: RolloutConfig | None = None) -> Problem:
        config = copy(self.config)
        config.rollout = rollout or replace(config.rollout, max_staleness=0)
        return read_problem(config, self._cluster, self._request.time)[0]

    def best(self) -> Iterator[tuple[StepTime, Layout, Config]]:
        """Yield layouts that the run's own checks allow, fastest first."""
        base = replace(
            layout_of(self.config, self._cluster),
            compiled=self.config.model.compile != "never",
        )
        shares = {
            name: self.config.rollout.gpu_share(name) * self._cluster.gpu_gib
            for name in ("colocated", "apart")
        }
        engines = [
            (ranks, half)
            for ranks, half in engine_halves(base, shares)
            if self._serves(replace(base, **half), half)
        ]
        halves = partial(self._halves, base)
        streams = []
        for ahead, problem in self._problems.items():
            placed = [
                (ranks, half) for ranks, half in engines if bool(half["staleness"]) is ahead
            ]
            streams.append(best_layouts(problem, base, placed, halves, self._fits))
        for seconds, layout in islice(
            merge(*streams, key=lambda candidate: candidate[0].seconds), MOST_CHECKED
        ):
            with suppress(ConfigError, UnsupportedModelError):
                config = with_layout(self.config, layout)
                check_layout(config)
                place(config, self._cluster)
                yield seconds, layout, config

    def gib(self, layout: Layout) -> float:
        """Return GiB of the fullest GPU."""
        return fullest_gib(self._problem.shape, layout, self._needs)

    def _fits(self, layout: Layout) -> bool:
        return layout.placement == "apart" or self.gib(layout) <= self._gib

    def _halves(self, base: Layout, ranks: int) -> Iterator[Half]:
        """Yield allowed training halves, each with the least recomputation that fits."""
        modes = ["none", "selective", "full"]
        chosen = self.config.model.gradient_checkpointing
        for half in training_halves(base, ranks, max(1, expert_count(self._text))):
            layout = replace(base, **half)
            if self._keeps(layout, half) and self._allows(layout):
                for mode in [chosen] if chosen != "auto" else modes:
                    variant = (
                        ATTENTION_KEPT if mode == "selective" and layout.compiled else mode
                    )
                    candidate = replace(layout, recomputed=RECOMPUTED[variant])
                    if (
                        training_gib(self._problem.shape, candidate, self._needs)[1]
                        <= self._gib
                    ):
                        yield {**half, "recomputed": candidate.recomputed}
                        break

    def _keeps(self, layout: Layout, half: Half) -> bool:
        """Return whether a half of a layout has the values that overrides give. `auto` and no engines are
        free, and a range of engines allows each number in it.
        """
        fixed_values = {SETTINGS[key]: value_of(self.config, key) for key in self._fixed}
        free = {"engines": 0, "placement": "auto"}
        engines = self.config.rollout.engine_range
        if "engines" in fixed_values and engines.is_elastic:
            del fixed_values["engines"]
            if (
                not engines.minimum
                <= half.get("engines", engines.minimum)
                <= engines.maximum
            ):
                return False
        return all(
            fixed_values[name] in (getattr(layout, name), free.get(name))
            for name in fixed_values.keys() & half.keys()
        )

    def _allows(self, layout: Layout) -> bool:
        config = self.config
        text = self._text
        method = config.policy.parallel.context_parallel_method
        parallel = ParallelConfig(
            context_parallel=layout.cp,
            context_parallel_method=method,
            tensor_parallel=layout.tp,
            pipeline_parallel=layout.pp,
            expert_parallel=layout.ep,
        )
        heads = text.get("num_attention_heads")
        features = features_of_file(text)
        longest = -(-config.longest_sequence // layout.cp)
        try:
            check_states(parallel, "", unshared_states(text, layout.cp * layout.tp))
            check_context_parallel(parallel, "", heads=heads, features=features)
            check_tensor_parallel(parallel, "", str(text.get("model_type")), text)
            check_experts(parallel, config.model, "", expert_count(text))
        except (ConfigError, UnsupportedModelError):
            return False
        learns = layout.tp == 1 or not (config.uses_critic or config.uses_reward_model)
        fits = longest <= layout.max_tokens and layout.dp <= config.mini_batch_sizes[-1]
        return (
            learns
            and fits
            and layout.pp * layout.virtual_stages <= self._problem.shape.layers
        )

    def _serves(self, layout: Layout, half: Half) -> bool:
        heads = self._text.get("num_attention_heads", 1)
        tp = layout.engine_tp
        pairs = self._text.get("num_key_value_heads") or heads
        divides = heads % tp == 0 and (pairs % tp == 0 or tp % pairs == 0)
        return (
            self._keeps(layout, half)
            and divides
            and engine_holds(self._problem.shape, layout, self._needs)
        )


def with_layout(config: Config, layout: Layout) -> Config:
    """Return the configuration with the settings of a layout."""
    new_config = deepcopy(config)
    for key, name in SETTINGS.items():
        section, _, setting = key.rpartition(".")
        setattr(value_of(new_config, section), setting, getattr(layout, name))
    new_config.model.gradient_checkpointing = CHECKPOINTING_OF[layout.recomputed]
    return new_config


def lines_of(number: int, seconds: StepTime, layout: Layout, gib: float) -> list[str]:
    """Describe a layout in two lines of at most 80 characters."""
    names = ("dp", "cp", "tp", "pp", "ep", "replicate")
    degrees = " ".join(
        f"{name} {size}"
        for name in names
        if (size := getattr(layout, name)) > 1 or name == "dp"
    )
    placement = layout.placement + (
        f", staleness {layout.staleness}" if layout.placement == "apart" else ""
    )
    mode = CHECKPOINTING_OF[layout.recomputed]
    return [
        f"{number:2} {seconds.seconds:8,.2f} s {gib:4.0f} GiB  {degrees}; "
        f"{layout.engines} engines of {layout.engine_tp}",
        f"   {placement}; checkpointing {mode}; idle {seconds.trainer_idle:.0%}, {seconds.engine_idle:.0%}; "
        f"waits for {seconds.limit}",
    ]


def record_of(number: int, seconds: StepTime, layout: Layout, gib: float) -> dict[str, Any]:
    """Describe a layout for programs: what `lines_of` shows, and its settings by name."""
    settings = {key: getattr(layout, name) for key, name in SETTINGS.items()}
    settings["model.gradient_checkpointing"] = CHECKPOINTING_OF[layout.recomputed]
    return {
        "number": number,
        "seconds": seconds.seconds,
        "gib": gib,
        "trainer_idle": seconds.trainer_idle,
        "engine_idle": seconds.engine_idle,
        "limit": seconds.limit,
        "settings": settings,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(partial(_run, arguments))


def _run(arguments: Sequence[str] | None) -> None:
    parser = OneLineParser(
        prog="python -m ballast layout",
        usage=USAGE,
        description="Find a run's fastest layouts.",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the settings of a layout"
    )
    parser.add_argument(
        "--take",
        type=int,
        default=1,
        choices=range(1, SHOWN + 1),
        metavar="N",
        help="its number in the list (1)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, and lines on stderr"
    )
    options, rest = parser.parse_known_args(arguments)
    request = parse_arguments([*rest, "--dry-run"], COMMAND)
    if request.cluster is None:
        raise ConfigError(
            "--cluster: describe the nodes, as in --cluster nodes=8,gpus=8,gpu=H100."
        )
    if options.write and options.write.exists():
        raise ConfigError(
            f"--write {options.write}: the file exists. Name another file, or remove it."
        )
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        records = _search(options, request)
    if options.json:
        print(json.dumps({"layouts": records}, indent=1))


def _search(options: Namespace, request: Arguments) -> list[dict[str, Any]]:
    search = LayoutSearch(request)
    print("seconds of a step, GiB of the fullest GPU; idle: trainers, engines", flush=True)
    configs = []
    records = []
    for number, (seconds, layout, config) in enumerate(
        islice(search.best(), SHOWN), start=1
    ):
        configs.append(config)
        gib = search.gib(layout)
        records.append(record_of(number, seconds, layout, gib))
        print("\n".join(lines_of(number, seconds, layout, gib)), flush=True)
    if not configs:
        raise ConfigError(
            "--cluster: no layout fits into memory and the rules. Describe more GPUs, or remove overrides."
        )
    if options.write:
        if options.take > len(configs):
            raise ConfigError(
                f"--take {options.take}: the list has {len(configs)} layouts. Name one of these."
            )
        choice = configs[options.take - 1]
        settings = replace(
            choice, resources=load(request.config, request.overrides).resources
        )
        with writing("--write", options.write):
            options.write.write_text(changed_yaml(settings), encoding="utf-8")
        print(
            f"{options.write}: layout {options.take}. Measure its memory with --dry-run --cluster"
        )
        check(choice)  # a setting of FILE may have no effect in the layout
    return records


if __name__ == "__main__":
    sys.exit(main())
