"""Nobody in the cellar: what of the package neither a run nor a command nor a user comes to is used by a named later work, or goes.

    python tools/check_cellar.py                # exit 1 and a list of complaints, or one line that says all is well
    python tools/check_cellar.py --root DIR     # for another checkout

Roots are the commands, the fronts that users import (`asyncrl`, `asyncrl.client`) with all public methods of what they export,
the programs of README.md and docs/, and examples/. Tests, tools and benchmarks are none. See `reach` for what is followed.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from house import PACKAGE, ROOT, Module, python_files
from reach import House, Key, Reach

# `cli/app.py` imports the modules of its commands by name.
OF_APP = ("bench", "check", "check_model", "examples", "explain", "join", "nodes", "prompts", "report", "shm")
COMMANDS: tuple[Key, ...] = (
    ("asyncrl.cli.app", "main"),
    ("asyncrl.main", "main"),
    *((f"asyncrl.cli.{each}", "main") for each in OF_APP),
)
FRONTS = ("asyncrl", "asyncrl.client")

# Module, or module:name, that nothing reaches yet -> who will use it. What an entry uses needs no entry of its own.
ALLOWED: dict[str, str] = {
    "asyncrl.generation.vllm.v0_32": "generation.engine=vllm: imported by its name where that vLLM is installed",
    "asyncrl.generation.vllm.v0_32_split:BoardTransfer.init_transfer_engine": "vLLM calls it",
    "asyncrl.generation.vllm.v0_32_split:BoardTransfer.start_weight_update": "vLLM calls it",
    "asyncrl.generation.vllm.v0_32_split:BoardTransfer.finish_weight_update": "vLLM calls it",
    "asyncrl.generation.vllm.v0_32_split:SplitExecutor._distributed_args": "vLLM calls it",
    "asyncrl.generation.vllm.v0_32_split:SplitExecutor._init_executor": "vLLM calls it",
    "asyncrl.generation.vllm.v0_32:_Loader.load_weights": "vLLM calls it",
    "asyncrl.generation.vllm.v0_32:_Loader.download_model": "vLLM calls it",
    "asyncrl.http.server:_Connections.connection_lost": "aiohttp calls it",
    "asyncrl.models.native.library:build_name": ".ci/run checks that there are kernels; benchmarks print it beside each number",
    "asyncrl.telemetry.output:LossyStream.writelines": "a text stream has it: libraries that write to stdout call it",
    "asyncrl.telemetry.machine:describe_cpu": "benchmarks name the machine beside each number",
}


def main() -> int:
    options = argparse.ArgumentParser(description="lists what only tests and benchmarks reach")
    options.add_argument("--root", type=Path, default=ROOT)
    given = options.parse_args()
    house = House(python_files(given.root, PACKAGE))
    reach = follow(house, given.root)
    allowed = ALLOWED if given.root == ROOT else {}
    complaints = list(needless(house, reach, allowed))
    for entry in allowed:
        admit(house, reach, entry)
    complaints += cellar(house, reach)
    count = len(house.modules)
    print("\n".join(complaints) if complaints else f"{count} modules: nobody in the cellar but {len(allowed)} expected")
    return 1 if complaints else 0


def follow(house: House, root: Path) -> Reach:
    reach = Reach(house)
    for entry in COMMANDS:
        reach.reach(entry)
    for front in FRONTS:
        for name in exported(house.modules[front]) if front in house.modules else []:
            key = house.meaning(front, name)
            if key is not None:
                reach.public(key)
    for program in programs(root):
        reach.program(program)
    reach.follow()
    return reach


def exported(module: Module) -> list[str]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def programs(root: Path) -> Iterator[ast.Module]:
    yield from (module.tree for module in python_files(root, "examples"))
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        for block in re.findall(
            r"^```python\n(.*?)^```$", page.read_text("utf-8") if page.exists() else "", re.M | re.S
        ):
            # `await` outside of a function, as in a notebook, is syntax enough for this
            yield ast.parse(block)


def needless(house: House, reach: Reach, allowed: dict[str, str]) -> Iterator[str]:
    """Entries that name nothing, or what is reached by now."""
    for entry in allowed:
        module, _, name = entry.partition(":")
        if module not in house.modules or (name and (module, name) not in house.units):
            yield f"{entry}: there is no such thing (any more); take it off the list of tools/check_cellar.py"
        elif (module, name) in reach.units:
            yield f"{entry}: a run reaches it now; take it off the list of tools/check_cellar.py"


def admit(house: House, reach: Reach, entry: str) -> None:
    """Take an entry for a root: a whole module is all that is public in it."""
    module, _, name = entry.partition(":")
    if module in house.modules:
        for each in [name] if name else [*house.functions(module), *exported(house.modules[module])]:
            reach.public(house.meaning(module, each) or (module, each))
        reach.follow()


def cellar(house: House, reach: Reach) -> Iterator[str]:
    """Whole modules, else whole classes, else functions and methods. What only these use follows from them."""
    for module in sorted(house.modules):
        if module not in reach.modules:
            yield f"{module}: nothing reaches this module"
    for (module, name), unit in sorted(house.units.items()):
        if (module, name) in reach.units or module not in reach.modules or not name:
            continue
        owner, _, member = name.rpartition(".")
        if (owner and (module, owner) not in reach.units) or (member or owner).startswith("__"):
            continue
        line = getattr(unit.nodes[0] if unit.nodes else None, "lineno", 1)
        path = house.modules[module].relative
        yield f"{path}:{line}: nothing reaches {name}; delete it with its tests, or list who will use it ({module}:{name})"


if __name__ == "__main__":
    sys.exit(main())
