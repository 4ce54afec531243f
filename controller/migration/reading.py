"""Read keys and values of another system's configuration from a shell script, a command, Python, YAML or JSON.

run.sh, "a.b=1 c.d=2", train.py, config.yaml, rl.toml --given--> {"a.b": 1, "c.d": 2}

Variables, defaults and arithmetic of a script are expanded. Nothing is run.
"""

import ast
import operator
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from controller.config.file import leaves, yaml_events
from workers.errors import ConfigError, clause

OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:[./@]\w+)+)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
CALLS = re.compile(r"\w*(Config|Trainer|Arguments)")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MOST_PARENTS = 8
LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}  # LoraConfig's names, as TRL's commands have them
OF_FUNCTIONS = ("reward_funcs", "tools")  # arguments of trainers whose values are functions of the script
ARRAY = re.compile(r"\$\{?(\w+\[[@*]\]|@|\*)\}?")  # words that are listed elsewhere, not a value
ENDS = ("\n", "--", ")", "&&", "||", "|", "&", ">", "2>&1")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")


class Recipe(dict[str, Any]):
    """Keys and values. program: the names of programs, modules and classes that stand beside them."""

    def __init__(self, values: Mapping[str, Any], program: str = "") -> None:
        super().__init__(values)
        self.program = program


def given(source: Sequence[str]) -> Recipe:
    """Return the keys of a file, or of a command's words. Raises ConfigError if there are none."""
    if len(source) == 1 and not re.search(r"[=\s]", source[0]):
        found = _of_file(Path(source[0]))
    else:
        found = _of_script(source[0] if len(source) == 1 else shlex.join(source))
    if not found:
        raise ConfigError(
            f"{source[0][:60]}: no key of a configuration found. Give a file, or a command with key=value."
        )
    return found


def _of_file(path: Path) -> Recipe:
    if path.exists() and not path.is_file():  # a device such as /dev/zero has no end
        raise ConfigError(f"{path} cannot be read: it is not a file. Name a script or a configuration.")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            tree = ast.parse(text)
            return Recipe(
                dict(_of_python(tree, _functions_by_name(tree, path))), " ".join(map(_called, ast.walk(tree)))
            )
        if path.suffix == ".toml":
            return Recipe(dict(leaves(tomllib.loads(text))))
        if path.suffix in (".yaml", ".yml", ".json"):
            return Recipe(_of_yaml(path))
        return _of_script(text)
    except (OSError, ValueError, SyntaxError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        reason = getattr(error, "strerror", None) or clause(error)
        raise ConfigError(f"{path} cannot be read: {reason}.") from None


def _of_yaml(path: Path) -> dict[str, Any]:
    """Return resolved values. One that only its own program can resolve stays as it is written."""
    content = _with_parents(path, MOST_PARENTS)
    written = OmegaConf.to_container(content)
    if not isinstance(written, Mapping):
        return {}
    values = dict(leaves(written))
    for key, value in values.items():
        if "${" in str(value):
            try:
                resolved = OmegaConf.select(content, key)
                is_section = OmegaConf.is_config(resolved)
                values[key] = OmegaConf.to_container(resolved, resolve=True) if is_section else resolved
            except OmegaConfBaseException:
                continue
    return values


def _with_parents(path: Path, depth: int) -> Any:
    """Merge the file over the parent that its `defaults` names, as NeMo-RL does."""
    text = path.read_text(encoding="utf-8")
    events = list(yaml_events(text))  # all of them: it refuses what is nested too deeply
    is_scalar = not any(isinstance(event, yaml.CollectionStartEvent) for event in events)
    content = OmegaConf.create("" if is_scalar else text)
    if not isinstance(content, DictConfig):
        return content
    name = cast(dict[str, Any], OmegaConf.to_container(content)).get("defaults")
    parent = path.parent / name if isinstance(name, str) else None
    if parent is None or not parent.is_file():
        return content  # `defaults` is then listed as a key that is not known
    if not depth:
        raise ConfigError(f"{path}: defaults={name}: more than {MOST_PARENTS} parents. Is one its own parent?")
    content.pop("defaults")
    return OmegaConf.merge(_with_parents(parent, depth - 1), content)


def _functions_by_name(tree: ast.Module, path: Path) -> dict[str, str]:
    """Return `file.py:name` of the functions that a script defines, and `module:name` of those that it imports."""
    defined = {
        node.name: f"{path}:{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    imported = {alias.asname or alias.name: f"{node.module}:{alias.name}" for node in imports for alias in node.names}
    return imported | defined


def _of_python(tree: ast.AST, functions: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Keyword arguments of calls such as GRPOConfig(...) and GRPOTrainer(...). Code in place of a value stays code."""
    for node in ast.walk(tree):
        name = _called(node)
        if isinstance(node, ast.Call) and CALLS.fullmatch(name):
            names = {None: "", "args": "", "model": "model_name_or_path"} | (LORA if name == "LoraConfig" else {})
            for keyword in node.keywords:
                key = names.get(keyword.arg, keyword.arg)
                if key:
                    yield key, _value_in_python(keyword.value, functions if key in OF_FUNCTIONS else {})


def _value_in_python(node: ast.expr, functions: Mapping[str, str]) -> Any:
    """Return a literal, the names of functions, or the code as a text in `${}`."""
    if isinstance(node, ast.List | ast.Tuple) and functions:
        return [_value_in_python(element, functions) for element in node.elts]
    if isinstance(node, ast.Name) and node.id in functions:
        return functions[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return f"${{{ast.unparse(node)}}}"


def _called(node: ast.AST) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""


def _of_script(text: str) -> Recipe:
    """Return the key.sub=value words, or else `--key value` and `--flag`."""
    try:
        words = list(script_words(text))
    except ValueError as error:
        raise ConfigError(f"the command cannot be read: {error}.") from None
    overrides = {found[1]: typed(found[2]) for word in words if (found := OVERRIDE.fullmatch(word))}
    names = (word for word in words if word != "\n" and "=" not in word and not FLAG.fullmatch(word))
    return Recipe(overrides or _flags(words), " ".join(names))


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the values by flag: a list where several words follow, and true where none does."""
    flags: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if flag := FLAG.fullmatch(word):
            values = flags[flag[1]] = [] if flag[2] is None else [flag[2]]
            if flag[2] is not None:
                values = None
        elif word in ENDS or ARRAY.fullmatch(word):
            values = None
        elif values is not None:
            values.append(word)
    return {name: _flag_value(texts) for name, texts in flags.items()}


def _flag_value(texts: Sequence[str]) -> Any:
    if len(texts) > 1:
        return [typed(text) for text in texts]
    return typed(texts[0]) if texts else True


def typed(text: str) -> Any:
    """Return the value as YAML reads it, or the text if it is not YAML."""
    if not text:
        return text
    try:
        value = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"])))["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        return text
    return None if value == "None" else value


def script_words(text: str) -> Iterator[str]:
    """Yield the words of all commands. `$` stays where a value needs a shell. ValueError for an open quote."""
    variables = {name: os.environ[name] for name in ("HOME", "PWD") if name in os.environ}
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    unfinished = ""
    for line in text.splitlines():
        unfinished += line
        try:
            words = shlex.split(_expanded(unfinished, variables), comments=True)
        except ValueError:  # a quote that continues on the next line
            unfinished += "\n"
            continue
        unfinished = ""
        for word in (word.rstrip(";") for word in words):
            if found := ASSIGNMENT.fullmatch(word):
                variables[found[1]] = found[2]
            yield word
        yield "\n"
    if unfinished:
        raise ValueError(f"a quote is not closed: {unfinished.strip().splitlines()[0][:60]}")


def _expanded(text: str, variables: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        default = found[0] if found[2] is None else found[2]
        return variables.get(found[1] or found[3], default)

    for _ in range(8):  # a default may hold another variable
        expanded = VARIABLE.sub(value, text)
        if expanded == text:
            break
        text = expanded
    return ARITHMETIC.sub(lambda found: _number(found, variables), text)


def _number(found: re.Match[str], variables: dict[str, str]) -> str:
    try:
        return str(_evaluated(ast.parse(found[1].strip(), mode="eval").body, variables))
    except (ValueError, SyntaxError, ArithmeticError, RecursionError):
        return found[0]


def _evaluated(node: ast.expr, variables: dict[str, str]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(variables.get(node.id, ""))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_evaluated(node.left, variables), _evaluated(node.right, variables)))
    raise ValueError(node)
