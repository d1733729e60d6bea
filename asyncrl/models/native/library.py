"""Calls the native kernels of `native.cpp`, if they were built: passes pointers, strides and sizes of tensors.

Before a call ask `takes(...)`, or `attends(...)` for `decode_attention`. If the answer is False, compute in torch.
`ASYNCRL_NATIVE=0` turns the kernels off, for a comparison with torch. A call releases the GIL and uses as many threads as torch.

Shape legend: N rows, E hidden size, F size of the MLP, X heads, D head size, V vocabulary, n running rows, H query heads, K
key/value heads. The shapes of `row_softmax` are those of `attention/rows.py`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.builds import is_current_build, native_enabled

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
SIMD_WIDTH = 16  # values that the kernels compute at once (SIMD)
_HEAD_SIZES = (16, 32, 64, 128)  # of `decode_attention`
_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
# Argument types of the C functions.
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
    """The library for the instruction set that torch uses (`ATEN_CPU_CAPABILITY` may lower it). None if not built or turned off."""
    name = {"AVX512": "_native_avx512", "AVX2": "_native_avx2"}.get(torch.backends.cpu.get_cpu_capability())
    if name is None or not native_enabled():
        return None
    folder = Path(__file__).parent
    sources = [folder / "native.cpp", folder / "vectors.h"]
    for path in sorted(folder.glob(f"{name}.*so")):
        # A library that was built for another machine raises OSError or AttributeError.
        try:
            library = ctypes.CDLL(str(path))
            library.asyncrl_source.restype = ctypes.c_uint32
            if not is_current_build(path.name, library.asyncrl_source(), sources):
                continue
            for function, signature in _SIGNATURES.items():
                entry = getattr(library, f"asyncrl_{function}")
                entry.argtypes, entry.restype = signature, None
        except (OSError, AttributeError):
            continue
        return library
    return None


_library = _load()


def available() -> bool:
    """Whether the native kernels are built for this machine and not turned off."""
    return _library is not None


def build_name() -> str:
    """The instruction set of the native kernels: "avx512" or "avx2". Without native kernels: "torch"."""
    return "torch" if _library is None else Path(_library._name).name.partition(".")[0].removeprefix("_native_")


def takes(*tensors: Tensor, size: int = SIMD_WIDTH) -> bool:
    """Whether the kernels can compute with these tensors. All tensors must be on the CPU, contiguous in the last dimension, and of
    one dtype: float32 or bfloat16. `size`, the number of values in a row, must be a multiple of `SIMD_WIDTH`; leave it out for a
    kernel that takes rows of any size."""
    if _library is None or size % SIMD_WIDTH:
        return False
    dtype = tensors[0].dtype
    if dtype not in _DTYPE_CODES:
        return False
    # A generator would double the time of this function, which runs for each kernel of each layer.
    for tensor in tensors:  # noqa: SIM110
        if tensor.dtype != dtype or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
            return False
    return True


def attends(size: int, *tensors: Tensor) -> bool:
    """Whether `decode_attention` can compute with heads of `size` values in these tensors."""
    return size in _HEAD_SIZES and takes(*tensors, size=size)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, offset: float = 0.0) -> None:
    """x [N, E], weight [E] -> out [N, E]. `out` may be `x`. The formula is that of `kernels.rms_norm`."""
    _call("rms_norm", x, x, x.stride(0), weight, offset, eps, out, out.stride(0), *x.shape)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, grad_weight: Tensor | None, out: Tensor, offset: float = 0.0
) -> None:
    """Adds the gradient of the input to `out` [N, E], and the gradient of the weight to `grad_weight` [E]. `grad` is [N, E]."""
    thread_sums = None
    if grad_weight is not None:
        # Without dtype and device torch would use the defaults of the process.
        thread_sums = torch.zeros(torch.get_num_threads(), x.shape[1], dtype=torch.float32, device="cpu")
    _call(
        "rms_norm_backward", x, grad, grad.stride(0), x, x.stride(0), weight, offset, eps, thread_sums, out, out.stride(0),
        *x.shape,
    )  # fmt: skip
    if grad_weight is not None and thread_sums is not None:
        grad_weight.add_(thread_sums.sum(0))


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """Rotates heads [N, X, D] in place, by negated angles if `sign` is -1. cos, sin [N, D / 2] and each heads[n] are contiguous."""
    count, size = heads.shape[1:]
    _call("rotate", heads, heads, heads.stride(0), count, size // 2, cos, sin, sign, heads.shape[0])


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [N, 2F] -> out [N, F] = silu(gate) * up."""
    _call("swiglu", out, gate_up, gate_up.stride(0), out, out.stride(0), *out.shape)


def swiglu_backward_(gate_up: Tensor, grad: Tensor, product: Tensor) -> None:
    """Overwrites `gate_up` [N, 2F] with its gradient, and `product` [N, F] with the output of `swiglu`. `grad` is [N, F]."""
    rows = gate_up, gate_up.stride(0), grad, grad.stride(0), product, product.stride(0)
    _call("swiglu_backward", grad, *rows, *grad.shape)


def head_statistics(
    logits: Tensor, inverse: Tensor, target: Tensor, logp: Tensor, lse: Tensor, entropy: Tensor
) -> None:
    """Writes `logp`, `lse` and `entropy` [N] float32 of logits [N, V] at temperature 1 / `inverse` [N]. `target` [N] is int64. All
    tensors but the logits must be contiguous."""
    _call("head_statistics", logits, logits, logits.stride(0), inverse, target, logp, lse, entropy, *logits.shape)


def head_gradient_(
    logits: Tensor, inverse: Tensor, target: Tensor, lse: Tensor, slope: Tensor, bonus: tuple[Tensor, Tensor] | None
) -> None:
    """Overwrites logits [N, V] with their gradient. `inverse` is 1 / temperature. `slope` is the gradient of the log-prob, divided
    by the temperature. `bonus` is (the gradient of the entropy, divided by the temperature; the entropy). None: no bonus. All
    tensors but the logits must be contiguous [N]: `target` int64, the others float32."""
    tensors = (inverse, target, lse, slope, *(bonus or (None, None)))
    _call("head_gradient", logits, logits, logits.stride(0), *tensors, *logits.shape)


def row_softmax(scores: Tensor, out: Tensor, prefix_R: Tensor, own_length_R: Tensor, heads: int, length: int) -> None:
    """scores [R K, L G, P + L] float32 -> weights `out` of the same shape, both contiguous. Query l of row r sees the first
    `prefix_R[r]` prefix keys, and keys 0..l of the `own_length_R[r]` own keys. Other keys get weight 0. Lengths are int64."""
    count = prefix_R.numel()
    group, context = scores.shape[1] // length, scores.shape[2] - length
    _call("row_softmax", out, scores, out, prefix_R, own_length_R, count, heads, length, group, context)


def row_softmax_backward_(weights: Tensor, slope: Tensor, scale: float) -> None:
    """Overwrites `slope`, gradient of `weights` [..., C], with `scale` times the gradient of the scores. Both are contiguous."""
    size = weights.shape[-1]
    _call("row_softmax_backward", weights, weights, slope, scale, weights.numel() // size, size)


def add_widened(target: Tensor, source: Tensor) -> None:
    """Adds bfloat16 `source` to float32 `target`. Both must be contiguous and have the same number of values."""
    assert _library is not None
    _library.asyncrl_add_widened(target.data_ptr(), source.data_ptr(), source.numel(), torch.get_num_threads())


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, position_n: Tensor, scaling: float
) -> Tensor:
    """Writes `key` and `value` [n, K, D] to the first n rows of the cache `keys` and `values` [rows, K, positions, D] at
    `position_n` (int64). Returns attention of `query` [n, H, D] over positions [0..position_n] -> [n, H, D]. Errors: ValueError
    for a dtype, head size or number of key/value heads that is not the cache's."""
    (rows, query_heads, size), heads = query.shape, keys.shape[1]
    same_dtype = query.dtype == key.dtype == value.dtype == keys.dtype
    if not same_dtype or size != keys.shape[3] or not key.shape == value.shape == (rows, heads, size):
        raise ValueError(
            f"decode attention: the cache holds {heads} heads of {keys.shape[3]} in {keys.dtype}; found queries of "
            f"{tuple(query.shape)} in {query.dtype}, keys of {tuple(key.shape)} in {key.dtype}, values of "
            f"{tuple(value.shape)} in {value.dtype}; pass the dtype and shape of the cache"
        )
    # The kernel reads the heads of a row as one piece of memory.
    if query.stride(1) != size or query.stride(2) != 1:
        query = query.contiguous()
    if key.stride(1) != size or value.stride(1) != size or key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _call(
        "decode_attention", query, query, query.stride(0), key, key.stride(0), value, value.stride(0), keys, values,
        keys.stride(0), keys.stride(1), position_n, scaling, out, rows, heads, query_heads // heads, size,
    )  # fmt: skip
    return out


def _call(name: str, like: Tensor, *arguments: Tensor | int | float | None) -> None:
    """Calls the kernel for the dtype of `like` with pointers to the tensors. `arguments` keeps temporary tensors alive."""
    values: list[int | float | None] = [_DTYPE_CODES[like.dtype]]
    for argument in arguments:
        values.append(argument.data_ptr() if isinstance(argument, Tensor) else argument)
    getattr(_library, f"asyncrl_{name}")(*values, torch.get_num_threads())
