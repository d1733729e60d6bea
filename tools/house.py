"""What the checks of the house share: the modules of a package, and what each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "asyncrl"


@dataclass(frozen=True)
class Import:
    """One name of one import statement. `import a.b` has no name; `from a import b` has `b`, and may mean a module."""

    module: str  # dotted and absolute
    name: str | None
    bound: str  # what the name is called where it is imported
    line: int
    at_run_time: bool  # neither for type checkers alone nor inside a function

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Module:
    path: Path
    relative: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        parts = self.relative.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> list[Import]:
        return list(imports(self.tree, list(self.relative.parts[:-1])))


def python_files(root: Path, *places: str) -> list[Module]:
    """Every Python file below these folders of the root, in order."""
    return [Module(path, path.relative_to(root)) for place in places for path in sorted((root / place).rglob("*.py"))]


def imports(tree: ast.AST, folder: Iterable[str], at_run_time: bool = True) -> Iterator[Import]:
    """Every import in the tree; `folder` is the dotted place of the file, which relative imports begin at."""
    place = list(folder)
    for node in statements(tree):
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        never = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        loaded = at_run_time and not later and not never
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, alias.asname or alias.name.split(".")[0], node.lineno, loaded)
        elif isinstance(node, ast.ImportFrom):
            base = place[: len(place) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(module, alias.name, alias.asname or alias.name, node.lineno, loaded)
        yield from imports(node, place, loaded)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements (and branches of them) that stand directly in a module, a class, a function or another statement."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        inside = getattr(node, part, ())
        yield from inside if isinstance(inside, list) else ()


def target(each: Import, known: Iterable[str]) -> str | None:
    """The module of the package that an import leads to, by the names of all its modules; None for one outside of it."""
    return each.dotted if each.dotted in known else each.module if each.module in known else None
