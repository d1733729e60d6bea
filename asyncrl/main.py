"""`torchrun -m asyncrl.main x.yaml a.b=c`: one rank of a training run. Also `python -m asyncrl.main` and `asyncrl run`.

Exit codes are those of `asyncrl.errors` (0 done, 1 unexpected, 2 configuration, 3 divergence, 4 stall, ...). After SIGINT,
SIGTERM or SIGHUP the run aborts the open step, saves the last version (`checkpoint.save_final`), and exits with 130, 143 or 129.
A later SIGINT or SIGTERM ends the process at once, with two exceptions. A checkpoint that is being written is finished first. A
signal within `SECOND_SIGNAL_AFTER_S` of the first signal is ignored: if a user stops a job, each rank gets SIGTERM twice, from
the user and from torchrun. If torchrun ends, its ranks get SIGTERM (distributed/launcher.py). A closed stdout is no error.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from asyncrl.concurrency.descriptors import Reserve, descriptor_advice
from asyncrl.concurrency.exit_deadline import run_program, start_exit_deadline
from asyncrl.config.imports import is_interrupt, raised
from asyncrl.distributed.launcher import Launcher, tie_to_launcher
from asyncrl.errors import AsyncrlError, ConfigError, PlatformError, RankLost
from asyncrl.telemetry.output import lossy_output, print_early

if TYPE_CHECKING:
    from asyncrl.config.schema import Config
    from asyncrl.distributed.world import World
    from asyncrl.runtime.runtime import RunSummary, Runtime
    from asyncrl.transport.rings.record_ring import RecordRing

SECOND_SIGNAL_AFTER_S = 5.0
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
USAGE = "usage: asyncrl run CONFIG.yaml [MORE.yaml ...] [a.b=value ...] [--dry-run [--assume-devices 8xH100]] [--help]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. `arguments`: `sys.argv[1:]` by default. Returns the exit code."""
    with lossy_output():
        return run_program(_main, arguments)


def _main(arguments: list[str]) -> int:
    # Imports are deferred: the schema's import takes a third of a second, and the imports of torch and transformers take seconds.
    # So a misspelled command or setting is reported before torch is imported.
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, flush=True)
        from asyncrl.config.describe import help_text

        print("\n" + help_text())
        return 0
    return report_errors(lambda: _start(arguments))


def _start(arguments: list[str]) -> int:
    dry_run = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    devices, arguments = _assumed_devices(arguments, dry_run)
    files, overrides = split_arguments(arguments)
    launcher = tie_to_launcher()
    for argument in arguments:
        if argument in ("--dryrun", "--dry_run", "dry-run"):
            raise ConfigError(f"there is no option {argument!r}; did you mean --dry-run?")
    if not files and not overrides:
        raise ConfigError(f"no configuration was given\n{USAGE}")
    print_early("reading the settings, and checking the files and functions that they name")
    from asyncrl.config.load import load_config

    config = load_config(files, overrides)
    from asyncrl.runtime.inputs import check_start

    check_start(config, code=dry_run)
    # A process without free file descriptors ends here, with advice, and not with an obscure ImportError below.
    reserve = Reserve()
    reserve.keep()
    reserve.close()
    print_early("importing torch and transformers")
    if dry_run:
        from asyncrl.runtime.placement import AssumedGpus
        from asyncrl.runtime.plan import plan

        print(plan(config, None if devices is None else AssumedGpus.parse(devices)))
        return 0
    return run(config, launcher)


def report_errors(start: Callable[[], int]) -> int:
    """The exit code of `start()`. Prints an AsyncrlError, or a lack of descriptors or threads, on stderr. Raises other errors."""
    try:
        return start()
    except AsyncrlError as error:
        print(f"asyncrl: {type(error).__name__}: {error}", file=sys.stderr)
        notes = list(dict.fromkeys(getattr(error, "__notes__", [])))
        if (advice := descriptor_advice(error)) and advice not in notes:
            notes.append(advice)
        for note in notes:
            print(f"  {note}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if not (advice := descriptor_advice(error)):
            if not isinstance(error, BlockingIOError) and str(error) != "can't start new thread":
                raise
            advice = (
                "no more threads or processes may be started; raise the limit of this user (`ulimit -u`) or of the container "
                "(pids.max), or end other programs"
            )
        print(f"asyncrl: PlatformError: {error}: {advice}", file=sys.stderr)
        return PlatformError.exit_code
    except KeyboardInterrupt:  # before `_run` handles the signals
        return 128 + signal.SIGINT


def _assumed_devices(arguments: list[str], dry_run: bool) -> tuple[str | None, list[str]]:
    """(value of `--assume-devices`, or None; the other arguments). Errors: ConfigError for this option without `--dry-run`."""
    option = "--assume-devices"
    index = next((n for n, argument in enumerate(arguments) if argument.partition("=")[0] == option), None)
    if index is None:
        return None, arguments
    if not dry_run:
        raise ConfigError(f"{option} plans for GPUs that are not here, and a run needs real ones; add --dry-run")
    others = arguments[:index] + arguments[index + 1 :]
    _, equals_sign, value = arguments[index].partition("=")
    if not equals_sign:
        # The value is the next argument, which now has the option's index.
        value = others.pop(index) if index < len(others) else ""
    return value, others


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into (files, overrides). Everything from the first override (`a.b=c` or `--a.b v`) on is an override."""
    files: list[str] = []
    for index, argument in enumerate(arguments):
        if argument.startswith("--") or "=" in argument:
            return files, list(arguments[index:])
        files.append(argument)
    return files, []


def run(config: Config, launcher: Launcher | None = None, world: World | None = None) -> int:
    """Run `config` in this process, on uvloop if installed. Returns the exit code. Errors: AsyncrlError. `launcher`: from
    `tie_to_launcher`. `world`: only from a node that joins a run. Every other caller must call `check_start` first."""
    # The thread pool of the tokenizers library would compete with the training thread for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Imports create almost no garbage, and take a sixth less time without the collector.
    gc.disable()
    try:
        import asyncrl.runtime.runtime  # noqa: F401
    finally:
        gc.enable()
    # At exit the interpreter would search all objects of torch and transformers for garbage, which takes a second.
    atexit.register(gc.freeze)
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        # `Runner.run` would handle SIGINT by cancelling the main task; `_run` has handlers of its own.
        loop = runner.get_loop()
        task = loop.create_task(_run(config, launcher, world))
        grace_s = config.watchdog.abort_grace_s
        # Once `_run` has ended, with an error or an exit code, the process must end within `grace_s`.
        task.add_done_callback(lambda done: start_exit_deadline(done.exception() or done.result(), grace_s, loop))
        while True:
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                if is_interrupt(error):
                    raise
                # If any task raises SystemExit, asyncio stops the loop. If that task was an episode of user code, only the
                # episode fails: `_run` is not done, and the loop is started again.
                if task.done():
                    raise AsyncrlError(f"user code ended the run: {raised(error)}") from error


async def _run(config: Config, launcher: Launcher | None, world: World | None) -> int:
    import anyio

    from asyncrl.runtime.runtime import Runtime

    # Empty, or the signal that stopped the run.
    stop_signals: list[signal.Signals] = []
    stopped_at = 0.0
    ring: RecordRing | None = None
    loop = asyncio.get_running_loop()
    scope = anyio.CancelScope()
    runtime = Runtime(config, checked=world is None, hard_exit=True, write=world is None, world=world)

    def stop(received: signal.Signals) -> None:
        nonlocal stopped_at
        if stop_signals:
            # A SIGHUP after the first signal changes nothing: a terminal that closes sends SIGHUP twice.
            if received is not signal.SIGHUP and loop.time() - stopped_at >= SECOND_SIGNAL_AFTER_S:
                _end_at_once(received, runtime)
            return
        stop_signals.append(received)
        stopped_at = loop.time()
        if launcher is not None:
            launcher.untie()
        runtime.expect_end(received.name)
        if ring is not None:
            # A producer's `put` that waits for room must raise now, and not only after the checkpoint.
            ring.end_intake()
        scope.cancel()
        why = f"torchrun (process {launcher.pid}) has ended" if launcher and launcher.has_ended else received.name
        save = " and writing a checkpoint" if config.checkpoint.save_final else ""
        doing = f"aborting the open step{save}" if world is None else "leaving the run"
        text = f"\nasyncrl: {why}: {doing}; SIGINT or SIGTERM after {SECOND_SIGNAL_AFTER_S:g} s ends the process"
        print(text, file=sys.stderr, flush=True)

    for handled in HANDLED_SIGNALS:
        # Under nohup this process ignores SIGHUP, and must keep ignoring SIGHUP.
        if handled is not signal.SIGHUP or signal.getsignal(handled) is not signal.SIG_IGN:
            loop.add_signal_handler(handled, stop, handled)
    with scope:
        try:
            # The ring is closed last: a step that is committed during the shutdown must release the records that it trained.
            async with open_ring(config) as ring, runtime:
                runtime.announce()
                if ring is not None:
                    runtime.start("door", open_doors, runtime, ring)
                summary = await runtime.run()
        except RankLost as lost:
            if world is not None and world.ended_well:
                print("asyncrl: the run has ended before this node generated", file=sys.stderr)
                return 0
            # If a job is stopped, another rank may get its signal first and leave before this rank.
            if not stop_signals:
                if lost.stopped_by is None:
                    raise
                stop_signals.append(signal.Signals[lost.stopped_by])
                print(f"asyncrl: another rank was stopped by {lost.stopped_by}; this rank ends, too", file=sys.stderr)
        else:
            _print_summary(summary, runtime)
    return 128 + stop_signals[0] if stop_signals else 0


def _end_at_once(received: signal.Signals, runtime: Runtime) -> None:
    """End by the signal's default action, as a shell expects. During a checkpoint only print a line, and let the shutdown go on."""
    if runtime.saving():
        print("asyncrl: the process ends once the checkpoint is written", file=sys.stderr, flush=True)
        return
    asyncio.get_running_loop().remove_signal_handler(received)
    signal.signal(received, signal.SIG_DFL)
    os.kill(os.getpid(), received)


@contextlib.asynccontextmanager
async def open_ring(config: Config) -> AsyncIterator[RecordRing | None]:
    """Open the record ring of `door.ring`; yield None if the setting is null. At the end print how many records remain, if any."""
    from asyncrl.runtime.door import ring_of

    if config.door.ring is None:
        yield None
        return
    async with ring_of(config) as ring:
        try:
            yield ring
        finally:
            ring.end_intake()  # so that the count is final
            if count := ring.statistics().outstanding:
                print(
                    f"ring {ring.name} (see `asyncrl shm`) holds {count} records that were not trained, for the next run"
                )


async def open_doors(runtime: Runtime, ring: RecordRing) -> None:
    """Feed the run from the ring, and from HTTP if `door.http_port` is set, until the training ends.

    Every rank has its own ring. The first rank of a machine serves HTTP, and spreads groups over the rings of the machine's ranks.
    """
    from functools import partial

    import anyio

    from asyncrl.runtime.door import local_rings, serve

    door, world = runtime.config.door, runtime.world
    rings = local_rings(runtime.config, world)
    more = f" and {', '.join(repr(name) for name in rings[1:])} (one per rank)" if len(rings) > 1 else ""
    runtime.note(f"waiting for producers at the record ring {rings[0]!r}{more} (asyncrl.client)")
    try:
        if door.http_port is None or world.local_rank != 0:
            await serve(runtime, ring)
            return
        from asyncrl.atropos.door import serve as serve_http
        from asyncrl.http.access import Address

        at = Address(door.http_host, door.http_port, door.http_key, door.http_names)
        async with anyio.create_task_group() as tasks:
            http = await tasks.start(partial(serve_http, runtime, ring, others=rings[1:], at=at))
            runtime.note(f"waiting for Atropos environments at {http.url}")
            if door.http_key == "":
                runtime.note('WARNING: door.http_key is "": every program of this machine may post groups to the run')
    finally:
        # A producer's `put` that waits for room must raise now, and not only after the last checkpoint.
        ring.end_intake()


def _print_summary(summary: RunSummary, runtime: Runtime) -> None:
    directory = runtime.directory
    if runtime.world.joined is not None:
        print(f"done: the run has ended at version {summary.version}, and this node has left it")
    if directory is None or not runtime.world.is_first:
        return
    groups = summary.books
    print(
        f"done: version {summary.version} in {summary.seconds:.0f} s; groups: {groups.admitted} admitted, "
        f"{groups.trained} trained, {groups.dropped} dropped, {groups.failed} failed"
    )
    for reason, count in summary.reasons.items():
        print(f"  {count} {reason}")
    files = [directory.report, directory.trace, directory.metrics, directory.rollouts, directory.checkpoints / "latest"]
    print(f"see {directory.path}: {', '.join(path.name for path in files if path.exists())}")


if __name__ == "__main__":
    sys.exit(main())
