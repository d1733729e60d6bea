"""AdamW over the flat masters: decay on matrices only, state that can be saved by parameter name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.config.schema import TrainConfig
from asyncrl.models.flat import FlatParameters

_SAVED = ("step", "exp_avg", "exp_avg_sq")


class FlatAdamW:
    """`torch.optim.AdamW` (Loshchilov and Hutter, arXiv:1711.05101) whose parameters and gradients are views.

    The optimizer never allocates gradients and never zeroes them: `FlatParameters.grad` belongs to the train step.
    """

    def __init__(self, flat: FlatParameters, config: TrainConfig) -> None:
        self.flat = flat
        self.parameters: list[nn.Parameter] = []
        for index in range(len(flat.names)):
            parameter = nn.Parameter(flat.view(flat.master, index))
            parameter.grad = flat.view(flat.grad, index)
            self.parameters.append(parameter)
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
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
        return float(self.optimizer.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """name -> {step, exp_avg, exp_avg_sq}: views of the live state; empty before the first step."""
        state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in zip(self.flat.names, self.parameters, strict=True):
            held = self.optimizer.state.get(parameter)
            if held:
                state[name] = {key: held[key] for key in _SAVED}
        return state

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Copy. An empty `state` is that of a fresh optimizer. Errors: KeyError names a parameter that is missing."""
        if not state:
            self.optimizer.state.clear()
            return
        missing = [name for name in self.flat.names if name not in state]
        if missing:
            raise KeyError(f"the optimizer state holds nothing for {missing[:3]} ({len(missing)} parameters missing)")
        for name, parameter in zip(self.flat.names, self.parameters, strict=True):
            saved = state[name]
            fresh: dict[str, Any] = {
                "step": saved["step"].detach().clone().to(device=parameter.device if parameter.is_cuda else "cpu"),
            }
            for key in _SAVED[1:]:
                if saved[key].shape != parameter.shape:
                    raise KeyError(f"{name}: {key} has shape {tuple(saved[key].shape)}, not {tuple(parameter.shape)}")
                fresh[key] = saved[key].detach().to(parameter.dtype).to(parameter.device, copy=True)
            self.optimizer.state[parameter] = fresh
