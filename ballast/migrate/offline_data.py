"""Translate the data of six systems' recipes for SFT, preferences and reward models into settings."""

from collections.abc import Mapping

from ballast.migrate.rules import Recipe, Settings, paths_of

NAMES_OF_DATA = tuple(
    f"data.{part}.{name}"
    for part in ("train", "validation")
    for name in ("data_path", "dataset_name", "split")
)
OWN_NAMES = (
    "ResponseDataset",
    "PreferenceDataset",
    "BinaryPreferenceDataset",
    "openai_format",
)


def name_data_of_nemo_rl(
    theirs: Recipe, part: str, key: str, ours: Settings, to_decide: list[str]
) -> None:
    parts = theirs.get(f"data.{part}")
    first, *others = parts if isinstance(parts, list) and parts else [None]
    section = first if isinstance(first, Mapping) else {}
    path = section.get("data_path") or theirs.get(f"data.{part}.data_path")
    name = section.get("dataset_name") or theirs.get(f"data.{part}.dataset_name")
    if path:
        split = (
            theirs.get(f"data.{part}.split")
            if "." not in str(path).rpartition("/")[2]
            else None
        )
        ours[key] = f"{path}@{split}" if split else str(path)
    elif name and name not in OWN_NAMES:
        to_decide.append(
            f"{key}: NeMo-RL's own data set {name} there. Write its records to a file and name it."
        )
    if others:
        to_decide.append(
            f"{key}: one file or folder here. Join the others: {', '.join(map(str, others))}."
        )


def ask_for_length(to_decide: list[str]) -> None:
    to_decide.append(
        "data.max_tokens: without a limit there. 2048 here, longer records are dropped. Set yours."
    )


def name_data_of_skyrl(
    theirs: Recipe, part: str, key: str, ours: Settings, to_decide: list[str]
) -> None:
    older = "" if part == "train" else "eval_"
    name, *others = paths_of(
        theirs.get(f"{part}_datasets", theirs.get(f"{older}dataset_name"))
    )
    split = paths_of(
        theirs.get(f"{part}_dataset_splits", theirs.get(f"{older}dataset_split"))
    )[0]
    if not name or "$" in name:
        return
    part_of_split, is_sliced, _ = split.partition("[")
    ours[key] = f"{name}@{part_of_split}" if part_of_split else name
    if is_sliced:
        to_decide.append(
            f"{key}={ours[key]}: {split} there. Write those records to a file to take them alone."
        )
    if others:
        to_decide.append(
            f"{key}={ours[key]}: one data set here. Join the others: {', '.join(others)}."
        )
