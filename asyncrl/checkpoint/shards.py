"""Checkpoints of a sharded trainer. A replica is a set of ranks that together hold one copy of the model. In the replica of rank 0,
every rank above 0 writes its rows of every tensor into a file, and rank 0 moves these files into the checkpoint.

    checkpoints/shards/step_40-rank_1.pt    written by rank 1, which then sends the SHA-256 to rank 0
    checkpoints/step_40/state/trainer.pt    the rows of rank 0, and the state that is not sharded
    checkpoints/step_40/state/shard_1.pt    the file of rank 1, moved here before the checkpoint is renamed into place

A save uses no collective: while a run stops, some ranks may never reach the collective. All ranks of the replica must share the
run directory. A resume reads full tensors, one at a time, so it may use another `distributed.sharding`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import CheckpointError

from .manifest import STATE
from .state import Writer, check_plain, read_tensors, save_tensors

if TYPE_CHECKING:
    from torch import Tensor

SHARDS = "shards"  # a folder in `checkpoints/`


def write_shard(folder: Path, version: int, rank: int, state: Mapping[str, Any]) -> list[str]:
    """Write host tensors to the file of a rank above 0. Returns its path and SHA-256, for rank 0. Errors: CheckpointError.
    Removes the rank's other files, except the file of the newest lower version: rank 0 saves during training, and may not have
    moved that file yet. Files of higher versions are from an earlier attempt of the run."""
    check_plain(dict(state), f"shard {rank}")
    path = folder / f"step_{version}-rank_{rank}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = {
            int(old.name.removeprefix("step_").partition("-")[0]): old for old in folder.glob(f"step_*-rank_{rank}.pt")
        }
        lower = sorted(old for old in earlier if old < version)
        for old_version in [*lower[:-1], *(old for old in earlier if old > version)]:
            earlier[old_version].unlink(missing_ok=True)  # missing if rank 0 moves the file at this moment
        for unfinished in folder.glob(f"step_*-rank_{rank}.pt.partial"):
            unfinished.unlink()
        partial = path.with_name(path.name + ".partial")
        digest = save_tensors(partial, state)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        raise CheckpointError(
            f"rank {rank} could not write its part of version {version} to {path}: {error}"
        ) from error
    return [str(path.absolute()), digest]


def shards_writer(checkpoints: Path, version: int, shards: Mapping[int, Sequence[str]]) -> Writer:
    """A writer for rank 0 that moves the files of all other ranks into the checkpoint.
    `shards`: the results of `write_shard`, by rank."""

    def write(directory: Path) -> dict[str, str]:
        for rank, (written, _) in shards.items():
            # The run directory may have been moved after the rank wrote its file.
            candidates = Path(written), checkpoints / SHARDS / Path(written).name
            path = next((candidate for candidate in candidates if candidate.exists()), None)
            if path is None:
                raise CheckpointError(
                    f"rank {rank} wrote its part of version {version}, but rank 0 finds no {written}: with "
                    "distributed.sharding=fsdp all ranks must see the run directory; put run.dir on a shared file system"
                )
            shutil.move(path, directory / STATE / f"shard_{rank}.pt")
        return {f"{STATE}/shard_{rank}.pt": digest for rank, (_, digest) in shards.items()}

    return write


def join_shards(directory: Path, trainer: dict[str, Any]) -> dict[str, Any]:
    """The trainer state with the rows of all ranks. `masters` and `optimizer` become mappings that read a tensor at each access.

    `directory`: of the checkpoint. `trainer`: the dictionary of trainer.pt. Without the key `shard` it already has all rows, and is
    returned unchanged. Errors: CheckpointError.
    """
    shard = trainer.get("shard")
    if shard is None:
        return trainer
    paths = [directory / STATE / f"shard_{rank}.pt" for rank in range(1, int(shard["ranks"]))]
    parts = [trainer, *(read_tensors(path, lazily=True) for path in paths)]
    state = {key: value for key, value in trainer.items() if key != "shard"}
    state["masters"] = _JoinedTensors([part["masters"] for part in parts])
    state["optimizer"] = _JoinedTensors([part["optimizer"] for part in parts])
    return state


class _JoinedTensors(Mapping[str, Any]):
    """Name -> tensor, or name -> dictionary of tensors. Concatenates the rows of all parts; scalars are those of the first part."""

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Any:
        values = [part[name] for part in self._parts]
        if isinstance(values[0], Mapping):
            return {key: _join_rows([value[key] for value in values]) for key in values[0]}
        return _join_rows(values)

    def __contains__(self, name: object) -> bool:
        return name in self._parts[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0])

    def __len__(self) -> int:
        return len(self._parts[0])


def _join_rows(values: Sequence[Tensor]) -> Tensor:
    import torch

    return values[0] if values[0].ndim == 0 else torch.cat(list(values))
