"""Merge a YAML over the files that its `defaults` names.

grpo.yaml, defaults: parent.yaml --compose--> one configuration (NeMo-RL)
ppo.yaml, defaults: [actor@policy.actor: fsdp, _self_] --compose--> one configuration (Hydra)

Hydra itself is not used: its releases demand an older OmegaConf than ours, and it needs the program's
packages.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import normpath
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from controller.config.yaml_text import yaml_events
from workers.errors import ConfigError

MOST_PARENTS = 8
BASES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""verl's own files. The table holds their defaults, for recipes that stand outside of verl's folder."""
ENTRY = re.compile(r"(?:(optional|override)\s+)?([^@\s]+)(?:@(\S+))?")
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.M)


@dataclass(frozen=True)
class Folders:
    """roots: folders in which Hydra looks for a name. choices: of `override`, by group.

    bases: the system's own files among the parents, merged. notes: for the user.
    """

    roots: Sequence[Path]
    choices: dict[str, Any] = field(default_factory=dict)
    bases: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """group: the file's folder below a root. package: the section that its keys go to."""

    group: str = ""
    package: str = ""


@dataclass(frozen=True)
class Composition:
    """content: the file merged over its parents. bases: parents with the system's own defaults. notes: for
    the user.
    """

    content: Any
    bases: Sequence[Any] = ()
    notes: Sequence[str] = ()


def compose(path: Path) -> Composition:
    """Merge the file over its parents. Raises ConfigError where one is missing."""
    content = _load(path)
    if not isinstance(content, DictConfig):
        return Composition(content)
    search = OmegaConf.select(content, "hydra.searchpath", default=[])
    folders = Folders([path.parent, *_search_folders(path, search)])
    merged = _merge(path, Place(), folders, MOST_PARENTS)
    bases = [merged] if path.stem in BASES else folders.bases
    return Composition(merged, bases, folders.notes)


def _load(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    events = list(yaml_events(text))  # all of them: it refuses what is nested too deeply
    is_scalar = not any(isinstance(event, yaml.CollectionStartEvent) for event in events)
    return OmegaConf.create("" if is_scalar else text)


def _search_folders(path: Path, search: Sequence[str]) -> Iterator[Path]:
    """Yield the folders of hydra.searchpath, which are relative to where the program starts."""
    for location in search:
        scheme, _, name = str(location).rpartition("://")
        relative = name.replace(".", "/") if scheme == "pkg" else name
        folders = [base / relative for base in (Path.cwd(), *path.resolve().parents)]
        yield from (folder for folder in folders if folder.is_dir())


def _merge(path: Path, place: Place, folders: Folders, depth: int) -> Any:
    content = _load(path)
    if not isinstance(content, DictConfig):
        return content
    names = _names_of_parents(content)
    if names is None:
        return content if not place.package else _in_section(content, place.package)
    if not depth:
        raise ConfigError(
            f"{path}: defaults={names[0]}: more than {MOST_PARENTS} parents. Is one its own parent?"
        )
    content.pop("defaults")
    if any(str(name).endswith((".yaml", ".yml")) for name in names):
        return _merge_files(path, names, content, folders, depth)
    _remember_choices(names, folders)
    if "_self_" not in names:
        names.append("_self_")
    merged: Any = OmegaConf.create()
    for name in names:
        if name == "_self_":
            merged = OmegaConf.merge(merged, _in_section(content, place.package))
        else:
            for parent in _parents_of_entry(path, name, place, folders, depth):
                merged = OmegaConf.merge(merged, parent)
    return merged


def _names_of_parents(content: DictConfig) -> list[Any] | None:
    """Return the entries of `defaults`. None: `defaults` means something else."""
    names = OmegaConf.to_container(content).get("defaults")  # type: ignore[union-attr]
    if isinstance(names, str):
        return [names]
    return names if isinstance(names, list) and names else None


def _merge_files(
    path: Path, names: Sequence[Any], content: DictConfig, folders: Folders, depth: int
) -> Any:
    """Merge over files, as NeMo-RL does."""
    merged: Any = OmegaConf.create()
    for name in names:
        parent = path.parent / str(name)
        if not parent.is_file():
            raise _missing(path, name, [path.parent])
        layer = _merge(parent, Place(), folders, depth - 1)
        merged = OmegaConf.merge(_without_replaced(merged, layer), layer)
    return OmegaConf.merge(_without_replaced(merged, content), content)


def _without_replaced(parent: Any, child: Any) -> Any:
    """Drop from `parent` the sections that `child` replaces as a whole: marked so, or of another
    kind there.
    """
    base = OmegaConf.create()
    for key in parent:
        parent_node = parent._get_node(key)
        child_node = child._get_node(key)
        is_section = OmegaConf.is_dict(child_node)
        if child_node is None:
            base[key] = parent_node
        elif (
            is_section
            and OmegaConf.is_dict(parent_node)
            and not child_node.pop("_override_", False)
        ):
            base[key] = _without_replaced(parent_node, child_node)
    return base


def _remember_choices(names: Sequence[Any], folders: Folders) -> None:
    for name in names:
        for key, choice in name.items() if isinstance(name, Mapping) else ():
            entry = ENTRY.fullmatch(str(key))
            if entry and entry[1] == "override":
                folders.choices.setdefault(entry[2].strip("/"), choice)


def _parents_of_entry(
    path: Path, name: Any, place: Place, folders: Folders, depth: int
) -> Iterator[Any]:
    """Yield the files of `group@package: choice`, or of `group/choice@package`."""
    key, choice = next(iter(name.items())) if isinstance(name, Mapping) else (name, None)
    entry = ENTRY.fullmatch(str(key))
    if not entry:
        raise _missing(path, name, folders.roots)
    kind, location, package = entry.groups()
    if kind == "override" or location.startswith("hydra/"):
        return
    group = location if isinstance(name, Mapping) else location.rpartition("/")[0]
    choices = choice if isinstance(name, Mapping) else location.rpartition("/")[2]
    choices = (
        folders.choices.get(group.strip("/"), choices)
        if isinstance(name, Mapping)
        else choices
    )
    folder = (
        group.lstrip("/")
        if group.startswith("/")
        else normpath(f"{place.group or '.'}/{group or '.'}")
    )
    for file_name in choices if isinstance(choices, list) else [choices]:
        if file_name is None:
            continue
        stem = str(file_name).removesuffix(".yaml")
        parent = next(_files(folders.roots, folder, stem), None)
        if parent is None and kind == "optional":
            continue
        if parent is None and stem in BASES:
            folders.notes.append(
                f"defaults: {stem} is not beside {path.name} or in its searchpath. verl's own defaults count "
                "for its keys, changes in yours do not."
            )
            continue
        if parent is None:
            raise _missing(path, f"{group}{'/' * bool(group)}{stem}", folders.roots)
        section = _section(parent, group, package, place.package)
        layer = _merge(
            parent, replace(place, group=folder, package=section), folders, depth - 1
        )
        if stem in BASES:
            folders.bases.append(layer)
        yield layer


def _files(roots: Sequence[Path], folder: str, stem: str) -> Iterator[Path]:
    paths = (root / folder / f"{stem}.yaml" for root in roots)
    return (path for path in paths if path.is_file())


def _section(file: Path, group: str, package: str | None, of_parent: str) -> str:
    """Return the section of a file's keys: the entry's, or the file's `# @package`, or its group's."""
    header = PACKAGE.search(file.read_text(encoding="utf-8"))
    of_group = ".".join(
        part for part in group.strip("/").split("/") if part not in ("", ".", "..")
    )
    section = package or (header[1] if header else of_group)
    section = section.replace("_here_", "").replace("_group_", of_group).strip(".")
    if section == "_global_" or section.startswith("_global_."):
        return section.removeprefix("_global_").strip(".")
    return ".".join(part for part in (of_parent, section) if part)


def _in_section(content: Any, package: str) -> Any:
    for name in reversed(package.split(".") if package else ()):
        content = OmegaConf.create({name: content})
    return content


def _missing(path: Path, name: Any, roots: Sequence[Path]) -> ConfigError:
    places = ", ".join(str(root) for root in dict.fromkeys(roots))
    return ConfigError(
        f"{path}: defaults={name}: no such file in {places}. Its keys would be missing. Put it there, or "
        "write its values into the recipe."
    )
