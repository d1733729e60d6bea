"""AdamW over the flat masters of what is trained, with state that can be saved by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asyncrl.config.schema import TrainConfig

_SAVED = ("step", "exp_avg", "exp_avg_sq")


class Parameters(Protocol):
    """What is trained, as trainer and optimizer see it: `models.flat.FlatParameters`, `distributed.fsdp.ShardedParameters`."""

    @property
    def names(self) -> Sequence[str]:
        """The parameters' names in the model, in the order in which they lie."""
        ...

    @property
    def master_dtype(self) -> torch.dtype:
        """Of masters, gradients and optimizer state: float32 or float64."""
        ...

    @property
    def grad(self) -> Tensor:
        """Every gradient that this rank holds, in one buffer."""
        ...

    @property
    def frozen(self) -> frozenset[str]:
        """Names of those that are not trained (models/parameters/frozen.py)."""
        ...

    def zero_grad(self) -> None:
        """Zero the gradients: before a step, and after it was aborted."""
        ...

    def zero_frozen(self) -> None:
        """Zero those of frozen parameters, which layers may have written: before the norm and the reduction."""
        ...

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """Views, in the order of `names`."""
        ...

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """Views of `grad`, in the order of `names`."""
        ...

    def load_masters(self, state: Mapping[str, Tensor]) -> None:
        """Copy saved masters in, and bring the modules up to date. Errors: KeyError for what is missing."""
        ...


class FlatAdamW:
    """`torch.optim.AdamW` (Loshchilov and Hutter, arXiv:1711.05101) whose parameters and gradients are views.

    Frozen parameters are none of its own: they have no state and are not decayed. Norms and biases (vectors, and stacked biases of
    experts by their name) are decayed where `train.decay_norms_and_biases` says so.

    The optimizer never allocates gradients and never zeroes them: `Parameters.grad` belongs to the train step.
    """

    def __init__(self, flat: Parameters, config: TrainConfig) -> None:
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        kept: list[nn.Parameter] = []
        for (name, master), (_, grad) in zip(flat.named_masters(), flat.named_grads(), strict=True):
            if name in flat.frozen:
                continue
            parameter = nn.Parameter(master)
            parameter.grad = grad
            self.names.append(name)
            self.parameters.append(parameter)
            is_matrix = parameter.ndim >= 2 and not name.rpartition(".")[2].endswith("bias")
            (decayed if is_matrix or config.decay_norms_and_biases else kept).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next `step`."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """For all parameters alike."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        """Move the masters; the modules' working copy is not refreshed here."""
        self.optimizer.step()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """name -> {step, exp_avg, exp_avg_sq}: views of the live state; empty before the first step."""
        state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            held = self.optimizer.state.get(parameter)
            if held:
                state[name] = {key: held[key] for key in _SAVED}
        return state

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Copy. An empty `state` is that of a fresh optimizer. Errors: KeyError names a parameter that is missing."""
        if not state:
            self.optimizer.state.clear()
            return
        missing = [name for name in self.names if name not in state]
        if missing:
            raise KeyError(f"the optimizer state holds nothing for {missing[:3]} ({len(missing)} parameters missing)")
        for name, parameter in zip(self.names, self.parameters, strict=True):
            saved = state[name]
            fresh: dict[str, Any] = {
                "step": saved["step"].detach().clone().to(device=parameter.device if parameter.is_cuda else "cpu"),
            }
            for key in _SAVED[1:]:
                if saved[key].shape != parameter.shape:
                    raise KeyError(f"{name}: {key} has shape {tuple(saved[key].shape)}, not {tuple(parameter.shape)}")
                fresh[key] = saved[key].detach().to(parameter.dtype).to(parameter.device, copy=True)
            self.optimizer.state[parameter] = fresh
