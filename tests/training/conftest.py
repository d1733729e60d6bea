"""transformers computes RMS norms in float32 even for float64 models: the oracle gets an exact one."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


def exact_norm(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden_states * scale)


def exact_offset_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    for norm in (LlamaRMSNorm, Qwen3RMSNorm, GraniteRMSNorm):
        monkeypatch.setattr(norm, "forward", exact_norm)
    monkeypatch.setattr(Gemma3RMSNorm, "forward", exact_offset_norm)
