"""State that is cut over ranks: each rank writes its rows, rank 0 takes the files into the checkpoint, a resume reads a whole.

    checkpoints/shards/step_40-rank_1.pt    written by rank 1 before it tells rank 0 where it is
    checkpoints/step_40/state/trainer.pt    rank 0's rows, and what is not cut
    checkpoints/step_40/state/shard_1.pt    the file of rank 1, moved here before the checkpoint gets its name

No collective: a run that is being stopped may have ranks that will never join one. All ranks must see one directory.
Whoever reads gets whole tensors, one at a time, whatever the number of ranks that wrote: a run may go on with another
`distributed.sharding`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import CheckpointError

from .manifest import STATE
from .state import Writer, check_plain, read_tensors, save_tensors

if TYPE_CHECKING:
    from torch import Tensor

_FOLDER = "shards"


def _path(checkpoints: Path, version: int, rank: int) -> Path:
    return checkpoints / _FOLDER / f"step_{version}-rank_{rank}.pt"


def write_shard(checkpoints: Path, version: int, rank: int, state: Mapping[str, Any]) -> str:
    """On rank > 0: the file for rank 0, and its SHA-256; this rank's earlier ones are removed, but for the last, which rank 0
    may not have taken yet (it writes while training goes on). Host tensors. Errors: CheckpointError."""
    check_plain(state, f"shard {rank}")
    path = _path(checkpoints, version, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = {int(old.name[5:].partition("-")[0]): old for old in path.parent.glob(f"step_*-rank_{rank}.pt")}
        for old in [waiting[each] for each in sorted(waiting)[:-1]]:
            old.unlink(missing_ok=True)  # rank 0 may take it now
        for torn in path.parent.glob(f"step_*-rank_{rank}.pt.partial"):
            torn.unlink()
        partial = path.with_name(path.name + ".partial")
        digest = save_tensors(partial, state)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where a disk is full
        raise CheckpointError(
            f"rank {rank} could not write its part of version {version} to {path}: {error}"
        ) from error
    return digest


def shards_writer(checkpoints: Path, version: int, digests: Mapping[int, str]) -> Writer:
    """On rank 0: moves the files of all other ranks into the checkpoint. `digests`: what `write_shard` said there, by rank."""

    def write(directory: Path) -> dict[str, str]:
        for rank in digests:
            path = _path(checkpoints, version, rank)
            if not path.exists():
                raise CheckpointError(
                    f"rank {rank} wrote its part of version {version}, but there is no {path} here: with "
                    "distributed.sharding=fsdp all ranks must see the run directory; put run.dir on a shared file system"
                )
            os.replace(path, directory / STATE / f"shard_{rank}.pt")
        return {f"{STATE}/shard_{rank}.pt": digest for rank, digest in digests.items()}

    return write


def joined(directory: Path, first: dict[str, Any]) -> dict[str, Any]:
    """The state of all ranks as one: `masters` and `optimizer` become mappings that read whole tensors when asked.

    `directory`: of the checkpoint. `first`: what trainer.pt holds; without `shard` it is whole. Errors: CheckpointError.
    """
    shard = first.get("shard")
    if shard is None:
        return first
    paths = [directory / STATE / f"shard_{rank}.pt" for rank in range(1, int(shard["ranks"]))]
    parts = [first, *(read_tensors(path, lazily=True) for path in paths)]
    whole = {key: value for key, value in first.items() if key != "shard"}
    whole["masters"] = _Joined([part["masters"] for part in parts])
    whole["optimizer"] = _Joined([part["optimizer"] for part in parts])
    return whole


class _Joined(Mapping[str, Any]):
    """Name -> whole tensor, or dictionary of them. Numbers are those of the first part."""

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Any:
        values = [part[name] for part in self._parts]
        if isinstance(values[0], Mapping):
            return {key: _cat([value[key] for value in values]) for key in values[0]}
        return _cat(values)

    def __contains__(self, name: object) -> bool:
        return name in self._parts[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0])

    def __len__(self) -> int:
        return len(self._parts[0])


def _cat(values: Sequence[Tensor]) -> Tensor:
    import torch

    return values[0] if values[0].ndim == 0 else torch.cat(list(values))
