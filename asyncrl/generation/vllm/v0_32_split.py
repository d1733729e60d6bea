"""vLLM 0.32 and 0.33 with tensor parallelism: one engine over several processes, each with a part of every layer.

    the worker    vLLM's scheduler, the sampler, and `SplitExecutor`, which sends each call to the partners
    a partner     another process (v0_32_partner.py), which repeats the calls. vLLM's own collectives combine the results

* Each process opens the weight board (memory with two versions of the weights), and records which parts of the weights vLLM's
  loader copies into its parameters. vLLM constructs a `BoardTransfer` in every process. Between two steps `BoardTransfer` copies
  the same parts of a new version.
* The worker samples and sends the tokens to the partners.
* If a partner dies, the worker ends, because the other processes would wait in a collective. No partner outlives the worker.
* In vLLM's process group the worker is rank 0, and partner `n` is rank `n`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from asyncrl.errors import TransportError
from asyncrl.models.parameters.layout import Layout
from asyncrl.transport.memory.board import Board

from .recording import RecordedPiece, fill
from .temporary import remove_segments

TRANSFER = "asyncrl"
_PROGRAM = "asyncrl.generation.vllm.v0_32_partner"
STEP = ("execute_model", "sample_tokens")  # partners do not answer these calls
Weights = Sequence[tuple[Sequence[RecordedPiece], Tensor]]
ChooseTokens = Callable[[Sequence[str], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Split:
    """How an engine is split. `board`: the worker's weight board. `devices`: of the worker and of each partner. `copies`: whether
    each of these processes reads a copy of the board, because the board lies on another device."""

    board: Board
    devices: Sequence[torch.device]
    copies: Sequence[bool]


@dataclass
class BoardSource(WeightTransferInitInfo):
    """The weight board of this process, what to copy from it, and whether to fetch a version before the copy."""

    board: Board
    weights: Weights
    fetches: bool


@dataclass
class BoardVersion(WeightTransferUpdateInfo):
    """The version that the next step computes with."""

    version: int


class BoardTransfer(WeightTransferEngine[BoardSource, BoardVersion]):
    """Copies a version from the weight board into the parameters of this process, in place."""

    init_info_cls, update_info_cls = BoardSource, BoardVersion
    _source: BoardSource

    def init_transfer_engine(self, init_info: BoardSource) -> None:
        self._source = init_info

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Overrides vLLM's method, which would wait until the device has ended the copies. Errors: TransportError if the board does
        not hold the version."""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: BoardVersion) -> None:
        source, version = self._source, update_info.version
        half = next((index for index in (0, 1) if source.board.version(index) == version), None)
        if half is None:
            raise TransportError(f"the weight board holds no version {version}")
        if source.fetches and (wait := source.board.fetch(half)) is not None:
            wait()
        for pieces, parameter in source.weights:
            fill(pieces, source.board.half(half), parameter)
        # The worker reports the version when all partners have answered. After the report the trainer may overwrite the other half.
        # So before its answer a partner waits until its reads of the other half have ended.
        if get_tp_group().rank_in_group and (wait := source.board.reads_ended()) is not None:
            wait()

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(TRANSFER, BoardTransfer)


class SplitExecutor(UniProcExecutor):
    """vLLM's executor for one process, which also sends each call to the partners. vLLM creates the object. Before that,
    `VllmCore` sets `split`, `config` and `layout` (see `ModelSpec`) on the class."""

    split: Split
    config: Mapping[str, Any]
    layout: Layout
    recorded: Sequence[RecordedPiece]  # what the partners copy from the board

    def _init_executor(self) -> None:
        self._closing = False
        self._channels: list[Connection] = []
        self._watchers: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._arguments: tuple[str, int, int] = super()._distributed_args()
        try:
            for number in range(1, len(self.split.devices)):
                self._start(number)
            super()._init_executor()
            answers = [self._receive(channel) for channel in self._channels]
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        except BaseException:
            self._end_partners()
            raise
        self.recorded = [piece for answer in answers for piece in answer]
        _unlink_memory(self._arguments[0])

    def _start(self, number: int) -> None:
        ours, theirs = Pipe()
        device, fd = self.split.devices[number], self.split.board.fd
        command = [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno()), str(os.getpid())]
        started: Future[subprocess.Popen[bytes]] = Future()
        arguments = started, command, (theirs.fileno(), fd), number
        watcher = threading.Thread(target=self._watch, args=arguments, name=f"partner {number}", daemon=True)
        watcher.start()
        process = started.result()
        theirs.close()
        self._channels.append(ours)
        self._processes.append(process)
        self._watchers.append(watcher)
        board = (
            self.split.board.description,
            fd,
            self.split.board.layout,
            device if self.split.copies[number] else None,
        )
        options = {"vllm_config": self.vllm_config, "distributed_init_method": self._arguments[0], "rank": number}
        options["local_rank"] = number if device.index is None else device.index
        ours.send((board, self.config, self.layout, device, options))

    def _watch(
        self, started: Future[subprocess.Popen[bytes]], command: Sequence[str], fds: Sequence[int], number: int
    ) -> None:
        """Start a partner, and end this process if the partner fails. This thread must live as long as this process: the kernel
        kills the partner when the thread that started it ends (PR_SET_PDEATHSIG)."""
        try:
            # The partner stays in the worker's Unix process group. The starter of the worker kills this group at the worker's end.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        code = process.wait()
        # 0: this process has closed the channel.
        if code and not self._closing:
            text = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
            print(f"partner {number} of this worker (process {process.pid}) {text}", file=sys.stderr, flush=True)
            # The lane (the device's thread) may wait for that partner in a collective that never returns.
            os._exit(1)

    def _receive(self, channel: Connection) -> Any:
        try:
            return channel.recv()
        except (EOFError, OSError):
            # The partner has ended. Its watcher ends this process.
            for watcher in self._watchers:
                watcher.join()
            raise

    def _distributed_args(self) -> tuple[str, int, int]:
        return self._arguments

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **options: Any
    ) -> Any:
        """Call a method of vLLM's worker in every process. Returns all results. For `STEP`: only the result of this process."""
        for channel in self._channels:
            # BrokenPipeError: the partner has ended, so `_watch` ends this process.
            with contextlib.suppress(BrokenPipeError):
                channel.send((method, args, kwargs or {}))
        result = super().collective_rpc(method, timeout, args, kwargs, **options)
        if method in STEP:
            return result
        return [*result, *(self._receive(channel) for channel in self._channels)]

    def shutdown(self) -> None:
        super().shutdown()
        self._end_partners()
        destroy_model_parallel()
        destroy_distributed_environment()

    def _end_partners(self) -> None:
        self._closing = True
        for channel, process, watcher in zip(self._channels, self._processes, self._watchers, strict=True):
            channel.close()
            process.kill()
            watcher.join()


def _unlink_memory(init_method: str) -> None:
    """Remove the names of vLLM's shared memory, which all processes have opened: a killed worker would leave the names behind."""
    buffer = get_tp_group().mq_broadcaster.buffer
    buffer.shared_memory.unlink()
    buffer.is_creator = False
    remove_segments(Path(init_method).name)


def sends_tokens(choose: ChooseTokens) -> ChooseTokens:
    """A function that calls `choose` and sends its tokens to the partners."""

    def choose_and_send(names: Sequence[str], logits_NV: Tensor) -> Tensor:
        tokens = choose(names, logits_NV).to("cpu", torch.int64)
        torch.distributed.broadcast(tokens, get_tp_group().ranks[0], get_tp_group().cpu_group)
        return tokens

    return choose_and_send


def receive_tokens(names: Sequence[str], _: Tensor) -> Tensor:
    """The tokens that the worker has sampled."""
    tokens = torch.empty(len(names), dtype=torch.int64)
    torch.distributed.broadcast(tokens, get_tp_group().ranks[0], get_tp_group().cpu_group)
    return tokens
