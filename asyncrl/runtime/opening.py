"""Opens a run whose settings are resolved. Order: run directory and journal, other ranks, ports, prompts, checkpoint, pumps.

All parts are on one exit stack, which closes them in the opposite order, also if the opening fails.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from asyncrl.concurrency.offload import offload
from asyncrl.config.resolve import last_version
from asyncrl.data.texts import decode
from asyncrl.distributed.line import LineServer
from asyncrl.telemetry.recorder import Recorder

from .build import open_ports
from .decided import Decided
from .inputs import load_prompts
from .journal import Journal
from .meeting import Nodes, let_join, meet_ranks
from .opened import OpenRun
from .performance import StepProfiler
from .plan import text_notes
from .progress import Listeners, Stages, rare_collections
from .saving import Checkpointer, SavedRun


async def open_run(
    decided: Decided, recorder: Recorder, listeners: Listeners, stages: Stages, stack: AsyncExitStack
) -> OpenRun:
    """`stages`: for the watchdog. Errors: ConfigError, DataError, CheckpointError, RankLost, and those of loading a model."""
    run = OpenRun(decided, recorder, listeners, stages, stack)
    await _open_directory(run)
    await meet_ranks(run)
    stages.begin("opening the ledger")
    await open_ports(run)
    stack.callback(stages.begin, "closing the engine, the reward workers and the lanes")
    # From here on the watchdog limits the time of every closure on these lanes. Not before: loading a model may take longer.
    stages.lanes.extend(run.lanes)
    stages.begin("reading the prompts")
    with recorder.wait("runtime", "the prompts", on="disk", cause="start"):
        run.prompts, held_out, notes = await offload(
            lambda: load_prompts(run.config, run.tokenizer, run.world, decided.rows, decided.environment is not None),
            "prompts",
        )
    stages.begin("restoring the checkpoint")
    saved_parts = run.ports, run.core, run.lanes[0], run.tokenizer, run.prompts
    unadmitted = set if run.dispatch is None else run.dispatch.unadmitted
    run.checkpointer = Checkpointer(run.config, run.directory, run.world, *saved_parts, unadmitted, run.positions)
    if run.saved is not None and run.world.trains:
        await run.checkpointer.restore(run.saved)
    if run.dispatch is not None and run.prompts is not None:
        run.dispatch.start(run.prompts, run.ports.ledger)
    stages.begin("opening what the run writes")
    await _open_sinks(run, notes)
    run.make_pumps(held_out)
    stack.enter_context(rare_collections())
    nodes = Nodes(run, run.line) if isinstance(run.line, LineServer) else None
    if nodes is not None:
        stack.push_async_exit(nodes.close)
    stack.push_async_exit(run.finalize)
    await stack.enter_async_context(run.supervisor)
    run.start()
    if nodes is not None:
        run.supervisor.start("nodes", nodes.write_often)
    let_join(run)
    stages.end()
    return run


async def _open_directory(run: OpenRun) -> None:
    """Lock the run directory, find the checkpoint to resume from, and make the journal, whose files `_open_sinks` opens."""
    config, directory, stages = run.config, run.directory, run.stages
    stages.begin("opening the run directory")
    opened: list[str] = []
    if directory is not None:
        # Closed last: the other parts may write to the directory until they end.
        run.stack.callback(directory.close)
        opened = await offload(lambda: directory.open(config, is_first=run.world.is_first), "run-directory")
    run.saved = await offload(lambda: SavedRun.to_resume(config, directory), "find-checkpoint")
    # The journal removes the lines after version `since`. -1: all lines, for a restart without a checkpoint. None: no line.
    since = -1 if directory and directory.restart else None
    if run.saved:
        since = run.saved.version
        opened.append(f"resume: {run.saved.checkpoint.path}")
    writable, plain = directory if run.world.is_first else None, run.world.joined is not None
    rollouts_in = directory.path if directory and run.world.trains else None
    last = last_version(config, run.base, run.decided.row_count)
    options: dict[str, Any] = {"last": last, "plain": plain, "rollouts_in": rollouts_in, "rank": run.world.rank}
    run.journal = Journal(config, writable, run.recorder, since, run.base, **options)
    await run.stack.enter_async_context(run.journal)
    run.stack.callback(stages.begin, "closing the sinks of metrics")
    stages.display = run.journal.live.status
    for line in (*run.decided.lines, *opened):
        run.journal.live.note(line)


async def _open_sinks(run: OpenRun, notes: list[str]) -> None:
    """Open the sinks of the journal, and the profiler. Show the notes of the start. `notes`: the notes about the prompts."""
    config, journal, policy = run.config, run.journal, run.policy
    journal.reserve = run.checkpointer.bytes_needed()
    await journal.open(partial(decode, run.tokenizer))
    if policy is not None:
        journal.missing_end_notes, missing_text_notes = text_notes(config, policy.module, run.tokenizer)
        notes = [*notes, *journal.missing_end_notes, *missing_text_notes]
    for line in notes:
        journal.live.note(f"note: {line}")
    run.profiler = StepProfiler(config, run.lanes[0], run.decided.device, journal.live.note)
    await run.profiler.at(run.ports.trainer.version)
