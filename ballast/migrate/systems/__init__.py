"""A module for each system whose settings follow from several of its keys.

recipe --prepare--> recipe with the keys that count --rows of the table--> settings --derive--> settings
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ballast.migrate.rules import Recipe, Settings, fit_cap
from ballast.migrate.systems import (
    areal,
    mindspeed_rl,
    nemo_rl,
    openrlhf,
    prime_rl,
    roll,
    skyrl,
    slime,
    trl,
    verl,
)


def _as_it_is(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    return recipe


@dataclass(frozen=True)
class System:
    """keys: whose values do not become a setting directly. derive: adds settings and open questions.

    prepare: returns the recipe without keys that another key switches off, and with names that have a row.
    """

    keys: tuple[str, ...]
    derive: Callable[[Recipe, Settings, list[str]], None]
    prepare: Callable[[Recipe, list[str]], Mapping[str, Any]] = _as_it_is


SYSTEMS = {
    "verl": System(verl.KEYS, verl.derive, verl.prepare),
    "TRL": System(trl.KEYS, trl.derive, trl.prepare),
    "slime": System(slime.KEYS, slime.derive, slime.prepare),
    "OpenRLHF": System(openrlhf.KEYS, openrlhf.derive, openrlhf.prepare),
    "ROLL": System(roll.KEYS, roll.derive, roll.prepare),
    "NeMo-RL": System(nemo_rl.KEYS, nemo_rl.derive, nemo_rl.prepare),
    "SkyRL": System(skyrl.KEYS, skyrl.derive, skyrl.prepare),
    "AReaL": System(areal.KEYS, areal.derive, areal.prepare),
    "MindSpeed-RL": System(mindspeed_rl.KEYS, mindspeed_rl.derive),
    "prime-rl": System(prime_rl.KEYS, prime_rl.derive, prime_rl.prepare),
    "verifiers": System(prime_rl.KEYS_OF_VERIFIERS, prime_rl.derive_environment),
}


def derive(system: str, recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """Add the settings that follow from several keys, and the open questions to `to_decide`."""
    if system in SYSTEMS:
        SYSTEMS[system].derive(recipe, settings, to_decide)
    if settings.get("rollout.placement") == "apart" and not settings.get(
        "rollout.replicas"
    ):
        settings["rollout.replicas"] = 1
        to_decide.append(
            "rollout.replicas=1: the number of engines on GPUs of their own. Set yours."
        )
    fit_cap(settings, to_decide)


def prepare(system: str, recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    return SYSTEMS[system].prepare(recipe, to_decide) if system in SYSTEMS else recipe


def keys_of(system: str) -> tuple[str, ...]:
    """Return the keys whose values do not become a setting directly."""
    return SYSTEMS[system].keys if system in SYSTEMS else ()
