"""What of a package a run can come to: from its roots along imports and names, without importing anything.

A unit is a module's own statements, a function, a class without its methods, or a method. A unit that is reached reaches the
modules that it imports (deferred imports too), the functions and classes that it names, and the methods of reached classes whose
name it reads as an attribute of anything. So a name that two classes share keeps both alive: this errs on the side of keeping.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from house import PACKAGE, Import, Module, imports, statements, target

Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]  # module, and the name in it: "", "f", "C" or "C.m"
Meaning = Callable[[str], Key | None]
_DOTTED = re.compile(rf"{PACKAGE}(\.[a-z_]\w*)+")
# Decorators that call nobody and register nothing; a function under another one is called by whoever defines that.
_PLAIN = re.compile(
    r"(functools\.|contextlib\.|torch\.|dataclasses\.|abc\.|typing\.)?(property|cached_property|staticmethod|classmethod|cache"
    r"|lru_cache|(async)?contextmanager|dataclass|overload|override|abstractmethod|no_grad|inference_mode|total_ordering"
    r"|runtime_checkable|wraps|once_differentiable)(\(.*\))?|triton\.jit|\w+\.setter|torch\.autograd\.function\.once_differentiable",
    re.DOTALL,
)
# Methods that other packages call on what they are given: torch, threading, json, logging, asyncio, rich, the array interface.
_CALLED_BY_OTHERS = {"forward", "backward", "setup_context", "run", "default", "emit", "ignore_aliases"}


@dataclass(eq=False)
class Unit:
    """What stands in one function, class or module by itself."""

    key: Key
    nodes: list[ast.AST]
    folder: tuple[str, ...]
    members: dict[str, Function] = field(default_factory=dict)  # of a class
    bases: tuple[str, ...] = ()

    @cached_property
    def inside(self) -> list[ast.AST]:
        """All nodes, but not those of other units."""
        found: list[ast.AST] = []
        waiting = list(self.nodes)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring may name anything
            found.append(node)
            waiting.extend(ast.iter_child_nodes(node))
        return found

    @cached_property
    def imports(self) -> list[Import]:
        loaded = not self.key[1]  # in a function every import is deferred, and counts
        found = [each for node in self.nodes for each in imports(_block(node), self.folder)]
        return [each for each in found if each.at_run_time or not loaded]


def _block(node: ast.AST) -> ast.AST:
    return ast.Module([node], []) if isinstance(node, ast.stmt) else node


class House:
    """The modules of a package by name, their units, and what their names mean."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = {module.name: module for module in modules}
        self.units: dict[Key, Unit] = {}
        self.bindings: dict[str, dict[str, Import | str]] = {}
        for module in modules:
            self._add(module)

    def _add(self, module: Module) -> None:
        folder = module.relative.parts[:-1]
        names: dict[str, Import | str] = {}
        loose: list[ast.AST] = []
        for node in _top(module.tree):
            if isinstance(node, Function):
                self.units[module.name, node.name] = Unit((module.name, node.name), [node], folder)
                names[node.name] = node.name
            elif isinstance(node, ast.ClassDef):
                self._add_class(module.name, node, folder)
                names[node.name] = node.name
            else:
                loose.append(node)
        for each in module.imports:
            if each.bound not in names:
                names[each.bound] = each
        self.bindings[module.name] = names
        self.units[module.name, ""] = Unit((module.name, ""), loose, folder)

    def _add_class(self, module: str, node: ast.ClassDef, folder: tuple[str, ...]) -> None:
        methods = {each.name: each for each in node.body if isinstance(each, Function)}
        rest: list[ast.AST] = [each for each in node.body if not isinstance(each, Function)]
        shell: list[ast.AST] = [*node.bases, *node.keywords, *node.decorator_list, *rest]
        bases = tuple(each.id for base in node.bases for each in ast.walk(base) if isinstance(each, ast.Name))
        self.units[module, node.name] = Unit((module, node.name), shell, folder, methods, bases)
        for each in node.body:
            if isinstance(each, Function):  # a property's setter stands beside its getter
                key = module, f"{node.name}.{each.name}"
                self.units.setdefault(key, Unit(key, [], folder)).nodes.append(each)

    def functions(self, module: str) -> list[str]:
        """The public functions and classes of a module."""
        return [name for name, meant in self.bindings[module].items() if meant == name and not name.startswith("_")]

    def meaning(self, module: str, name: str) -> Key | None:
        """Where a name of a module is defined: a unit, a module (with an empty name), or None for what lies outside."""
        found = self.bindings[module].get(name)
        if isinstance(found, str):
            return module, found
        return self.imported(found) if found is not None else None

    def imported(self, each: Import) -> Key | None:
        place = target(each, self.modules)
        if place is None:
            return None
        if each.name is None:  # `import a.b.c` binds a
            return (each.bound if each.bound in self.modules else place), ""
        return (place, "") if place == each.dotted else self.meaning(place, each.name) or (place, "")


def _top(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module, with what stands in the branches of its `if` and `try`."""
    for node in statements(tree):
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            if isinstance(node, ast.If):
                yield ast.Expr(node.test)
            yield from _top(node)
        else:
            yield node


class Reach:
    """What is reached from units, exported names and programs; `unit in reach.units` once `follow` has returned."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.modules: set[str] = set()
        self.units: dict[Key, Unit] = {}
        self.attributes: set[str] = set()
        self._waiting: list[Unit] = []
        self._by_member: dict[str, list[Key]] = {}

    def program(self, tree: ast.Module) -> None:
        """A file outside of the package, all of it."""
        self._waiting.append(Unit(("", ""), list(tree.body), ()))

    def follow(self) -> None:
        while self._waiting:
            self._read(self._waiting.pop())

    def public(self, key: Key) -> None:
        """What users are given: a function, or a class with all its public methods."""
        self.reach(key)
        unit = self.house.units.get(key)
        for name in unit.members if unit is not None else ():
            if not name.startswith("_"):
                self.reach((key[0], f"{key[1]}.{name}"))

    def reach(self, key: Key) -> None:
        module, name = key
        if module not in self.modules:
            self.modules.add(module)
            self.reach((module, ""))
            if "." in module:
                self.reach((module.rpartition(".")[0], ""))
        unit = self.house.units.get(key)
        if unit is None or key in self.units:
            return
        self.units[key] = unit
        self._waiting.append(unit)
        for member, function in unit.members.items():
            self._by_member.setdefault(member, []).append((module, f"{name}.{member}"))
            dunder = member.startswith("__") and member.endswith("__")
            if dunder or member in self.attributes or member in _CALLED_BY_OTHERS or _registered(function):
                self.reach((module, f"{name}.{member}"))

    def _read(self, unit: Unit) -> None:
        module = unit.key[0]
        local = {each.bound: each for each in unit.imports}
        for each in unit.imports:
            place = target(each, self.house.modules)
            if place is not None:
                self.reach((place, ""))
        if unit.key[1] == "" and module:
            for name, meant in self.house.bindings[module].items():
                function = self.house.units.get((module, name)) if isinstance(meant, str) else None
                if function is not None and (
                    name in ("__getattr__", "__dir__") or any(map(_registered, function.nodes))
                ):
                    self.reach((module, name))

        def meaning(name: str) -> Key | None:
            if name in local:
                return self.house.imported(local[name])
            return self.house.meaning(module, name) if module else None

        bases = {id(node.value) for node in unit.inside if isinstance(node, ast.Attribute)}
        for node in unit.inside:
            if isinstance(node, ast.Name):
                key = meaning(node.id)
                if key is not None:
                    self.reach(key)
                    if not key[1] and id(node) not in bases:
                        self._hand_on(key[0])
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self._attribute(node, meaning)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for text in _DOTTED.finditer(node.value):
                    if text.group() in self.house.modules:
                        self.reach((text.group(), ""))
            elif isinstance(node, ast.Call) and len(node.args) > 0:
                self._call(ast.unparse(node.func), node.args, meaning)

    def _call(self, name: str, arguments: list[ast.expr], meaning: Meaning) -> None:
        """What reads names as texts."""
        first, second = arguments[0], arguments[1] if len(arguments) > 1 else None
        if name in ("getattr", "hasattr") and second is not None:
            module = self._module_of(first, meaning)
            if isinstance(second, ast.Constant):
                self._use(str(second.value))
            elif module is not None:  # any of them
                for known in self.house.functions(module):
                    self.reach((module, known))
        elif name.endswith("import_module") and isinstance(first, ast.Constant) and first.value in self.house.modules:
            self._hand_on(first.value)

    def _hand_on(self, module: str) -> None:
        """The module itself is a value: its functions may be read as attributes of some variable."""
        for known in self.house.functions(module):
            self._by_member.setdefault(known, []).append((module, known))
            if known in self.attributes:
                self.reach((module, known))

    def _attribute(self, node: ast.Attribute, meaning: Meaning) -> None:
        key = self._module_of(node.value, meaning)
        if key is None:
            self._use(node.attr)
            return
        inner = f"{key}.{node.attr}"
        self.reach((inner, "") if inner in self.house.modules else self.house.meaning(key, node.attr) or (key, ""))

    def _module_of(self, node: ast.expr, meaning: Meaning) -> str | None:
        """The module that `a` or `a.b` names; None for anything else."""
        if isinstance(node, ast.Name):
            key = meaning(node.id)
            return key[0] if key is not None and key[1] == "" else None
        if isinstance(node, ast.Attribute):
            outer = self._module_of(node.value, meaning)
            inner = f"{outer}.{node.attr}"
            return inner if outer is not None and inner in self.house.modules else None
        return None

    def _use(self, name: str) -> None:
        if name not in self.attributes:
            self.attributes.add(name)
            for key in self._by_member.get(name, []):
                self.reach(key)


def _registered(node: ast.AST) -> bool:
    """Does a decorator hand this function to somebody who calls it?"""
    return isinstance(node, Function) and any(not _PLAIN.fullmatch(ast.unparse(each)) for each in node.decorator_list)
