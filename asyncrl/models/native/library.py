"""The native kernels of `native.cpp`, if they were built: a thin layer that hands over pointers, strides and sizes.

`takes(...)` says whether a call may be made: the library is there, the tensors are float32 or bfloat16 on the CPU, and their
rows have the sizes that the kernels know. Who gets False computes in torch. `ASYNCRL_NATIVE=0` turns them off, to
compare. The calls release the GIL and use as many threads as torch does here.

Shape legend: N rows, E hidden size, F size of the MLP, X heads, D head size, V vocabulary, n running rows, H query heads, K
key/value heads.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.builds import of_this_source, wanted

_CODES = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16  # numbers that a kernel takes at once
_HEAD_SIZES = (16, 32, 64, 128)
_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm": (_I, _P, _N, _P, _F, _F, _P, _N, _N, _N, _I),
    "rms_norm_backward": (_I, _P, _N, _P, _N, _P, _F, _F, _P, _P, _N, _N, _N, _I),
    "rotate": (_I, _P, _N, _N, _N, _P, _P, _F, _N, _I),
    "swiglu": (_I, _P, _N, _P, _N, _N, _N, _I),
    "swiglu_backward": (_I, _P, _N, _P, _N, _P, _N, _N, _N, _I),
    "head_statistics": (_I, _P, _N, _P, _P, _P, _P, _P, _N, _N, _I),
    "head_gradient": (_I, _P, _N, _P, _P, _P, _P, _P, _P, _N, _N, _I),
    "row_softmax": (_I, _P, _P, _P, _P, _N, _N, _N, _N, _N, _I),
    "row_softmax_backward": (_I, _P, _P, _F, _N, _N, _I),
    "add_widened": (_P, _P, _N, _I),
    "decode_attention": (_I, _P, _N, _P, _N, _P, _N, _P, _P, _N, _N, _P, _F, _P, _N, _N, _N, _N, _I),
}


def _load() -> ctypes.CDLL | None:
    """The build for this machine; torch's own judgement of the CPU counts, so `ATEN_CPU_CAPABILITY` works here too."""
    if not wanted():
        return None
    here = Path(__file__).parent
    name = {"AVX512": "_native_avx512", "AVX2": "_native_avx2"}.get(torch.backends.cpu.get_cpu_capability())
    for path in sorted(here.glob(f"{name}.*so")):
        try:
            library = ctypes.CDLL(str(path))
            library.asyncrl_source.restype = ctypes.c_uint32
            if not of_this_source(path.name, library.asyncrl_source(), [here / "native.cpp", here / "vectors.h"]):
                continue
            for function, signature in _SIGNATURES.items():
                entry = getattr(library, f"asyncrl_{function}")
                entry.argtypes, entry.restype = signature, None
        except (OSError, AttributeError):  # built for another machine
            continue
        return library
    return None


_library = _load()


def available() -> bool:
    """Whether the native kernels were built for this machine and are not turned off."""
    return _library is not None


def build() -> str:
    """Which kernels run: avx512, avx2, or torch's own."""
    return "torch" if _library is None else Path(_library._name).name.partition(".")[0].removeprefix("_native_")


def takes(*tensors: Tensor, size: int = LANES) -> bool:
    """Rows (the last dimension) of `size` values, contiguous, all of one dtype and on the CPU."""
    if _library is None or size % LANES:
        return False
    dtype = tensors[0].dtype
    if dtype not in _CODES:
        return False
    # No generator: it would cost as much again, for each kernel of each layer.
    for tensor in tensors:  # noqa: SIM110
        if tensor.dtype != dtype or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
            return False
    return True


def attends(size: int, *tensors: Tensor) -> bool:
    """Whether `decode_attention` knows heads of `size`."""
    return size in _HEAD_SIZES and takes(*tensors, size=size)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, offset: float = 0.0) -> None:
    """x [N, E], weight [E] -> out [N, E]; may be in place."""
    _call("rms_norm", x, x, x.stride(0), weight, offset, eps, out, out.stride(0), *x.shape)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, grad_weight: Tensor | None, out: Tensor, offset: float = 0.0
) -> None:
    """`out` [N, E] += gradient of the input, `grad_weight` [E] += that of the weight."""
    parts = None
    # Dtype and device named: the process's defaults may be others.
    if grad_weight is not None:
        parts = torch.zeros(torch.get_num_threads(), x.shape[1], dtype=torch.float32, device="cpu")
    _call(
        "rms_norm_backward", x, grad, grad.stride(0), x, x.stride(0), weight, offset, eps, parts, out, out.stride(0),
        *x.shape,
    )  # fmt: skip
    if grad_weight is not None and parts is not None:
        grad_weight.add_(parts.sum(0))


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """heads [N, X, D] in place, D contiguous and heads adjacent; cos and sin [N, D / 2], contiguous."""
    count, size = heads.shape[1:]
    _call("rotate", heads, heads, heads.stride(0), count, size // 2, cos, sin, sign, heads.shape[0])


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [N, 2F] -> out [N, F]."""
    _call("swiglu", out, gate_up, gate_up.stride(0), out, out.stride(0), *out.shape)


def swiglu_backward_(gate_up: Tensor, grad: Tensor, product: Tensor) -> None:
    """`gate_up` [N, 2F] becomes its own gradient, `product` [N, F] the forward's result."""
    _call(
        "swiglu_backward",
        grad,
        gate_up,
        gate_up.stride(0),
        grad,
        grad.stride(0),
        product,
        product.stride(0),
        *grad.shape,
    )


def head_statistics(
    logits: Tensor, inverse: Tensor, target: Tensor, logp: Tensor, lse: Tensor, entropy: Tensor
) -> None:
    """logits [N, V] -> `logp`, `lse`, `entropy` [N], float32; `target` is int64; all but the logits contiguous."""
    _call("head_statistics", logits, logits, logits.stride(0), inverse, target, logp, lse, entropy, *logits.shape)


def head_gradient_(
    logits: Tensor,
    inverse: Tensor,
    target: Tensor,
    lse: Tensor,
    slope: Tensor,
    bend: tuple[Tensor, Tensor] | None,
) -> None:
    """logits [N, V] become their gradient; everything else [N] float32, `target` int64, all contiguous."""
    outer, entropy = bend or (None, None)
    _call("head_gradient", logits, logits, logits.stride(0), inverse, target, lse, slope, outer, entropy, *logits.shape)


def row_softmax(scores: Tensor, out: Tensor, prefix_R: Tensor, own_R: Tensor, heads: int, length: int) -> None:
    """scores [R K, L G, P + L], float32, contiguous -> weights `out`, of that shape, contiguous. Query l of row r sees the
    first `prefix_R[r]` keys and own keys 0..l of `own_R[r]` (int64); the others get 0."""
    count = prefix_R.numel()
    group, context = scores.shape[1] // length, scores.shape[2] - length
    _call("row_softmax", out, scores, out, prefix_R, own_R, count, heads, length, group, context)


def row_softmax_backward_(weights: Tensor, slope: Tensor, scale: float) -> None:
    """`slope` [..., C], the gradient of `weights` [..., C], becomes that of the scores times `scale`. Both contiguous."""
    size = weights.shape[-1]
    _call("row_softmax_backward", weights, weights, slope, scale, weights.numel() // size, size)


def add_widened(target: Tensor, source: Tensor) -> None:
    """float32 `target` += bfloat16 `source`, both contiguous and of one length."""
    assert _library is not None
    _library.asyncrl_add_widened(target.data_ptr(), source.data_ptr(), source.numel(), torch.get_num_threads())


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, position_n: Tensor, scaling: float
) -> Tensor:
    """Writes `key` and `value` [n, K, D] at `position_n` (int64) of `keys` and `values` [rows, K, positions, D] and attends
    with `query` [n, H, D] over [0..position] -> [n, H, D]. Errors: ValueError for another dtype or head size than the cache's."""
    (rows, total, size), heads = query.shape, keys.shape[1]
    one_dtype = query.dtype == key.dtype == value.dtype == keys.dtype
    if not one_dtype or size != keys.shape[3] or not key.shape == value.shape == (rows, heads, size):
        raise ValueError(
            f"decode attention: the cache holds {heads} heads of {keys.shape[3]} in {keys.dtype}; found queries of "
            f"{tuple(query.shape)} in {query.dtype}, keys of {tuple(key.shape)} in {key.dtype}, values of "
            f"{tuple(value.shape)} in {value.dtype}"
        )
    if query.stride(1) != size or query.stride(2) != 1:  # heads of a row must be adjacent
        query = query.contiguous()
    if key.stride(1) != size or value.stride(1) != size or key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _call(
        "decode_attention", query, query, query.stride(0), key, key.stride(0), value, value.stride(0), keys, values,
        keys.stride(0), keys.stride(1), position_n, scaling, out, rows, heads, total // heads, size,
    )  # fmt: skip
    return out


def _call(name: str, like: Tensor, *arguments: Tensor | int | float | None) -> None:
    """Tensors as pointers; a scratch tensor that an argument refers to lives until the call is over."""
    plain: list[int | float | None] = [_CODES[like.dtype]]
    for argument in arguments:
        plain.append(argument.data_ptr() if isinstance(argument, Tensor) else argument)
    getattr(_library, f"asyncrl_{name}")(*plain, torch.get_num_threads())
