"""Opens a run, in this order: device, inputs, run directory, the checkpoint to go on from, the other ranks, the model with all
that is built on it, prompts, journal, and last the pumps.

Everything that has to be closed goes on one exit stack, so that the run is closed in the opposite order, however far it came.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.concurrency.offload import offload
from asyncrl.config.resolve import resolve
from asyncrl.config.schema import Config
from asyncrl.data.prompts import EMBEDDED_GROUPS
from asyncrl.data.prompts_files import Rows
from asyncrl.data.prompts_sources import load_rows
from asyncrl.data.texts import decode, eos_token_ids
from asyncrl.data.texts import notes as text_notes
from asyncrl.distributed.heartbeat import Heartbeat
from asyncrl.distributed.world import World
from asyncrl.generation.requests import sampling_params
from asyncrl.pumps.pipeline import StepReport
from asyncrl.telemetry.recorder import Recorder

from .build import Builder, Built, Overrides
from .device import Settled, meet, settle
from .directory import RunDirectory
from .inputs import check_code, check_inputs
from .journal import Journal
from .opened import Foundation, OpenRun
from .parts import Site
from .performance import StepProfiler
from .prompts import load_prompts
from .saving import Checkpointer, SavedRun
from .stages import Stages
from .steps import Listeners


@dataclass(frozen=True, slots=True)
class Given:
    """What the program passed to its Runtime."""

    config: Config
    overrides: Overrides
    prompts: Any  # as a data function may return them; None: by the configuration, or submitted
    write: bool  # False leaves no run directory behind
    checked: bool  # the program called `check_start`


async def open_run(
    given: Given,
    recorder: Recorder,
    listeners: Listeners[StepReport],
    stages: Stages,
    stack: AsyncExitStack,
) -> OpenRun:
    """`stages`: for the watchdog. Errors: ConfigError, DataError, CheckpointError, RankLost; as the
    model's loading."""
    base, saved = await _found(given, recorder, listeners, stages, stack)
    stages.begin("reading the prompts")
    rows = None if given.prompts is None else await offload(lambda: load_rows(given.prompts), "prompts")
    built = await _build(given, base, saved, stack, rows)
    stack.callback(stages.begin, "closing the engine, the reward workers and the lanes")
    stages.lanes.extend(built.lanes)  # only now: loading a model may take longer than any closure may later
    checkpointer = Checkpointer(base.config, base.directory, built, base.world, recorder)
    stages.begin("reading the prompts")
    with recorder.wait("runtime", "the prompts", on="disk", cause="start"):
        prompts, held_out, notes = await offload(
            lambda: load_prompts(base.config, built.tokenizer, base.world, rows), "prompts"
        )
    stages.begin("restoring the checkpoint")
    if saved is not None:
        await checkpointer.restore(saved, prompts)
    stages.begin("opening what the run writes")
    base.journal.reserve = checkpointer.bytes_needed()
    await base.journal.open(partial(decode, built.tokenizer))
    note = base.journal.live.note
    if (policy := built.policy) is not None:
        stops = sampling_params(base.config.rollout, built.tokenizer).stop_token_ids
        ends, vocabulary = (
            (*eos_token_ids(policy.module, built.tokenizer), *stops),
            policy.config.get_text_config().vocab_size,
        )
        base.journal.known, lacking = text_notes(base.config, built.tokenizer, ends, int(vocabulary))
        notes = [*notes, *base.journal.known, *lacking]
    for line in notes:
        note(f"note: {line}")
    folder = None if base.directory is None else base.directory.path
    profiler = StepProfiler(base.config, built.lanes[0], base.device, folder, base.world.rank, note)
    await profiler.at(built.ports.trainer.version)
    run = OpenRun(base, built, checkpointer, profiler, prompts, held_out, saved)
    # Start-up ends here.
    run.collect_garbage = stack.enter_context(collections_between_steps(recorder))
    stack.push_async_exit(run.finalize)
    await stack.enter_async_context(run.supervisor)
    run.start()
    stages.end()
    return run


@contextlib.contextmanager
def collections_between_steps(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Freeze what start-up made, and yield a function that makes a full collection where one is due: call it between two steps.

    A full collection holds the GIL, once transformers is loaded for 0.2 to 0.4 s, and Python makes one wherever an allocation
    happens to make it due. It takes at most a hundredth of the time here. A program that disabled the collector, or froze its own
    objects, keeps that; nothing is changed then.
    """
    found, due = gc.get_threshold(), 0.0
    if not gc.isenabled() or gc.get_freeze_count():
        yield lambda: None
        return

    def collect() -> None:
        nonlocal due
        began = time.perf_counter()
        if gc.isenabled() and gc.get_count()[2] > found[2] and began > due:
            with recorder.work("event loop", "collect garbage"):
                gc.collect()
            due = time.perf_counter() + 100 * (time.perf_counter() - began)

    # Else garbage would be frozen, too, and the memory that it holds.
    gc.collect()
    gc.freeze()
    # Without steps, as in a program that only generates, Python collects by itself, later.
    gc.set_threshold(found[0], found[1], 100 * found[2])
    try:
        yield collect
    finally:
        gc.set_threshold(*found)
        gc.unfreeze()


async def _found(
    given: Given, recorder: Recorder, listeners: Listeners[StepReport], stages: Stages, stack: AsyncExitStack
) -> tuple[Foundation, SavedRun | None]:
    """Everything before the model: what is wrong with files and settings is told here."""
    began = time.perf_counter()
    stages.begin("looking at the device, the settings and the files they name")
    world = World.from_env()
    settled = await offload(lambda: settle(given.config, world.local_rank, world.local_world_size), "device")
    config = await _resolve(given, settled, world)
    directory = await offload(lambda: RunDirectory(config), "run-directory") if given.write else None
    opened: list[str] = []
    stages.begin("opening the run directory")
    if directory is not None:
        stack.callback(directory.close)  # after everything that writes there
        opened = await offload(lambda: directory.open(config, leader=world.is_first), "run-directory")
    saved = await offload(lambda: SavedRun.to_resume(config, directory), "find-checkpoint")
    since = saved.version if saved else -1 if directory and directory.restart else None  # -1: no line stays
    journal = Journal(config, directory if world.is_first else None, recorder, since)
    await stack.enter_async_context(journal)
    stack.callback(stages.begin, "closing the sinks of metrics")
    stages.show_on(journal.live.status)
    for line in (*settled.lines, *opened, *(saved.lines if saved else ())):
        journal.live.note(line)

    async def close(kind: object, *_: object) -> None:
        await offload(lambda: world.close(failed=kind is not None), "farewell")  # it waits for the other ranks

    stack.push_async_exit(close)
    stages.begin("meeting the other ranks")
    # The others may never come. A run that is stopped meanwhile holds nothing yet that it would have to save.
    await offload(lambda: meet(world, settled), "rendezvous", abandon=True)
    for line in world.notes:
        journal.live.note(line)
    if world.world_size > 1:
        saved = await offload(lambda: _agree(world, directory, saved), "find-checkpoint")
        stages.heartbeat = stack.enter_context(Heartbeat(world.store("alive"), world.rank, world.world_size))
    return Foundation(config, world, settled.device, recorder, directory, journal, listeners, stages, began), saved


def _agree(world: World, directory: RunDirectory | None, saved: SavedRun | None) -> SavedRun | None:
    """What the first rank goes on from: the others may have looked when it had begun to write."""
    store = world.store("start")
    if world.is_first:
        store.set("goes on", str(saved is not None))
    if directory is None or store.get("goes on") != b"True":
        return None
    return saved or SavedRun.latest(directory)


async def _resolve(given: Given, settled: Settled, world: World) -> Config:
    """What the settings mean together, checked with the files and the code that they name."""
    own, brings = given.overrides, given.prompts is not None
    submitted = not brings and given.config.data.train is None and given.config.door.ring is None
    config = resolve(
        settled.config,
        world.world_size,
        embedding=submitted or brings,
        submitted=submitted,
        own_environment=own.environment is not None,
    )
    brought = brings, bool(own.rewards), own.environment is not None, own.hooks is not None
    await offload(lambda: check_code(config) if given.checked else check_inputs(config, *brought), "inputs")
    return config


async def _build(
    given: Given, base: Foundation, saved: SavedRun | None, stack: AsyncExitStack, rows: Rows | None
) -> Built:
    turn, version = (saved.turn, saved.version) if saved else (0, 0)
    first_group = EMBEDDED_GROUPS + base.world.rank if saved is None else saved.next_group(base.world.rank)
    logs = None if base.directory is None else base.directory.workers
    own = given.overrides.environment is not None
    site = Site(base.config, base.world, base.device, base.recorder, stack, base.stages.say, logs, rows, own)
    base.stages.begin("opening the ledger")
    return await Builder(site).build(given.overrides, turn, version, first_group)
