"""Creates a worker's engine and attaches its weight board, from the setup message that its rank sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from asyncrl.concurrency.lane import ThreadLane
from asyncrl.config.schema import Config
from asyncrl.generation.embedded.engine import EmbeddedEngine
from asyncrl.generation.vllm.engine import ChooseTokens, CoreSpec, VllmEngine
from asyncrl.generation.vllm.versions import load_adapter, require_vllm
from asyncrl.models.loading import load_tokenizer_of
from asyncrl.models.outputs import TOKENS
from asyncrl.models.parameters.layout import Layout
from asyncrl.models.paths import ModelPath
from asyncrl.models.policy import DTYPES
from asyncrl.models.reading import ModelSkeleton, open_reader
from asyncrl.telemetry.recorder import Recorder
from asyncrl.transport.memory.board import Board, wait_for_device

Serving: TypeAlias = EmbeddedEngine | VllmEngine


async def create_engine(
    setup: Mapping[str, Any],
    config: Config,
    device: torch.device,
    lane: ThreadLane,
    recorder: Recorder,
    report_stage: Callable[[str], None],
) -> tuple[Serving, Board]:
    """The engine, not yet opened with `async with`, and the weight board. Takes minutes for a large model. `report_stage` is called
    with a text at each stage. Errors: ConfigError; TransportError if the board has another layout."""
    options = {name: setup[name] for name in ("max_sequences", "max_context", "kv_positions")}
    options["kv_after_update"] = config.engine.kv_after_update or "keep"
    options["kept_prefix_max_age"] = config.engine.kept_prefix_max_age or 0
    if config.generation.engine == "vllm":
        return await _open_vllm(setup, config, device, lane, recorder, report_stage, options)
    report_stage("building the model")
    path, description = ModelPath(**setup["path"]), setup["for_engine"]
    skeleton = await lane.run(lambda: ModelSkeleton(config.model), name="engine/skeleton")
    digest = skeleton.digest()
    board, half = await _attach_board(setup, digest, device, lane)
    policy = await lane.run(
        lambda: open_reader(skeleton, half, description["extras"], path, setup["max_context"], config.seed),
        name="engine/load",
    )
    if setup["board"]["slab"] is not None:
        # Frees the policy's own weights before the cache is allocated: the trainer may need memory of the same GPU.
        await lane.run(lambda: policy.flat.move_to(half), name="engine/bind")
    tokenizer = await lane.run(lambda: load_tokenizer_of(config.model), name="engine/tokenizer")
    engine = EmbeddedEngine(
        policy,
        tokenizer,
        lane,
        recorder,
        prefill_tokens=config.engine.prefill_tokens,
        record_routes=config.algorithm.router_replay,
        eos=tuple(description["stop_ids"]),
        **options,
    )
    return engine, board


async def _attach_board(
    setup: Mapping[str, Any], digest: str, device: torch.device, lane: ThreadLane, one_copy: bool = False
) -> tuple[Board, Tensor]:
    """(board, a half with weights). A process that reads copies gets its copy of the half. `one_copy`: see `Board.attach`."""
    copy_to = device if setup["copies"][0] else None
    board = await lane.run(
        lambda: Board.attach(setup["board"], setup["board_fd"], digest, copy_to, one_copy), name="engine/board"
    )
    # Any half with weights will do. If the trainer overwrites the half during the fetch, the first update repairs the weights.
    index = 0 if board.version(0) is not None else 1
    await wait_for_device(await lane.run(lambda: board.fetch(index), name="engine/fetch"))
    return board, board.half(index)


async def _open_vllm(
    setup: Mapping[str, Any],
    config: Config,
    device: torch.device,
    lane: ThreadLane,
    recorder: Recorder,
    report_stage: Callable[[str], None],
    options: dict[str, Any],
) -> tuple[Serving, Board]:
    # The setup describes the model; the weights come only from the board. No checkpoint is read.
    description, dtype = setup["for_engine"], DTYPES[config.model.dtype]
    layout = Layout.from_message(description["layout"])
    digest = layout.digest(dtype)
    # One copy suffices: vLLM has its own parameters, and reads the board's copy only in `VllmCore.bind`.
    board, half = await _attach_board(setup, digest, device, lane, one_copy=True)
    version = await lane.run(lambda: require_vllm(device.type), name="engine/version")
    report_stage(f"importing vLLM {version}")
    adapter = await lane.run(load_adapter, name="engine/import")
    # The limits include the fixed sequence of TOKENS tokens that `VllmEngine.outputs` computes beside the requests.
    limits = adapter.CoreLimits(
        sequences=options["max_sequences"] + 1,
        context=max(options["max_context"], TOKENS + 1),
        positions=options["kv_positions"] + TOKENS + 1,
        step_tokens=config.engine.prefill_tokens,
        # A split engine divides the key-value heads among its processes, but every process has at least one head.
        position_bytes=description["position_bytes"] // min(len(setup["devices"]), description["kv_heads"]),
    )
    tokenizer = await lane.run(lambda: load_tokenizer_of(config.model), name="engine/tokenizer")

    devices, copies = [torch.device(name) for name in setup["devices"]], setup["copies"]
    split = adapter.Split(board, devices, copies) if len(devices) > 1 else None

    def open_core(choose: ChooseTokens) -> Any:
        spec = adapter.ModelSpec(description["config"], layout, half)
        return adapter.VllmCore(spec, limits, choose, split=split)

    engine = VllmEngine(
        open_core,
        CoreSpec(dtype, description["vocabulary"], tuple(description["stop_ids"]), description["routed"]),
        tokenizer,
        lane,
        recorder,
        **options,
    )
    report_stage("vLLM is building its model and cache")
    await lane.run(engine.open_on_lane, name="engine/open")
    return engine, board
