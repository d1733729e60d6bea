"""A CPU copy of the trainer's state for a checkpoint. The device's thread makes the copy, and another thread writes it.

Master weights and moments change only when a step finishes. So a snapshot during an open step has the last finished version.
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
    """All tensors are on the CPU. `model`: the tensors of the Hugging Face files, in the matmul dtype. `state`: for a resume."""

    version: int
    model: dict[str, torch.Tensor]
    state: dict[str, Any]
    policy: PolicyModel
    # Tensors of the adapters, named as in peft's files. None: the run has no adapters.
    adapter: dict[str, torch.Tensor] | None = None

    def write_pretrained(self, directory: Path, tokenizer: Any, base: str | None = None) -> None:
        """Writes model and tokenizer in Hugging Face format, for `from_pretrained` and vLLM. May run on any thread.

        Adapters (LoRA) are merged into the model, and also written to `adapter/` in peft's format. `base`: name of the base model.
        """
        self.policy.write_pretrained(directory, self.model)
        if self.adapter is not None:
            assert self.policy.lora is not None
            self.policy.lora.write_adapter(directory / "adapter", self.adapter, base)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(directory)

    def non_finite_tensor(self) -> str | None:
        """The path of the first tensor with NaN or infinite values, or None. Reads all tensors."""
        return non_finite_tensor({"model": self.model, "state": self.state, "adapter": self.adapter})


def take_snapshot(core: TorchTrainer) -> Snapshot:
    """Copies the state of the trainer. Must run on the device's thread."""
    return Snapshot(
        version=core.version,
        model=core.policy.host_state(),
        state=copy_to_host(core.state_dict()),
        policy=core.policy,
        adapter=None if core.policy.lora is None else core.policy.lora.host_state(),
    )


def copy_to_host(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples, with every tensor on the CPU. Tuples become lists."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_to_host(item) for item in value]
    return value


def non_finite_tensor(value: Any, name: str = "") -> str | None:
    """The path, such as `model.weight`, of the first tensor with NaN or infinite values in nested dicts and lists, or None."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or not value.numel():
            return None
        # Minimum and maximum are NaN if any value is NaN.
        is_finite = all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(value))
        return None if is_finite else name
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    items = value.items() if isinstance(value, dict) else ()
    paths = (non_finite_tensor(item, f"{name}.{key}" if name else str(key)) for key, item in items)
    return next((path for path in paths if path is not None), None)
