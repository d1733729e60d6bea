"""A copy on the host of everything a checkpoint holds, taken on the lane in one closure and written by another thread.

Masters and optimizer moments do not move while a step accumulates, so a snapshot may be taken with a step open: it is the
last committed version, whatever the open step has gathered so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from asyncrl.models.policy import PolicyModel

    from .trainer import TorchTrainer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`model`: named tensors of the Hugging Face files, in the matmul dtype; `state`: what resuming needs. All on the host."""

    version: int
    model: dict[str, torch.Tensor]
    state: dict[str, Any]
    policy: PolicyModel
    adapter: dict[str, torch.Tensor] | None = None  # by the names of peft's files

    def write_pretrained(self, directory: Path, tokenizer: Any, base: str | None = None) -> None:
        """Model and tokenizer in Hugging Face format; loads with `from_pretrained` and with vLLM as it is. Any thread.

        With adapters that is the merged model; `adapter/` holds them in peft's format, on the model named `base`.
        """
        self.policy.write_pretrained(directory, self.model)
        if self.adapter is not None:
            assert self.policy.lora is not None
            self.policy.lora.write_adapter(directory / "adapter", self.adapter, base)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(directory)

    def unsound(self) -> str | None:
        """The name of a tensor that holds NaN or infinite values, None where there is none. One pass over all of it."""
        return unsound({"model": self.model, "state": self.state, "adapter": self.adapter})


def take(core: TorchTrainer) -> Snapshot:
    """Copy the state of the trainer. Runs on the lane."""
    return Snapshot(
        version=core.version,
        model=core.policy.host_state(),
        state=host(core.state_dict()),
        policy=core.policy,
        adapter=None if core.policy.lora is None else core.policy.lora.host_state(),
    )


def host(value: Any) -> Any:
    """Nested containers with every tensor copied to the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [host(item) for item in value]
    return value


def unsound(value: Any, name: str = "") -> str | None:
    """The place, inside nested containers, of a tensor that holds NaN or infinite values; None where there is none."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or not value.numel():
            return None
        return None if all(bool(torch.isfinite(end)) for end in torch.aminmax(value)) else name  # both keep a NaN
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    found = (unsound(item, f"{name}.{key}" if name else str(key)) for key, item in items)
    return next((place for place in found if place is not None), None)
