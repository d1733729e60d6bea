"""One call of a benchmark: its options, the folder that it works in, its children, and the files that it writes.

A bench is data: an `Option` per line with its default and the value that `--quick` takes instead; `run` does the rest. What was
measured is in the JSON after every run, also where a later one fails or is interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple, TypeVar

from asyncrl.telemetry.machine import describe_cpu

from .job import MODELS, PEERS, BenchError, Job, ModelJob, cache_directory
from .plots import matplotlib_found
from .processes import environment, run_json

PLACES = (
    "--trl-python",
    "--vllm-python",
    "--cache",
    "--out",
)  # they name places on this machine: kept out of the results
DTYPES = ("float32", "bfloat16")
T = TypeVar("T")


# -- options -----------------------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def words(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Of a list with commas: each once, in the given order."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        if unknown := [word for word in found if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not among {', '.join(known)}")
        return found

    return parse


def model(text: str) -> str:
    if text not in MODELS and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a directory nor one of {', '.join(MODELS)}")
    return text


@dataclass(frozen=True, slots=True)
class Option:
    """`how`: what argparse is told beside that. Its type follows from the default where it is not said."""

    name: str
    default: Any
    help: str
    quick: Any | EllipsisType = ...  # the same
    how: Mapping[str, Any] = field(default_factory=dict)

    def declare(self, parser: argparse.ArgumentParser, quick: bool) -> None:
        default = self.default if self.quick is ... or not quick else self.quick
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        how = {
            "default": default,
            "help": self.help if shown in (None, "", False) else f"{self.help} ({shown})",
            **self.how,
        }
        if default is False:
            how["action"] = "store_true"
        elif isinstance(default, int | float):
            how.setdefault("type", positive if isinstance(default, int) else float)
        parser.add_argument(self.name, **how)


def option(name: str, default: Any, help: str, quick: Any = ..., **how: Any) -> Option:
    return Option(name, default, help, quick, how)


def result_options(name: str) -> tuple[Option, ...]:
    return (
        option("--out", "tools/results", "folder of the results"),
        option("--name", name, "name of the result files"),
    )


def child_options(name: str, timeout_s: float | None = None) -> tuple[Option, ...]:
    """Of a bench that has children."""
    return (
        option("--cache", None, "where models and environments are kept (~/.cache/asyncrl/bench)"),
        *result_options(name),
        option("--timeout", timeout_s, "seconds that one run may take", type=float),
    )


def run_options(name: str, dtypes: str = "which of them", repetitions: int = 3) -> tuple[Option, ...]:
    """Of a bench whose runs compute."""
    return (
        option("--dtypes", "float32,bfloat16", dtypes, "float32", type=words(*DTYPES)),
        option("--threads", 2, "torch threads of each side", 1),
        option("--repetitions", repetitions, "alternating runs of everything; medians are shown", 1),
        *child_options(name),
    )


MODEL = option(
    "--model",
    "smollm2",
    "smollm2, tiny, small, gpt_oss, qwen3_moe, qwen3_600m, or a model directory",
    "tiny",
    type=model,
)
DEVICE = option("--device", "cpu", "where both sides compute", choices=("cpu", "cuda"))
OVERRIDES = option("overrides", [], "settings of asyncrl's side, after the job's own", nargs="*", metavar="a.b=c")


def peer_options(peer: str, default: str) -> tuple[Option, ...]:
    return (
        option("--peer", default, f"{peer}, or none: asyncrl alone", "none", choices=(peer, "none")),
        option(
            f"--{peer}-python", None, "interpreter or folder of an environment that has the peer; else one is made in the cache"
        ),
    )  # fmt: skip


class Measured(NamedTuple):
    """The tables, and what draws the plot where there is matplotlib."""

    lines: Sequence[str]
    draw: Callable[[Path], None] | None = None


def cuda_peer(options: argparse.Namespace) -> str | None:
    """Of a bench that compares with TRL on `--device`."""
    if options.device == "cuda" and options.peer == "trl" and options.trl_python is None:
        return "--device cuda: the environment with TRL that is made here has no CUDA; --trl-python, or --peer none"
    return None


def agree(options: argparse.Namespace) -> str | None:
    """Nothing to complain about."""


@dataclass(frozen=True, slots=True)
class Bench:
    name: str
    doc: str
    quick: str  # what `--quick` does
    options: Sequence[Option]
    measure: Callable[[Place], Measured]
    check: Callable[[argparse.Namespace], str | None] = agree  # says what does not go together

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Exits with 2 and a sentence where they make no sense. An option that is given wins over `--quick`."""
        parser = argparse.ArgumentParser(
            prog=f"asyncrl bench {self.name}",
            allow_abbrev=False,
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--quick", action="store_true", help=f"smoke test: {self.quick}")
        for each in self.options:
            each.declare(parser, "--quick" in arguments)
        options = parser.parse_intermixed_args(arguments)
        if complaint := self.check(options):
            parser.error(complaint)
        return options


def public_command(bench: str, arguments: Sequence[str]) -> str:
    """What is written beside the figures."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if skip or word.startswith(tuple(f"{option}=" for option in PLACES)):
            skip = False
        elif word in PLACES:
            skip = True
        else:
            kept.append(word)
    return shlex.join(["asyncrl", "bench", bench, *kept])


# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """Where a call works: the cache, and in it a folder with the jobs and the logs of its runs."""

    bench: str
    options: argparse.Namespace
    command: str
    written: list[Path] = field(default_factory=list)

    @cached_property
    def cache(self) -> Path:
        return cache_directory(self.options.cache)

    @cached_property
    def scratch(self) -> Path:
        self.cache.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="run-", dir=self.cache))

    def model(self) -> str:
        """Its directory; one of `MODELS` is made in the cache where it is not there yet."""
        given = self.options.model
        if given not in MODELS:
            return str(Path(given).absolute())
        folder = self.cache / "models" / given
        if not (folder / "config.json").exists():
            self.own("model", ModelJob(given, str(folder)), given)
        return str(folder)

    def own(self, command: str, job: Job, label: str, python: Path | None = None) -> dict[str, Any]:
        """A command of child.py in a fresh process of this interpreter, or of another one that has what asyncrl needs. Errors:
        `BenchError`."""
        words = [python or sys.executable, "-m", "asyncrl_bench.child", command]
        return self._side(words, environment(job.threads, package=True), job, f"{command}-{label}")

    def peer(
        self, python: Path, script: str, job: Job, label: str, given: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """A script of peers/ by its own interpreter. `given`: its environment, where it needs another one."""
        words = [python, PEERS / f"{script}.py"]
        return self._side(words, given or environment(job.threads, package=False), job, f"{script}-{label}")

    def _side(self, words: Sequence[Any], given: Mapping[str, str], job: Job, label: str) -> dict[str, Any]:
        file = job.write(self.scratch / f"{label}.json")
        log = self.scratch / f"{label}.log"
        return run_json([*words, file], environment=given, log=log, timeout_s=self.options.timeout)

    def file(self, suffix: str) -> Path:
        path = Path(self.options.out) / f"{self.options.name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path not in self.written:
            self.written.append(path)
        return path

    def write(self, **content: Any) -> None:
        """The JSON: what was measured, and where, when and with what."""
        options = {
            key: value for key, value in vars(self.options).items() if f"--{key}".replace("_", "-") not in PLACES
        }
        about = {
            "bench": self.bench,
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "command": self.command,
            "options": options,
            "cpu": describe_cpu(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        self.file(".json").write_text(json.dumps(about | content, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def turned(sides: Iterable[T], repetition: int) -> list[T]:
    """The order turns with every repetition, so that a machine that gets slower slows all sides."""
    return list(sides)[:: 1 if repetition % 2 == 0 else -1]


def run(bench: Bench, arguments: Sequence[str]) -> int:
    """Prints what was measured. 1 where a run failed: the message names a log, which is kept then."""
    place = Place(bench.name, bench.parse(arguments), public_command(bench.name, arguments))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # its children are ended, too
    try:
        lines, draw = bench.measure(place)
    except BenchError as error:
        print(f"asyncrl bench: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    if draw is not None and matplotlib_found():
        draw(place.file(".png"))
    print("\n".join([*lines, "", f"written: {', '.join(map(str, place.written))}"]))
    if "scratch" in vars(place):
        shutil.rmtree(place.scratch, ignore_errors=True)
    return 0
