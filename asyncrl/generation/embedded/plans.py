"""The attention plans over the embedded engine's cache. A plan serves one forward: it computes the attention of each layer.

`DecodePlan`: one token for each running row. `ExtendPlan`: pieces of rows (prefill). If the cache has a kernel for ragged rows (of
several lengths), a plan calls it once in each layer. This kernel takes sliding windows, but no soft-capped scores and no sinks.
*Terms* of a layer are a window shorter than a row, soft-capped scores, and sinks. If no kernel computes them, a plan reads only the
band of positions that the rows see (`models.attention.general`).

Shape legend: T packed tokens, H query heads, K key/value heads, D head size, n running rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.models.attention.general import attend_seen, cut_into_blocks, visible
from asyncrl.models.attention.interface import NO_TERMS, AttentionPlan, AttentionTerms
from asyncrl.models.attention.ragged import Ends, RaggedRows
from asyncrl.models.copying import to_device
from asyncrl.models.native import library as native
from asyncrl.types import Int64Array

from .cache import KVCache

# Limit of the float32 keys that a band of several rows reads. bfloat16 keys are copied to float32; the copy must fit CPU caches.
_BAND_BYTES = 8 << 20
# The limit on a GPU. It is larger, because the dozen launches of each band take as long as reading 128 MiB.
_DEVICE_BAND_BYTES = 256 << 20


def split_bands(position_n: Int64Array, window: int | None, max_positions: int) -> list[tuple[int, int, int, int]]:
    """Split rows [0..n), with queries at `position_n`, into bands (start, stop, low, high): rows [start..stop) see only positions
    [low..high). A band of several rows reads at most `max_positions` positions, summed over its rows."""
    first_n = np.zeros_like(position_n) if window is None else np.maximum(position_n - (window - 1), 0)
    bands: list[tuple[int, int, int, int]] = []
    for row, (first, last) in enumerate(zip(first_n.tolist(), position_n.tolist(), strict=True)):
        start, _, low, high = bands.pop() if bands else (row, row, first, last + 1)
        widened = start, row + 1, min(low, first), max(high, last + 1)
        if (row + 1 - start) * (widened[3] - widened[2]) <= max_positions or start == row:
            bands.append(widened)
        else:
            bands += [(start, row, low, high), (row, row + 1, first, last + 1)]
    return bands


class _CachePieces:
    """Pieces of rows that are written to the cache and attend causally over their row, by the cache's kernel. The host computes all
    indices once, and one copy brings them to the device."""

    def __init__(self, cache: KVCache, layout: Tensor, count: int, longest_q: int, longest_k: int) -> None:
        """`layout`: the result of `make_layout` for `count` pieces, on the device. `longest_q`: tokens of the longest piece.
        `longest_k`: most positions that a piece reads."""
        self.cache = cache
        tokens = layout.numel() - 3 * count - 2
        self._write_index, queries, keys, used = layout.split([tokens, count + 1, count + 1, count])
        self._queries = Ends(queries.to(torch.int32), longest_q)
        self._keys = Ends(keys.to(torch.int32), longest_k)
        self._used = used.to(torch.int32)

    @staticmethod
    def make_layout(cache: KVCache, row_n: Int64Array, start_n: Int64Array, length_n: Int64Array) -> Int64Array:
        """Row, first position and length of each of n pieces -> int64 [T + 3 n + 2], in this order: each token's index in the flat
        cache [T]; the bounds of the pieces among the tokens [n + 1]; each row's start in the flat cache, and the end of the last
        piece there [n + 1]; the number of positions that each piece reads [n]."""
        row_start_n = row_n * cache.shape.positions
        piece_start_n = np.cumsum(length_n) - length_n
        end_n = start_n + length_n
        index_T = np.repeat(row_start_n + start_n - piece_start_n, length_n) + np.arange(length_n.sum())
        pieces = [piece_start_n, length_n.sum(keepdims=True)]
        return np.concatenate([index_T, *pieces, row_start_n, row_start_n[-1:] + end_n[-1:], end_n])

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D] of the pieces, one after another -> [T, H, D]."""
        self.write(layer, key, value)
        assert self.cache.ragged_kernel is not None
        keys, values = self.cache.flat_keys[layer], self.cache.flat_values[layer]
        rows = RaggedRows(self._queries, self._keys, True, window)
        return self.cache.ragged_kernel.cached((query, keys, values), rows, self._used, scaling)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values to the cache without attention."""
        self.cache.flat_keys[layer].index_copy_(0, self._write_index, key)
        self.cache.flat_values[layer].index_copy_(0, self._write_index, value)

    def supports(self, terms: AttentionTerms) -> bool:
        """Whether the kernel computes these terms."""
        return terms.softcap is None and terms.sinks is None


class DecodePlan(AttentionPlan):
    """One token for each of the rows [0..n): writes its key and value at `position_n`, attends over [0..position]."""

    def __init__(self, cache: KVCache, position_n: Int64Array, layout: Tensor | None = None) -> None:
        """`layout`: a device tensor with a result of `DecodePlan.layout`. None: the plan makes the layout of `position_n`. For a
        CUDA graph the caller may overwrite the tensor with the layout of positions that are at most the largest of `position_n`."""
        self.cache = cache
        self.position_n = np.ascontiguousarray(position_n, np.int64)
        self.longest = int(position_n.max(initial=-1)) + 1
        self._write_index: Tensor | None = None
        self._bands: dict[int | None, list[tuple[slice, slice, Tensor]]] = {}
        self._ragged: _CachePieces | None = None
        if cache.ragged_kernel is not None:
            if layout is None:
                layout = to_device(self.layout(cache, position_n), cache.device)
            self._ragged = _CachePieces(cache, layout, position_n.size, 1, self.longest)
        if cache.has_native_kernel or self._ragged is not None:
            return
        # Additive, [n, 1, 1, longest]: the rows are padded to the longest.
        self._mask: Tensor | None = None
        if int(position_n.min(initial=self.longest)) + 1 < self.longest:
            length_n = to_device(position_n + 1, cache.device)[:, None, None, None]
            padding = torch.arange(self.longest, device=cache.device) >= length_n
            self._mask = torch.zeros(padding.shape, dtype=cache.data.dtype, device=cache.device)
            self._mask.masked_fill_(padding, float("-inf"))

    @staticmethod
    def layout(cache: KVCache, position_n: Int64Array) -> Int64Array:
        """The indices of one decode step of rows [0..n), for a cache with a kernel for ragged rows."""
        row_n = np.arange(position_n.size)
        return _CachePieces.make_layout(cache, row_n, position_n, np.ones_like(row_n))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """`query` [n, H, D], `key` and `value` [n, K, D] -> [n, H, D]."""
        cache = self.cache
        size = cache.shape.head_size
        if self._ragged is not None and self._ragged.supports(terms):
            return self._ragged.attend(layer, query, key, value, scaling, terms.simplified_for(self.longest).window)
        if terms is not NO_TERMS:
            terms = terms.simplified_for(self.longest)
            if not terms.empty:
                return self._attend_with_terms(layer, query, key, value, scaling, terms)
        if cache.has_native_kernel:
            return native.decode_attention(
                query, key, value, cache.keys[layer], cache.values[layer], torch.from_numpy(self.position_n), scaling
            )
        self._write(layer, key, value)
        n, heads = query.shape[0], query.shape[1]
        grouped = query.reshape(n, cache.shape.heads, -1, size)  # [n, K, G, D]: G queries share a key head
        keys, values = cache.keys[layer][:n, :, : self.longest], cache.values[layer][:n, :, : self.longest]
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scaling)
        return out.reshape(n, heads, size)

    def _attend_with_terms(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms
    ) -> Tensor:
        self._write(layer, key, value)
        n, heads, size = query.shape
        grouped = query.reshape(n, self.cache.shape.heads, -1, size)  # [n, K, G, D]
        out = query.new_empty(grouped.shape)
        for rows, band, seen in self._bands_of(terms.window):
            keys = self.cache.keys[layer][rows, :, band].flatten(0, 1)
            values = self.cache.values[layer][rows, :, band].flatten(0, 1)
            part = attend_seen(grouped[rows].flatten(0, 1), keys, values, seen, scaling, terms.softcap, terms.sinks)
            out[rows] = part.view(-1, *grouped.shape[1:])
        return out.view(n, heads, size)

    def _bands_of(self, window: int | None) -> list[tuple[slice, slice, Tensor]]:
        """Each band: its rows, the positions that it reads, and the mask of seen positions, bool [rows, 1, positions]."""
        if window not in self._bands:
            cache, device = self.cache, self.cache.device
            band_bytes = _BAND_BYTES if device.type == "cpu" else _DEVICE_BAND_BYTES
            max_positions = band_bytes // (4 * cache.shape.heads * cache.shape.head_size)
            self._bands[window] = []
            for start, stop, low, high in split_bands(self.position_n, window, max_positions):
                position = to_device(self.position_n[start:stop, None], device)
                seen = visible(position, torch.arange(low, high, device=device), window)
                self._bands[window].append((slice(start, stop), slice(low, high), seen))
        return self._bands[window]

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        cache, shape = self.cache, self.cache.shape
        if self._ragged is not None:
            self._ragged.write(layer, key, value)
            return
        if self._write_index is None:  # [n * K], indices of the flat buffer
            heads = np.arange(self.position_n.size)[:, None] * shape.heads + np.arange(shape.heads)
            index = (heads * shape.positions + self.position_n[:, None]).reshape(-1)
            self._write_index = to_device(index, cache.device)
        cache.flat_keys[layer].index_copy_(0, self._write_index, key.reshape(-1, shape.head_size))
        cache.flat_values[layer].index_copy_(0, self._write_index, value.reshape(-1, shape.head_size))


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Known tokens [start..start + length) of the sequence in `slot`. The cache row `row` holds the tokens before `start`."""

    slot: int
    row: int
    start: int
    length: int


class ExtendPlan(AttentionPlan):
    """Packed pieces: each writes its keys and values to its row, and attends causally over that row. Neighbouring pieces that start
    at 0 and have equal lengths share one attention call, so callers sort pieces by length."""

    def __init__(self, cache: KVCache, pieces: list[PromptPiece]) -> None:
        self.cache = cache
        self.pieces = pieces
        self.offsets = np.cumsum([0, *(piece.length for piece in pieces)]).tolist()
        self.longest = max((piece.start + piece.length for piece in pieces), default=0)
        self.calls: list[tuple[int, int]] = []  # (first, stop): pieces [first..stop) share one call
        for index, piece in enumerate(pieces):
            previous = pieces[index - 1] if index else None
            joins = previous is not None and previous.start == piece.start == 0 and previous.length == piece.length
            if joins:
                self.calls[-1] = (self.calls[-1][0], index + 1)
            else:
                self.calls.append((index, index + 1))
        self._ragged: _CachePieces | None = None
        if cache.ragged_kernel is not None:
            row_n, start_n, length_n = np.array([(piece.row, piece.start, piece.length) for piece in pieces]).T
            layout = to_device(_CachePieces.make_layout(cache, row_n, start_n, length_n), cache.device)
            self._ragged = _CachePieces(cache, layout, len(pieces), int(length_n.max()), self.longest)
            return
        self.masks = {index: self._mask(piece) for index, piece in enumerate(pieces) if piece.start}

    def _mask(self, piece: PromptPiece) -> Tensor:
        """Additive causal mask [length, start + length] of a piece whose first `start` positions are cached."""
        device, dtype = self.cache.device, self.cache.data.dtype
        end = piece.start + piece.length
        query_position = torch.arange(piece.start, end, device=device).unsqueeze(1)
        mask = torch.zeros(piece.length, end, dtype=dtype, device=device)
        return mask.masked_fill_(torch.arange(end, device=device) > query_position, float("-inf"))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """`query` [T, H, D], `key` and `value` [T, K, D] -> [T, H, D]."""
        cache = self.cache
        if self._ragged is not None and self._ragged.supports(terms):
            return self._ragged.attend(layer, query, key, value, scaling, terms.simplified_for(self.longest).window)
        for piece, offset in zip(self.pieces, self.offsets, strict=False):
            packed = slice(offset, offset + piece.length)
            positions = slice(piece.start, piece.start + piece.length)
            cache.keys[layer][piece.row, :, positions] = key[packed].transpose(0, 1)
            cache.values[layer][piece.row, :, positions] = value[packed].transpose(0, 1)
        terms = terms.simplified_for(self.longest)
        if not terms.empty:
            return self._attend_with_terms(layer, query, scaling, terms)
        out = torch.empty_like(query)
        for first, stop in self.calls:
            packed = slice(self.offsets[first], self.offsets[stop])
            if first in self.masks:
                out[packed] = self._attend_over_row(layer, first, query[packed], scaling)
            else:
                q, k, v = (
                    tensor[packed].unflatten(0, (stop - first, -1)).transpose(1, 2) for tensor in (query, key, value)
                )
                attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
                out[packed] = attended.transpose(1, 2).flatten(0, 1)
        return out

    def _attend_over_row(self, layer: int, index: int, query: Tensor, scaling: float) -> Tensor:
        """`query` [length, H, D] of piece number `index`, whose row has earlier positions -> [length, H, D]."""
        piece, shape = self.pieces[index], self.cache.shape
        end = piece.start + piece.length
        shared_by = query.shape[1] // shape.heads  # G, query heads per key head
        # [K, G, end, D], with stride 0 in G
        keys = self.cache.keys[layer][piece.row, :, None, :end].expand(-1, shared_by, -1, -1)
        values = self.cache.values[layer][piece.row, :, None, :end].expand(-1, shared_by, -1, -1)
        grouped = query.unflatten(1, (shape.heads, shared_by)).permute(1, 2, 0, 3)  # [K, G, length, D]
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=self.masks[index], scale=scaling)
        return attended.permute(2, 0, 1, 3).flatten(1, 2)

    def _attend_with_terms(self, layer: int, query: Tensor, scaling: float, terms: AttentionTerms) -> Tensor:
        shape, device = self.cache.shape, self.cache.device
        out = torch.empty_like(query)
        for piece, offset in zip(self.pieces, self.offsets, strict=False):
            keys = self.cache.keys[layer][piece.row]  # [K, positions, D]
            values = self.cache.values[layer][piece.row]
            for block in cut_into_blocks(piece.start, piece.length, terms.window, query.shape[1]):
                band = slice(block.low, block.end)
                packed = slice(offset + block.first - piece.start, offset + block.end - piece.start)
                grouped = query[packed].unflatten(1, (shape.heads, -1)).transpose(0, 1)  # [K, L, G, D]
                column = torch.arange(block.low, block.end, device=device)
                seen = visible(column[block.first - block.low :], column, terms.window)
                part = attend_seen(
                    grouped.flatten(1, 2), keys[:, band], values[:, band], seen.unsqueeze(0), scaling, terms.softcap,
                    terms.sinks,
                )  # fmt: skip
                out[packed] = part.view(grouped.shape).transpose(0, 1).flatten(1, 2)
        return out
