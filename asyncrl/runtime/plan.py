"""The text of `--dry-run`, and the first lines of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.describe import to_yaml
from asyncrl.config.resolve import slots, staleness_bound, warnings
from asyncrl.config.schema import Config
from asyncrl.data.texts import eos_token_ids, notes
from asyncrl.distributed.roles import Roles
from asyncrl.distributed.world import World
from asyncrl.generation.requests import sampling_params

from .decided import choose_device, choose_settings
from .directory import RunDirectory
from .inputs import measure_prompts, row_count
from .memory import cut_model, kv_positions, memory_warnings, predicted, table, worker_parts
from .placement import AssumedGpus, Gpus, embedded_on_plain_path, place

if TYPE_CHECKING:
    from .gate import Verdict


def plan(config: Config, assumed: AssumedGpus | None = None) -> str:
    """The text of `--dry-run`: resolved configuration, slots, staleness bound, predicted memory. `assumed`: GPUs to plan for
    instead of those of this machine. Writes nothing. Call `check_start` first. Errors: ConfigError, DataError."""
    gpus, world = assumed or Gpus(), _planned_world(config, assumed)
    engine_was_auto = config.generation.engine == "auto"
    config, device, choices = choose_settings(config, world, gpus)
    verdict = _verdict(config) if config.train.kind == "torch" else None
    if engine_was_auto and verdict is not None:
        config, plain_lines = embedded_on_plain_path(config, verdict.path.name)
        if plain_lines:
            choices = (*(line for line in choices if not line.startswith("generation.engine")), *plain_lines)
    per_step = config.rollout.groups_per_step * config.rollout.group_size
    lines = [
        to_yaml(config).rstrip(),
        "",
        f"slots: {slots(config)} groups ({slots(config) * config.rollout.group_size} sequences) over {world.world_size} rank(s)",
        f"per step: {config.rollout.groups_per_step} groups x {config.rollout.group_size} = {per_step} sequences",
        f"staleness bound: a trained token is at most {staleness_bound(config)} policy versions old",
        *(world.roles.describe(rank) for rank in range(world.world_size) if world.roles.differ),
    ]
    if verdict is not None:
        from asyncrl.models.loading import describe_module, load_tokenizer_of, parameter_count

        missing_ends, missing_text = text_notes(config, describe_module(config.model), load_tokenizer_of(config.model))
        prompts = measure_prompts(config)
        weights = parameter_count(config.model)
        place_rank = partial(place, config, device, weights=weights, gpus=gpus)
        placements = {name: place_rank(each) for name, each in _kinds(world).items()}
        cut = None
        if config.distributed.sharding == "fsdp":
            cut = cut_model(config, device, world, next(iter(placements.values())), gpus)
        predict = partial(predicted, config, len(world.roles.train), prompts, verdict.path, cut=cut)
        memory: list[str] = []
        for name, placed in placements.items():
            memory += [f"predicted memory of {name}:", table(parts := predict(placed))]
            memory += _notes(memory_warnings(parts, device, gpus))
            if placed.workers and placed.on_other_device(0):
                # `devices=()`: as if the engine were on the trainer's device, with the cache of all workers together.
                worker = worker_parts(config, placed, predict(replace(placed, devices=()))["cache"])
                memory += ["predicted memory of one worker:", table(worker)]
                memory += _notes(memory_warnings(worker, placed.devices[0], gpus))
        lines += [
            *choices,
            *([] if cut is None else [cut.line(len(world.roles.train))]),
            *dict.fromkeys(placed.line for placed in placements.values()),
            *(_roles(config, world, weights, assumed) if assumed else ()),
            *verdict.lines(),
            f"cache: {kv_positions(config, prompts)} positions for {config.engine.max_sequences} sequences; prompts of up to "
            f"{prompts.longest} tokens ({prompts.how})",
            *memory,
            *_notes([*prompts.notes, *missing_ends, *missing_text]),
        ]
    restart = RunDirectory(config).restart
    return "\n".join([*lines, *_notes(warnings(config, row_count(config))), *([restart] if restart else [])])


def _planned_world(config: Config, assumed: AssumedGpus | None) -> World:
    """The World of rank 0 (under torchrun: of this rank) in the planned run, with the roles of all ranks. Errors: ConfigError."""
    world = World.from_env()
    if assumed is not None:
        ranks = assumed.ranks(config)
        world = World(0, assumed.nodes * ranks, 0, ranks)
    elif "WORLD_SIZE" not in os.environ:
        world = World(0, Roles.ranks_named(config.distributed), 0, 1)
    world.roles = Roles.resolve(config.distributed, world.world_size)
    return world


def _kinds(world: World) -> dict[str, World]:
    """Name -> the world of one rank of each kind: trains, generates, both, or joins the run."""
    roles = world.roles
    first = {(roles.trains(rank), roles.generates(rank)): rank for rank in reversed(range(world.world_size))}
    kinds = {
        f"rank {rank}" if roles.differ else "one rank": replace(world, rank=rank) for rank in sorted(first.values())
    }
    if roles.listens and not roles.receivers:
        # A joining node is a rank that only generates. The plan assumes that it has the devices of this machine.
        node = replace(world, rank=world.world_size, local_rank=0, local_world_size=1)
        kinds["a node that joins"] = replace(node, roles=replace(roles, generate=(node.rank,)))
    return kinds


def _notes(lines: Sequence[str]) -> list[str]:
    return [f"note: {line}" for line in lines]


def _roles(config: Config, world: World, weights: int, assumed: AssumedGpus) -> list[str]:
    """The GPUs on which each rank of the first machine trains and generates, and the command that starts the run. If ranks have
    different roles, the ranks of all machines are listed."""
    ranks, nodes = world.local_world_size, assumed.nodes
    lines = [f"assumed: {nodes} machine(s) with {assumed.per_node} x {assumed.name}"]
    for rank in range(world.world_size if world.roles.differ else ranks):
        device = choose_device(config.model.device, rank % ranks, ranks, assumed)
        placement = place(config, device, replace(world, rank=rank, local_rank=rank % ranks), weights, assumed)
        engines = ", ".join(dict.fromkeys(map(str, placement.devices))) or "the same"
        does = [f"trains on {device}"] if placement.trains else []
        does += [f"generates on {engines}"] if placement.generates else []
        lines.append(f"  rank {rank}: {', '.join(does)}")
    rendezvous = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500" if nodes > 1 else ""
    torchrun = f"torchrun --nproc-per-node {ranks}{rendezvous} -m asyncrl.main"
    command = "asyncrl run" if world.world_size == 1 else torchrun
    start = "start on each machine" if nodes > 1 else "start"
    return [*lines, f"{start}: {command} CONFIG.yaml"]


def text_notes(config: Config, module: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
    """(warnings about completions without an end, about missing text), as `data.texts.notes`, with the model's EOS tokens."""
    end_ids = {*eos_token_ids(module, tokenizer), *sampling_params(config.rollout, tokenizer).stop_token_ids}
    return notes(config, tokenizer, end_ids)


def _verdict(config: Config) -> Verdict:
    """The gate's verdict on the model's class and configuration. No weights are read: the probe has random weights."""
    # transformers takes seconds to import, and `train.kind: dry_run` needs no model.
    from asyncrl.models.loading import describe_module, load_tokenizer_of, require_ids_fit, require_saveable

    from .gate import check_run_model

    module, tokenizer = describe_module(config.model), load_tokenizer_of(config.model)
    require_ids_fit(module, tokenizer)
    require_saveable(module, tokenizer)
    return check_run_model(config, module)


def announcement(
    config: Config, directory: Path | None, verdict: Verdict | None, placed: str, *, rows: int | None
) -> list[str]:
    """The first lines of a run: sizes, placement, the model's path, and warnings about a resolved configuration.
    `placed`: the sentence about the placement. `rows`: the number of configured training prompts; None without such prompts."""
    rollout = config.rollout
    lines = [
        f"{config.run.name}: preset {config.preset}, {rollout.groups_per_step} groups x {rollout.group_size} "
        f"per step, age at most {staleness_bound(config)}, {slots(config)} slots; {directory or 'no run directory'}"
    ]
    lines += [placed, *verdict.lines(), *native_note(config)] if verdict else []
    if rows is None and verdict and verdict.rotary:
        lines.append("note: other processes that sample groups must use the rotary frequencies named above")
    return lines + [f"note: {warning}" for warning in warnings(config, rows)]


def native_note(config: Config) -> list[str]:
    """A note if the model is computed on the CPU without the native kernels; else an empty list."""
    from asyncrl.models.native.library import available

    if available() or choose_device(config.model.device, 0).type != "cpu":
        return []
    return [
        "note: there are no native kernels for this machine, or ASYNCRL_NATIVE is 0: torch's own kernels are used, which are "
        "slower. pip builds native kernels if it finds a C++ compiler for x86-64 (AVX2 or AVX-512)"
    ]
