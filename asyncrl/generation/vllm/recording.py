"""Copies weights from a flat buffer with transformers' names into vLLM's model, whose parameters have other names and shapes.

vLLM loads its weights once, from views of a buffer. Meanwhile `record` intercepts torch's dispatcher and notes each copy into a
parameter. `fill` repeats the copies from later buffers.

`record` refuses a parameter that was computed instead of copied (transposed, scaled), or was not written exactly once.
`require_all_read` refuses a weight that vLLM did not read: vLLM would compute another model without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.errors import ConfigError
from asyncrl.models.parameters.layout import Layout

_USE_OTHER = "use generation.engine=embedded"


class RecordedPiece(NamedTuple):
    """A copy of `rows` times `size` elements to offset `target` of the parameter. In the parameter the rows are contiguous. In the
    buffer, row i begins at offset `source + i * step`. `rows` is above 1 if this process of a tensor-parallel engine has only some
    columns of a weight. `source` None: zeros (padding)."""

    target: int
    source: int | None
    size: int
    rows: int = 1
    step: int = 0


def fill(pieces: Iterable[RecordedPiece], buffer: Tensor, parameter: Tensor) -> None:
    """Copy the weights of `buffer` into a parameter. Padding stays zero."""
    flat = parameter.view(-1)
    for target, source, size, rows, step in pieces:
        if source is not None:
            rows_of_buffer = buffer.as_strided((rows, size), (step, 1), source + buffer.storage_offset())
            flat[target : target + rows * size].view(rows, size).copy_(rows_of_buffer)


Load = Callable[[Iterable[tuple[str, Tensor]]], object]


def record(load: Load, layout: Layout, buffer: Tensor, targets: Mapping[str, Tensor]) -> dict[str, list[RecordedPiece]]:
    """For each of `targets`, the pieces that `load` copies into the target from views of `buffer`, sorted by offset in the target.
    Pieces that are neighbours both in the target and in the buffer are merged. `targets` must not share storage. Call
    `require_all_read` afterwards. Errors: ConfigError for a parameter that does not consist only of copies."""
    with _WriteRecorder(buffer, targets) as writes:
        load(layout.views(buffer))
    return {
        name: _merge_pieces(name, tensor, [] if name in writes.computed else writes.found[name])
        for name, tensor in targets.items()
    }


class _WriteRecorder(TorchDispatchMode):
    """Records every write into the targets: copies of the buffer, zeros, and (in `computed`) anything else, such as a change in
    place after a copy. A comparison of values cannot replace the recorder: the trainer may write into the buffer, a half of the
    weight board, during the load."""

    def __init__(self, buffer: Tensor, targets: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._source, self._origin = buffer.untyped_storage().data_ptr(), int(buffer.storage_offset())
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in targets.items()}
        self.found: dict[str, list[RecordedPiece]] = {name: [] for name in targets}
        self.computed: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._record_write(func, arguments.get(argument.name), args)
        return result

    def _record_write(self, func: Any, written: Any, args: Any) -> None:
        """Record that `func` has written into this argument: a tensor, or a list of tensors."""
        for target in written if isinstance(written, list | tuple) else [written]:
            if not isinstance(target, Tensor) or not target.numel():
                continue
            name = self._names.get(target.untyped_storage().data_ptr())
            if name is None:
                continue
            piece = self._piece(func, target, args)
            if piece is None:
                self.computed.add(name)
            else:
                self.found[name].append(piece)

    def _piece(self, func: Any, target: Tensor, args: Any) -> RecordedPiece | None:
        """The piece, if `func` was `fill_(0)`, or a `copy_` of buffer elements that a piece can describe; else None."""
        if func not in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar) or not target.is_contiguous():
            return None
        start, size, source = int(target.storage_offset()), target.numel(), args[1]
        if not isinstance(source, Tensor):
            return RecordedPiece(start, None, size) if source == 0 else None
        is_of_buffer = source.untyped_storage().data_ptr() == self._source
        if not is_of_buffer or source.shape != target.shape:
            return None
        offset = int(source.storage_offset()) - self._origin
        if source.is_contiguous():
            return RecordedPiece(start, offset, size)
        if source.ndim != 2 or source.stride(1) != 1:
            return None
        rows, columns = source.shape
        return RecordedPiece(start, offset, columns, rows, source.stride(0))


def _merge_pieces(name: str, tensor: Tensor, found: list[RecordedPiece]) -> list[RecordedPiece]:
    pieces: list[RecordedPiece] = []
    covered = 0
    for piece in sorted(found, key=lambda piece: piece.target):
        if piece.target != covered:
            break
        covered += piece.size * piece.rows
        last = pieces[-1] if pieces else None
        single = last is not None and last.rows == piece.rows == 1
        if last and single and last.source is not None and last.source + last.size == piece.source:
            pieces[-1] = last._replace(size=last.size + piece.size)
        else:
            pieces.append(piece)
    if (
        covered != tensor.numel()
        or sum(piece.size * piece.rows for piece in found) != covered
        or not tensor.is_contiguous()
    ):
        raise ConfigError(
            f"model.path: vLLM computes its parameter {name} {tuple(tensor.shape)} from the weights, or does not copy each "
            f"element once, so new versions cannot be handed to it; {_USE_OTHER}"
        )
    return pieces


def require_all_read(layout: Layout, pieces: Iterable[RecordedPiece]) -> None:
    """Errors: ConfigError for a weight that is not read as a whole. `pieces`: of all parameters, in all processes of an engine."""
    table = np.array([piece[1:] for piece in pieces if piece.source is not None], np.int64).reshape(-1, 4)
    source, size, count, step = (np.repeat(column, table[:, 2]) for column in table.T)
    # The index of each row in its piece.
    number = np.arange(count.size) - np.repeat(np.cumsum(table[:, 2]) - table[:, 2], table[:, 2])
    starts, ends = source + number * step, source + number * step + size
    order = np.argsort(starts, kind="stable")
    starts, furthest = starts[order], np.maximum.accumulate(ends[order])
    # Spans of elements that were read: touching rows are one span.
    gaps = starts[1:] > furthest[:-1]
    span_starts, span_ends = starts[np.r_[True, gaps][: starts.size]], furthest[np.r_[gaps, True][: starts.size]]
    for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets, strict=True):
        last = offset + torch.Size(shape).numel()
        span = int(np.searchsorted(span_starts, offset, side="right")) - 1
        if span < 0 or last > span_ends[span]:
            raise ConfigError(
                f"model.path: vLLM does not read the weight {name} {shape}, so it would compute another model; {_USE_OTHER}"
            )
