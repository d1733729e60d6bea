"""The state of a run in a checkpoint: `state/trainer.pt` and `state/run.json`.

torch is imported inside the functions, so that programs that only list checkpoints do not wait for this import.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import CheckpointError

from .manifest import STATE, HashedFile

# Writes files of a checkpoint into the directory that it gets. May return the SHA-256 of these files, by relative path.
Writer = Callable[[Path], Mapping[str, str] | None]

TRAINER = "trainer.pt"
_PLAIN = (str, bytes, int, float, bool, type(None))


def state_writer(*, trainer: Mapping[str, Any], run: Mapping[str, Any]) -> Writer:
    """A writer of trainer.pt and run.json.

    `trainer`: nested dictionaries, lists and tuples of **host** tensors, numbers, strings, bytes and None. Other types are
    refused, because unpickling them would run code. `run`: JSON values (version, turn, resolved configuration; for each rank its
    cursor, ids of untrained groups, next group id, replay buffer). The writer raises `CheckpointError` with the refused entry.
    """

    def write(directory: Path) -> dict[str, str]:
        check_plain(dict(trainer), "trainer")
        folder = directory / STATE
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_bytes(orjson.dumps(run, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
        return {f"{STATE}/{TRAINER}": save_tensors(folder / TRAINER, trainer)}

    return write


def save_tensors(path: Path, state: Mapping[str, Any]) -> str:
    """Write `state` with `torch.save` and return the SHA-256 of the file. Errors: OSError, RuntimeError."""
    import torch

    # If torch opens the path itself, a full disk raises only "unexpected pos 704 vs 598". If torch gets an open file, the chain of
    # the exception has the OSError, where `CheckpointStore` looks for it.
    with HashedFile(path) as file:
        torch.save(dict(state), file)
    return file.hexdigest()


def check_plain(value: Any, name: str) -> None:
    """Raise `CheckpointError` for a tensor outside the host, and for a value that `torch.load(weights_only=True)` would refuse."""
    import torch

    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            check_plain(key, f"{name} (a key)")
            check_plain(item, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{name}[{index}]")
    elif isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise CheckpointError(f"{name} is a tensor on {value.device}; pass a copy on the host")
    elif type(value) not in _PLAIN:
        raise CheckpointError(
            f"{name} is {type(value).__module__}.{type(value).__name__}; pass only tensors, numbers, strings, bytes, None, "
            "lists, tuples and dictionaries, so that loading the checkpoint runs no code"
        )


def read_tensors(path: Path, *, lazily: bool = False) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`, with tensors on the host. Runs no pickled code. Errors: `CheckpointError`.
    `lazily`: memory-map the tensors, so that their bytes are read at the first use."""
    import torch

    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    # torch.load raises OSError, RuntimeError, EOFError and UnpicklingError.
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return loaded
