"""Describe a configuration: the pages of `--dry-run` and `--settings`.

Config --> settings | placement | sizes | automatic | caps | notes
schema --> every key, type, default, range
"""

import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import yaml

from controller.actors.layout import (
    Bundle,
    Pool,
    RoleRequest,
    idle_gpus,
    pools,
    role_requests,
    sum_reserved,
)
from controller.config import Config, TrainingConfig, changed_yaml, to_yaml
from controller.config.conditions import Conditions, effect_words
from controller.config.file import Setting, settings
from controller.config.model_files import read_model_files
from controller.config.offline import OfflineConfig
from controller.config.training import Limits, count_noun, has_amd_gpus
from controller.preflight.automatic import automatic_choices
from controller.preflight.describe_fit import fits_lines
from controller.preflight.page import Page


def describe(config: TrainingConfig, *, everything: bool = False) -> str:
    """Write the page of `--dry-run` for a checked configuration. everything: include default settings."""
    blocks = []
    for section in page_sections(config, everything=everything):
        blocks.append("\n".join([f"== {section.title} ==", *section.lines]))
    return "\n\n".join(blocks)


@dataclass(frozen=True)
class Section:
    """A part of the page. name: its key in JSON. facts: what its lines tell, for programs."""

    name: str
    title: str
    lines: list[str]
    facts: dict[str, Any]


def page_sections(config: TrainingConfig, *, everything: bool = False) -> list[Section]:
    """Return the sections that have lines, for a checked configuration."""
    text = to_yaml(config) if everything else changed_yaml(config)
    title = "configuration"
    if not everything:
        title = "configuration, where it differs from the defaults (--all: everything)"
    choices = automatic_choices(config)
    sections = [
        Section(
            "configuration", title, text.splitlines(), {"settings": yaml.safe_load(text)}
        ),
        Section("placement", "placement", _placement(config), _placement_facts(config)),
        Section("sizes", "sizes", _sizes(config), _size_facts(config)),
        Section(
            "automatic",
            "automatic",
            [f"{key}=auto -> {choice}" for key, choice in choices.items()],
            {"choices": choices},
        ),
        Section(
            "caps",
            "caps",
            [_cap_line(config, limits) for limits in config.limits.values()],
            {"passes": {name: asdict(limits) for name, limits in config.limits.items()}},
        ),
        Section("notes", "notes", _notes(config), {}),
    ]
    return [section for section in sections if section.lines]


def write_sections(config: TrainingConfig, page: Page, *, everything: bool) -> None:
    for section in page_sections(config, everything=everything):
        page.begin(section.name, section.title, **section.facts)
        page.write(*section.lines)


def _placement_facts(config: TrainingConfig) -> dict[str, Any]:
    return {
        "device": "GPUs" if config.uses_gpus else "CPUs",
        "pools": [asdict(pool) for pool in pools(config)],
        "roles": [asdict(request) for request in role_requests(config)],
        "reserved": {name: sum_reserved(config, name) for name in ("CPU", "GPU")},
    }


def _size_facts(config: TrainingConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "steps": config.run.steps,
        "longest_sequence": config.longest_sequence,
        "folder": str(config.run_folder),
    }
    if isinstance(config, Config):
        facts["sequences_per_step"] = config.sequences_per_step
        facts["mini_batches"] = config.mini_batch_sizes
        facts["updates_per_step"] = config.updates_per_step
        facts["engine_tokens"] = config.max_model_tokens
    if isinstance(config, OfflineConfig):
        facts["sequences_per_step"] = config.records_per_step * config.sequences_per_record
    return facts


def settings_page(schema: type[TrainingConfig] = Config) -> str:
    blocks = []
    for section, section_settings in groupby(
        settings(schema()), key=lambda setting: setting.key.partition(".")[0]
    ):
        blocks.append(f"== {section} ==")
        blocks += [
            _setting_entry(setting, schema.conditions) for setting in section_settings
        ]
    return "\n".join(blocks)


def section_names(schema: type[TrainingConfig] = Config) -> list[str]:
    return list(
        dict.fromkeys(setting.key.partition(".")[0] for setting in settings(schema()))
    )


def _setting_entry(setting: Setting, conditions: Conditions) -> str:
    default = "must be set" if setting.required else f"default {setting.default!r}"
    facts = ", ".join(fact for fact in (setting.type_name, default, setting.range) if fact)
    text = f"{setting.doc} {effect_words(conditions, setting.only_with)}"
    doc = textwrap.fill(text, width=100, initial_indent="    ", subsequent_indent="    ")
    return f"{setting.key}  ({facts})\n{doc}"


def _placement(config: TrainingConfig) -> list[str]:
    device = "GPUs" if config.uses_gpus else "CPUs"
    engines = (
        f"; rollout.placement is {config.rollout_placement}"
        if isinstance(config, Config)
        else ""
    )
    lines = [f"models run on {device}{engines}"]
    lines += [_pool_line(pool) for pool in pools(config)]
    lines += [_role_line(request) for request in role_requests(config)]
    engines_beside, shared = config.colocated_engines
    if engines_beside:
        lines.append(
            f"each engine uses {shared} of the policy's GPUs while training sleeps, and reserves no other"
        )
    if config.engine_range.is_elastic:
        lines.append(_range_line(config))
    lines.append(
        f"reserved in all: {sum_reserved(config, 'CPU'):g} CPUs, {sum_reserved(config, 'GPU'):g} GPUs"
    )
    return lines + fits_lines(config)


def _range_line(config: TrainingConfig) -> str:
    bundle = next(pool.bundles[0] for pool in pools(config) if pool.name == "rollout")
    return (
        f"{config.engine_range.words_at_start} at the start, each in a bundle that is reserved alone; a "
        f"further one takes {_bundle(bundle)} once the cluster has it free"
    )


def _pool_line(pool: Pool) -> str:
    counts = Counter(_bundle(bundle) for bundle in pool.bundles)
    bundles = " + ".join(f"{count} x {bundle}" for bundle, count in counts.items())
    return f"pool {pool.name}: {bundles}, strategy {pool.strategy}"


def _bundle(bundle: Bundle) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items()) + "}"


def _role_line(request: RoleRequest) -> str:
    gpus = f", {request.gpus:g} GPU" if request.gpus else ""
    last = request.actors - 1
    bundles = "0" if last == 0 else f"0..{last}"
    place = (
        f"bundle {bundles} of pool {request.pool}"
        if request.pool
        else "anywhere in the cluster"
    )
    return f"{request.role}: {count_noun(request.actors, 'actor')}, {request.cpus:g} CPU{gpus} each, {place}"


def _sizes(config: TrainingConfig) -> list[str]:
    parallel = config.policy.parallel
    stages = []
    if parallel.pipeline_parallel > 1:
        parts = (
            f", {parallel.virtual_stages} parts of the layers each"
            if parallel.virtual_stages > 1
            else ""
        )
        stages = [
            f"a model: in {parallel.pipeline_parallel} stages{parts}. Each data-parallel rank has all of them"
        ]
    if isinstance(config, OfflineConfig):
        return _offline_sizes(config) + stages
    return _sampling_sizes(config) + stages if isinstance(config, Config) else []


def _offline_sizes(config: OfflineConfig) -> list[str]:
    count = config.records_per_step * config.sequences_per_record
    length = (
        f"{config.run.steps} steps"
        if config.run.steps
        else f"{count_noun(config.run.epochs, 'epoch')} of data.train"
    )
    ranks = count_noun(config.policy.data_parallel, "rank")
    return [
        f"a step: {count_noun(count, 'sequence')} over {ranks}, at most "
        f"{count * config.longest_sequence:,} tokens",
        f"the run: {length}, written to {config.run_folder}",
    ]


def _sampling_sizes(config: Config) -> list[str]:
    sizes = config.mini_batch_sizes
    spread = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[-1]} to {sizes[0]}"
    tokens = config.sequences_per_step * config.longest_sequence
    passes = f", in each of {config.batch.epochs} epochs" if config.batch.epochs > 1 else ""
    return [
        f"a step: {config.batch.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples = "
        f"{config.sequences_per_step} sequences, at most {tokens:,} tokens",
        f"a mini-batch: {spread} sequences over {count_noun(config.policy.data_parallel, 'rank')}; "
        f"{len(sizes)} a step{passes}",
        f"a sequence: at most {config.data.max_prompt_tokens} + {config.longest_response} = "
        f"{config.longest_sequence} tokens. Engines take {config.max_model_tokens}",
        f"the run: {config.run.steps} steps, {config.run.steps * config.updates_per_step} optimiser steps, "
        f"written to {config.run_folder}",
    ]


def _cap_line(config: TrainingConfig, limits: Limits) -> str:
    longest = config.longest_sequence
    room = limits.max_tokens * config.policy.parallel.context_parallel // longest
    patches = (
        f". Its images have at most {limits.max_patches:,} patches"
        if limits.max_patches
        else ""
    )
    if limits.max_sequences:
        room = min(room, limits.max_sequences)
    return (
        f"{limits.cap} {limits.max_tokens} >= longest possible sequence {longest}: a micro-batch has room "
        f"for at least {room} such sequences{patches}"
    )


def warnings(config: Config) -> list[str]:
    """Return warnings, which a run prints at its start too."""
    lines = state_warnings(config)
    if config.resources.device == "auto" and not config.uses_gpus and has_amd_gpus():
        lines.append(
            "resources.device=auto: AMD GPUs (ROCm) are not supported, so models run on CPUs"
        )
    if not read_model_files(config.model.path, "model.path").end_of_sequence:
        lines.append(
            f"model.path={config.model.path} names no end-of-sequence token (eos_token of its tokenizer, "
            "eos_token_id of generation_config.json): every response runs to rollout.sampling.max_new_tokens"
        )
    return lines


def state_warnings(config: TrainingConfig) -> list[str]:
    """Return what models lack on GPUs of the kernels of their layers with a state."""
    if not config.uses_gpus:
        return []
    from workers.model.rules.state_packages import missing_kernels

    lines = []
    for key, path in config.model_paths.items():
        if path and (problem := missing_kernels(read_model_files(path, key).text)):
            lines.append(
                f"{key}={path}: {problem}. Install ballast-rl[hybrid] on every node"
            )
    return lines


def _notes(config: TrainingConfig) -> list[str]:
    notes = idle_gpus(config, config.gpus)
    notes += (
        _sampling_notes(config) if isinstance(config, Config) else state_warnings(config)
    )
    if (
        config.policy.max_tokens_per_micro_batch * config.policy.parallel.context_parallel
        < 2 * config.longest_sequence
    ):
        notes.append(
            "policy.max_tokens_per_micro_batch is below twice the longest possible sequence. Long "
            "sequences leave packs half empty"
        )
    return notes


def _sampling_notes(config: Config) -> list[str]:
    sampling = config.rollout.sampling
    notes = warnings(config)
    if not config.uses_gpus and config.model.dtype == "bfloat16":
        notes.append(
            "model.dtype=bfloat16 on CPU: log-probs of engines and trainer differ by rounding, up to about "
            "0.5"
        )
    if config.model.batch_invariant:
        notes.append(
            "model.batch_invariant=true: at equal weights the log-probs of engines and trainer are equal bit "
            "for bit. Layers are not compiled, and prompts are not shared. Never run on a card"
        )
    if sampling.cuts:
        notes.append(
            f"rollout.sampling.{sampling.cuts[0]} cuts the distribution that is sampled from. The trainer's "
            "log-probs are of the whole one"
        )
    if sampling.changes:
        notes.append(
            f"rollout.sampling.{sampling.changes[0]} changes the distribution that is sampled from. "
            "algorithm.loss.rollout_correction weighs its tokens by the trained policy's"
        )
    return notes
