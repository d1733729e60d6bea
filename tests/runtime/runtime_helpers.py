"""Configurations and processes for the tests of whole runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import warm
import yaml
from ports import reserved_port
from runtime_rewards import share

from asyncrl.client import Scored
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.pumps.pipeline import StepReport
from asyncrl.runtime.runtime import RunSummary, Runtime
from asyncrl.telemetry.explained import metric
from asyncrl.telemetry.sinks import read_jsonl

metric("loss")  # reads the table: not first where an event loop runs
MODEL, REWARDS, HOOKS = (Path(__file__).with_name(f"runtime_{name}.py") for name in ("model", "rewards", "hooks"))
ROOT = MODEL.parents[2]
PROGRAM = ("-m", "asyncrl.main")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
# A rank that writes what it trained and ended with to rank_N.pt in the folder RANK_WEIGHTS.
RANK = (str(MODEL.with_name("runtime_rank.py")),)
# What depends on the clock, and nothing else: all other metrics of a sync run are the same in every run.
CLOCKED = ("time", "perf/", "time/", "idle/", "busy/", "loop/", "lane/", "queue/")

REAL: dict[str, Any] = {
    "threads": 1,
    "model": {"path": f"{MODEL}:build", "dtype": "float32"},  # what is proved is exact
    "data": {"train": f"{MODEL}:rows", "max_prompt_tokens": 12},
    "reward": f"{REWARDS}:share",
    "rollout": {"group_size": 4, "groups_per_step": 4, "max_tokens": 8},
    "train": {"lr": 1e-2, "max_steps": 3, "tokens_per_microbatch": 128},
    "telemetry": {"live": "off"},
}
ENDLESS = REAL | {"train": REAL["train"] | {"max_steps": 100_000}}
FAST: dict[str, Any] = {"telemetry": {"live": "off", "trace": False, "report": False}}
DRY: dict[str, Any] = {
    "engine": {"kind": "dry_run"},
    "train": {"kind": "dry_run", "max_steps": 3, "tokens_per_microbatch": 128},
    "data": {"max_prompt_tokens": 64},
    "rollout": {"group_size": 4, "groups_per_step": 4, "max_tokens": 8},
    "dry_run": {"decode_step_s": 0.0005, "finish_s": 0.0005},
    "telemetry": {"live": "off"},
}
# Fed through `door.ring`, which the test names.
FED: dict[str, Any] = {
    **{key: value for key, value in REAL.items() if key not in ("reward", "data")},
    "data": {"max_prompt_tokens": 12},
    "rollout": {**REAL["rollout"], "groups_per_step": 2},
    "telemetry": {"live": "plain"},
    "door": {"ring_mib": 4, "producer_mib": 1, "producer_records": 64},
}


def scored(token: int = 5, reward: float = 0.0, version: int = 0) -> Scored:
    return Scored([4, 5, token], reward, [0, 1, 1], [0, -1, -1], versions=[-1, version, version], prompt_length=1)


def started_by(launcher: str, number: int, place: Path) -> dict[str, str]:
    """The variables of the start after `number` restarts of a job, as torchrun and SLURM set them."""
    if launcher == "SLURM":
        return {"SLURM_JOB_ID": "17", **({"SLURM_RESTART_COUNT": str(number)} if number else {})}
    error_file = str(place / f"torchelastic_x/none_y/attempt_{number}/0/error.json")
    count = {"TORCHELASTIC_RESTART_COUNT": str(number)}
    return {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": error_file, **count}


def write_yaml(folder: Path, tree: dict[str, Any], name: str = "run.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(yaml.safe_dump(tree))
    return path


def config_of(folder: Path, *overrides: str, base: dict[str, Any] = REAL) -> Config:
    """The base configuration with overrides, its run directory in `folder`."""
    return load_config([write_yaml(folder, base)], [f"run.dir={folder}/runs", *overrides])


def embedded(folder: Path, base: dict[str, Any] = REAL, *overrides: str) -> Config:
    """Without prompts, rewards or an end: the program brings them."""
    tree = {key: value for key, value in base.items() if key != "reward"}
    tree["data"] = {"max_prompt_tokens": base["data"]["max_prompt_tokens"]}
    tree["train"] = {key: value for key, value in base["train"].items() if key != "max_steps"}
    return config_of(folder, "rollout.groups_per_step=2", *overrides, base=tree)


async def feed(runtime: Runtime, groups: int) -> None:
    for _ in range(groups):
        group = await runtime.generate("a3=", n=4)
        await runtime.submit(group, share([str(t.completion) for t in group], ["a"] * 4))


async def train(folder: Path, *overrides: str, base: dict[str, Any] = REAL, **options: Any) -> RunSummary:
    """A run in this process, to its end."""
    async with Runtime(config_of(folder, *overrides, base=base), **options) as runtime:
        return await runtime.run()


async def reports_of(config: Config, **options: Any) -> list[StepReport]:
    """Of each step of a run in this process."""
    async with Runtime(config, **options) as runtime:
        steps = runtime.steps()
        await runtime.run()
    return [report async for report in steps]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Its lines. Whatever kind of run it was, `asyncrl explain` knows every name in them."""
    lines = read_jsonl(run / "metrics.jsonl")
    unknown = sorted({name for line in lines for name in line if metric(name) is None})
    assert not unknown, f"not in telemetry/assets/metrics.md: {unknown}"
    return lines


def unclocked(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k != "time" and not k.startswith(CLOCKED[1:]) and not k.endswith("_ms")}
        for line in lines
    ]


def rollouts_of(run: Path) -> list[dict[str, Any]]:
    """Every trajectory that was trained, in order of steps."""
    files = sorted((run / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem[5:]))
    return [row for path in files for row in read_jsonl(path)]


def check_trained_once(run: Path, steps: int, open_at_the_end: int = 0) -> None:
    """Each group of these steps was trained once. Of the last prompts, so many may have been left for others by the end."""
    groups, count = Counter(row["group_id"] for row in rollouts_of(run)), steps * REAL["rollout"]["groups_per_step"]
    assert set(groups.values()) == {REAL["rollout"]["group_size"]} and len(groups) == count, groups
    assert sorted(groups)[: count - open_at_the_end] == list(range(count - open_at_the_end)), groups


def weights_of(run: Path, version: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(run / "checkpoints" / f"step_{version}" / "model.safetensors")


def equal_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


class Process:
    """A program of ours in a process of its own, its output in a file so that no pipe fills up."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: Sequence[str] = PROGRAM,
        python: str = sys.executable,
        start: type[subprocess.Popen[Any]] = warm.Popen,
        **environ: str,
    ):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **environ,
        }
        self.log = folder / "output.txt"
        with self.log.open("wb") as log:
            self._popen = start(
                [python, *program, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def ended(self) -> int | None:
        """The exit code, or None while it lives."""
        return self._popen.poll()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 120.0) -> int:
        """The exit code. A process that does not end in time is killed, and the test fails with its output."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not ended after {timeout_s:g} s:\n{self.output[-4000:]}") from None

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        """Until the outside sees it: there is no event that a foreign process could set for us."""
        end = time.monotonic() + timeout_s
        while not condition():
            if self._popen.poll() is not None:
                raise AssertionError(f"ended with {self._popen.returncode} before {what}:\n{self.output[-4000:]}")
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"no {what} after {timeout_s:g} s:\n{self.output[-4000:]}")
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """The process and everything it started, at once. Where they have ended that is fine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


def lines_at_least(run: Path, count: int) -> Callable[[], bool]:
    return lambda: len(metrics_of(run)) >= count


def start(folder: Path, tree: dict[str, Any], *overrides: str, **options: Any) -> Process:
    """A program with this configuration."""
    return Process(folder, str(write_yaml(folder, tree)), *overrides, **options)


def complete(folder: Path, tree: dict[str, Any], *overrides: str, **options: Any) -> str:
    """The output of such a program, which ended well."""
    process = start(folder, tree, *overrides, **options)
    assert process.wait(200) == 0, process.output
    return process.output


@contextlib.contextmanager
def start_two(
    folder: Path,
    tree: dict[str, Any],
    program: Sequence[str] = PROGRAM,
    own: Sequence[str] = (),
    *,
    size: int = 2,
    programs: Sequence[Sequence[str]] = (),
    **more: str,
) -> Iterator[list[Process]]:
    """Without torchrun, which would stop the one when the other has ended. None outlives the block. `size`: how many ranks.
    `own`: of each rank, an override or an empty text. `programs`: of each rank, in place of `program`."""
    ranks = list[Process]()
    with reserved_port() as port:
        try:
            for rank in range(size):
                environ = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
                environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}
                settings = f"run.dir={folder}/runs", *filter(None, own[rank : rank + 1])
                chosen = programs[rank] if programs else program
                ranks.append(start(folder / str(rank), tree, *settings, program=chosen, **environ))
            yield ranks
        finally:
            for each in ranks:
                each.kill()


def run_ranks(folder: Path, tree: dict[str, Any], size: int = 2, *own: str, **options: Any) -> list[str]:
    """The outputs of such ranks, each of which ended well."""
    with start_two(folder, tree, size=size, own=own, **{"WARM_WORKERS": "", **options}) as ranks:
        codes = [rank.wait(150) for rank in ranks]
        assert codes == [0] * size, [rank.output[-3000:] for rank in ranks]
        return [rank.output for rank in ranks]
