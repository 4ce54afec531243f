"""Find the flags that a Python launcher writes into texts, as the ones of slime and miles do.

args = f"--n-samples-per-prompt 8 --prompt-data {folder}/train.jsonl " --flags_in_texts--> one text
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

FLAG_IN_TEXT = re.compile(r"(?:^|\s)--[a-zA-Z][\w.-]*")

EXPECTS_VALUE = re.compile(r"--[a-zA-Z][\w.-]*[ =]+$|\S$")


def flags_in_texts(tree: ast.Module) -> str:
    """Return the texts with flags of the function that has most of them, or of the module, in their order."""
    values = _values_by_name(tree)
    places: list[ast.AST] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef)
    ]
    texts_of_places = [list(_texts_with_flags(place, values)) for place in [*places, tree]]
    counts = [_count_flags(texts) for texts in texts_of_places]
    if not counts[-1]:
        return ""
    of_functions = max(counts[:-1], default=0)
    best = counts.index(of_functions) if of_functions * 2 > counts[-1] else -1
    programs = [
        value
        for name, value in values.items()
        if value.endswith(".py") and "script" in name
    ]
    return " ".join([*programs, *texts_of_places[best]])


def _count_flags(texts: Iterable[str]) -> int:
    return sum(len(FLAG_IN_TEXT.findall(text)) for text in texts)


def _values_by_name(tree: ast.Module) -> dict[str, str]:
    """Return the constants that are assigned to a name: variables, keyword arguments, defaults of a
    dataclass.
    """
    values: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            value = node.value
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is not None
        ):
            name = node.target.id
            value = node.value
        elif isinstance(node, ast.keyword) and node.arg:
            name = node.arg
            value = node.value
        else:
            continue
        text = _constant(value, values)
        if text is not None:
            values.setdefault(name, text)
    return values


def _constant(node: ast.expr, values: Mapping[str, str]) -> str | None:
    """Return the text of a constant, of a known name, of os.environ.get("NAME", default) or of
    os.path.join.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
        return str(node.value)
    if isinstance(node, ast.Name):
        return values.get(node.id)
    if isinstance(node, ast.JoinedStr):
        text = _text_of(node, values)
        return None if "$" in text else text
    if not isinstance(node, ast.Call) or not node.args:
        return None
    function = ast.unparse(node.func)
    parts = [_constant(argument, values) for argument in node.args]
    if function.endswith("path.join") and None not in parts:
        return "/".join(str(part) for part in parts)
    if function in ("int", "float", "str") or function.endswith(("environ.get", "getenv")):
        return parts[-1]
    return None


def _texts_with_flags(place: ast.AST, values: Mapping[str, str]) -> Iterator[str]:
    if isinstance(place, ast.JoinedStr | ast.Constant):
        text = _text_of(place, values)
        if FLAG_IN_TEXT.search(text):
            yield text
        return
    for child in ast.iter_child_nodes(place):
        yield from _texts_with_flags(child, values)


def _text_of(node: ast.AST, values: Mapping[str, str]) -> str:
    if isinstance(node, ast.JoinedStr):
        text = ""
        for part in node.values:
            is_value = not isinstance(part, ast.FormattedValue) or EXPECTS_VALUE.search(
                text
            )
            # Other flags, which have texts of their own.
            text += _text_of(part, values) if is_value else " "
        return text
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        name = (
            node.value.id
            if isinstance(node.value, ast.Name)
            else getattr(node.value, "attr", "")
        )
        return values.get(name, "$" + "".join(ast.unparse(node.value).split()))
    return ""
