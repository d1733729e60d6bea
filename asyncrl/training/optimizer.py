"""AdamW over the masters (the master weights) of the trained parameters, with state that is saved by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asyncrl.config.schema import TrainConfig

_SAVED = ("step", "exp_avg", "exp_avg_sq")


class Parameters(Protocol):
    """The parameters that trainer and optimizer use. `FlatParameters` and `distributed.fsdp.ShardedParameters` implement it."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters in the model, in the order of the buffer."""

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of masters, gradients and optimizer state: float32 or float64."""

    @property
    def grad(self) -> Tensor:
        """All gradients of this rank, in one buffer."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that are not trained (models/parameters/frozen.py)."""

    def zero_grad(self) -> None:
        """Zeros the gradients. Called before the first backward of a step, and when a step is aborted."""

    def zero_frozen(self) -> None:
        """Zeros the gradients of frozen parameters, which fused layers may write. Called before norm and reduction."""

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view of the master), in the order of `names`."""

    def named_grads(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view of `grad`), in the order of `names`."""

    def load_masters(self, state: Mapping[str, Tensor]) -> None:
        """Copies saved masters into the buffer and refreshes the modules."""


def require_names(what: str, names: Sequence[str], state: Mapping[str, object]) -> None:
    """Errors: KeyError if `state` lacks one of the parameters."""
    if missing := [name for name in names if name not in state]:
        raise KeyError(
            f"{what} lacks {len(missing)} of {len(names)} parameters, such as {missing[:3]}; was it saved by another model?"
        )


class FlatAdamW:
    """`torch.optim.AdamW` (Loshchilov and Hutter, arXiv:1711.05101) over views of the flat masters and gradients.

    Frozen parameters have no state and no weight decay. Norms and biases are decayed only with `train.decay_norms_and_biases`.
    All vectors count as norms or biases, and so do matrices whose name ends in "bias" (stacked biases of experts).
    The optimizer never allocates or zeros gradients, since the train step owns `Parameters.grad`.
    """

    def __init__(self, flat: Parameters, config: TrainConfig) -> None:
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        not_decayed: list[nn.Parameter] = []
        for (name, master), (_, grad) in zip(flat.named_masters(), flat.named_grads(), strict=True):
            if name in flat.frozen:
                continue
            parameter = nn.Parameter(master)
            parameter.grad = grad
            self.names.append(name)
            self.parameters.append(parameter)
            is_matrix = parameter.ndim >= 2 and not name.rpartition(".")[2].endswith("bias")
            (decayed if is_matrix or config.decay_norms_and_biases else not_decayed).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": not_decayed, "weight_decay": 0.0},
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
        """Sets the learning rate of all parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        """Updates the masters. The caller must refresh the working copy of the modules."""
        self.optimizer.step()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """name -> {step, exp_avg, exp_avg_sq}. The tensors are not copied. Empty before the first step."""
        state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            moments = self.optimizer.state.get(parameter)
            if moments:
                state[name] = {key: moments[key] for key in _SAVED}
        return state

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Copies `state`. An empty `state` resets the optimizer. Errors: KeyError for a missing parameter or a wrong shape."""
        if not state:
            self.optimizer.state.clear()
            return
        require_names("the optimizer state", self.names, state)
        for name, parameter in zip(self.names, self.parameters, strict=True):
            saved = state[name]
            restored: dict[str, Any] = {
                "step": saved["step"].detach().clone().to(device=parameter.device if parameter.is_cuda else "cpu"),
            }
            for key in _SAVED[1:]:
                if saved[key].shape != parameter.shape:
                    shapes = f"{tuple(saved[key].shape)}, but the parameter has {tuple(parameter.shape)}"
                    raise KeyError(f"{name}: the saved {key} has shape {shapes}")
                restored[key] = saved[key].detach().to(parameter.dtype).to(parameter.device, copy=True)
            self.optimizer.state[parameter] = restored
