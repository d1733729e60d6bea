"""The program of a partner, a process that computes a part of each layer for a worker (v0_32_split.py). Two arguments:
the descriptor of the channel to the worker, and the pid of the worker."""

from __future__ import annotations

import contextlib
import sys
import threading
from multiprocessing.connection import Connection
from typing import Never

from asyncrl.concurrency.child import die_with_parent
from asyncrl.errors import ConfigError


def serve(channel: Connection) -> Never:
    """Load this process's part of the model, then repeat the calls of the worker. EOFError: the worker has closed the channel."""
    # Imports that take seconds.
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from asyncrl.transport.memory.board import Board

    from . import v0_32, v0_32_split

    (description, fd, digest, copy_to), model_config, layout, device, options = channel.recv()
    # vLLM takes the number of the device from here, as in `v0_32`.
    options["vllm_config"].device_config.device = device
    torch.set_grad_enabled(False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    board = Board.attach(description, fd, digest, copy_to, one_copy=True)
    half = 0 if board.version(0) is not None else 1
    if (wait := board.fetch(half)) is not None:
        wait()
    number, lock = options["rank"], threading.Lock()
    wrapper = WorkerWrapperBase(number)
    with v0_32.loading(v0_32.ModelSpec(model_config, layout, board.half(half))) as loader:
        # `init_worker` takes a list with the arguments of all ranks, and reads only those of this rank.
        wrapper.init_worker([{}] * number + [options | {"is_driver_worker": False, "shared_worker_lock": lock}])
        wrapper.init_device()
        try:
            wrapper.load_model()
            v0_32.require_supported(wrapper.get_model(), loader.parameters, device)
        except v0_32.FAILURES as error:
            # The worker raises this error or another error, then closes the channel. `recv` waits until the channel is closed.
            channel.send(error if isinstance(error, ConfigError) else RuntimeError(str(error)))
            channel.recv()
            raise
    current_platform.update_block_size_for_backend(options["vllm_config"])
    runner = wrapper.worker.model_runner
    runner.sampler = v0_32.EngineSampler(runner, v0_32_split.receive_tokens)
    weights = [(pieces, loader.parameters[name]) for name, pieces in loader.recorded.items()]
    wrapper.init_weight_transfer_engine({"board": board, "weights": weights, "fetches": copy_to is not None})
    channel.send([piece for pieces, _ in weights for piece in pieces])
    while True:
        method, args, kwargs = channel.recv()
        result = run_method(wrapper, method, args, kwargs)
        if method not in v0_32_split.STEP:
            channel.send(result)


if __name__ == "__main__":
    # Before the slow imports, so that a partner never outlives its worker.
    die_with_parent(int(sys.argv[2]))
    with contextlib.suppress(EOFError):
        serve(Connection(int(sys.argv[1])))
