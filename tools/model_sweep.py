"""Every causal model type of the installed transformers, small, through the product's own load path, against itself.

    python tools/model_sweep.py                        # all of them, and writes tools/results/models.md: the nightly form
    python tools/model_sweep.py --types llama bloom    # some (`small_models.py` has the names), printed
    python tools/model_sweep.py --sample               # one process, a family of each kind: what CI runs

Each row is a process with a time limit, forked from one that has loaded torch and transformers, so that a crash or a hang is
a row. What is compared, and with what: `model_oracle.py`. Exit 1 where a row is WRONG or an inner error; a row is `refused`
only by a ConfigError.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

if TYPE_CHECKING:
    from model_oracle import Measured

LIMIT_S = 400.0
STATUSES = ("right", "refused", "WRONG", "inner error", "not buildable")
# Rows of CI, which have to be right.
SAMPLE = (
    "llama", "qwen3", "mistral", "gemma2 capped", "gemma3_text", "gpt_oss", "granite multipliers", "phi3", "lfm2", "falcon_h1",
    "bamba", "bloom", "deepseek_v3", "cohere2",
)  # fmt: skip


def examine(name: str) -> Measured:
    """In this process."""
    import warnings

    import model_oracle
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_oracle.examine(name)


def _child(name: str, pipe: Connection, limit_s: float) -> None:
    faulthandler.dump_traceback_later(limit_s, exit=True)  # where it hangs, on stderr
    pipe.send(examine(name))


def examine_apart(context: Any, name: str, limit_s: float = LIMIT_S) -> Measured:
    """In a process of its own, which may crash or hang."""
    from model_oracle import Measured

    started = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, theirs, limit_s), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s + 10):
            found = Measured(name, status="inner error", remark=f"no answer after {limit_s:.0f} s")
        else:
            found = ours.recv()
    except EOFError:
        process.join(5)
        found = Measured(name, status="inner error", remark=f"the process died (exit code {process.exitcode})")
    if process.is_alive():
        process.kill()
    process.join()
    print(
        f"{time.monotonic() - started:6.1f} s  {name:28} {found.status:13} {found.path:10.10} {found.remark[:140]}",
        flush=True,
    )
    return found


def sweep(names: list[str], jobs: int) -> list[Measured]:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # of the server, which imports before it is told our path
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["model_oracle"])
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda name: examine_apart(context, name), names))


def summary(found: list[Measured]) -> str:
    counts = Counter(measured.status for measured in found)
    paths = Counter(measured.path.split(" ")[0] for measured in found if measured.status == "right")
    right = ", ".join(f"{number} {path}" for path, number in sorted(paths.items()))
    return "; ".join(
        f"{counts[status]} {status}" + (f" ({right})" if status == "right" and right else "") for status in STATUSES
    )


def table(found: list[Measured]) -> str:
    lines = [
        "| type | class | | path | log-probs, nats | gradients, relative | sampler, nats | checkpointing | remark |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        sampler = None if row.sampler is None else max(row.sampler, row.updated or 0.0)
        cells = [
            row.name, row.kind, row.status, row.path, _number(row.logprobs), _number(row.gradients), _number(sampler),
            row.checkpointing, "; ".join([row.remark, *row.notes] if row.remark else row.notes),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1g}"


def report(found: list[Measured], seconds: float, command: str) -> str:
    from asyncrl.telemetry.machine import describe_cpu

    return f"""# Models

{summary(found)}

`{command}`, {time.strftime("%Y-%m-%d")}: transformers {version("transformers")}, torch {version("torch")}, {describe_cpu()},
{seconds:.0f} s. Each type of transformers' causal language models is built small from its configuration, with random weights, and
what a run would compute of it is compared with transformers' own eager forward and backward, row by row: log-probs of a packed
microbatch of ragged rows (up to 40 tokens, past windows of 8 and original contexts of 16), gradients of all parameters,
and log-probs that the sampler gave, also across an update of the weights. `right` is within 1e-4 nats and 1e-4 relative; `refused`
is a model that no run starts with, and why; `not buildable` is one that transformers itself does not build or run so. Names with
a space are variants of the type before it.

{table(found)}
"""


def complaint(name: str) -> str | None:
    """What is held against a row of the sample. In this process."""
    found = examine(name)
    if found.status == "right":
        return None
    return f"{name}: {found.status}: {'; '.join([found.remark, *found.notes])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", help="names of rows; all by default")
    parser.add_argument("--sample", action="store_true", help="the sample of CI, in this process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, help="file for the table; of a whole sweep, tools/results/models.md")
    options = parser.parse_args()
    if options.sample:
        complaints = [text for text in map(complaint, SAMPLE) if text]
        print("\n".join(complaints) or f"{len(SAMPLE)} families, all right")
        return int(bool(complaints))
    import small_models

    if unknown := sorted(set(options.types or ()) - set(small_models.row_names())):
        parser.error(f"there is no {', '.join(unknown)}; rows: {', '.join(small_models.row_names())}")
    started = time.monotonic()
    found = sweep(options.types or small_models.row_names(), options.jobs)
    text = report(found, time.monotonic() - started, "python " + " ".join(sys.argv))
    out = options.out or (None if options.types else ROOT / "tools" / "results" / "models.md")
    if out is None:
        print(text)
    else:
        out.write_text(text, encoding="utf-8")
    print(summary(found))
    return int(any(row.status in ("WRONG", "inner error") for row in found))


if __name__ == "__main__":
    sys.exit(main())
