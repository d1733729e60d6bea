"""What `tools/chaos` and `tools/measure` share: subcommands, children, the machine, tables, and what a run leaves behind."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
RESULTS = TOOLS / "results"
EXAMPLES = ROOT / "examples"
# Of this program and of its children: the package, the tools, the examples' models, the tests' records.
PATHS = [str(path) for path in (ROOT, TOOLS, EXAMPLES, ROOT / "tests" / "transport")]
SHARED_MEMORY = Path("/dev/shm")


def main(package: str, usage: str | None) -> int:
    """`NAME [options]` runs `main` of the module NAME, `NAME:FUNCTION [words]` one of its functions: a child of the tool."""
    sys.path[1:1] = PATHS
    names = sorted(path.stem for path in (TOOLS / package).glob("*.py") if "def add_options" in path.read_text("utf-8"))
    name, _, role = (sys.argv[1:] or [""])[0].partition(":")
    if name not in names:
        print(usage)
        print(f"Subcommands: {', '.join(names)}. `NAME --help` says what each does.")
        return int(name not in ("-h", "--help"))
    module = importlib.import_module(f"{package}.{name}")
    if role:
        return getattr(module, role)(*sys.argv[2:]) or 0
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"tools/{package} {name}", description=module.__doc__, formatter_class=form)
    module.add_options(parser)
    return int(module.main(parser.parse_intermixed_args(sys.argv[2:])))


def start(module: str, function: str, *words: object, **options: Any) -> subprocess.Popen[Any]:
    """A child that calls a function of a tool's module with these words. `options`: of `Popen`; `env` is added to this one's."""
    package, _, name = module.partition(".")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **options.pop("env", {})}
    environment["PYTHONPATH"] = os.pathsep.join(PATHS)
    command = [sys.executable, str(TOOLS / package), f"{name}:{function}", *map(str, words)]
    return subprocess.Popen(command, env=environment, **options)


def answers(module: str, function: str, *words: object, ranks: int = 1, env: dict[str, str]) -> list[dict[str, Any]]:
    """What each of these ranks, children as in `start`, prints in its last line, as JSON."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    children = []
    try:
        for rank in range(ranks):
            place = {
                "RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_PORT": port,
            }
            place_env = {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            children.append(start(module, function, *words, env=env | place_env, stdout=subprocess.PIPE, text=True))
        return [json.loads(child.communicate(timeout=3600)[0].splitlines()[-1]) for child in children]
    finally:
        end(children)


def end(processes: Iterable[subprocess.Popen[Any]]) -> None:
    """Those that still live are killed."""
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], object], seconds: float, look_s: float = 0.01) -> bool:
    """Whether it came true in time. Other processes make it true: there is no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(look_s)
    return True


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in "ZX"
    return False


def left_in_shared_memory(text: str) -> list[str]:
    """Names with this text in them."""
    return sorted(name for name in os.listdir(SHARED_MEMORY) if text in name)


def command() -> str:
    """The line that started this tool, for above a table."""
    program = Path(sys.argv[0])
    return " ".join(["python", f"tools/{(program.parent if program.suffix else program).name}", *sys.argv[1:]])


def machine() -> str:
    """What a number is measured on."""
    from asyncrl.telemetry.machine import describe_cpu

    return f"{describe_cpu()}, load {os.getloadavg()[0]:.1f}"


def split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """(configuration files, overrides)"""
    return [word for word in given if "=" not in word], [word for word in given if "=" in word]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def print_tally(counts: Counter[str], *heads: str, file: Path | None = None) -> int:
    """How often each thing happened, and how often something was wrong then ("broken ..."). The exit code: 1 where it was.

    `file`: JSON with the counts of the calls before, to which these are added.
    """
    broken = any(name.startswith("broken") for name in counts)
    if file is not None:
        counts = counts + tally_of(file)
        file.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    names = sorted(name for name in counts if not name.startswith("broken"))
    rows = ((name, counts[name], counts[f"broken {name}"]) for name in names)
    print("\n".join(["", *table([*heads, "broken"], rows)]))
    return int(broken)


def tally_of(file: Path | None) -> Counter[str]:
    return Counter(json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else {})
