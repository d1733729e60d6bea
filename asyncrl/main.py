"""`torchrun -m asyncrl.main x.yaml a.b=c`: one rank of a training run. Also `python -m asyncrl.main` and `asyncrl run`.

Exit codes: those of `asyncrl.errors` (0 done, 1 unexpected, 2 configuration, 3 divergence, 4 stall, ...); 130 after SIGINT,
143 after SIGTERM and 129 after SIGHUP (a closed terminal; ignored under nohup), once the open step is aborted and the last
committed version is checkpointed. A second SIGINT or SIGTERM ends the process at once, but not within `AGAIN_AFTER_S` of the first
(who stops a whole job signals the launcher and its ranks, and the launcher then signals the ranks: that is one stop), and never
while a checkpoint is being written. A launcher that ends is a SIGTERM to its ranks (asyncrl/distributed/launcher.py). Output that
nobody reads any more ends nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from asyncrl.concurrency.descriptors import Reserve, none_left, way_out
from asyncrl.concurrency.ending import run_program, start_exit_deadline
from asyncrl.config.imports import is_interrupt, raised
from asyncrl.distributed.launcher import Launcher, tied
from asyncrl.errors import AsyncrlError, ConfigError, PlatformError, RankLost
from asyncrl.telemetry.output import lossy_output, say_early

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.runtime.runtime import RunSummary, Runtime
    from asyncrl.transport.rings.record_ring import RecordRing

AGAIN_AFTER_S = 5.0
STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
USAGE = "usage: asyncrl run CONFIG.yaml [MORE.yaml ...] [a.b=value ...] [--dry-run] [--help]"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command, with the arguments of the process by default. Returns the exit code."""
    with lossy_output():
        return run_program(_main, arguments)


def _main(given: list[str]) -> int:
    # The schema takes a third of a second to import, and torch and transformers take seconds: first say, or check, what needs none.
    if "--help" in given or "-h" in given:
        print(USAGE, flush=True)
        from asyncrl.config.describe import help_text

        print("\n" + help_text())
        return 0
    dry_run = "--dry-run" in given
    rest = [argument for argument in given if argument != "--dry-run"]
    files, overrides = split_arguments(rest)
    try:
        launcher = tied()
        for argument in rest:
            if argument in ("--dryrun", "--dry_run", "dry-run"):
                raise ConfigError(f"there is no option {argument!r}; did you mean --dry-run?")
        if not files and not overrides:
            raise ConfigError(f"no configuration was given\n{USAGE}")
        say_early("reading the settings, and checking the files and functions that they name")
        from asyncrl.config.load import load_config

        config = load_config(files, overrides)
        from asyncrl.runtime.inputs import check_start

        check_start(config, code=dry_run)
        spare = Reserve()
        spare.keep()  # else it would be told in the middle of an import
        spare.spend()
        say_early("importing torch and transformers")
        if dry_run:
            from asyncrl.runtime.plan import print_plan

            print_plan(config)
            return 0
        return run(config, launcher)
    except AsyncrlError as error:
        print(f"asyncrl: {type(error).__name__}: {error}", file=sys.stderr)
        for note in dict.fromkeys([*getattr(error, "__notes__", []), *([way_out()] if none_left(error) else [])]):
            print(f"  {note}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if none_left(error):
            said = way_out()
        elif isinstance(error, BlockingIOError) or str(error) == "can't start new thread":
            said = (
                "no more threads or processes may be started; raise the limit of this user (`ulimit -u`) or of the container "
                "(pids.max), or end other programs"
            )
        else:
            raise
        print(f"asyncrl: PlatformError: {error}: {said}", file=sys.stderr)
        return PlatformError.exit_code
    except KeyboardInterrupt:  # before the run took over the signals: nothing was begun
        return 128 + signal.SIGINT


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files come first; from the first override (`a.b=c`, `--a.b v`) on, everything is an override."""
    files: list[str] = []
    for index, argument in enumerate(arguments):
        if argument.startswith("--") or "=" in argument:
            return files, list(arguments[index:])
        files.append(argument)
    return files, []


def run(config: Config, launcher: Launcher | None = None) -> int:
    """One run in this process, after `check_start` (on uvloop where it is there). Returns the exit code; raises `AsyncrlError`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its thread pool would fight the lane for the cores
    with _no_collections():
        import asyncrl.runtime.runtime  # noqa: F401  else `_run` would load it, with collections
    # The interpreter's end looks for garbage among everything that torch and transformers made, for a second: nothing there is.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        # Not `Runner.run`, whose SIGINT handling would cancel the main task; ours aborts, checkpoints and returns a code.
        loop = runner.get_loop()
        task = loop.create_task(_run(config, launcher))
        grace_s = config.watchdog.abort_grace_s
        task.add_done_callback(lambda done: start_exit_deadline(done.exception() or done.result(), grace_s, loop))
        while True:
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as left:
                if is_interrupt(left):
                    raise
                # asyncio lets it out of the loop, whichever task raised it. Where that is a task of the user's, the task keeps it
                # as its error for who awaits it: an episode fails then, and the run goes on.
                if task.done():
                    raise AsyncrlError(f"user code ended the run: {raised(left)}") from left


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Modules make a million objects that stay: looking for garbage among them is a sixth of the time that loading takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def _run(config: Config, launcher: Launcher | None) -> int:
    import anyio

    from asyncrl.runtime.runtime import Runtime

    stopped: list[signal.Signals] = []
    since = 0.0  # when the first signal came
    ring: RecordRing | None = None
    loop = asyncio.get_running_loop()
    scope = anyio.CancelScope()
    runtime = Runtime(config, checked=True, hard_exit=True)
    handled = [each for each in STOPPED_BY if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]

    def stop(received: signal.Signals) -> None:
        nonlocal since
        if stopped:
            # A terminal that closes sends two SIGHUP.
            if received is not signal.SIGHUP and loop.time() - since >= AGAIN_AFTER_S:
                _end_at_once(received, runtime)
            return
        stopped.append(received)
        since = loop.time()
        if launcher is not None:
            launcher.untie()  # its end must not cut short what has a deadline of its own
        runtime.expect_end(received.name)
        if ring is not None:
            # Now, and not behind the checkpoint: producers that wait hear it.
            ring.end_intake()
        scope.cancel()
        why = f"torchrun (process {launcher.pid}) has ended" if launcher and launcher.has_ended else received.name
        print(
            f"\nasyncrl: {why}: aborting the open step and writing a checkpoint; once more after {AGAIN_AFTER_S:g} s ends at once",
            file=sys.stderr,
            flush=True,
        )

    for each in handled:
        loop.add_signal_handler(each, stop, each)
    with scope:
        try:
            # The ring closes last: a step that is committed while the run is being stopped still releases its records.
            async with open_ring(config) as ring, runtime:
                runtime.announce()
                if ring is not None:
                    runtime.start("door", open_doors, runtime, ring)
                summary = await runtime.run()
        except RankLost as lost:
            # The other ranks are being stopped, too, and one of them was faster.
            if not stopped and lost.stopped_by is None:
                raise
            if not stopped and lost.stopped_by is not None:
                stopped.append(signal.Signals[lost.stopped_by])
                print(f"asyncrl: another rank was stopped by {lost.stopped_by}, and this one with it", file=sys.stderr)
        else:
            _print_summary(summary, runtime)
    return 128 + stopped[0] if stopped else 0


def _end_at_once(received: signal.Signals, runtime: Runtime) -> None:
    """By the signal's own action, as the shell expects. Not while a checkpoint is being written: it would be lost."""
    if runtime.saving():
        print("asyncrl: the process ends once the checkpoint is written", file=sys.stderr, flush=True)
        return
    asyncio.get_running_loop().remove_signal_handler(received)
    signal.signal(received, signal.SIG_DFL)
    os.kill(os.getpid(), received)


@contextlib.asynccontextmanager
async def open_ring(config: Config) -> AsyncIterator[RecordRing | None]:
    """What producers attach to, where `door.ring` is set. However the run ends, it says what is left for the next one."""
    from asyncrl.runtime.door import ring_of

    if config.door.ring is None:
        yield None
        return
    async with ring_of(config) as ring:
        try:
            yield ring
        finally:
            ring.end_intake()  # what came until here is counted
            left = ring.statistics().outstanding
            if left:
                print(
                    f"{left} records that were not trained wait in ring {ring.name} (see `asyncrl shm`) for the next run"
                )


async def open_doors(runtime: Runtime, ring: RecordRing) -> None:
    """Feed the run from `door.ring`, and over HTTP where `door.http_port` says so, until the training ends.

    Every rank has a ring of its own. The first rank of a machine listens, and spreads what comes over the rings there.
    """
    from functools import partial

    import anyio

    from asyncrl.runtime.door import rings_here, serve

    door, world = runtime.config.door, runtime.world
    here = rings_here(runtime.config, world)
    ranks = f" and {', '.join(repr(name) for name in here[1:])} (one a rank)" if len(here) > 1 else ""
    runtime.note(f"waiting for producers at the record ring {here[0]!r}{ranks} (asyncrl.client)")
    try:
        if door.http_port is None or world.local_rank != 0:
            await serve(runtime, ring)
            return
        from asyncrl.http.access import Address
        from asyncrl.http.atropos import serve as serve_http

        at = Address(door.http_host, door.http_port, door.http_key, door.http_names)

        async with anyio.create_task_group() as tasks:
            http = await tasks.start(partial(serve_http, runtime, ring, others=here[1:], at=at))
            runtime.note(f"waiting for Atropos environments at {http.url}")
            if door.http_key == "":
                runtime.note('WARNING: door.http_key is "": every program of this machine may post there')
    finally:
        # The training is over: producers hear it before the last checkpoint is written.
        ring.end_intake()


def _print_summary(summary: RunSummary, runtime: Runtime) -> None:
    directory = runtime.directory
    if directory is None or not runtime.world.is_first:
        return
    books = summary.books
    print(
        f"done: version {summary.version} in {summary.seconds:.0f} s; groups: {books.admitted} admitted, {books.trained} trained, "
        f"{books.dropped} dropped, {books.failed} failed"
    )
    for reason, count in summary.reasons.items():
        print(f"  {count} {reason}")
    left = [
        directory.report,
        directory.trace,
        directory.metrics,
        directory.path / "rollouts",
        directory.checkpoints / "latest",
    ]
    print(f"see {directory.path}: {', '.join(path.name for path in left if path.exists())}")


if __name__ == "__main__":
    sys.exit(main())
