"""Our calls into libraries, read from our source, and whether what is installed takes them.

    source --ast--> imports, aliases --> every call of a library's function ------.
                    receivers, by class --> every call of a library's method ------+--> bind to the signature
                    torch.ops --> the operator's schema as a signature ------------'      --> problems, a line each

What is bound: that the name is there, the number of positional arguments, every keyword, and constants
against a parameter of Literal type. Built-in functions without a signature are only looked up.
"""

import ast
import builtins
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

LIBRARIES = ("vllm", "torch", "transformers", "safetensors", "peft", "flash_attn")
OURS = object()  # what a name stands for that no library has given


@dataclass(frozen=True)
class Call:
    """target: as it is written. positional: number of arguments, those of known stars included. constants:
    values that are written out, by position or keyword. open: whether more keywords come from a `**mapping`.
    """

    line: int
    target: str
    positional: int
    keywords: tuple[str, ...]
    constants: Mapping[int | str, Any]
    open: bool = False


@dataclass(frozen=True)
class Tables:
    """What the source does not say, by the text of an expression, subscripts as `[]`.

    receivers: of what class an object is; None for one of ours or of Python's. stars: into how many arguments
    `*x` unfolds. watched: classes whose method names, called on something that is not in `receivers`, are a
    problem; not the names in `common`, which many classes have. published: signatures of packages that are
    not installed here.
    passes_on: methods that call their first argument with the others.
    """

    receivers: Mapping[str, type | None] = field(default_factory=dict)
    stars: Mapping[str, int] = field(default_factory=dict)
    watched: tuple[type, ...] = ()
    common: tuple[str, ...] = ("encode", "size", "step")
    published: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    passes_on: tuple[str, ...] = ()

    @property
    def watched_names(self) -> set[str]:
        names = {
            name
            for kind in self.watched
            for name in vars(kind)
            if not name.startswith("__")
        }
        return names - set(self.common)


@dataclass
class Found:
    """bound: the targets that were resolved, with what each call's positional arguments were bound to.
    problems: a line each.
    """

    bound: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def check_source(source: str, tables: Tables, *, module: Any = None) -> Found:
    """Resolve and bind every call of the source. module: where its classes are, for calls on `self`."""
    reader = _Reader(tables, module)
    reader.visit(ast.parse(source))
    return reader.found


def check_file(path: Path, root: Path, tables: Tables) -> Found:
    """As `check_source`, of one of our modules; problems begin with its path."""
    found = check_source(path.read_text(), tables, module=module_of(path, root))
    return Found(
        found.bound, [f"{path.relative_to(root)}:{problem}" for problem in found.problems]
    )


def module_of(path: Path, root: Path) -> Any:
    return importlib.import_module(
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    )


def calls_on(source: str, receivers: tuple[str, ...]) -> Iterator[tuple[str, Call | None]]:
    """What a source asks of the objects that it calls `receivers`: (attribute, its call or None)."""
    reader = _Reader(Tables(), None)
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _text(node.value) in receivers:
            call = called.get(id(node))
            yield node.attr, reader._call_of(call, call.args) if call else None


def overrides(kind: type) -> Iterator[tuple[str, Call]]:
    """Every method of a library's class that ours replaces, called with all of its parameters by name."""
    for name in vars(kind):
        base = next(
            (getattr(base, name) for base in kind.__mro__[1:] if name in vars(base)), None
        )
        if (
            name.startswith("__")
            or not inspect.isroutine(base)
            or not _is_library(base.__module__)
        ):
            continue
        parameters = list(inspect.signature(base).parameters.values())
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            continue
        names = tuple(
            p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD
        )
        yield name, Call(0, f"{kind.__name__}.{name}", 0, names, {})


def strings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def signature_of(target: Any) -> inspect.Signature | None:
    """Of a function, class or torch operator; None if Python knows none."""
    if schema := getattr(getattr(target, "default", None), "_schema", None):
        kinds = inspect.Parameter
        return inspect.Signature(
            [
                kinds(
                    argument.name if argument.name != "self" else "self_",
                    kinds.KEYWORD_ONLY
                    if argument.kwarg_only
                    else kinds.POSITIONAL_OR_KEYWORD,
                    default=argument.default_value
                    if argument.has_default_value()
                    else kinds.empty,
                )
                for argument in schema.arguments
            ]
        )
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def bind(
    signature: inspect.Signature, call: Call, *, with_self: bool = False
) -> tuple[str, ...]:
    """Names that the arguments are bound to, in order. Raises TypeError if they do not fit."""
    arguments = [*(["self"] if with_self else []), *range(call.positional)]
    bound = (signature.bind_partial if call.open else signature.bind)(
        *arguments, **dict.fromkeys(call.keywords)
    )
    return tuple(list(bound.arguments)[with_self:])


class _Reader(ast.NodeVisitor):
    def __init__(self, tables: Tables, module: Any) -> None:
        self.tables, self.module, self.found = tables, module, Found()
        self.scopes: list[dict[str, Any]] = [{}]
        self.owner: type | None = None
        self.of_lambda: set[str] = set()

    # What a name stands for

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name, whole = (
                (alias.asname, alias.name)
                if alias.asname
                else (alias.name.partition(".")[0],) * 2
            )
            if _is_library(alias.name):
                importlib.import_module(alias.name)
                self.scopes[-1][name] = importlib.import_module(whole)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            source, name = str(node.module), alias.asname or alias.name
            if _is_library(source):
                self.scopes[-1][name] = self._imported(node.lineno, source, alias.name)

    def _imported(self, line: int, source: str, name: str) -> Any:
        if published := self.tables.published.get(f"{source}.{name}"):
            return published
        try:
            module = importlib.import_module(source)
            return (
                getattr(module, name)
                if hasattr(module, name)
                else importlib.import_module(f"{source}.{name}")
            )
        except ImportError:
            self.found.problems.append(f"{line}: {source} has no {name}")
            return OURS

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        value = (
            self._resolve(node.value)
            if isinstance(node.value, (ast.Name, ast.Attribute))
            else OURS
        )
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.scopes[-1][target.id] = value

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.owner = self.owner, getattr(self.module, node.name, None)
        self.generic_visit(node)
        self.owner = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        names = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        self.scopes.append({argument.arg: OURS for argument in names if argument})
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that ast asks for

    def visit_Lambda(self, node: ast.Lambda) -> None:
        before, names = self.of_lambda, {argument.arg for argument in node.args.args}
        self.of_lambda = before | names
        self.generic_visit(node)
        self.of_lambda = before

    def _receiver(self, node: ast.expr) -> type | None:
        text = _text(node)
        return (
            None
            if text.partition(".")[0] in self.of_lambda
            else self.tables.receivers.get(text)
        )

    def _resolve(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return next(
                (scope[node.id] for scope in reversed(self.scopes) if node.id in scope),
                OURS,
            )
        if not isinstance(node, ast.Attribute):
            return OURS
        owner = self._resolve(node.value)
        if owner is OURS:
            return OURS
        try:
            return getattr(owner, node.attr)
        except AttributeError:
            self._problem(node, f"{ast.unparse(node)} is not there")
            return OURS

    # What is called

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._resolve(node)  # a name that is only read must be there, too
        kind = self._receiver(node.value)
        if kind is not None and not has(kind, node.attr):
            self._problem(node, f"{_text(node)}: {kind.__name__} has no {node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        target = self._resolve(node.func)
        if target is not OURS:
            self._bind(node, target)
        elif isinstance(node.func, ast.Attribute):
            self._bind_method(node, node.func, node.args)
        if _text(node.func) in self.tables.passes_on and isinstance(
            node.args[0], ast.Attribute
        ):
            self._bind_method(node, node.args[0], node.args[1:])
        self.generic_visit(node)

    def _bind_method(
        self, node: ast.Call, function: ast.Attribute, arguments: list[ast.expr]
    ) -> None:
        kind = self._class_of(function)
        if kind is None or not hasattr(kind, function.attr):
            return
        static = inspect.getattr_static(kind, function.attr)
        method = getattr(kind, function.attr)
        if _is_library(getattr(method, "__module__", "") or ""):
            self._bind(
                node,
                method,
                arguments,
                with_self=not isinstance(static, (staticmethod, classmethod)),
            )

    def _class_of(self, function: ast.Attribute) -> type | None:
        receiver = _text(function.value)
        if receiver in self.tables.receivers:
            return self._receiver(function.value)
        if receiver == "self":
            return self.owner
        if receiver == "super()":
            return self.owner and self.owner.__mro__[1]
        is_library = (
            isinstance(function.value, (ast.Name, ast.Attribute))
            and self._resolve(function.value) is not OURS
        )
        if function.attr in self.tables.watched_names and not is_library:
            kinds = ", ".join(
                kind.__name__ for kind in self.tables.watched if function.attr in vars(kind)
            )
            self._problem(
                function,
                f"{_text(function)}: a method of {kinds}? name the class of {receiver}",
            )
        return None

    def _bind(
        self,
        node: ast.Call,
        target: Any,
        arguments: list[ast.expr] | None = None,
        *,
        with_self=False,
    ) -> None:
        signature = signature_of(target)
        call = self._call_of(node, node.args if arguments is None else arguments)
        names = self.found.bound.setdefault(_name(target, call), [])
        if signature is None:
            return
        try:
            names.append(bind(signature, call, with_self=with_self)[: call.positional])
            _check_constants(target, names[-1], call)
        except TypeError as error:
            self._problem(node, f"{call.target}{signature}: {error}")

    def _call_of(self, node: ast.Call, arguments: list[ast.expr]) -> Call:
        positional = 0
        constants: dict[int | str, Any] = {}
        for argument in arguments:
            if isinstance(argument, ast.Starred):
                positional += self._unfolded(argument)
                continue
            if isinstance(argument, ast.Constant):
                constants[positional] = argument.value
            positional += 1
        named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        constants |= {
            name: value.value
            for name, value in named.items()
            if isinstance(value, ast.Constant)
        }
        is_open = any(keyword.arg is None for keyword in node.keywords)
        return Call(
            node.lineno, _text(node.func), positional, tuple(named), constants, is_open
        )

    def _unfolded(self, star: ast.Starred) -> int:
        text = _text(star.value)
        if text not in self.tables.stars:
            self._problem(star, f"*{text}: say how many arguments that is")
        return self.tables.stars.get(text, 0)

    def _problem(self, node: ast.AST, text: str) -> None:
        self.found.problems.append(f"{getattr(node, 'lineno', 0)}: {text}")


def has(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute: of the class, a field, or set by a method on `self`."""
    return hasattr(kind, name) or any(
        name in known for known in map(_instance_names, kind.__mro__)
    )


def _instance_names(kind: type) -> set[str]:
    annotated = set(vars(kind).get("__annotations__", ()))
    if kind.__module__ == builtins.__name__:
        return annotated
    try:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return annotated
    return annotated | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and _text(node.value) == "self"
    }


def _check_constants(target: Any, names: tuple[str, ...], call: Call) -> None:
    """Raise TypeError for a constant that a parameter of Literal type does not list."""
    try:
        hints = typing.get_type_hints(
            target.__init__ if isinstance(target, type) else target
        )
    except (NameError, TypeError, AttributeError):  # hints of what is not imported there
        return
    for place, value in call.constants.items():
        name = names[place] if isinstance(place, int) and place < len(names) else place
        allowed = list(_alternatives(hints.get(str(name))))
        listed = [option for kind in allowed for option in typing.get_args(kind)]
        if (
            allowed
            and all(typing.get_origin(kind) is Literal for kind in allowed)
            and value not in listed
        ):
            raise TypeError(f"{name}={value!r} is none of {listed}")


def _alternatives(hint: Any) -> Iterator[Any]:
    hint = getattr(hint, "__value__", hint)
    if hint is None or hint is type(None):
        return
    if typing.get_origin(hint) in (typing.Union, type(int | str)):
        for member in typing.get_args(hint):
            yield from _alternatives(member)
    else:
        yield hint


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return f"{_text(node.value)}[]"
    if isinstance(node, ast.Attribute):
        return f"{_text(node.value)}.{node.attr}"
    return ast.unparse(node)


def _name(target: Any, call: Call) -> str:
    name = getattr(target, "__qualname__", None) or str(target)
    return f"{getattr(target, '__module__', '')}.{name}" if name else call.target
