"""Read keys and values of another system's configuration from a shell script, a command, Python, YAML or
JSON.

run.sh, "a.b=1 c.d=2", train.py, config.yaml, rl.toml --read_recipe--> {"a.b": 1, "c.d": 2}

Nothing is run.
"""

import ast
import operator
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ballast.migrate.launchers import flags_in_texts
from ballast.migrate.named_files import find_named_file
from ballast.migrate.parents import compose
from ballast.migrate.shell import ShellScript
from controller.config.file import leaves
from workers.errors import ConfigError, clause

OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:[./@]\w+)+)=(.*)", re.DOTALL)
UNDOTTED = re.compile(r"[+]{0,2}([a-z]\w*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
CALLS = re.compile(r"\w*(Config|Trainer|Arguments)")
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    # OmegaConf reads a signature, which the builtin lacks.
    "max": lambda first, second: max(first, second),
}
"""Resolvers of NeMo-RL's recipes."""
# LoraConfig's names, as TRL's commands have them.
LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "bias": "lora_bias",
    "task_type": "lora_task_type",
}
# Arguments of trainers whose values are functions of the script.
OF_FUNCTIONS = ("reward_funcs", "tools")
# Arguments whose values are data sets of the hub, or files.
OF_DATA = ("train_dataset", "eval_dataset")
# Of load_dataset, with one file of records that Ballast reads too.
FORMATS_OF_FILES = ("json", "parquet")
# Words that are listed elsewhere, not a value.
ARRAY = re.compile(r"\$\{?(\w+\[[@*]\]|@|\*)\}?")
PROGRAM_IN_COMMENT = re.compile(r"^\s*#.*?\b(trl \w+)", re.M)
ENDS = ("\n", "--", ")", "&&", "||", "|", "&", ">", "2>&1")
LAUNCHER = re.compile(
    r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|run|srun)|\$.*"
)
"""Words that a program's file may follow, behind flags of the launcher."""
FLAG_IN_COMMAND = re.compile(r"\s--[A-Za-z]")
BEGINS_COMMAND = ("\n", "&&", "||", "|", ";", "do")
TOOL = re.compile(
    r"(?:ray (?:start|stop|status)|(?:uv )?pip3? \w+|uv (?:venv|tool|sync)|(?:hf|huggingface-cli) \w+"
    r"|git \w+|docker \w+|nvidia-smi|curl|wget|pkill) .*"
)
"""Commands beside the one that trains. A recipe has none of their flags."""
SHELL = re.compile(r"(?:.*/)?(?:ba|z)?sh")


class Recipe(dict[str, Any]):
    """Keys and values.

    program: the names of programs, modules and classes that stand beside them. notes: lines for the user
    about what reading could not decide. defaults: keys whose values are the system's own defaults.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        program: str = "",
        notes: Sequence[str] = (),
        defaults: Iterable[str] = (),
    ) -> None:
        super().__init__(values)
        self.program = program
        self.notes = list(notes)
        self.defaults = frozenset(defaults)


def read_recipe(source: Sequence[str]) -> Recipe:
    """Return the keys of a file, or of a command's words. Raises ConfigError if there are none."""
    if len(source) == 1 and not re.search(r"[=\s]", source[0]):
        recipe = _of_file(Path(source[0]))
    else:
        recipe = _of_script(
            source[0] if len(source) == 1 else shlex.join(source), Path.cwd()
        )
    if not recipe:
        fix = "Give a file, or a command with key=value"
        if source[0].endswith(".py"):
            fix = "It takes them from its command line: give that command, in quotes"
        raise ConfigError(f"{source[0][:60]}: no key of a configuration found. {fix}.")
    return recipe


def _of_file(path: Path) -> Recipe:
    if path.exists() and not path.is_file():  # a device such as /dev/zero has no end
        raise ConfigError(
            f"{path} cannot be read: it is not a file. Name a script or a configuration."
        )
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            return _of_python_file(ast.parse(text), path)
        if path.suffix == ".toml":
            return Recipe(dict(leaves(tomllib.loads(text))))
        if path.suffix in (".yaml", ".yml", ".json"):
            return _of_yaml(path, " ".join(PROGRAM_IN_COMMENT.findall(text)))
        return _of_script(text, path.parent)
    except (
        OSError,
        ValueError,
        TypeError,  # OmegaConf's, where a child's list meets a parent's section
        SyntaxError,
        yaml.YAMLError,
        OmegaConfBaseException,
        RecursionError,
    ) as error:
        reason = getattr(error, "strerror", None) or clause(error)
        raise ConfigError(f"{path} cannot be read: {reason}.") from None


def _of_yaml(path: Path, program: str) -> Recipe:
    """Return resolved values. One that only its own program can resolve stays as it is written."""
    for name, compute in ARITHMETIC.items():
        OmegaConf.register_resolver(name, compute, replace=True)
    composition = compose(path)
    content = composition.content
    written = OmegaConf.to_container(content)
    if not isinstance(written, Mapping):
        return Recipe({})
    values = dict(leaves(written))
    defaults = [key for base in composition.bases for key in _equal_keys(base, values)]
    for key, value in values.items():
        if "${" in str(value):
            try:
                resolved = OmegaConf.select(content, key)
                is_section = OmegaConf.is_config(resolved)
                values[key] = (
                    OmegaConf.to_container(resolved, resolve=True)
                    if is_section
                    else resolved
                )
            except OmegaConfBaseException:
                continue
    return Recipe(values, program, composition.notes, defaults)


def _equal_keys(base: Any, values: Mapping[str, Any]) -> list[str]:
    base_values = cast(dict[str, Any], OmegaConf.to_container(base))
    return [
        key for key, value in leaves(base_values) if key in values and values[key] == value
    ]


def _functions_by_name(tree: ast.Module, path: Path) -> dict[str, str]:
    """Return `file.py:name` of the functions that a script defines, and `module:name` of those that it
    imports.
    """
    defined = {
        node.name: f"{path}:{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    ]
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in imports
        for alias in node.names
    }
    return imported | defined


def _of_python(tree: ast.AST, functions: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Keyword arguments of calls such as GRPOConfig(...) and GRPOTrainer(...). Code in place of a value stays
    code.
    """
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        name = _called(node)
        if isinstance(node, ast.Call) and CALLS.fullmatch(name):
            names = {None: "", "args": "", "model": "model_name_or_path"} | (
                LORA if name == "LoraConfig" else {}
            )
            for keyword in node.keywords:
                key = names.get(keyword.arg, keyword.arg)
                if key:
                    data = _data_set(keyword.value, assigned) if key in OF_DATA else ""
                    yield (
                        key,
                        data
                        or _value_in_python(
                            keyword.value, functions if key in OF_FUNCTIONS else {}
                        ),
                    )


def _data_set(node: ast.expr, assigned: Mapping[str, ast.expr]) -> str:
    """Return `NAME:CONFIGURATION@SPLIT` of a call of load_dataset, its file, or "". Also of a variable or a
    split.
    """
    if isinstance(node, ast.Name) and node.id in assigned:
        assignments = {name: value for name, value in assigned.items() if name != node.id}
        return _data_set(assigned[node.id], assignments)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        dataset = _data_set(node.value, assigned)
        split = str(node.slice.value)
        if dataset.endswith((".json", ".jsonl", ".parquet")):
            return dataset if split == "train" else ""  # the only split of a file
        return f"{dataset}@{split}" if dataset and "@" not in dataset else ""
    if not isinstance(node, ast.Call) or _called(node) != "load_dataset":
        return ""
    values = dict(zip(("path", "name"), node.args, strict=False))
    values |= {keyword.arg or "**": keyword.value for keyword in node.keywords}
    parts = {
        name: str(value.value)
        for name, value in values.items()
        if isinstance(value, ast.Constant)
    }
    if parts.keys() == values.keys() and _is_one_file(parts):
        return parts["data_files"]
    if (
        len(node.args) > 2
        or parts.keys() != values.keys()
        or not parts.keys() <= {"path", "name", "split"}
    ):
        return ""
    marks = (("", "path"), (":", "name"), ("@", "split"))
    return "".join(f"{mark}{parts[name]}" for mark, name in marks if name in parts)


def _is_one_file(arguments: Mapping[str, str]) -> bool:
    """Whether load_dataset reads all records of one file."""
    file = arguments.get("data_files", "")
    is_of_records = arguments.get("path") in FORMATS_OF_FILES and arguments.keys() <= {
        "path",
        "data_files",
        "split",
    }
    return (
        is_of_records
        and arguments.get("split", "train") == "train"
        and bool(file)
        and "*" not in file
    )


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


def _of_python_file(tree: ast.Module, path: Path) -> Recipe:
    """Return the arguments of trainers, or else the flags that a launcher writes into texts."""
    program = " ".join(map(_called, ast.walk(tree)))
    arguments = dict(_of_python(tree, _functions_by_name(tree, path)))
    if "LoraConfig" in program:
        arguments.pop("peft_config", None)  # its own arguments are read
    if arguments:
        return Recipe(arguments, program, _notes_on_import(tree, path, arguments))
    text = flags_in_texts(tree)
    if not text:
        return Recipe({})
    recipe = _of_script(text, path.parent)
    recipe.notes.append(
        f"flags in texts of {path.name}: conditions of Python were not followed, the last value counts."
    )
    return recipe


def _notes_on_import(
    tree: ast.Module, path: Path, arguments: Mapping[str, Any]
) -> list[str]:
    """Say that the script trains when it is imported, if functions in it are named."""
    functions = [
        str(name) for key in OF_FUNCTIONS for name in _as_names(arguments.get(key))
    ]
    at_import = [node for node in tree.body if isinstance(node, ast.Expr | ast.Assign)]
    trains = any(_called(node.value) == "train" for node in at_import)
    if not trains or not any(name.startswith(f"{path}:") for name in functions):
        return []
    return [
        f"reward.functions: {path.name} trains when it is imported. Move the functions into a file of their "
        "own."
    ]


def _as_names(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _called(node: ast.AST) -> str:
    return (
        getattr(node.func, "id", getattr(node.func, "attr", ""))
        if isinstance(node, ast.Call)
        else ""
    )


def _of_script(text: str, folder: Path) -> Recipe:
    """Return the key.sub=value words, or else `--key value` and `--flag`, over the file that they name."""
    script = ShellScript(text)
    try:
        words = list(_without_tools(list(_with_quoted_commands(list(script.words())))))
    except ValueError as error:
        raise ConfigError(f"the command cannot be read: {error}.") from None
    overrides = dict(_overrides(words))
    names = (
        word
        for word in words
        if word != "\n" and "=" not in word and not FLAG.fullmatch(word)
    )
    recipe = Recipe(overrides or _flags(words), " ".join(names), script.notes)
    file = find_named_file(words, folder, recipe.notes)
    return _over_file(recipe, file) if file else recipe


def _with_quoted_commands(words: Sequence[str]) -> Iterator[str]:
    """Put the words of the command in `bash -c "..."` in its place. The flags before are the launcher's."""
    for position, word in enumerate(words):
        is_quoted = (
            position > 1
            and words[position - 1] == "-c"
            and SHELL.fullmatch(words[position - 2])
        )
        if is_quoted and FLAG_IN_COMMAND.search(word):
            yield "--"
            yield from ShellScript(word).words()
        else:
            yield word


def _without_tools(words: Sequence[str]) -> Iterator[str]:
    """Leave out the commands that prepare a machine, such as `ray start --head`."""
    is_tool = False
    for position, word in enumerate(words):
        begins_program = LAUNCHER.fullmatch(word) and not word.startswith("$")
        if word in BEGINS_COMMAND or begins_program:  # semicolons are gone here
            is_tool = False
        elif position == 0 or words[position - 1] in BEGINS_COMMAND:
            is_tool = (
                TOOL.fullmatch(" ".join([*words[position : position + 3], ""])) is not None
            )
        if not is_tool:
            yield word


def _over_file(recipe: Recipe, path: Path) -> Recipe:
    """Put the words of a command over the values of a file, whose names have no hyphens."""
    base = _of_file(path)
    words = {
        key.replace("-", "_") if "." not in key else key: value
        for key, value in recipe.items()
    }
    for name in ("config", "config_path", "config_name"):
        words.pop(name, None)
    program = f"{recipe.program} {base.program}".strip()
    return Recipe(
        {**base, **words},
        program,
        [*recipe.notes, *base.notes],
        base.defaults - words.keys(),
    )


def _overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield key.sub=value, and key=value behind the program of a command that has such words."""
    command: list[tuple[str, Any]] = []
    is_behind_program = False
    for word in [*words, "\n"]:
        match = OVERRIDE.fullmatch(word) or (is_behind_program and UNDOTTED.fullmatch(word))
        if match:
            command.append((match[1], parse_value(match[2])))
        elif word == "\n":
            if any("." in key for key, _ in command):
                yield from command
            command = []
            is_behind_program = False
        elif "=" not in word:
            is_behind_program = (
                is_behind_program or word in ("-m", "--") or word.endswith(".py")
            )


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the values by flag: a list where several words follow, and true where none does."""
    flags: dict[str, list[str]] = {}
    of_submission: list[
        str
    ] = []  # `ray job submit --address A -- python train.py` has options of its own
    values: list[str] | None = None
    awaits_program = False
    for word in words:
        is_program = awaits_program and word.endswith(".py")
        if word in ("\n", "-m") or is_program:
            awaits_program = False
        elif LAUNCHER.fullmatch(word) and not values:
            awaits_program = True
        if word == "--module" and awaits_program:  # the launcher's, as `-m` is
            values = None
        elif flag := FLAG.fullmatch(word):
            of_submission.append(flag[1])
            values = flags[flag[1]] = [] if flag[2] is None else [flag[2]]
            if flag[2] is not None:
                values = None
        elif word == "submit":
            of_submission = []
            values = None
        elif word in ENDS or is_program or ARRAY.fullmatch(word):
            if word == "--":
                for name in of_submission:
                    flags.pop(name, None)
            values = None
        elif values is not None:
            values.append(word)
    return {name: _flag_value(texts) for name, texts in flags.items()}


def _flag_value(texts: Sequence[str]) -> Any:
    if len(texts) > 1:
        return [parse_value(text) for text in texts]
    return parse_value(texts[0]) if texts else True


def parse_value(text: str) -> Any:
    """Return the value as YAML reads it, or the text if it is not YAML."""
    # The tables of keys have the same few texts for every recipe. Callers change lists.
    return deepcopy(_parse_text(text))


@cache
def _parse_text(text: str) -> Any:
    if not text or text.lower() in ("no", "yes", "on", "off"):  # booleans of YAML 1.1 alone
        return text
    try:
        value = cast(
            dict[str, Any],
            OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"])),
        )["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        return text
    return None if value == "None" else value
