"""The input embedding of a training forward, with a gradient that lands where it belongs.

Autograd's own makes a dense [V, E] tensor per microbatch in the matmul dtype, sums repeated tokens in it, and adds it to
the gradient: for a tied embedding of a small model that is more memory traffic than a layer, and with bfloat16 the sums
over repeated tokens are bfloat16 sums. This one adds the T rows straight into the flat gradient.

Shape legend: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def is_plain(module: nn.Module) -> bool:
    """Whether `embed` computes what the module does: a lookup, and Gemma's scaling of what was found."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        return False
    if type(module) is nn.Embedding:
        return True
    tokens = torch.arange(min(module.num_embeddings, 8), device=module.weight.device)
    return isinstance(getattr(module, "embed_scale", None), Tensor) and torch.equal(
        module(tokens), _scaled(module, F.embedding(tokens, module.weight))
    )


def embed(module: nn.Embedding, tokens_T: Tensor, grad_buffer_VE: Tensor) -> Tensor:
    """[T] -> [T, E]. Backward adds to `grad_buffer_VE`, in its dtype, and reports nothing to autograd.

    Like the module's own, it gives no gradient to the row of `padding_idx`.
    """
    rows: Tensor = _Embed.apply(module.weight, tokens_T, grad_buffer_VE, module.padding_idx)
    return rows if type(module) is nn.Embedding else _scaled(module, rows)


def _scaled(module: nn.Module, rows: Tensor) -> Tensor:
    """In the dtype of the rows, to which transformers rounds the factor as well."""
    result: Tensor = rows * module.embed_scale.to(rows.dtype)  # type: ignore[operator]  # an attribute of Module: Tensor or Module
    return result


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, buffer: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.buffer, ctx.padding = buffer, padding
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        rows = grad.to(ctx.buffer.dtype)
        if ctx.padding is not None:
            rows = rows * (tokens != ctx.padding).unsqueeze(1)
        ctx.buffer.index_add_(0, tokens, rows)
        return None, None, None, None
