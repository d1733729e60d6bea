"""What lies beside the model in a checkpoint: `state/trainer.pt` and `state/run.json`.

torch is imported where it is used: who only lists or inspects checkpoints need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import CheckpointError

from .manifest import STATE, HashedFile

# Writes its files into the (temporary) directory it is given. What it hashed meanwhile it returns, by relative path.
Writer = Callable[[Path], Mapping[str, str] | None]

TRAINER = "trainer.pt"
_PLAIN = (str, bytes, int, float, bool, type(None))


def state_writer(*, trainer: Mapping[str, Any], run: Mapping[str, Any]) -> Writer:
    """Writes both files of the resumable state.

    `trainer`: nested dictionaries, lists and tuples of **host** tensors, numbers, strings and bytes: nothing that would
    need unpickling of code. `run`: what JSON holds (version, turn, prompt cursor, admitted but untrained group ids,
    counters, the resolved configuration). Errors of the writer: `CheckpointError` that names the entry.
    """

    def write(directory: Path) -> dict[str, str]:
        check_plain(trainer, "trainer")
        folder = directory / STATE
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_bytes(orjson.dumps(run, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
        return {f"{STATE}/{TRAINER}": save_tensors(folder / TRAINER, trainer)}

    return write


def save_tensors(path: Path, state: Mapping[str, Any]) -> str:
    """A file of `torch.save`; its SHA-256. Errors: OSError, RuntimeError."""
    import torch

    # Through a file of ours: given a path, torch says of a full disk "unexpected pos 704 vs 598" and nothing else;
    # this way the OSError is in the chain of the error, where the store finds it.
    with HashedFile(path) as file:
        torch.save(dict(state), file)
    return file.hexdigest()


def check_plain(value: Any, name: str) -> None:
    """Errors: `CheckpointError` for an entry that `torch.load(weights_only=True)` would refuse, or a tensor "
    "elsewhere."""
    import torch

    if isinstance(value, Mapping):
        for key, item in value.items():
            check_plain(key, f"{name} (a key)")
            check_plain(item, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{name}[{index}]")
    elif isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise CheckpointError(f"{name} is a tensor on {value.device}; hand over a copy on the host")
    elif type(value) not in _PLAIN:
        raise CheckpointError(
            f"{name} is {type(value).__module__}.{type(value).__name__}; a checkpoint holds tensors, numbers, strings, "
            "bytes, lists and dictionaries alone, so that loading it runs no code"
        )


def read_run(directory: Path) -> dict[str, Any]:
    """The dictionary of `run.json`. Errors: `CheckpointError`."""
    path = directory / STATE / "run.json"
    try:
        run = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(run, dict):
        raise CheckpointError(f"{path} holds {type(run).__name__}; expected an object")
    return run


def read_trainer(directory: Path) -> dict[str, Any]:
    """The dictionary of `trainer.pt`, tensors on the host; runs no pickled code. Errors: `CheckpointError`."""
    return read_tensors(directory / STATE / TRAINER)


def read_tensors(path: Path, *, lazily: bool = False) -> dict[str, Any]:
    """A file of `torch.save` in the same way; `lazily`: tensors are read from it when they are used."""
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:
        # Torch raises OSError, RuntimeError, EOFError and UnpicklingError here.
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds {type(loaded).__name__}; expected a dictionary")
    return loaded
