"""Parameters with defaults, and fields of dataclasses, that no call in reached code gives. A list to judge, by names alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from reach import Function, House, Key, Reach, Unit, registered


@dataclass
class Given:
    """What all calls of one name hand over."""

    positions: int = 0
    keywords: set[str] = field(default_factory=set)
    anything: bool = False  # *rest, **more, or the function is handed on and called by somebody else


@dataclass(frozen=True)
class Parameter:
    name: str
    position: int | None  # None: by keyword alone
    line: int


def never_given(house: House, reach: Reach) -> Iterator[str]:
    given: dict[str, Given] = {}
    elsewhere: set[str] = set()  # set after the making: `replace(x, a=1)`, `x.a = 1`
    for unit in [*reach.units.values(), *reach.programs]:
        _gather(house, unit, given, elsewhere)
    for key, unit in sorted(reach.units.items()):
        if key in reach.given_to_users:
            continue
        for callee, parameters, fields in _defined(key, unit):
            calls = given.get(callee, Given())
            for each in parameters if not calls.anything else []:
                reached = each.position is not None and each.position < calls.positions
                if not reached and each.name not in calls.keywords and not (fields and each.name in elsewhere):
                    yield f"{house.modules[key[0]].relative}:{each.line}: {key[1]}: nothing gives {each.name}"


def _gather(house: House, unit: Unit, given: dict[str, Given], elsewhere: set[str]) -> None:
    owner = (unit.key[0], unit.key[1].partition(".")[0])
    called = set()
    for call in unit.calls:
        called.add(id(call.func))
        function, handed = call.func, call.args
        if _name(function) == "partial" and handed:
            function, handed = handed[0], handed[1:]
            called.add(id(function))
        if _name(function) == "replace":
            elsewhere.update(each.arg for each in call.keywords if each.arg)
        for name in _callees(house, owner, function):
            calls = given.setdefault(name, Given())
            calls.positions = max(calls.positions, len(handed))
            calls.keywords.update(each.arg for each in call.keywords if each.arg)
            starred = any(isinstance(each, ast.Starred) for each in handed)
            calls.anything |= starred or any(each.arg is None for each in call.keywords)
    annotations = {id(node) for top in unit.inside for node in _annotation(top)}
    for node in unit.inside:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            elsewhere.add(node.attr)
        elif isinstance(node, ast.Name | ast.Attribute) and id(node) not in called and id(node) not in annotations:
            name = _name(node)
            if name in given or isinstance(node, ast.Name):
                found = house.meaning(unit.key[0], name) if unit.key[0] else None
                function = house.units.get(found) if found is not None else None
                if function is not None and not function.members and found is not None and found[1]:
                    given.setdefault(found[1], Given()).anything |= isinstance(function.nodes[0], Function)


def _annotation(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("annotation", "returns"):
        inside = getattr(node, name, None)
        if isinstance(inside, ast.AST):
            yield from ast.walk(inside)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _callees(house: House, owner: Key, function: ast.expr) -> Iterator[str]:
    """The names under which what is called may be defined."""
    name = _name(function)
    if name == "cls":
        yield owner[1]
    elif name == "__init__":
        unit = house.units.get(owner)
        for base in unit.nodes if unit is not None else []:
            yield _name(base.value if isinstance(base, ast.Subscript) else base)
    elif name:
        yield name
        bound = house.bindings.get(owner[0], {}).get(name)
        if bound is not None and not isinstance(bound, str) and bound.name:
            yield bound.name


def _defined(key: Key, unit: Unit) -> Iterator[tuple[str, list[Parameter], bool]]:
    """(what its calls are named, its parameters with defaults, whether they are fields)."""
    owner, _, name = key[1].rpartition(".")
    if unit.members or not isinstance(next(iter(unit.nodes), None), Function):
        decorators = [ast.unparse(node) for node in unit.nodes if isinstance(node, ast.expr)]
        if any("dataclass" in text for text in decorators):
            yield key[1], list(_fields(unit)), True
    elif not name.startswith("__") or name == "__init__":
        for function in unit.nodes[:1]:
            if isinstance(function, Function) and not registered(function):
                yield (owner if name == "__init__" else name), list(_options(function, bool(owner))), False


def _fields(unit: Unit) -> Iterator[Parameter]:
    position = 0
    for node in unit.nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = "" if node.value is None else ast.unparse(node.value)
            made = "init=False" in value or "default_factory" in value  # state, which the object keeps itself
            if value and not made and not node.target.id.startswith("_"):
                yield Parameter(node.target.id, position, node.lineno)
            position += 1


def _options(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> Iterator[Parameter]:
    arguments = function.args
    static = any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)
    positional = [*arguments.posonlyargs, *arguments.args][1 if method and not static else 0 :]
    first = len(positional) - len(arguments.defaults)
    for position, each in enumerate(positional):
        if position >= first:
            yield Parameter(each.arg, position, each.lineno)
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            yield Parameter(each.arg, None, each.lineno)
