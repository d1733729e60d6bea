"""The input embedding of a training forward. Its backward adds the T gradient rows directly to the flat gradient buffer.

The backward of `nn.Embedding` makes a dense [V, E] tensor for every microbatch. For a small model with tied embeddings this
costs more memory traffic than a layer. In bfloat16 that backward also sums the rows of repeated tokens in bfloat16.

Shape legend: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def is_lookup(module: nn.Module) -> bool:
    """Whether `embed` can replace the module: a lookup and nothing else, or one that is scaled by `embed_scale` as in Gemma."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        return False
    if type(module) is nn.Embedding:
        return True
    tokens = torch.arange(min(module.num_embeddings, 8), device=module.weight.device)
    return isinstance(getattr(module, "embed_scale", None), Tensor) and torch.equal(
        module(tokens), _scale(module, F.embedding(tokens, module.weight))
    )


def embed(module: nn.Embedding, tokens_T: Tensor, grad_buffer_VE: Tensor) -> Tensor:
    """[T] -> [T, E]. Backward adds to `grad_buffer_VE`, in the buffer's dtype. Autograd adds nothing to `module.weight.grad`.

    As in `nn.Embedding`, the row of token `padding_idx` gets no gradient.
    """
    rows: Tensor = _Embed.apply(module.weight, tokens_T, grad_buffer_VE, module.padding_idx)
    return rows if type(module) is nn.Embedding else _scale(module, rows)


def _scale(module: nn.Module, rows: Tensor) -> Tensor:
    """`rows` times `embed_scale`, which is rounded to the dtype of the rows as in transformers."""
    result: Tensor = rows * module.embed_scale.to(rows.dtype)  # type: ignore[operator]  # declared as Tensor or Module
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
