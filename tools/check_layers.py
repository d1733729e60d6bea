"""Checks the house: imports point down and run in no circle, files and functions keep their size, private names stay private.

    python tools/check_layers.py            # exit 1 and a list of complaints, or one line that says all is well
    python tools/check_layers.py DIRECTORY  # the same for another checkout

Floors are those of the drawing in docs/concepts.md. Two rooms on one floor may not import each other, and inside a room
neither two files nor two folders may, by however many steps; imports that are deferred or for type checkers count too. The
lower floors import no torch. Each room has a ceiling of lines. A comment behind code is short, a docstring says something, and
a class name stands for one thing. Exceptions are listed below, each with its reason.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from house import PACKAGE, ROOT, Module, python_files, statements, target

FLOORS: dict[str, int] = {
    "types": 0, "ports": 0, "errors": 0, "builds": 0, "config": 0, "records": 0, "algorithms": 0,
    "telemetry": 1,
    "concurrency": 2,
    "transport": 3, "distributed": 3,
    "data": 4, "models": 4, "client": 4, "http": 4,
    "generation": 5, "environments": 5, "endpoint": 5, "rewards": 5, "training": 5, "weights": 5, "checkpoint": 5,
    "pumps": 6, "runtime": 6,
    "main": 7, "cli": 7, "atropos": 7,
}  # fmt: skip

# importer -> rooms it may import beside what its floor allows
SAME_FLOOR: dict[str, set[str]] = {
    "config": {"types", "errors", "algorithms"},  # the schema is made of what the methods declare
    "algorithms": {"types", "errors"},  # the ground floor is one room in four files
    "ports": {"types"},
    "types": set(),
    "records": {"types", "errors"},  # the schema is data about the nouns
    "generation": {"weights"},  # a worker's end of the weight board
    "endpoint": {"environments"},  # serves the sessions of episodes
    "runtime": {"pumps"},  # the facade owns the pumps; the pumps know nothing of it
    "main": {"atropos"},  # opens it where the configuration asks for it
    "cli": {"main"},  # two doors to the same run
}
TORCH_FREE = {
    "types",
    "ports",
    "errors",
    "config",
    "algorithms",
    "records",
    "telemetry",
    "concurrency",
    "endpoint",
    "environments",
    "rewards",
    "client",
}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
SOURCES = (".py", ".c", ".h", ".cpp", ".cu")
PRAGMA = re.compile(r"^#\s*(type: ignore(\[[\w, -]+\])?|noqa(: [\w, ]+)?|pragma: \w+)\s*")
BARE_IGNORE = re.compile(r"# type: ignore(\[[\w, -]+\])?\s*$")
MAX_TEST_FILE_LINES = 650  # a test file is a list: it is read entry by entry
# Of arguments besides self, cls and an autograd function's ctx; and of options, which are keywords that may be left out.
# Constructors are exempt: a struct that only shortens their signature hides what an object is made of.
MAX_ARGUMENTS = 7
# path or path:function -> reason
SIZE_EXCEPTIONS: dict[str, str] = {
    "tests/algorithms/test_algorithms_trl_oracle.py:stand_in": "every attribute that TRL's own code reads, one a line",
    "tools/gpu_check.py": "one file that is carried to a bare machine",
}
# the same; more arguments than MAX_ARGUMENTS
ARGUMENT_EXCEPTIONS: dict[str, str] = {
    "asyncrl/models/attention/interface.py:_attention": "the signature that transformers calls",
    "asyncrl/models/head/logprobs.py:token_logprobs": "a function of tensors: its options are buffers and bounds, by name",
    "asyncrl/models/head/triton_kernels.py:gradient_kernel": "a kernel is told each pointer and stride by itself",
    "asyncrl/models/native/triton_kernels.py:rotate_kernel": "the same",
}
# path:name -> reason
PRIVATE_EXCEPTIONS: dict[str, str] = {}
# folder -> reason
CIRCLE_EXCEPTIONS: dict[str, str] = {}
MAX_TRAILING_COMMENT = 60  # characters
MIN_DOCSTRING = 4  # words
# class -> why two things have that name
CLASS_NAME_EXCEPTIONS: dict[str, str] = {}
# Lines of a room (Python, C and C++), of tests/ and of tools/ without benchmarks. A ceiling falls with every cut. A change that
# exceeds one raises it in the same commit, with a line of the commit message that says what a user gets for it.
CEILINGS: dict[str, int] = {
    "algorithms": 1940,
    "asyncrl": 1284,
    "atropos": 789,
    "checkpoint": 688,
    "cli": 786,
    "client": 295,
    "concurrency": 2007,
    "config": 2948,
    "data": 2648,
    "distributed": 3466,
    "endpoint": 1417,
    "environments": 2221,
    "generation": 5444,
    "http": 419,
    "models": 7526,
    "pumps": 4539,
    "records": 1155,
    "rewards": 1726,
    "runtime": 6339,
    "telemetry": 2498,
    "training": 1859,
    "transport": 2979,
    "weights": 894,
    "tests": 64915,
    "tools": 9241,
}
BENCHMARKS = "asyncrl_bench"
BENCH_FINDER = "asyncrl/cli/bench.py"


def main() -> int:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    house, around = python_files(root, PACKAGE), python_files(root, "tests", "tools", "examples")
    complaints = [complaint for module in house for complaint in check_floors(module)]
    complaints += check_circles(house)
    complaints += check_circles(python_files(root / "tools/bench", BENCHMARKS))
    for module in house + around:
        complaints += check_sizes(module)
        complaints += check_private(module)
    for module in house:
        complaints += check_arguments(module)
        complaints += check_ignores(module)
        complaints += check_prose(module)
    complaints += check_class_names(house)
    complaints += check_ceilings(root)
    print("\n".join(complaints) if complaints else f"{len(house)} files: imports point down, sizes are kept")
    return 1 if complaints else 0


def check_floors(module: Module) -> Iterator[str]:
    where, room = module.relative, module.relative.with_suffix("").parts[1]
    if room == "__init__":
        return
    if room not in FLOORS:
        yield f"{where}: {room!r} has no floor; add it to FLOORS and to the drawing in docs/concepts.md"
        return
    for dotted, line, at_run_time in sorted({(each.dotted, each.line, each.at_run_time) for each in module.imports}):
        names = dotted.split(".")
        if names[0] == "torch" and at_run_time and room in TORCH_FREE:
            yield f"{where}:{line}: {room} imports torch; it must work without"
        if names[0] == BENCHMARKS and str(where) != BENCH_FINDER:
            yield f"{where}:{line}: imports the benchmarks; only {BENCH_FINDER} may, and has to do without them"
        other = names[1] if names[0] == PACKAGE and len(names) > 1 else room
        if other == room or other not in FLOORS:
            continue
        if FLOORS[other] > FLOORS[room]:
            yield f"{where}:{line}: {room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]}): imports point down"
        elif FLOORS[other] == FLOORS[room] and other not in SAME_FLOOR.get(room, set()):
            yield f"{where}:{line}: {room} imports {other} on its own floor; go through asyncrl.ports"


def check_ignores(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), 1):
        if BARE_IGNORE.search(line):
            yield (
                f"{module.relative}:{number}: what the type checker shall not see needs its reason: # type: ignore[kind]  # why"
            )


def check_circles(house: list[Module]) -> Iterator[str]:
    """In no folder may two of its files and folders reach each other.

    The package's own front is left out: it names what stands on every floor, and loads none of it.
    """
    known = {module.name: module for module in house if module.name != PACKAGE}
    folders: dict[str, dict[str, dict[str, str]]] = {}  # folder -> importer -> imported -> where
    for module in known.values():
        for each in module.imports:
            other = target(each, known)
            if other is None or other == module.name:
                continue
            ours, theirs = _parts(module), _parts(known[other])
            shared = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            edges = folders.setdefault("/".join(ours[:shared]), {})
            edges.setdefault(ours[shared], {}).setdefault(theirs[shared], f"{module.relative}:{each.line}")
    for folder, edges in sorted(folders.items()):
        for circle in circles(edges) if folder not in CIRCLE_EXCEPTIONS else []:
            steps = [f"{a} imports {b} ({edges[a][b]})" for a, b in zip(circle, [*circle[1:], circle[0]], strict=True)]
            yield f"{folder}: a circle of imports: {', '.join(steps)}"


def _parts(module: Module) -> tuple[str, ...]:
    return module.relative.with_suffix("").parts


def circles(edges: dict[str, dict[str, str]]) -> Iterator[list[str]]:
    """One shortest circle through each node that lies on one and on none of those before."""
    seen: set[str] = set()
    for start in sorted(edges):
        paths = [[start]]
        visited: set[str] = set()
        while paths and start not in seen:
            path = paths.pop(0)
            for other in sorted(edges.get(path[-1], {})):
                if other == start:
                    yield path
                    seen.update(path)
                    break
                if other not in visited:
                    visited.add(other)
                    paths.append([*path, other])


def check_sizes(module: Module) -> Iterator[str]:
    where, lines = module.relative, module.text.count("\n")
    most = MAX_TEST_FILE_LINES if where.parts[0] == "tests" else MAX_FILE_LINES
    if lines > most and str(where) not in SIZE_EXCEPTIONS:
        yield f"{where}: {lines} lines; at most {most}"
    for _, node in functions(module.tree):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES and f"{where}:{node.name}" not in SIZE_EXCEPTIONS:
            yield f"{where}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}"


def check_arguments(module: Module) -> Iterator[str]:
    where = module.relative
    for owner, function in functions(module.tree):
        given = function.args
        names = [each.arg for each in [*given.posonlyargs, *given.args]]
        options = sum(default is not None for default in given.kw_defaults)
        count = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"])) + len(given.kwonlyargs) - options
        name = f"{owner}.{function.name}" if owner else function.name
        if function.name == "__init__" or f"{where}:{name}" in ARGUMENT_EXCEPTIONS:
            continue
        if count > MAX_ARGUMENTS:
            yield f"{where}:{function.lineno}: {name} has {count} arguments; at most {MAX_ARGUMENTS}"
        if options > MAX_ARGUMENTS:
            yield f"{where}:{function.lineno}: {name} has {options} options; at most {MAX_ARGUMENTS}"


def check_prose(module: Module) -> Iterator[str]:
    """Comments behind code are short, docstrings are sentences."""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type != tokenize.COMMENT or not token.line[: token.start[1]].strip():
            continue
        said = PRAGMA.sub("", token.string)
        if len(said) > MAX_TRAILING_COMMENT:
            yield f"{module.relative}:{token.start[0]}: a comment of {len(said)} characters behind code; put it above the line"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and len(words) < MIN_DOCSTRING:
                yield f"{module.relative}:{getattr(node, 'lineno', 1)}: a docstring of {len(words)} words; say more, or nothing"


def check_class_names(house: list[Module]) -> Iterator[str]:
    """One name, one thing."""
    places: dict[str, list[str]] = {}
    for module in house:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name not in CLASS_NAME_EXCEPTIONS:
                places.setdefault(node.name, []).append(f"{module.relative}:{node.lineno}")
    for name, found in places.items():
        if len(found) > 1:
            yield f"{found[0]}: class {name} stands in {', '.join(found[1:])}, too; one name stands for one thing"


def check_ceilings(root: Path) -> Iterator[str]:
    for room, lines in count_lines(root).items():
        if lines > CEILINGS.get(room, lines):
            yield (
                f"{room}: {lines} lines; its ceiling is {CEILINGS[room]} (tools/check_layers.py): delete as much, or raise it and "
                "say in the commit what a user gets for it"
            )


def count_lines(root: Path) -> dict[str, int]:
    """By room of the package, whose files at the top are `asyncrl`; of `tests`; of `tools` without its benchmarks."""
    lines: dict[str, int] = {}
    for top in (PACKAGE, "tests", "tools"):
        for path in sorted((root / top).rglob("*")):
            parts = path.relative_to(root).parts
            if path.suffix not in SOURCES or parts[:2] == ("tools", "bench"):
                continue
            room = parts[1] if top == PACKAGE and len(parts) > 2 else top
            lines[room] = lines.get(room, 0) + path.read_text(encoding="utf-8").count("\n")
    return lines


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each function with the class that it is a method of, or an empty text."""
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, node
            yield from functions(node)
        else:
            yield from functions(node, node.name if isinstance(node, ast.ClassDef) else owner)


def check_private(module: Module) -> Iterator[str]:
    """Names with an underscore in front are not imported, and in the package not read off a module that was imported."""
    modules = {each.bound for each in module.imports if each.module.split(".")[0] == PACKAGE}
    for each in module.imports:
        name = each.name or ""
        if each.bound in modules and _hidden(name) and f"{module.relative}:{name}" not in PRIVATE_EXCEPTIONS:
            yield f"{module.relative}:{each.line}: {name} is private to {each.module}"
    for node in ast.walk(module.tree) if module.relative.parts[0] == PACKAGE else []:
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _hidden(node.attr)):
            continue
        if node.value.id in modules and node.value.id.islower():
            yield f"{module.relative}:{node.lineno}: {node.value.id}.{node.attr} is private to another module"


def _hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


if __name__ == "__main__":
    sys.exit(main())
