"""Every loss learns: a variant of the quickstart with two updates per batch, three seeds, sync and asynchronous.

    python tools/learning_comparison.py            # tools/results/learning_comparison.{json,md,png}; exit 1 if a goal is missed
    python tools/learning_comparison.py --quick    # one loss and a wrong clip, one seed, sync: the smoke test of CI

Goals: within 150 batches the mean reward of five of them reaches 0.8, in all runs of every loss, with tokens clipped where
the loss has a clip; and not with a clip that is wrong on purpose (if that learns too, the comparison shows nothing). What is
not seen here is a clip that does too little: losses without any learn as well. A run ends when it has reached its goal.
Beside them, at staleness 8, whole runs with and without corrections against the sampler, of a loss that nothing else holds
back.

The runs share `--processes` child processes of one thread each; this process imports no torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl.telemetry.machine import describe_cpu  # noqa: E402

CHILD = ROOT / "tools" / "learning" / "child.py"
COMMAND = "python tools/learning_comparison.py"
GOAL, LIMIT, STALE_BATCHES, SEEDS = 0.8, 150, 100, (0, 1, 2)
QUICK = 90  # batches of the wrong clip in the smoke test, in which the right one needs less
MODES = {"sync": ["preset=sync"], "async 4": ["preset=async", "rollout.max_staleness=4"]}
LOSSES: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "bnpo": (),
    "dapo": ("clip.epsilon_high=0.28",),
    "dr_grpo": ("advantage=dr_grpo",),
    "gspo": (),
    "cispo": ("cispo.low=0.8", "cispo.high=1.2", "train.lr=3.0e-4"),
    "sapo": ("train.lr=3.0e-4",),
    "luspo": (),
    "vespo": (),
    "reinforce": ("train.lr=3.0e-4",),
    "ppo_clip": ("clip.dual_clip=3.0",),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "force_on_policy": ("loss=dapo", "force_on_policy=true", "train.lr=3.0e-4"),
}
NEVER_CLIPS = ("sapo", "vespo", "reinforce", "force_on_policy")
WRONG = ("sign", "bounds")
STALE = ["preset=async", "rollout.max_staleness=8", "algorithm.loss=reinforce"]
CORRECTIONS = {
    "on": ["algorithm.importance.cap=2.0", "algorithm.off_policy_mask.threshold=0.2"],
    "off": ["algorithm.importance.cap=null"],
}


@dataclass(slots=True)
class Job:
    """One run. `part`: loss, wrong or corrections."""

    part: str
    name: str
    mode: str
    seed: int
    own: list[str]  # settings that differ from the variant's
    needs_clip: bool = False
    wrong_clip: str | None = None
    stop_at: float | None = GOAL
    batches: int = LIMIT
    result: dict[str, Any] = field(default_factory=dict)

    def request(self) -> str:
        modes = MODES.get(self.mode, [])
        overrides = [*modes, *self.own, f"seed={self.seed}", f"train.max_steps={self.batches}"]
        keys = {"wrong_clip": self.wrong_clip, "stop_at": self.stop_at, "needs_clip": self.needs_clip}
        return json.dumps({"overrides": overrides, **keys})

    @property
    def key(self) -> str:
        return f"{self.part} {self.name} {self.mode}: {self.request()}"

    @property
    def clip(self) -> float | None:
        """Mean share of the tokens (gspo, luspo: sequences) that the clip held, over the last update of each batch."""
        values = self.result["clip"]
        return statistics.fmean(values) if values else None

    @property
    def complaint(self) -> str | None:
        """What the comparison holds against this run."""
        if self.part == "corrections":
            return None
        reached = self.result["reached"]
        if self.part == "wrong":
            return None if reached is None else f"learned in {reached} batches, with a wrong clip"
        if reached is not None:
            return None
        last = statistics.fmean(self.result["reward"][-5:])
        clipped = not self.needs_clip or bool(self.clip)
        return f"at {last:.2f} after {LIMIT} batches" if last < GOAL or clipped else "nothing was ever clipped"


def jobs(quick: bool) -> list[Job]:
    if quick:
        return [
            Job("loss", "dapo", "sync", 0, ["algorithm.loss=dapo"], True),
            Job("wrong", "sign", "sync", 0, ["algorithm.loss=dapo"], wrong_clip="sign", batches=QUICK),
        ]
    found = []
    rows = {name: (f"loss={name}", *own) for name, own in LOSSES.items()} | VARIANTS
    for (name, own), mode, seed in itertools.product(rows.items(), MODES, SEEDS):
        settings = [setting if setting.startswith("train.") else f"algorithm.{setting}" for setting in own]
        found.append(Job("loss", name, mode, seed, settings, name not in NEVER_CLIPS))
    for name, seed in itertools.product(WRONG, SEEDS):
        found.append(Job("wrong", name, "sync", seed, ["algorithm.loss=dapo"], wrong_clip=name))
    for name, seed in itertools.product(CORRECTIONS, SEEDS):
        found.append(
            Job("corrections", name, "async 8", seed, [*STALE, *CORRECTIONS[name]], stop_at=None, batches=STALE_BATCHES)
        )
    return found


def run_all(work: list[Job], processes: int, runs: Path) -> None:
    """Fill in every job's result; what is done stands in `runs`, a line each, and is not run again.

    Errors: RuntimeError with the end of a child's log where one died.
    """
    done = dict(map(json.loads, runs.read_text(encoding="utf-8").splitlines())) if runs.exists() else {}
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in work:
        if job.key in done:
            job.result = done[job.key]
        else:
            waiting.put(job)
    processes = min(processes, waiting.qsize())
    if processes == 0:
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        failed = threading.Event()
        futures = [pool.submit(_worker, waiting, Path(folder) / f"{i}.log", runs, failed) for i in range(processes)]
        for future in futures:
            future.result()


def _worker(waiting: queue.SimpleQueue[Job], log: Path, runs: Path, failed: threading.Event) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen([sys.executable, str(CHILD)], stderr=file, **pipes) as child,
    ):
        while not failed.is_set():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                child.stdin.close()
                return
            child.stdin.write(job.request() + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line.startswith("{"):
                failed.set()
                child.kill()
                tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-25:])
                raise RuntimeError(f"the run {job.name}, {job.mode}, seed {job.seed} died; its last lines:\n{tail}")
            job.result = json.loads(line)
            with runs.open("a", encoding="utf-8") as file_of_runs:
                file_of_runs.write(json.dumps([job.key, job.result]) + "\n")
            print(f"{job.part:11} {job.name:16} {job.mode:8} seed {job.seed}: {said(job)}", flush=True)


def said(job: Job) -> str:
    result = job.result
    last = statistics.fmean(result["reward"][-5:])
    clip = "" if job.clip is None else f", {job.clip:.1%} clipped"
    goal = f"goal after {result['reached']}" if result["reached"] else f"{last:.2f} after {len(result['reward'])}"
    return f"{goal} batches{clip}, age to {max(result['age']):.0f}; {result['seconds']:.1f} s, {result['cpu_seconds']:.1f} s of CPU"


def table(work: list[Job]) -> str:
    """Markdown: a row per loss, its runs of one mode in a cell."""
    head = " | ".join(
        f"{mode}: batches to {GOAL}, seeds {', '.join(map(str, SEEDS))} | clipped | age" for mode in MODES
    )
    lines = [f"| loss | settings of its own | {head} | CPU s per run | |", "|---" * (4 + 3 * len(MODES)) + "|"]
    for part, name in dict.fromkeys((job.part, job.name) for job in work if job.part != "corrections"):
        mine = [job for job in work if (job.part, job.name) == (part, name)]
        cells = [f"wrong clip: {name}" if part == "wrong" else name, ", ".join(_settings(mine[0]))]
        for mode in MODES:
            runs = [job for job in mine if job.mode == mode]
            cells.append(", ".join(str(job.result["reached"] or f"- ({job.result['reward'][-1]:.2f})") for job in runs))
            clips = [job.clip for job in runs if job.clip is not None]
            cells.append(f"{min(clips):.1%} to {max(clips):.1%}" if clips and runs[0].needs_clip else "")
            cells.append(f"{max(max(job.result['age']) for job in runs):.0f}" if runs else "")
        cells.append(f"{statistics.fmean(job.result['cpu_seconds'] for job in mine):.1f}")
        ok = not any(job.complaint for job in mine)
        cells.append(("fails, as it must" if part == "wrong" else "learns") if ok else "**missed**")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _settings(job: Job) -> list[str]:
    kept = (each.removeprefix("algorithm.") for each in job.own)
    return [f"`{each}`" for each in kept if each != f"loss={job.name}"]


def document(work: list[Job], seconds: float, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": COMMAND + (" --quick" if given.quick else ""),
        "cpu": describe_cpu(),
        "python": platform.python_version(),
        "processes": given.processes,
        "seconds": None if given.runs else round(seconds, 1),
        "cpu_seconds": round(sum(job.result["cpu_seconds"] for job in work), 1),
        "goal": {"reward": GOAL, "batches": LIMIT},
        "missed": [f"{job.name}, {job.mode}, seed {job.seed}: {job.complaint}" for job in work if job.complaint],
        "runs": [{**asdict(job), "result": job.result} for job in work],
    }


def markdown(work: list[Job], found: dict[str, Any]) -> str:
    took = "" if found["seconds"] is None else f" ({found['processes']} of them: {found['seconds'] / 60:.1f} minutes)"
    text = [
        "# Every loss learns\n",
        f"`{found['command']}`, {found['date']}, {found['cpu']}: {len(work)} runs, {found['cpu_seconds'] / 60:.1f} minutes of CPU "
        f"in processes of one thread{took}. Task: "
        "`tools/learning/task.yaml`, `updates_per_batch` 2, so two policy versions a batch: staleness 4 is an age of up to 8 "
        f"versions. A run ends when the mean reward of five batches has reached {GOAL}, or after {LIMIT} batches.\n",
        table(work),
    ]
    stale = [job for job in work if job.part == "corrections"]
    if stale:
        text.append(
            f"\nAt staleness 8 (ages up to {max(max(job.result['age']) for job in stale):.0f} versions), loss reinforce:\n"
        )
        text += [
            "| corrections | settings | mean reward of the last ten of the batches | of all | mismatch KL |",
            "|---|---|---|---|---|",
        ]
        for name in CORRECTIONS:
            runs = [job.result for job in stale if job.name == name]
            last = ", ".join(f"{statistics.fmean(run['reward'][-10:]):.3f}" for run in runs)
            whole = ", ".join(f"{statistics.fmean(run['reward']):.3f}" for run in runs)
            kl = ", ".join(f"{statistics.fmean(run['kl']):.4f}" for run in runs)
            own = ", ".join(f"`{each.removeprefix('algorithm.')}`" for each in CORRECTIONS[name])
            text.append(f"| {name} | {own} | {last} | {whole} | {kl} |")
        text.append("\n![curves](learning_comparison.png)")
    return "\n".join(text) + "\n"


def draw(work: list[Job], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stale = [job for job in work if job.part == "corrections"]
    columns = 2 if stale else 1
    figure, axes = plt.subplots(1, columns, figsize=(5.5 * columns, 4.5), layout="constrained", squeeze=False)
    left, right = axes[0][0], axes[0][-1]
    judged = [job for job in work if job.part != "corrections"]
    names = list(dict.fromkeys((job.part, job.name) for job in judged))
    for mode, marker, shift in (("sync", "o", -0.12), ("async 4", "^", 0.12)):
        runs = [job for job in judged if job.mode == mode]
        spots = [(job.result["reached"] or LIMIT, names.index((job.part, job.name)) + shift) for job in runs]
        hollow = ["none" if job.result["reached"] is None else f"C{marker == '^':d}" for job in runs]
        x, y = zip(*spots, strict=True)
        left.scatter(x, y, marker=marker, facecolors=hollow, edgecolors=f"C{marker == '^':d}", s=22, label=mode)
    left.set_yticks(range(len(names)), [f"wrong clip: {n}" if part == "wrong" else n for part, n in names])
    left.invert_yaxis()
    left.set(xlabel=f"batches until the mean of five is {GOAL} (hollow: never)", xlim=(0, LIMIT + 4))
    left.legend(frameon=False, loc="upper right")
    for name, color in (("on", "C0"), ("off", "C3")) if stale else ():
        curves = [smooth(job.result["reward"]) for job in stale if job.name == name]
        for curve in curves:
            right.plot(curve, color=color, alpha=0.3, linewidth=0.8)
        right.plot([statistics.fmean(at) for at in zip(*curves, strict=True)], color=color, label=f"corrections {name}")
    if stale:
        title = "reinforce at staleness 8, three seeds"
        right.set(xlabel="batch", ylabel="reward, mean of five batches", ylim=(0, 1.02), title=title)
        right.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


def smooth(values: list[float], window: int = 5) -> list[float]:
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test of half a minute: one loss and a wrong clip")
    parser.add_argument("--processes", type=int, default=2, help="child processes of one thread each (2)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "tools" / "results", help="folder of the results (tools/results)"
    )
    parser.add_argument("--runs", type=Path, help="a file that keeps every finished run; a second call goes on from it")
    given = parser.parse_args()
    work, started = jobs(given.quick), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run_all(work, given.processes, given.runs or Path(folder) / "runs.jsonl")
    found = document(work, time.perf_counter() - started, given)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "learning_comparison.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    (given.out / "learning_comparison.md").write_text(text := markdown(work, found), encoding="utf-8")
    if not given.quick:
        draw(work, given.out / "learning_comparison.png")
    print("\n" + text)
    for missed in found["missed"]:
        print("MISSED: " + missed)
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
