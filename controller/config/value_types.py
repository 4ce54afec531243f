"""Types of settings: which values each accepts, and how a message names them."""

from typing import Any, get_args, get_origin

from workers.config.engine_range import Count, is_range

# The types of setting that are not a single value.
Numbers = dict[str, float]
Biases = dict[int, float]
Options = dict[str, Any]
TYPE_NAMES = {
    bool: "true or false (bool)",
    int: "a whole number (int)",
    Count: "a whole number, or a range of two, MIN..MAX",
    float: "a number (float)",
    str: "a text (str)",
    Numbers: "numbers by name (NAME: NUMBER, ...)",
    dict[str, str]: "texts by name (NAME: TEXT, ...)",
    Biases: "numbers by token id (ID: NUMBER, ...)",
    list[str]: "a list of texts ([TEXT, ...])",
    list[int]: "a list of whole numbers ([NUMBER, ...])",
    Options: "values by name (NAME: VALUE, ...)",
}


def is_of_type(value: Any, wanted: type) -> bool:
    """Whether a setting of the type `wanted` accepts `value`."""
    if isinstance(value, bool) or wanted is bool:
        return isinstance(value, bool) and wanted is bool
    if wanted == Count:
        return isinstance(value, int) or is_range(value)
    kind = get_origin(wanted)
    inner = get_args(wanted)
    if kind is list:
        return isinstance(value, list) and all(
            is_of_type(entry, inner[0]) for entry in value
        )
    if kind is dict:
        names, values = inner
        return isinstance(value, dict) and all(
            isinstance(name, names) and (values is Any or is_of_type(entry, values))
            for name, entry in value.items()
        )
    accepted: dict[type, tuple[type, ...]] = {
        int: (int,),
        float: (int, float),
        str: (str, int, float),
    }
    return isinstance(value, accepted[wanted])
