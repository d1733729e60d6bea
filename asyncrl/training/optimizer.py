"""AdamW over the masters (master weights) of the trained parameters, and the schedule of its learning rate. A checkpoint saves the
state of the optimizer by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.distributed.fsdp import ShardedParameters
    from asyncrl.models.parameters.flat import FlatParameters

_SAVED = ("step", "exp_avg", "exp_avg_sq")
# What a rank trains: the parameters of the model, or those of its LoRA adapters. With sharding: the rank's rows of each parameter.
Parameters: TypeAlias = "FlatParameters | ShardedParameters"


def require_names(what: str, names: Sequence[str], state: Mapping[str, object]) -> None:
    """Errors: KeyError if `state` lacks one of `names`. `what`: the name of `state` in the message."""
    if missing := [name for name in names if name not in state]:
        raise KeyError(
            f"{what} lacks {len(missing)} of {len(names)} parameters, such as {missing[:3]}; was it saved from another model?"
        )


class FlatAdamW:
    """`torch.optim.AdamW` (Loshchilov and Hutter, arXiv:1711.05101) over views of the flat masters and gradients.

    Frozen parameters are left out. Norms and biases have weight decay only with `train.decay_norms_and_biases`. All vectors count
    as norms or biases, and so do matrices whose name ends in "bias" (stacked biases of experts).
    The optimizer never allocates or zeros gradients, because the trainer owns `Parameters.grad`.
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
        """Updates the masters. The caller must then copy them to the weights that the modules read (`PolicyModel.advance`)."""
        self.optimizer.step()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> {step, exp_avg, exp_avg_sq}. The tensors are not copied. Empty before the first step."""
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


class Schedule:
    """Linear warm-up from 0 to the peak `train.lr`, then constant or decay to `min_lr_ratio` * peak. The rate after k steps:

        k < warmup: lr(k) = peak * k / warmup      k >= warmup: lr(k) = peak * decay((k - warmup) / (total - warmup))

    decay(x) is 1 (constant), 1 - (1 - r) x (linear), or r + (1 - r) (1 + cos(pi x)) / 2 (cosine: Loshchilov and Hutter,
    arXiv:1608.03983, eq. 5). r is `min_lr_ratio`, x at most 1. With r = 0 the rates equal those of `transformers.get_scheduler`.
    """

    def __init__(self, config: TrainConfig, total_steps: int | None = None) -> None:
        """`total_steps`: optimizer steps of the run; None: not known. Errors: ConfigError if a schedule with decay gets None."""
        if config.schedule != "constant" and total_steps is None:
            raise ConfigError(
                f"train.schedule is {config.schedule}, which needs the last step; set train.max_steps, or train.max_epochs if the "
                "run has prompts, or use constant"
            )
        self.config = config
        self.total_steps = total_steps

    def lr(self, steps_done: int) -> float:
        """The learning rate of the next optimizer step, after `steps_done` steps."""
        config = self.config
        warmup = config.warmup_steps
        if steps_done < warmup:
            return config.lr * steps_done / warmup
        if config.schedule == "constant":
            return config.lr
        assert self.total_steps is not None
        x = min((steps_done - warmup) / max(self.total_steps - warmup, 1), 1.0)
        decayed = x if config.schedule == "linear" else (1 - math.cos(math.pi * x)) / 2
        return config.lr * (1 - (1 - config.min_lr_ratio) * decayed)
